"""One index of a module's parameters for an operation: made once, handed on, and right about what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_mfsdp import fully_shard, fully_shard_optimizer
from lightning_mfsdp.checkpoint.state import index as room
from lightning_mfsdp.fabric import checkpoints
from tests.checkpoint.internals import (
    ParameterIndex,
    Ranks,
    full_model_state,
    full_optimizer_state,
    lightning_io,
    locate,
)
from tests.helpers.distributed import run_distributed


def made() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Two optimizers, a tied weight, and a parameter that is not sharded."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    fully_shard(model, ignored_parameters=[model[2].bias])
    optimizers = [fully_shard_optimizer(torch.optim.Adam([one], lr=0.1)) for one in (model[0].weight, model[2].weight)]
    model(torch.ones(1, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers


def counted(function: Callable[[], object]) -> int:
    """Walks through a model's parameters meanwhile."""
    walks, walk = [], room.sharded_parameters
    room.sharded_parameters = lambda module: walks.append(module) or walk(module)
    try:
        function()
    finally:
        room.sharded_parameters = walk
    return len(walks)


def every_operation_makes_one(rank: int, world: int, folder: str) -> dict[str, int]:
    model, optimizers = made()
    path = Path(folder)
    found: dict[str, int] = {}
    index = ParameterIndex(model)
    states = [lightning_io.optimizer_state(index, one) for one in optimizers]
    content = lightning_io.ShardedContent.of(
        index, {"state_dict": model.state_dict(), "optimizer_states": states}, Ranks()
    )
    lightning_io.save(locate(path / "sharded"), content, ranks=Ranks())
    states = [full_optimizer_state(one, keep=rank == 0) for one in optimizers]
    whole = {"state_dict": full_model_state(model.state_dict(), keep=rank == 0), "optimizer_states": states}
    lightning_io.save(locate(path / "full"), lightning_io.FullContent(checkpoint=whole), ranks=Ranks())
    for kind in ("sharded", "full"):
        found[f"load {kind}"] = counted(
            lambda kind=kind: lightning_io.load(locate(path / kind), model, optimizers, strict=True, weights_only=None)
        )
    state: dict[str, Any] = {"model": model, "first": optimizers[0], "second": optimizers[1]}
    for kind, whole_file in (("sharded", False), ("full", True)):
        place = locate(path / f"fabric {kind}")
        found[f"fabric save {kind}"] = counted(
            lambda place=place, whole_file=whole_file: checkpoints.save(
                place, state, {}, whole=whole_file, ranks=Ranks()
            )
        )
        found[f"fabric load {kind}"] = counted(
            lambda place=place: checkpoints.load(place, dict(state), strict=True, weights_only=None)
        )
    return found


def test_every_operation_makes_one(tmp_path: Path) -> None:
    for found in run_distributed(every_operation_makes_one, 2, str(tmp_path)):
        assert found == dict.fromkeys(found, 1)
        assert len(found) == 6


def an_index_knows_names_memory_and_what_optimizers_hold(rank: int, world: int) -> None:
    model, optimizers = made()
    index = ParameterIndex(model)
    assert [view.name for view in index.all] == ["0.weight", "2.weight"]
    assert list(index.views) == ["0.weight", "1.weight", "2.weight"]
    assert index.views["0.weight"] is index.views["1.weight"]
    assert index.others == {"2.bias": ("2.bias", model[2].bias)}
    assert [index.names_by_group(one) for one in optimizers] == [[["0.weight"]], [["2.weight"]]]
    assert index.name_of(model[2].bias) == "2.bias"
    assert all(map(index.knows, optimizers))
    assert not index.knows(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    state = model.state_dict()
    assert index.rows_of(state["1.weight"]).size() == (4, 4)
    assert index.rows_of(state["2.bias"]) is state["2.bias"]


def test_an_index_knows_names_memory_and_what_optimizers_hold() -> None:
    run_distributed(an_index_knows_names_memory_and_what_optimizers_hold, 2)
