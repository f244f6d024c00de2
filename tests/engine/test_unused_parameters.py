"""Parameters that no rank used have no gradient, under every sharding, as under DDP(find_unused_parameters=True)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mfsdp.engine import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, no_sync, sharded_parameters
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.chain import STRATEGIES, context, inputs, weights
from tests.helpers.pairwise import in_turn, in_world


class Towers(nn.Module):
    """Units of which a program uses some; each has a weight that it never uses and one that it uses when told.

    Attributes:
        used: Towers that the next forward runs, in their order.
        bends: Whether they use their optional weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Tower() for _ in range(3))
        self.out = nn.Linear(8, 2)
        self.never = nn.Parameter(torch.ones(5, 3))
        self.used: tuple[int, ...] = (0, 1, 2)
        self.bends = True

    def forward(self, x: Tensor) -> Tensor:
        for index, tower in enumerate(self.towers):
            if index in self.used:
                x = x + tower(x, self.bends)
        return self.out(x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.bend = nn.Parameter(torch.full((1, 8), 0.5))  # one row: a rank has none of it
        self.spare = nn.Parameter(torch.ones(3, 8))

    def forward(self, x: Tensor, bends: bool) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x * self.bend if bends else x


def plain() -> Towers:
    torch.manual_seed(0)
    return Towers().double()


PRECISE = MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float64)


