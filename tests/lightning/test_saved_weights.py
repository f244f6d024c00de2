"""A weight that a hook puts into a checkpoint beside the state dict is saved whole, as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded, strict_warnings


class Copies(Classifier):
    """Keeps a copy of its head in the checkpoint; on rank 0 alone if asked."""

    def __init__(self, first_alone: bool = False) -> None:
        super().__init__()
        self.first_alone = first_alone
        self.loaded: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.first_alone or self.global_rank == 0:
            checkpoint["kept"] = {"head": self.head.weight, "twice": [2 * self.head.weight.detach()]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["kept"]


def saved(rank: int, world_size: int, folder: Path, kind: str) -> list[Tensor]:
    strict_warnings()

    def trainer() -> Trainer:
        return make_trainer(folder, world_size, strategy=MFSDPStrategy(state_dict_type=kind), max_steps=2)

    model, again, path = seeded(Copies), seeded(Copies), folder / f"{kind}.ckpt"
    fitting = trainer()
    fitting.fit(model, loader(4, 16, rank, world_size))
    fitting.save_checkpoint(path)
    trainer().fit(again, loader(4, 16, rank, world_size), ckpt_path=path)
    head = full_state(model)["head.weight"]
    assert all(type(tensor) is Tensor for tensor in (again.loaded["head"], *again.loaded["twice"]))
    model.first_alone = True
    with pytest.raises(RuntimeError, match=r"rank 1 has put .* \[\] into it, and rank 0 \['kept\.head',"):
        fitting.save_checkpoint(folder / "other.ckpt")
    return [head, again.loaded["head"], again.loaded["twice"][0] / 2]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_what_a_hook_puts_beside_the_state_dict_is_whole(kind: str, tmp_path: Path) -> None:
    for head, *others in run_distributed(saved, 2, tmp_path, kind):
        for other in others:
            assert torch.equal(other, head)


def saved_by_fabric(rank: int, world_size: int, folder: Path) -> list[Tensor]:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=MFSDPFabricStrategy())
    fabric.launch()
    model = fabric.setup_module(torch.nn.Linear(5, 3))
    fabric.save(folder / "fabric.ckpt", {"model": model, "kept": model.weight})
    return [fabric.load(folder / "fabric.ckpt", {"model": model})["kept"], model.weight.full_tensor()]


def test_fabric_saves_a_weight_whole(tmp_path: Path) -> None:
    for kept, weight in run_distributed(saved_by_fabric, 2, tmp_path):
        assert torch.equal(kept, weight)
