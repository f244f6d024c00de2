"""Random lists of forwards and backwards of a unit: it is reduced once in every backward, and resharded after each.

The process group is a fake one of two ranks.
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
from tests.engine.internals import unit_of
from tests.helpers.chain import context


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@dataclass
class Machine:
    """A unit and the losses that were computed with it.

    Attributes:
        losses: What a backward may begin with, and whether its graph may be kept: not one that is recomputed by a backward of its own.
    """

    losses: list[tuple[Tensor, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        unit = unit_of(self.model)
        assert unit is not None
        self.unit = unit
        self.root = context(self.model)

    def forward(self, kind: str) -> None:
        """Its input needs a gradient ("end") or not ("open"), or it is checkpointed."""
        x = torch.ones(2, 4, requires_grad=kind != "open")
        if kind == "evaluation":
            with torch.no_grad():
                self.model(x)
        elif kind in ("reentrant", "checkpoint"):
            result = checkpoint(self.model, x, use_reentrant=kind == "reentrant")
            self.losses.append((result.sum(), kind != "reentrant"))
        else:
            self.losses.append((self.model(x).sum(), True))

    def backward(self, which: int, retain: bool) -> None:
        """Of one of the losses, however old it is."""
        if not self.losses:
            return
        which %= len(self.losses)
        loss, may_be_kept = self.losses[which]
        retain = retain and may_be_kept
        before = self.root.reductions.started
        loss.backward(retain_graph=retain)
        assert self.root.reductions.started == before + 1, "one group is reduced once"
        assert not self.unit.weights[0].present, "it is resharded"
        if not retain:
            del self.losses[which]

    def both(self) -> None:
        """Of all losses together."""
        if not self.losses:
            return
        before = self.root.reductions.started
        torch.stack([loss for loss, _ in self.losses]).sum().backward()
        assert self.root.reductions.started == before + 1, "one group is reduced once"
        self.losses.clear()

    def drop(self, which: int) -> None:
        """A loss is never used."""
        if self.losses:
            del self.losses[which % len(self.losses)]


EVENTS = st.one_of(
    st.tuples(st.just("forward"), st.sampled_from(("end", "open", "checkpoint", "reentrant", "evaluation"))),
    st.tuples(st.just("backward"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("both")),
    st.tuples(st.just("drop"), st.integers(0, 3)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=12))
def test_a_unit_is_reduced_once_in_every_backward(events: list[tuple[Any, ...]]) -> None:
    machine = Machine()
    for name, *arguments in events:
        getattr(machine, name)(*arguments)
        assert not machine.unit.weights[0].registered, "outside of forwards modules show sharded parameters"
