"""Hooks on parameters, registered before or after sharding.

`register_hook` sees what it sees under DDP, on the ranks that registered it; `register_post_accumulate_grad_hook` the accumulated gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

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


def scaling(factor: float) -> Callable[[Any], None]:
    def scale(parameter: Any) -> None:
        parameter.grad.mul_(factor)

    return scale


def halved_by_hooks(model: nn.Module) -> list[Any]:
    return [parameter.register_post_accumulate_grad_hook(scaling(0.5)) for parameter in model.parameters()]


def of_two_backwards(model: nn.Module, rank: int, unused: bool) -> dict[str, Tensor]:
    """Gradients; the second backward leaves the blocks out if they are to be `unused` in it."""
    net = model.module if isinstance(model, DistributedDataParallel) else model
    for step in range(2):
        if step and unused:
            net.blocks, blocks = nn.Sequential(), net.blocks
        model(inputs(rank, step)).square().sum().backward()
        if step and unused:
            net.blocks = blocks
    return {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in net.named_parameters()
    }


def hooks_after_accumulation_see_what_was_accumulated(rank: int, world: int) -> None:
    """In both backwards, as under DDP; and not where the second one brings no gradient."""
    problems = Problems()
    for unused in (False, True):
        wrapped = DistributedDataParallel(seeded(), find_unused_parameters=unused)
        halved_by_hooks(wrapped.module)
        expected = of_two_backwards(wrapped, rank, unused)
        for sharding in SHARDINGS:
            for before in (True, False):
                model = seeded()
                if before:
                    halved_by_hooks(model)
                sharded(model, sharding)
                if not before:
                    halved_by_hooks(model)
                for name, gradient in of_two_backwards(model, rank, unused).items():
                    problems.close(gradient, expected[name], f"{sharding}, {before=}, {unused=}: {name}")
    problems.finish()


def hooks_stay_when_sharding_begins_and_ends_and_their_handles_remove_them(rank: int, world: int) -> None:
    for sharding in SHARDINGS:
        model = seeded()
        handles, former = halved_by_hooks(model), model.first.bias
        sharded(model, sharding)
        handles.append(former.register_post_accumulate_grad_hook(scaling(3.0)))
        handles.append(model.first.bias.register_post_accumulate_grad_hook(scaling(5.0)))

        def factor(model: Net = model) -> float:
            plain = seeded()
            for net in (plain, model):
                net.zero_grad()
                net(inputs(0)).square().sum().backward()
            gradient = model.first.bias.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            return round((whole.sum() / plain.first.bias.grad.sum()).item(), 3)  # type: ignore[union-attr,operator]

        assert factor() == 7.5, sharding
        unshard_model(model)
        assert factor() == 7.5, f"{sharding}: plain again"
        assert model.first.bias is former
        sharded(model, sharding)
        for handle in handles[-2:]:
            handle.remove()
        assert factor() == 0.5, sharding
        for handle in handles:
            handle.remove()
        assert factor() == 1.0, sharding


def what_is_held_back_reaches_hooks_at_once_when_it_is_reduced(rank: int, world: int) -> None:
    for sharding in SHARDINGS:
        models, seen = [seeded(), seeded()], list[Tensor]()
        models[0].first.weight.register_post_accumulate_grad_hook(
            lambda parameter, seen=seen: seen.append(parameter.grad.full_tensor().clone())
        )
        for model in models:
            sharded(model, sharding)
            with no_sync(model):
                model(inputs(rank)).square().sum().backward()
            model(inputs(rank, 1)).square().sum().backward()
        assert len(seen) == (1 if world > 1 else 2), f"{sharding}: {len(seen)} calls; one rank holds nothing back"
        assert torch.equal(seen[-1], models[1].first.weight.grad.full_tensor())  # type: ignore[union-attr]


def read_by_hooks(model: Net, name: str) -> list[float]:
    """The norm of a gradient whenever the gradient of the first weight comes; 0 where there is none."""
    read, norms = model.get_parameter(name), list[float]()
    model.first.weight.register_hook(lambda _: norms.append(0.0 if read.grad is None else float(read.grad.norm())))
    return norms


def a_gradient_read_in_a_backward_is_that_of_plain_pytorch_or_an_error(rank: int, world: int) -> None:
    """Of the same parameter, and of one whose gradient has come already: other ranks have a part in what is there."""
    for name, reads_before_an_error in (("first.weight", 1), ("blocks.1.0.weight", 0)):
        plain = seeded()
        expected = read_by_hooks(plain, name)
        of_two_backwards(plain, rank, unused=False)
        for sharding in SHARDINGS:
            model = seeded()
            norms = read_by_hooks(model, name)
            sharded(model, sharding)
            if world == 1:
                of_two_backwards(model, rank, unused=False)
                torch.testing.assert_close(norms, expected)
                continue
            with pytest.raises(EngineStateError, match=r"weight .*is read while a backward runs, and this object"):
                of_two_backwards(model, rank, unused=False)
            assert norms == [0.0] * reads_before_an_error, sharding


def what_an_optimizer_has_from_before_sharding_is_not_stepped_by_a_hook(rank: int, world: int) -> None:
    """As the optimizer in the backward of PyTorch's tutorial: it would train nothing, or add gradients up."""
    for sharding in SHARDINGS:
        model = seeded()
        optimizer = torch.optim.SGD([model.first.weight], lr=0.1)
        former = model.first.weight

        def step(parameter: Any, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        former.register_post_accumulate_grad_hook(step)
        sharded(model, sharding)
        with pytest.raises(EngineStateError, match="in a hook the one it is given"):
            model(inputs(rank)).square().sum().backward()


class Recomputed(nn.Module):
    """Compiled for each number of rows again: without gradients in its forward, and with them in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.compiled = torch.compile(self.inner, backend="eager", dynamic=False)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compiled, x, use_reentrant=True)  # type: ignore[no-any-return]


def a_compiler_in_a_backward_finds_parameters_with_earlier_gradients(rank: int, world: int) -> None:
    """Dynamo describes each parameter with its gradient."""
    for sharding in SHARDINGS:
        torch.manual_seed(0)
        plain, model = nn.Sequential(Recomputed(), Recomputed()), nn.Sequential(Recomputed(), Recomputed())
        model.load_state_dict(plain.state_dict())
        for block in model:
            fully_shard(block, sharding=sharding)
        fully_shard(model, sharding=sharding)
        for rows in (2, 3):
            for net in (plain, model):
                net(torch.ones(rows, 5, requires_grad=True)).sum().backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), expected)  # type: ignore[union-attr]


CASES = (
    a_compiler_in_a_backward_finds_parameters_with_earlier_gradients,
    hooks_see_this_ranks_whole_gradient_once_in_each_backward,
    one_rank_may_register_hooks_alone,
    what_a_hook_returns_is_reduced_in_its_place,
    hooks_see_the_gradients_of_recomputed_layers,
    a_frozen_parameter_and_one_of_a_plain_module_take_none,
    hooks_after_accumulation_see_what_was_accumulated,
    hooks_stay_when_sharding_begins_and_ends_and_their_handles_remove_them,
    what_is_held_back_reaches_hooks_at_once_when_it_is_reduced,
    a_gradient_read_in_a_backward_is_that_of_plain_pytorch_or_an_error,
    what_an_optimizer_has_from_before_sharding_is_not_stepped_by_a_hook,
)
WORLDS = {1: CASES, 2: CASES}


@by_world(WORLDS)
def test_hooks_of_parameters(world: int, case: Any) -> None:
    check(WORLDS, world, case)
