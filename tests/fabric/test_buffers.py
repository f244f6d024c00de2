"""Under Fabric buffers follow rank 0 at the first forward of an evaluation, in checkpoints and in state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.fabric.loops import batches, launched
from tests.helpers.distributed import run_distributed


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def runs(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {"followed": {}, "left": {"broadcast_buffers": False}}.items():
        fabric = launched(world, {"units": [nn.Linear], **options})
        module = Normed()
        model = fabric.setup(module)
        for phase in ("first", "second"):
            model.train()
            for x, _ in batches(rank, world, 2):
                model(x)
            trained = module.norm.running_mean.clone()
            model.eval()
            x = batches(rank, world, 1)[0][0]
            model(x)
            found[f"{name} {phase}"] = trained, module.norm.running_mean.clone()
            with torch.no_grad():
                module.norm.running_mean.fill_(30.0 + rank)
            model(x)
            found[f"{name} {phase}, later in it"] = module.norm.running_mean.clone()
        fabric.save(Path(folder, name), {"model": model})
        found[f"{name} saved"] = module.norm.running_mean.clone()
        with torch.no_grad():
            module.norm.running_mean.fill_(40.0 + rank)
        state = fabric.strategy.get_module_state_dict(model._forward_module)
        found[f"{name} state dict"] = state["norm.running_mean"].clone()
    fabric = launched(world, {"units": [nn.Linear], "sharding": "no_shard"})
    model = fabric.setup(nn.Sequential(nn.Linear(3, 5)))
    if rank == 0:
        model.eval()
        model(torch.ones(2, 3))
        model.train()
    fabric.backward(model(torch.ones(2, 3)).sum())
    found["without buffers"] = model.module[0].bias.grad.full_tensor()
    return found


def test_the_first_forward_of_an_evaluation_a_checkpoint_and_a_state_dict_follow_rank_0(tmp_path: Path) -> None:
    first, second = run_distributed(runs, 2, str(tmp_path))
    for phase in ("first", "second"):
        trained, evaluated = first[f"followed {phase}"]
        assert torch.equal(trained, evaluated)
        assert torch.equal(second[f"followed {phase}"][1], evaluated)
        assert not torch.equal(second[f"followed {phase}"][0], trained), "ranks saw different data"
        assert torch.equal(*second[f"left {phase}"])
    for rank, found in enumerate((first, second)):
        assert found["followed first, later in it"].tolist() == [30.0 + rank] * 3, "once an evaluation"
        assert found["followed saved"].tolist() == [30.0] * 3
        assert found["followed state dict"].tolist() == [40.0] * 3
        assert found["without buffers"].tolist() == [2.0] * 5, "one rank may evaluate alone"
        assert found["left saved"].tolist() == [30.0 + rank] * 3
        assert found["left state dict"].tolist() == [40.0 + rank] * 3
