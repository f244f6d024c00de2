"""`register_hook` on sharded parameters: it sees what it sees under DDP, on the ranks that registered it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mfsdp import EngineStateError, fully_shard, no_sync, unshard_model
from lightning_mfsdp.recompute import Recompute, apply_recompute
from tests.engine.cases import Problems
from tests.engine.worlds import by_world, check

SHARDINGS = ("no_shard", "optim_grads", "optim_grads_params")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(torch.relu(self.first(x)))


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(net: Net, sharding: str) -> Net:
    for block in net.blocks:
        fully_shard(block, sharding=sharding)
    return fully_shard(net, sharding=sharding)


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.linspace(-1.0, 1.0, 12).view(3, 4) * (rank + 1) + step


def watched(module: nn.Module, names: list[str] | None = None) -> tuple[list[tuple[str, Tensor]], list[Any]]:
    """What hooks of parameters are called with, in order; and their handles."""
    seen: list[tuple[str, Tensor]] = []
    handles = [
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.clone())))
        for name, parameter in module.named_parameters()
        if names is None or name in names
    ]
    return seen, handles


def expected_under_ddp(rank: int) -> list[tuple[str, Tensor]]:
    wrapped = DistributedDataParallel(seeded())
    seen, _ = watched(wrapped.module)
    for step in range(2):
        wrapped(inputs(rank, step)).square().sum().backward()
    return seen


def hooks_see_this_ranks_whole_gradient_once_in_each_backward(rank: int, world: int) -> None:
    problems, expected = Problems(), expected_under_ddp(rank)
    for sharding in SHARDINGS:
        model = sharded(seeded(), sharding)
        seen, handles = watched(model)
        for step in range(2):
            model(inputs(rank, step)).square().sum().backward()
        problems.expect(len(seen) == len(expected), f"{sharding}: {len(seen)} calls, expected {len(expected)}")
        for (name, gradient), (_, of_ddp) in zip(sorted(seen, key=_name), sorted(expected, key=_name), strict=False):
            problems.expect(type(gradient) is Tensor, f"{sharding} {name}: {type(gradient)}")
            problems.close(gradient, of_ddp, f"{sharding} {name}")
        for handle in handles:
            handle.remove()
        model(inputs(rank)).square().sum().backward()
        problems.expect(len(seen) == len(expected), f"{sharding}: a removed hook ran")
    problems.finish()


def _name(item: tuple[str, Tensor]) -> str:
    return item[0]


def one_rank_may_register_hooks_alone(rank: int, world: int) -> None:
    problems, expected = Problems(), [item for item in expected_under_ddp(rank) if item[0] == "first.weight"]
    for sharding in SHARDINGS:
        models = [sharded(seeded(), sharding) for _ in range(2)]
        seen, _ = watched(models[0], ["first.weight"] if rank == 0 else [])
        for step in range(2):
            for model in models:
                model(inputs(rank, step)).square().sum().backward()
        problems.expect(len(seen) == (2 if rank == 0 else 0), f"{sharding}: {len(seen)} calls")
        for (name, gradient), (_, of_ddp) in zip(seen, expected, strict=False):
            problems.close(gradient, of_ddp, f"{sharding} {name}")
        for name, parameter in models[1].named_parameters():
            got = models[0].get_parameter(name).grad.full_tensor()  # type: ignore[union-attr]
            problems.close(got, parameter.grad.full_tensor(), f"{sharding} {name}")  # type: ignore[union-attr]
    problems.finish()


def what_a_hook_returns_is_reduced_in_its_place(rank: int, world: int) -> None:
    problems = Problems()
    for sharding in SHARDINGS:
        models = [sharded(seeded(), sharding) for _ in range(2)]
        models[0].first.weight.register_hook(lambda gradient: gradient * 3)
        for model in models:
            with no_sync(model):
                model(inputs(rank)).square().sum().backward()
            model(inputs(rank, 1)).square().sum().backward()
        got, expected = (model.first.weight.grad.full_tensor() for model in models)
        problems.close(got, expected * 3, sharding)
        got, expected = (model.first.bias.grad.full_tensor() for model in models)
        problems.close(got, expected, f"{sharding}: another parameter")
    problems.finish()


def hooks_see_the_gradients_of_recomputed_layers(rank: int, world: int) -> None:
    problems, expected = Problems(), expected_under_ddp(rank)
    for sharding in SHARDINGS:
        model = seeded()
        apply_recompute(model, Recompute(modules=["blocks.*"]))
        model = sharded(model, sharding)
        seen, _ = watched(model)
        for step in range(2):
            model(inputs(rank, step)).square().sum().backward()
        problems.expect(len(seen) == len(expected), f"{sharding}: {len(seen)} calls, expected {len(expected)}")
        for (name, gradient), (_, of_ddp) in zip(sorted(seen, key=_name), sorted(expected, key=_name), strict=False):
            problems.close(gradient, of_ddp, f"{sharding} {name}")
    problems.finish()


def a_frozen_parameter_and_one_of_a_plain_module_take_none(rank: int, world: int) -> None:
    model = seeded()
    model.first.bias.requires_grad_(False)
    sharded(model, "optim_grads_params")
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        model.first.bias.register_hook(print)
    former = model.first.weight
    seen, _ = watched(model, ["first.weight"])
    unshard_model(model)
    with pytest.raises(
        EngineStateError, match=r"register_hook on parameter .*take the parameter from the module again"
    ):
        former.register_hook(print)
    model(inputs(rank)).sum().backward()
    assert [name for name, _ in seen] == ["first.weight"]


CASES = (
    hooks_see_this_ranks_whole_gradient_once_in_each_backward,
    one_rank_may_register_hooks_alone,
    what_a_hook_returns_is_reduced_in_its_place,
    hooks_see_the_gradients_of_recomputed_layers,
    a_frozen_parameter_and_one_of_a_plain_module_take_none,
)
WORLDS = {1: CASES, 2: CASES}


@by_world(WORLDS)
def test_hooks_of_parameters(world: int, case: Any) -> None:
    check(WORLDS, world, case)
