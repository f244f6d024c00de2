"""Time a strategy through Lightning's Trainer, on the same work as train.py.

    torchrun --standalone --nproc_per_node=4 examples/benchmark/through_trainer.py mfsdp 300m,1b

Strategies: mfsdp, mfsdp-tuned (symmetric memory, spare memory for fewer gathers, gradients sharded while they accumulate),
mfsdp-lean (the same with weights in bfloat16, whose optimizer keeps remainders; with --state-dtype bfloat16 or 8bit),
mfsdp-no-shard (sharding="no_shard"), fsdp (FSDPStrategy, a unit for each block), model-parallel (ModelParallelStrategy
with FSDP2's fully_shard on each block), ddp, single (SingleDeviceStrategy, for one process). Rank 0 prints one JSON line for each size,
starting with RESULT, in the format of train.py.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmark.command import Plan, result_of, run, stamp
from examples.benchmark.engines import Options, adamw, build
from examples.decoder import Block, next_token_loss
from lightning_mfsdp import MFSDPStrategy, MixedPrecisionPolicy

STRATEGIES = ("mfsdp", "mfsdp-tuned", "mfsdp-lean", "mfsdp-no-shard", "fsdp", "model-parallel", "ddp", "single")
# The others are given dtypes of their own.
PRECISIONS = {
    "mfsdp-lean": "bf16-true",
    **dict.fromkeys(("mfsdp", "mfsdp-tuned", "mfsdp-no-shard", "ddp", "single"), "bf16-mixed"),
}


class Timed(Callback):
    """Device and host time of each optimizer step; losses stay on the device."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stamps: list[torch.cuda.Event] = []
        self.host: list[float] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_index: int) -> None:
        """Stamp the start of a step."""
        if batch_index % self.plan.accumulation:
            return
        if len(self.stamps) == self.plan.warmup:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.stamps.append(stamp())
        self.host.append(time.perf_counter())

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Keep the loss, as it was before Lightning divided it by the number of microbatches."""
        self.losses.append(loss.detach() * self.plan.accumulation)


class TimedDecoder(LightningModule):
    """The decoder of the benchmark."""

    def __init__(self, options: Options, strategy: str) -> None:
        super().__init__()
        self.options, self.strategy = options, strategy
        self.decoder: Any = None

    def configure_model(self) -> None:
        """Build, and shard where the strategy leaves that to the user."""
        if self.decoder is not None:
            return
        dtype = torch.bfloat16 if self.strategy == "mfsdp-lean" else torch.float32
        self.decoder = build(self.options, torch.device("cuda", torch.cuda.current_device()), dtype)
        if self.options.compiled:
            for block in self.decoder.blocks:
                block.forward = torch.compile(block.forward)
        if self.strategy == "model-parallel":
            from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
            from torch.distributed.fsdp import fully_shard

            policy = Policy(param_dtype=torch.bfloat16, reduce_dtype=self.options.reduce_dtype)
            mesh = self.device_mesh["data_parallel"]
            for block in (*self.decoder.blocks, self.decoder):
                fully_shard(block, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        """Mean loss of the microbatch."""
        (ids,) = batch
        return next_token_loss(self.decoder(ids[:, :-1]), ids[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in every engine of the benchmark."""
        return adamw(self.parameters(), self.options)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """By the norm of all gradients, in the way of each strategy: under FSDPStrategy the Trainer cannot clip by norm."""
        if gradient_clip_val and self.strategy == "fsdp":
            self.trainer.strategy.model.clip_grad_norm_(gradient_clip_val)
        elif gradient_clip_val and self.strategy in ("model-parallel", "ddp", "single"):
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def strategy_of(name: str, options: Options, *, graph: bool) -> Strategy | str:
    """The strategy as a user would set it up for this model."""
    if name.startswith("mfsdp"):
        if name == "mfsdp-lean" and options.state_dtype == "float32":
            raise SystemExit(
                "Error: mfsdp-lean needs --state-dtype bfloat16 or 8bit: torch.optim.AdamW keeps no remainders"
            )
        dtypes: dict[str, Any] = (
            {"main_params_dtype": None} if name == "mfsdp-lean" else {"compute_dtype": torch.bfloat16}
        )
        policy = MixedPrecisionPolicy(grad_comm_dtype=options.reduce_dtype, **dtypes)
        sharding = "no_shard" if name == "mfsdp-no-shard" else "optim_grads_params"
        tuned: dict[str, Any] = {}
        if name in ("mfsdp-tuned", "mfsdp-lean"):
            tuned = {"symmetric_memory": True, "reshard_after_forward": "auto", "accumulation": "sharded"}
        return MFSDPStrategy(sharding=sharding, policy=policy, cuda_graph=graph, **tuned)
    if graph:
        raise SystemExit(f"Error: {name} cannot capture a step as a CUDA graph")
    if name == "fsdp":
        from torch.distributed.fsdp import MixedPrecision

        dtypes = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=options.reduce_dtype, buffer_dtype=torch.bfloat16
        )
        return FSDPStrategy(auto_wrap_policy={Block}, mixed_precision=dtypes)
    if name == "model-parallel":
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    if name == "single":
        if dist.get_world_size() != 1:
            raise SystemExit(f"Error: single is for one process, and there are {dist.get_world_size()}")
        return SingleDeviceStrategy(torch.device("cuda", torch.cuda.current_device()))
    return "ddp"


def measure(name: str, options: Options, plan: Plan) -> dict[str, object]:
    """One fit; figures as in train.py."""
    config = options.config
    microbatch = options.microbatch
    generator = torch.Generator().manual_seed(1234 + dist.get_rank())
    rows = torch.randint(0, config.vocab, (4 * microbatch, config.seq + 1), generator=generator)
    data = rows.repeat(-(-(plan.warmup + plan.steps + 1) * plan.accumulation // 4), 1)
    timed = Timed(plan)
    module = TimedDecoder(options, name)
    trainer = Trainer(
        accelerator="gpu",
        devices=dist.get_world_size(),
        strategy=strategy_of(name, options, graph=plan.graph),
        precision=PRECISIONS.get(name),
        max_steps=plan.warmup + plan.steps + 1,
        accumulate_grad_batches=plan.accumulation,
        gradient_clip_val=options.clip or None,
        callbacks=[timed],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=microbatch, pin_memory=True))
    host = [b - a for a, b in zip(timed.host[plan.warmup :], timed.host[plan.warmup + 1 :], strict=False)]
    return result_of(f"trainer:{name}", options, plan, timed.stamps[plan.warmup :], host, timed.losses)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    run(STRATEGIES, measure, __doc__)
