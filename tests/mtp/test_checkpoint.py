"""A predictor that shares a tied embedding and head, through checkpoints of the Trainer: saved on two ranks, loaded on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import run_distributed
from tests.helpers.pairwise import pairwise
from tests.lightning.models import FOREIGN_WARNINGS, full_state, make_trainer, seeded, strict_warnings
from tests.lightning.test_checkpoint import local_state
from tests.mtp.models import VOCAB, Model

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
UNITS = {"automatic": "auto", "one by one": ["Embedding", "LinearLossHead", "PredictorLayer", "CausalLayer"]}
STEPS = 2

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(depth=2, recompute=True)
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model.loss(batch[0][:, :-1], batch[0][:, 1:])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def data(rank: int, steps: int) -> DataLoader[Any]:
    ids = torch.randint(VOCAB, (2 * steps, 9), generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(ids), batch_size=2)


def trainer_for(world: int, sharding: str, units: Any, kind: str, steps: int = STEPS) -> Any:
    strategy = MFSDPStrategy(sharding=sharding, units=units, state_dict_type=kind)
    return make_trainer("unused", world, strategy=strategy, max_epochs=-1, max_steps=steps)


def save(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found = {}
    for sharding, name, kind in pairwise(STRATEGIES, UNITS, ("sharded", "full"), together=1):
        model = seeded(Net)
        trainer = trainer_for(world, sharding, UNITS[name], kind)
        trainer.fit(model, data(rank, STEPS))
        path = f"{folder}/{sharding} {name} {kind}"
        trainer.save_checkpoint(path)
        found[path] = full_state(model), local_state(trainer, model)["optimizer"]
    return found


def load(rank: int, world: int, paths: list[str]) -> dict[str, Any]:
    """What a fresh model is after loading, and that it goes on."""
    strict_warnings()
    found = {}
    for path in paths:
        model = Net()
        kind = path.rsplit(" ", 1)[1]
        trainer = trainer_for(world, "optim_grads_params", "auto", kind)
        trainer.fit(model, data(rank, STEPS), ckpt_path=path)
        assert not model.losses, "there was nothing left to train"
        found[path] = full_state(model), local_state(trainer, model)["optimizer"]
        on = trainer_for(world, "optim", UNITS["one by one"], kind, steps=STEPS + 1)
        on.fit(model := Net(), data(rank, STEPS), ckpt_path=path)
        assert bool(torch.stack(model.losses).isfinite().all())  # one of the next epoch
    return found


def test_a_tied_embedding_and_head_are_loaded_to_the_bit_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved = run_distributed(save, 2, str(tmp_path))
    (loaded,) = run_distributed(load, 1, list(saved[0]))
    for path, (weights, moments) in loaded.items():
        expected = saved[0][path][0]
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items()), path
        ranks = saved[:1] if "no_shard" in path else saved
        for name, state in moments.items():
            pieces = [rank[path][1][name]["exp_avg"] for rank in ranks if name in rank[path][1]]
            assert torch.equal(state["exp_avg"], torch.cat(pieces)), f"{path}: {name}"
    names = {"model.embedding.weight", "model.head.weight", "model.norm.weight"}
    for path in loaded:
        if path.endswith("full"):
            state = torch.load(path, weights_only=True)["state_dict"]
            assert {
                name for name in state if not name.startswith(("model.predictor.layers.", "model.blocks."))
            } == names
            assert torch.equal(state["model.embedding.weight"], state["model.head.weight"])
