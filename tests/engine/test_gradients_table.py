"""The gradients of a group, driven by random lists of events and compared with a table, in numbers and in cells.

Losses are products with integers, so that sums and averages over 1, 2 or 4 ranks are exact, in whatever order they come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mfsdp.engine import fully_shard, no_sync
from lightning_mfsdp.engine.core.gradients import Sync
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, context
from tests.helpers.nights import NIGHT, thinned

SHAPES = ((5, 3), (1, 4), (7,))  # one rank has all of the second
SEQUENCES = {1: 60, 2: 60, 4: 60} if NIGHT else {1: 6, 2: 4, 4: 3}  # by number of ranks
LENGTH = 14


class Products(nn.Module):
    """The sum of products of its parameters with given tensors, of those that are given.

    Attributes:
        fails: Whether its backward raises, once it has begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.each = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, factors: dict[int, Tensor], anchor: Tensor) -> Tensor:
        total = anchor + sum((self.each[index] * factor).sum() for index, factor in factors.items())
        if self.fails and total.requires_grad:
            total.register_hook(_fail)
        return total * 1


@dataclass
class Expected:
    """What the table says.

    Attributes:
        main: What each `.grad` is once all is reduced that waits; `None` where it was cleared or never used.
        waiting: What earlier backwards held back, reduced.
        is_used: Whether any rank used a parameter since the last reduction.
        reached: How far what waits was reduced.
        shards: How many shards of each gradient this rank keeps until they are reduced over all axes.
        changed: Whose gradient was cleared or replaced since the last backward. If all were, the next one drops what waits.
    """

    main: list[Tensor | None] = field(default_factory=lambda: [None] * len(SHAPES))
    waiting: list[Tensor] = field(default_factory=lambda: [torch.zeros(shape) for shape in SHAPES])
    is_used: list[bool] = field(default_factory=lambda: [False] * len(SHAPES))
    reached: Sync = Sync.ALL
    shards: int = 0
    changed: set[int] = field(default_factory=set)

    def reduce(self) -> None:
        """What waits joins `main`."""
        for index, used in enumerate(self.is_used):
            if used:
                before = self.main[index]
                self.main[index] = self.waiting[index] if before is None else before + self.waiting[index]
        self.forget()

    def forget(self) -> None:
        """Nothing waits any more."""
        self.waiting = [torch.zeros(shape) for shape in SHAPES]
        self.is_used = [False] * len(SHAPES)
        self.reached, self.shards = Sync.ALL, 0
        self.changed.clear()

    def clear(self, index: int, value: Tensor | None = None) -> None:
        """The user cleared a gradient, or put another one in its place."""
        self.main[index] = value
        self.waiting[index], self.is_used[index] = torch.zeros(SHAPES[index]), False
        self.changed.add(index)

    def begin(self) -> None:
        """A backward begins."""
        if len(self.changed) == len(SHAPES):
            self.shards = 0
        self.changed.clear()


