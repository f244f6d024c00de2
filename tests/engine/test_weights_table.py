"""The states of a group's weights, driven by random lists of events and compared with a table.

Two groups share one pooled buffer, as units that never ran together do. The process group is a fake one of two ranks, whose collectives are
called and move nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the "fake" backend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_mfsdp.engine import fully_shard
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.core.storage import Slot
from lightning_mfsdp.engine.core.weights import Weights
from tests.helpers.chain import context

PRIVATE, SHARED = "private", "shared"


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@dataclass
class Expected:
    """What the table says of one group.

    Attributes:
        at: Its memory, `None`: sharded.
        leases: Units that compute with it.
        registered: The module shows unsharded parameters.
        gathers: All-gathers that were issued.
    """

    at: str | None = None
    leases: int = 0
    registered: bool = False
    gathers: int = 0


class Machine:
    """The code beside the table."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.modules = [nn.Linear(4, 4, bias=False) for _ in range(2)]
        for module in self.modules:
            fully_shard(module)
        self.model = fully_shard(nn.Sequential(*self.modules))
        for _ in range(3):  # until the pool has a plan
            self.model(torch.ones(1, 4)).sum().backward()
        self.root = context(self.model)
        self.root.recover()
        self.weights: list[Weights] = [
            group.weights for unit in self.root.units for group in unit.groups if unit.name in ("0", "1")
        ]
        self.shared = Slot(self.weights[0].client.size_bytes, torch.device("cpu"), fixed=True)
        _ = self.shared.memory
        for weights in self.weights:
            weights.client.home = self.shared
        self.private = [Slot(weights.client.size_bytes, torch.device("cpu"), fixed=False) for weights in self.weights]
        self.expected = [Expected(), Expected()]
        self.before = self.root.lane.started

    def buffer(self, index: int, name: str) -> Slot:
        return self.shared if name == SHARED else self.private[index]

    # -- the table -----------------------------------------------------------------------------------------------------

    def can_have(self, index: int, name: str) -> bool:
        """Whether memory is free or is given up."""
        other = self.expected[1 - index]
        return name == PRIVATE or other.at != SHARED or not (other.leases or other.registered)

    def takes(self, index: int, name: str) -> None:
        other = self.expected[1 - index]
        if name == SHARED and other.at == SHARED:
            other.at, other.registered = None, False
        self.expected[index].at = name
        self.expected[index].gathers += 1

    def unshard(self, index: int, name: str | None, ahead: bool) -> None:
        one, weights = self.expected[index], self.weights[index]
        needed = None if name is None else self.buffer(index, name)
        if one.at is not None and name in (None, one.at):
            pass  # it is there
        elif name is not None and ahead and self.expected[1 - index].at == SHARED == name:
            pass  # left for later
        elif name is not None and ahead and one.at is not None and one.leases:
            pass  # somebody reads it elsewhere
        else:
            one.at, one.registered = None, False
            if name is None:
                self.takes(index, SHARED if self.can_have(index, SHARED) else PRIVATE)
            else:
                self.takes(index, name)
        weights.unshard(needed, ahead=ahead)

    def use(self, index: int) -> None:
        """A unit computes with it."""
        one = self.expected[index]
        if one.at is None or one.leases > 3:
            return
        one.leases, one.registered = one.leases + 1, True
        self.weights[index].register()
        self.weights[index].leases += 1

    def end_use(self, index: int) -> None:
        one = self.expected[index]
        if not one.leases:
            return
        one.leases -= 1
        self.weights[index].leases -= 1
        if not one.leases:
            one.registered = False
            self.weights[index].unregister()

    def reshard(self, index: int) -> None:
        one = self.expected[index]
        if not one.leases:
            one.at, one.registered = None, False
            self.weights[index].reshard()

    def give_up(self, index: int, required: bool) -> None:
        one = self.expected[index]
        answer = one.at is not None and (required or not (one.leases or one.registered))
        if answer:
            one.at, one.registered = None, False
        assert self.weights[index].give_up(required) is answer

    def hide(self, index: int) -> None:
        self.expected[index].registered = False
        self.weights[index].unregister()

    def change(self, index: int) -> None:
        """The main weight is written, and the root refreshes: what nobody uses goes, what is used is gathered again where it is."""
        one = self.expected[index]
        self.root.weights_changed(
            [group for unit in self.root.units for group in unit.groups if group.weights is self.weights[index]]
        )
        self.root.refresh()
        if not (one.leases or one.registered):
            one.at = None

    # -- what holds after every event ----------------------------------------------------------------------------------

    def check(self) -> None:
        for index, (one, weights) in enumerate(zip(self.expected, self.weights, strict=True)):
            assert bool(weights.present) == (one.at is not None)
            assert weights.leases == one.leases
            assert weights.registered == one.registered
            shown = self.modules[index]._parameters["weight"]
            assert isinstance(shown, ShardedParameter) != one.registered
            if one.at is not None:
                if one.at == PRIVATE and weights.buffer is not self.shared:
                    self.private[index] = weights.buffer  # the pool has chosen it
                assert weights.buffer is self.buffer(index, one.at)
                assert weights.buffer.holder is weights.client.reference
                full: Any = shown if one.registered else None
                assert full is None or full.untyped_storage().data_ptr() == weights.buffer.memory.data_ptr()
        holders = [index for index, one in enumerate(self.expected) if one.at == SHARED]
        assert len(holders) < 2, "one buffer, one holder"
        if not holders:
            assert self.shared.holder is None
        assert self.root.lane.started - self.before == sum(one.gathers for one in self.expected)


EVENTS = st.one_of(
    st.tuples(st.just("unshard"), st.integers(0, 1), st.sampled_from((None, SHARED, PRIVATE)), st.booleans()),
    st.tuples(st.sampled_from(("use", "end_use", "reshard", "hide", "change")), st.integers(0, 1)),
    st.tuples(st.just("give_up"), st.integers(0, 1), st.booleans()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=25))
def test_the_code_does_what_the_table_says(events: list[tuple[Any, ...]]) -> None:
    machine = Machine()
    machine.check()
    for name, *arguments in events:
        getattr(machine, name)(*arguments)
        machine.check()
