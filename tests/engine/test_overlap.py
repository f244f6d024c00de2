"""Gradients of a unit are reduced while the backward of other units computes, whatever a unit is and however it is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import fully_shard
from tests.engine.internals import context_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import DIM, adamw, inputs

BLOCKS = 8


class Noted(torch.autograd.Function):
    """Nothing, but a note when the backward of a block begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradient, None


class Block(nn.Module):
    """Two layers; `inside` is around what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.inside: Callable[[Any, Tensor], Tensor] = lambda function, x: function(x)

    def residual(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self.residual, x)


class Blocks(nn.Module):
    """Blocks between two layers of the root. `around` is around so many blocks at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.around: Callable[[Any, Tensor], Tensor] = lambda function, x: function(x)
        self.at_a_time = 1
        self.log: list[str] = []

    def some(self, start: int, x: Tensor) -> Tensor:
        for number in range(start, start + self.at_a_time):
            x = Noted.apply(self.blocks[number](x), partial(self.log.append, f"blocks.{number}"))
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for start in range(0, BLOCKS, self.at_a_time):
            x = self.around(partial(self.some, start), x)
        return self.after(x)


recomputed = partial(checkpoint, use_reentrant=False)
recomputed_in_a_backward_of_its_own = partial(checkpoint, use_reentrant=True)


def plainly(model: Blocks) -> None:
    """No change."""


def recomputing_blocks(model: Blocks) -> None:
    model.around = recomputed


def recomputing_pairs(model: Blocks) -> None:
    model.around, model.at_a_time = recomputed, 2


def recomputing_blocks_in_backwards_of_their_own(model: Blocks) -> None:
    model.around = recomputed_in_a_backward_of_its_own


def recomputing_parts(model: Blocks) -> None:
    for block in model.blocks:
        block.inside = recomputed


def recomputing_parts_in_backwards_of_their_own(model: Blocks) -> None:
    for block in model.blocks:
        block.inside = recomputed_in_a_backward_of_its_own


def frozen_in_part(model: Blocks) -> None:
    for block in model.blocks:
        block.first.requires_grad_(False)


def evaluated(model: Blocks) -> None:
    """Before each step."""
    model.register_forward_pre_hook(lambda model, args: evaluate(model) if torch.is_grad_enabled() else None)


@torch.no_grad()
def evaluate(model: Blocks) -> None:
    model(inputs(0))


WAYS = (
    plainly,
    recomputing_blocks,
    recomputing_pairs,
    recomputing_blocks_in_backwards_of_their_own,
    recomputing_parts,
    recomputing_parts_in_backwards_of_their_own,
    frozen_in_part,
    evaluated,
)


def a_unit_is_reduced_before_the_next_one_begins(rank: int, world: int) -> None:
    wrong: list[str] = []
    for length, change in product((1, 2, 4), WAYS):
        torch.manual_seed(0)
        model = Blocks()
        units = [model.blocks[start : start + length] for start in range(0, BLOCKS, length)]
        for unit in units:
            fully_shard(unit[0] if length == 1 else list(unit))
        fully_shard(model)
        change(model)
        optimizer, reductions = adamw(model), context_of(model).reductions
        reductions.watches.append(lambda unit, log=model.log: log.append(f"reduced {unit.name}"))
        for step in range(3):
            model.log.clear()
            model(inputs(step, rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            wrong += [f"{length} {change.__name__}, step {step}: {line}" for line in late(model.log, length)]
    assert not wrong, "\n".join(wrong)


def late(log: list[str], length: int) -> list[str]:
    """Units that were reduced after the backward of the next one had begun."""
    found = []
    for first in range(length, BLOCKS, length):
        last = first + length - 1
        name = f"blocks.{first}" if length == 1 else f"blocks.{first}..blocks.{last}"
        if log.index(f"reduced {name}") > log.index(f"blocks.{first - 1}"):
            found.append(f"{name} in {log}")
    return found


WORLDS = {2: [a_unit_is_reduced_before_the_next_one_begins]}


@by_world(WORLDS)
def test_overlap(world: int, case: Any) -> None:
    check(WORLDS, world, case)