class Machine:
    """The code beside the table."""

    def __init__(self, rank: int, world: int, sharding: str, outer: int, random: Random) -> None:
        self.rank, self.world, self.random = rank, world, random
        mesh = None
        if outer > 1:
            mesh = init_device_mesh("cpu", (outer, world // outer), mesh_dim_names=("outer", "shard"))
        self.model: Any = fully_shard(Products(), mesh, sharding=sharding)
        (group,) = context(self.model).groups
        self.gradients, self.full, self.inner = group.gradients, group.full_extent, group.inner_extent
        self.outer = outer
        self.shards_gradients = sharding not in ("no_shard", "optim")
        self.expected = Expected()

    # -- events --------------------------------------------------------------------------------------------------------

    def backward(self, sync: Sync, *, fails: bool = False) -> None:
        """One forward and backward. All ranks draw what all ranks use and with which factors."""
        drawn = [
            {index: self._integers(index) for index in range(len(SHAPES)) if self.random.random() < 0.6}
            for _ in range(self.world)
        ]
        anchor = torch.ones((), requires_grad=True)
        self.begins_pass()
        with _synchronizing(self.model, sync):
            self.model.fails = fails
            loss = self.model(drawn[self.rank], anchor)
            self.model.fails = False
            try:
                loss.backward()
            except ZeroDivisionError:
                self.model({}, torch.ones(()))  # what a failed backward left goes when the next pass begins
                self.expected.forget()
                return
        one = self.expected
        one.begin()
        for factors in drawn:
            for index, factor in factors.items():
                one.waiting[index] = one.waiting[index] + factor / self.world
                one.is_used[index] = True
        communicates = self.world == 1 or sync is Sync.ALL or (sync is Sync.SHARD and self.shards_gradients)
        if self.world == 1 or sync is Sync.ALL or (communicates and self.outer == 1):
            one.reduce()
        elif communicates:
            one.reached, one.shards = Sync.SHARD, len(self.inner)
        else:
            one.reached = Sync.NONE
            if drawn[self.rank]:
                one.shards = len(self.full)

    def begins_pass(self) -> None:
        """A forward whose backward does not come."""
        self.model({}, torch.ones(()))
        assert self.gradients.bucket_bytes == 0 or self.expected.shards == len(self.full)
        if all(grad is None for grad in self.expected.main) and self.expected.reached is Sync.ALL:
            assert not self.gradients.is_open, "nothing is there, and no memory"

    def clear(self) -> None:
        for index in self._some():
            self.model.each[index].grad = None
            self.expected.clear(index)

    def zero_grad(self) -> None:
        self.model.zero_grad()
        for index in range(len(SHAPES)):
            self.expected.clear(index)

    def replace(self) -> None:
        for index in self._some():
            value = self._integers(index)
            self.model.each[index].grad = value.clone()
            self.expected.clear(index, value)

    def scale(self) -> None:
        """Arithmetic in place, before which all that waits is reduced."""
        self.look()
        for index in self._some():
            if self.expected.main[index] is not None:
                self.model.each[index].grad.mul_(2)
                self.expected.main[index] = self.expected.main[index] * 2

    def look(self) -> None:
        """Compute with every gradient."""
        for index, parameter in enumerate(self.model.each):
            if self.expected.reached is not Sync.ALL and index not in self.expected.changed:
                parameter.grad + 1  # it stands for what waits
                self.expected.reduce()
            found, expected = parameter.grad, self.expected.main[index]
            assert (found is None) == (expected is None), index
            if found is not None:
                assert torch.equal(found.full_tensor(), expected), index

    def check(self) -> None:
        one, gradients = self.expected, self.gradients
        assert gradients.held_back is one.reached
        if not one.changed:  # else the next backward empties cells
            waiting = gradients._waiting
            assert (0 if waiting is None else len(waiting.extent)) == one.shards
            assert gradients.bucket_bytes == 0 or one.shards == len(self.full)
        if one.reached is Sync.ALL:
            self.look()

    def _some(self) -> list[int]:
        return [index for index in range(len(SHAPES)) if self.random.random() < 0.5]

    def _integers(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randint(-4, 5, SHAPES[index], generator=generator).float() * self.world


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def _synchronizing(model: nn.Module, sync: Sync) -> Any:
    return no_sync(model, keep_sharded=sync is Sync.SHARD) if sync is not Sync.ALL else torch.enable_grad()


EVENTS = (
    *(("backward", Sync.ALL), ("backward", Sync.NONE), ("backward", Sync.NONE), ("backward", Sync.SHARD)),
    *(("clear",), ("zero_grad",), ("replace",), ("scale",), ("look",), ("begins_pass",), ("fails",)),
)


def random_lists_of_events(rank: int, world: int) -> None:
    for outer in thinned((2, 1), 2) if world == 4 else (1,):
        for strategy in STRATEGIES:
            for seed in range(SEQUENCES[world]):
                random = Random(f"{strategy} {outer} {seed}")
                machine = Machine(rank, world, strategy, outer, random)
                told: list[Any] = []
                for _ in range(LENGTH):
                    name, *arguments = random.choice(EVENTS)
                    told.append((name, *arguments))
                    try:
                        if name == "fails":
                            machine.backward(random.choice(list(Sync)), fails=True)
                        else:
                            getattr(machine, name)(*arguments)
                        machine.check()
                    except AssertionError as error:
                        raise AssertionError(f"{strategy}, outer {outer}, seed {seed}: {told}") from error
                machine.look()
                dist.barrier()


WORLDS = {1: (random_lists_of_events,), 2: (random_lists_of_events,), 4: (random_lists_of_events,)}


@by_world(WORLDS)
def test_the_code_does_what_the_table_says(world: int, case: Any) -> None:
    check(WORLDS, world, case)