def sharded(sharding: str, **options: Any) -> Towers:
    model, options = plain(), {"policy": PRECISE, **options}
    for tower in model.towers:
        fully_shard(tower, sharding=sharding, **options)
    return fully_shard(model, sharding=sharding, **options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


# What a rank uses in a microbatch of a step: towers, and whether they bend.
Uses = Callable[[int, int, int], tuple[tuple[int, ...], bool]]


def all_ranks_alike(rank: int, step: int, micro: int) -> tuple[tuple[int, ...], bool]:
    return ((0, 1, 2), (0, 2), (1,), (0, 1, 2))[step], step % 2 == 0


def one_rank_bends(rank: int, step: int, micro: int) -> tuple[tuple[int, ...], bool]:
    return (0, 1, 2), rank == step % 2


def one_microbatch_bends(rank: int, step: int, micro: int) -> tuple[tuple[int, ...], bool]:
    return (0, 1, 2), rank == 0 and micro == step % 2


def nothing_but_the_root(rank: int, step: int, micro: int) -> tuple[tuple[int, ...], bool]:
    return (), False


USES: tuple[Uses, ...] = (all_ranks_alike, one_rank_bends, one_microbatch_bends, nothing_but_the_root)


def run(model: Any, module: Towers, optimizer: Any, uses: Uses, rank: int, micros: int, held: Any, set_to_none: bool):
    """Four steps; returns which parameters had a gradient in each."""
    had = []
    names = [name for name, _ in module.named_parameters()]
    for step in range(4):
        for micro in range(micros):
            module.used, module.bends = uses(rank, step, micro)
            with held(model, micro < micros - 1):
                model(inputs(10 * step + micro, rank).double()).square().mean().backward()
        had.append([name for name, one in zip(names, module.parameters(), strict=True) if one.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return had


class nothing_held:  # noqa: N801 - stands for a context manager of the same use
    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


def holds(make: Callable[[Any], Any]) -> Any:
    return lambda model, is_held: make(model) if is_held else nothing_held()


def trained_by_ddp(world: int, uses: Uses, rank: int, micros: int, held: bool, set_to_none: bool):
    module = plain()
    model = DistributedDataParallel(module, find_unused_parameters=True) if world > 1 else module
    optimizer = adamw(module.parameters())
    holding = holds(lambda model: model.no_sync()) if held and world > 1 else nothing_held
    had = run(model, module, optimizer, uses, rank, micros, holding, set_to_none)
    return had, {name: parameter.detach() for name, parameter in module.named_parameters()}


def unused_parameters_are_left_alone(rank: int, world: int) -> None:
    ways = ((1, False, True), (2, True, True), (2, True, False), (2, False, True))  # microbatches, no_sync, set_to_none

    def possible(uses: Uses, way: tuple[int, bool, bool], sharding: str, local: bool) -> bool:
        """DTensors have the gradients that local rows have, so one way says enough of them."""
        return local or way[0] == 1

    rows = in_world(world, (1, 2, 3), USES, ways, STRATEGIES, (True, False), possible=possible)
    for (uses, (micros, held, set_to_none)), alike in groupby(rows, key=lambda row: row[:2]):
        had, expected = trained_by_ddp(world, uses, rank, micros, held, set_to_none)
        for _, _, sharding, local in alike:
            case = f"{uses.__name__} {micros} {held} {set_to_none} {sharding} {local}"
            model = sharded(sharding)
            optimizer = fully_shard_optimizer(adamw(model.parameters()), elementwise=local)
            holding = holds(no_sync) if held else nothing_held
            assert run(model, model, optimizer, uses, rank, micros, holding, set_to_none) == had, case
            for name, weight in weights(model).items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14, msg=f"{case}: {name}")


def only_a_rank_that_left_a_parameter_unused_waits(rank: int, world: int) -> None:
    for sharding in in_turn(0, STRATEGIES):
        model = sharded(sharding)
        for module in (model, *model.towers):
            for name in ("never", "spare"):
                if hasattr(module, name):
                    getattr(module, name).requires_grad_(False)
        usage = context(model).reductions._usage
        for step, bending in enumerate(((0, 1), (0,), (1,), ())):
            before = usage.waits
            model.bends = rank in bending
            model(inputs(step, rank).double()).square().mean().backward()
            assert usage.waits - before == (0 if rank in bending else 1), (sharding, step)
            model.zero_grad()
            used = {view.name for view in sharded_parameters(model) if view.grad is not None}
            assert not used


def unused_parameters_get_zeros_if_told_so(rank: int, world: int) -> None:
    for sharding in in_turn(1, STRATEGIES):
        model = sharded(sharding, unused_parameters="zero")
        model.used = (0, 2)
        model(inputs(0, rank).double()).square().mean().backward()
        for view in sharded_parameters(model):
            assert view.grad is not None, view.name
            if view.name.startswith("towers.1") or view.name.endswith(("spare", "never")):
                assert not view.grad.any(), view.name
        assert context(model).reductions._usage.waits == 0


def unused_parameters_get_zeros_while_a_graph_includes_backwards(rank: int, world: int) -> None:
    """A graph cannot ask whether a parameter was used. Without it they have none again."""
    model = sharded("optim_grads")
    model.used = (0, 2)
    for is_in_graph in (False, True, False):
        if is_in_graph:
            context(model).reductions.include_in_graph()
        model(inputs(0, rank).double()).square().mean().backward()
        assert (model.never.grad is not None) is (model.towers[1].bend.grad is not None) is is_in_graph
        model.zero_grad()
        if is_in_graph:
            context(model).reductions.leave_graph()


def an_optimizer_clears_gradients_on_ranks_without_rows(rank: int, world: int) -> None:
    """Of one row, one rank has all: the others hear of it when an optimizer on local rows clears its gradient."""
    for sharding, set_to_none in product(in_turn(2, STRATEGIES), (True, False)):
        model = sharded(sharding)
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        model(inputs(0, rank).double()).square().mean().backward()
        assert all(tower.bend.grad is not None for tower in model.towers)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((tower.bend.grad is None) is set_to_none for tower in model.towers)


CASES = (
    unused_parameters_are_left_alone,
    only_a_rank_that_left_a_parameter_unused_waits,
    unused_parameters_get_zeros_if_told_so,
    an_optimizer_clears_gradients_on_ranks_without_rows,
)
WORLDS = {
    1: (CASES[0], *CASES[2:]),
    2: (*CASES, unused_parameters_get_zeros_while_a_graph_includes_backwards),
    **at_night({3: CASES}),
}


@by_world(WORLDS)
def test_unused_parameters(world, case):
    check(WORLDS, world, case)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match='unused_parameters: expected "none" or "zero", got None'):
        fully_shard(nn.Linear(2, 2), unused_parameters=None)
