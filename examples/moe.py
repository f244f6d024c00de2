"""A decoder with mixtures of experts, trained on real text under `Trainer(strategy="mfsdp")`.

Its experts may be divided among ranks (expert parallelism) and sharded over the others. Without arguments it takes the first of these
configurations, which needs no GPU:

    python examples/moe.py fit --config examples/configs/moe/cpu.yaml
    python examples/moe.py fit --config examples/configs/moe/cpu.yaml --model.expert_parallel_size 1 --trainer.devices 1
    python examples/moe.py fit --config examples/configs/moe/cpu.yaml --trainer.callbacks+=lightning_mfsdp.callbacks.PagedStash \
        --trainer.callbacks.picture pages.png --trainer.callbacks.page_rows 16 --model.layers 6
    python examples/moe.py fit --config examples/configs/moe/cpu.yaml --trainer.accelerator gpu --trainer.devices 4 \
        --trainer.precision bf16-mixed --model.dim 1024 --model.layers 12 --model.experts 64 --model.top_k 8 --model.expert_width 512
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from examples.decoder import Decoder, DecoderConfig, next_token_loss
from examples.lightning_decoder import LightningDecoder, TextDataModule
from examples.reporting import hide_spurious_warnings
from examples.text import BYTES, unigram_bits_per_byte
from lightning_mfsdp import fully_shard
from lightning_mfsdp.moe import GroupedExperts, TopKRouter, expert_parallel, take_over_budget


class Mixture(nn.Module):
    """A router and its experts, in the place of a feed-forward layer.

    Attributes:
        routing_loss: What the last forward adds to the loss.
    """

    def __init__(self, dim: int, experts: int, top_k: int, width: int, capacity_factor: float | None) -> None:
        super().__init__()
        self.router = TopKRouter(hidden_size=dim, num_experts=experts, top_k=top_k, z_loss_weight=1e-3)
        self.experts = GroupedExperts(
            num_experts=experts, hidden_size=dim, intermediate_size=width, capacity_factor=capacity_factor
        )
        self.routing_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, of shape [B, S, D], to the same shape."""
        tokens = x.flatten(0, 1)
        routes = self.router(tokens)
        self.routing_loss = routes.loss
        return self.experts(tokens, routes.expert_index, routes.probabilities).view_as(x)


class LightningMixture(LightningDecoder):
    """Trains a decoder with mixtures of experts to predict the next byte.

    Args:
        dim: Model width.
        layers: Number of blocks.
        heads: Of attention.
        experts: In each block.
        top_k: Experts a token goes through.
        expert_width: Inner width of an expert.
        expert_parallel_size: Among how many ranks the experts of a block are divided.
        capacity_factor: Rows that the experts of a rank have room for, relative to the average. `None`: for all there can be.
        learning_rate: Peak of the schedule.
    """

    def __init__(
        self,
        dim: int = 64,
        layers: int = 2,
        heads: int = 4,
        experts: int = 8,
        top_k: int = 2,
        expert_width: int = 64,
        expert_parallel_size: int = 1,
        capacity_factor: float | None = None,
        learning_rate: float = 5e-3,
    ) -> None:
        sizes = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": heads, "ffn": 2 * dim}
        super().__init__(DecoderConfig(**sizes, vocab=BYTES, seq=1024), learning_rate=learning_rate)
        self.mixture = (dim, experts, top_k, expert_width, capacity_factor)
        self.expert_parallel_size = expert_parallel_size
        self.counted_step = 0

    @property
    def mixtures(self) -> list[Mixture]:
        """Of all blocks."""
        return [block.feed_forward for block in self.decoder.blocks]

    def configure_model(self) -> None:
        """Build the decoder and shard its blocks; the strategy shards what is around them."""
        if self.decoder is not None:
            return
        self.decoder = Decoder(self.config)
        for block in self.decoder.blocks:
            block.feed_forward = Mixture(*self.mixture)
        if self.expert_parallel_size == 1:
            return  # the strategy finds the blocks by itself
        # Dense layers are sharded over all ranks. Experts differ along the second axis, and are sharded over the first.
        ranks, size = self.device_mesh.size(), self.expert_parallel_size
        mesh = init_device_mesh(self.device_mesh.device_type, (ranks // size, size), mesh_dim_names=("shard", "expert"))
        policy = self.trainer.strategy.precision_plugin.policy
        for block in self.decoder.blocks:
            expert_parallel(block.feed_forward.experts, mesh)
            fully_shard(block.feed_forward.experts, mesh, policy=policy)
            fully_shard(block, self.device_mesh, policy=policy)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """Mean loss of the microbatch in nats, and what keeps the load of experts even."""
        loss = next_token_loss(self.decoder(batch[:, :-1]), batch[:, 1:])
        routing = torch.stack([mixture.routing_loss for mixture in self.mixtures]).sum()
        self.log("bits_per_byte", loss.detach() / math.log(2), prog_bar=True)
        self.log("routing_loss", routing.detach())
        return loss + routing

    def on_train_batch_end(self, outputs: object, batch: Tensor, batch_index: int) -> None:
        """After each optimizer step log how even the load was, as device tensors without a host sync, and restart the count."""
        if self.trainer.global_step == self.counted_step:
            return  # gradients are accumulated, and so are counts
        self.counted_step = self.trainer.global_step
        found = [mixture.router.statistics() for mixture in self.mixtures]
        self.log("busiest_expert", torch.stack([one.most for one in found]).max())
        self.log("unused_experts", torch.stack([one.unused for one in found]).sum())
        self.log("over_budget", take_over_budget(self).float())
        for mixture in self.mixtures:
            mixture.router.balance()


def main() -> None:
    """Parse the command line and run."""
    hide_spurious_warnings()
    cli = LightningCLI(
        LightningMixture,
        TextDataModule,
        seed_everything_default=0,
        save_config_callback=None,
        args=None if sys.argv[1:] else ["fit", "--config", str(ROOT / "examples/configs/moe/cpu.yaml")],
    )
    figures = cli.trainer.callback_metrics
    if cli.trainer.is_global_zero and "val_bits_per_byte" in figures:
        print(f"\nbusiest expert      {float(figures['busiest_expert']):.2f} times the mean")
        print(f"unigram baseline    {unigram_bits_per_byte(cli.datamodule.held_out()):.3f} bits per byte")
        print(f"held-out text       {float(figures['val_bits_per_byte']):.3f} bits per byte")


if __name__ == "__main__":
    main()
