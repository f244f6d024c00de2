"""Checkpoints of experts do not depend on how many ranks the experts were divided among; routers' biases go on from theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy, fully_shard
from lightning_mfsdp.moe import expert_parallel
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import FOREIGN_WARNINGS, full_state, make_trainer, strict_warnings
from tests.moe.models import batch, build, loss_of

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]
WORLD = 4 if NIGHT else 2
SAVED = (("sharded", 2), ("full", 4 if NIGHT else 1))


class Trained(LightningModule):
    """A mixture whose experts are divided among `ep` ranks and sharded over the others."""

    def __init__(self, ep: int, seed: int = 0, dispatcher: str = "all_gather") -> None:
        super().__init__()
        self.ep, self.seed, self.dispatcher = ep, seed, dispatcher
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = build(self.seed)
        dense, policy = self.device_mesh, self.trainer.precision_plugin.policy
        mesh = init_device_mesh("cpu", (dense.size() // self.ep, self.ep), mesh_dim_names=("shard", "expert"))
        for block in self.model.blocks:
            block.router.balancing, block.router.bias_step = "bias", 0.05
            fully_shard(expert_parallel(block.experts, mesh, dispatcher=self.dispatcher), mesh, policy=policy)
            fully_shard(block, dense, policy=policy)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        return loss_of(self.model, ids)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for block in self.model.blocks:
            block.router.balance()

    def state(self) -> dict[str, Tensor]:
        """Whole weights, and what routers have learned of the load."""
        biases = {name: value for name, value in self.model.state_dict().items() if name.endswith("router.bias")}
        return {**full_state(self), **biases}

    def train_dataloader(self) -> Any:
        batches = [batch(step, self.global_rank, self.trainer.world_size) for step in range(4)]
        return DataLoader(batches, batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)  # a small one magnifies rounding


def fit(ep: int, world: int, *, epochs: int, seed: int = 0, path: Path | None = None, **options: Any) -> tuple:
    model = Trained(ep, seed)
    strategy = MFSDPStrategy(**options)
    trainer = make_trainer(
        "", world, strategy=strategy, max_epochs=epochs, gradient_clip_val=0.5, accumulate_grad_batches=2
    )
    trainer.fit(model, ckpt_path=None if path is None else str(path))
    return trainer, model


def save(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Checkpoints of both kinds after one epoch; the state after two."""
    strict_warnings()
    for kind, ep in SAVED:
        trainer, _ = fit(ep, world, epochs=1, state_dict_type=kind)
        trainer.save_checkpoint(f"{folder}/{kind}.ckpt")
    _, model = fit(1, world, epochs=2)
    return model.state()


def resume(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    strict_warnings()
    if NIGHT:
        kinds = [(kind, ep) for kind in ("sharded", "full") for ep in ((1, 2, 4) if world == WORLD else (1,))]
    else:
        kinds = [("sharded", 1), ("full", 2)] if world == WORLD else [("sharded", 1)]
    return [fit(ep, world, epochs=2, seed=7, path=Path(folder, f"{kind}.ckpt"))[1].state() for kind, ep in kinds]


def test_a_checkpoint_is_continued_with_experts_divided_otherwise(tmp_path: Path) -> None:
    expected = run_distributed(save, WORLD, str(tmp_path))[0]
    whole = torch.load(tmp_path / "full.ckpt", weights_only=True)["state_dict"]
    assert whole["model.blocks.0.experts.weight_in"].shape == (8, 24, 8)
    found = run_distributed(resume, WORLD, str(tmp_path))[0] + run_distributed(resume, 1, str(tmp_path))[0]
    assert len(found) == (8 if NIGHT else 3)
    assert expected["blocks.0.router.bias"].any()
    for state in found:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
