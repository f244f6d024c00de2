"""The calls of a unit, driven by random lists of events and compared with the table of what it awaits.

    event                     calls that no backward has come through    calls that may come again
    a forward in grad mode    + its call
    a pass begins                                                        without those whose graph was freed
    a backward has ended      none                                       those that no two backwards in a row have missed; a call that
                                                                         was forgotten is reduced with, and stays forgotten

A unit is reduced once in every backward that has gradients of it, whatever it awaits. The process group is a fake one of two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the "fake" backend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import fully_shard
from lightning_mfsdp.engine.core.call import Call
from lightning_mfsdp.engine.core.unit import unit_of
from tests.helpers.chain import context


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@dataclass(eq=False)
class Expected:
    """One call in the table.

    Attributes:
        missed: Backwards since it was reached, or since its forward.
        outlasts_pass: It may be reached after further forwards: its graph was kept, or was not reached.
    """

    missed: int = 0
    outlasts_pass: bool = True


@dataclass(eq=False)
class Loss:
    """What a backward may begin with.

    Attributes:
        value: The loss.
        call: What the table says of its call; `None` where the forward ran without gradients, to be computed again.
        is_there: Its graph was not freed.
    """

    value: Tensor
    call: Expected | None
    is_there: bool = True


@dataclass
class Machine:
    """The code beside the table."""

    losses: list[Loss] = field(default_factory=list)
    waiting: list[Expected] = field(default_factory=list)
    spent: list[Expected] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        unit = unit_of(self.model)
        assert unit is not None
        self.unit = unit
        self.root = context(self.model)

    # -- events --------------------------------------------------------------------------------------------------------

    def forward(self, kind: str) -> None:
        """A forward: its input needs a gradient ("end") or not ("open"), or it is checkpointed."""
        self.spent = [call for call in self.spent if call.outlasts_pass]
        x = torch.ones(2, 4, requires_grad=kind != "open")
        if kind == "evaluation":
            with torch.no_grad():
                self.model(x)
            return
        call = None if kind == "reentrant" else Expected()
        if kind == "reentrant":
            y = checkpoint(self.model, x, use_reentrant=True)
        elif kind == "checkpoint":
            y = checkpoint(self.model, x, use_reentrant=False)
        else:
            y = self.model(x)
        if call is not None:
            self.waiting.append(call)
        self.losses.append(Loss(y.sum(), call))

    def backward(self, which: int, retain: bool) -> None:
        """Of one of the losses that are there."""
        there = [loss for loss in self.losses if loss.is_there]
        if not there:
            return
        loss = there[which % len(there)]
        retain = retain and loss.call is not None
        before = self.root.reductions.started
        loss.value.backward(retain_graph=retain)
        assert self.root.reductions.started == before + 1, "one group is reduced once"
        loss.is_there = retain
        calls, self.waiting = [*self.spent, *self.waiting], []
        for call in calls:
            reached = call is loss.call
            call.missed = 0 if reached else call.missed + 1
            call.outlasts_pass = retain or not reached
        self.spent = [call for call in calls if call.missed < 2]

    def drop(self, which: int) -> None:
        """A loss is never used."""
        if self.losses:
            del self.losses[which % len(self.losses)]

    def check(self) -> None:
        awaited = self.unit.awaited
        assert len(awaited.calls) == len(self.waiting)
        assert sorted(map(describe, awaited.spent)) == sorted((one.missed, one.outlasts_pass) for one in self.spent)
        assert not self.unit.weights[0].registered, "outside of forwards modules show sharded parameters"
        assert not awaited.hides_calls


def describe(call: Call) -> tuple[int, bool]:
    return call.missed, call.outlasts_pass


EVENTS = st.one_of(
    st.tuples(st.just("forward"), st.sampled_from(("end", "open", "checkpoint", "reentrant", "evaluation"))),
    st.tuples(st.just("backward"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("drop"), st.integers(0, 3)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=12))
def test_the_code_does_what_the_table_says(events: list[tuple[Any, ...]]) -> None:
    machine = Machine()
    machine.check()
    for name, *arguments in events:
        getattr(machine, name)(*arguments)
        machine.check()
