"""Spare memory goes to weights that stay gathered: last units first, the same on all ranks, and never a reason for another result."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_mfsdp.engine import units
from lightning_mfsdp.engine.comm.communicators import Channels
from lightning_mfsdp.engine.core import planning
from lightning_mfsdp.engine.core.planning import spare_bytes, those_that_fit
from tests.engine.worlds import by_world, check
from tests.helpers.chain import adamw, assert_same_weights, context, inputs, loss_of, sharded_chain, train

LAYERS = 6


@given(st.lists(st.integers(1, 100)), st.integers(0, 400))
def test_those_that_fit_are_the_longest_start_within_the_budget(sizes, budget):
    count = those_that_fit(sizes, budget)
    assert sum(sizes[:count]) <= budget
    assert count == len(sizes) or sum(sizes[: count + 1]) > budget


def test_a_cpu_has_no_memory_to_spare():
    assert spare_bytes(torch.device("cpu"), []) == 0


def trained_with(spare, rank, steps=6, **options):
    """A chain trained with so many bytes to spare, and the gathers of each step."""
    model = sharded_chain(layers=LAYERS, reshard_after_forward="auto", **options)
    optimizer = adamw(model)
    gathers: list[int] = []
    losses: list[torch.Tensor] = []
    with mock.patch.object(planning, "spare_bytes", return_value=spare):
        for step in range(steps):
            before = context(model).lane.started
            losses += train(model, optimizer, [step], rank)
            gathers.append(context(model).lane.started - before)
    return model, losses, gathers


def as_many_units_stay_as_fit(rank, world):
    plain, expected, _ = trained_with(0, rank)
    size = next(view.full_bytes for view in units(plain) if view.name.startswith("layers"))
    for count in (0, 2, LAYERS - 1):
        model, losses, gathers = trained_with(count * size + size // 2, rank)
        kept = [view.name for view in units(model) if view.stays_gathered]
        # The last layer and the root stay in any case, at no cost of memory.
        assert kept == [f"layers.{index}" for index in range(LAYERS - 1 - count, LAYERS - 1)], kept
        assert gathers[-1] == gathers[1] - count, gathers
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        assert_same_weights(model, plain)
        pool = context(model).lane.pool
        assert pool.allocated_bytes == pool.fixed_bytes, "the new plan holds them"


def validation_gives_everything_back(rank, world):
    model, _, _ = trained_with(10**9, rank)
    with torch.no_grad():
        model(inputs(3, rank))
    assert not any(group.weights.present for unit in context(model).units for group in unit.groups)
    loss_of(model, inputs(4, rank)).backward()


def slots_are_symmetric_while_all_ranks_plan_together(rank, world):
    """Ranks ask each other once for each of these plans. Later ones are a rank's own, and in ordinary memory."""
    made: list[int] = []

    def allocator(channels, axis):
        def make(size):
            made.append(size)
            return torch.empty(size, dtype=torch.uint8)

        return make

    model = sharded_chain(layers=LAYERS)
    optimizer, pool = adamw(model), context(model).lane.pool
    context(model).channels.symmetric = True
    asked, lengths = [0], [0]
    with (
        mock.patch.object(Channels, "allocator", allocator),
        mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as ask,
    ):
        for step in range(4):
            if step == 2 and rank == 0:
                pool.outdate()  # one plans, all plan
            train(model, optimizer, [step], rank)
            asked.append(ask.call_count)
            lengths.append(len(made))
        last = sum(made[-len(pool._fixed) :]), pool.fixed_bytes
        model.wrap = lambda layer, x: layer(model.layers[LAYERS - 1](x)) if layer is model.layers[0] else layer(x)
        with pytest.warns(UserWarning, match="planned again, in ordinary memory"):
            train(model, optimizer, [4], rank)
    # The first backwards, and the one after it is decided what stays gathered.
    assert [*asked, ask.call_count] == [0, 1, 2, 3, 3, 3]
    assert lengths[0] < lengths[1] <= lengths[2] < lengths[3] == lengths[4] == len(made)
    assert last[0] == last[1]


WORLDS = {
    2: (
        as_many_units_stay_as_fit,
        validation_gives_everything_back,
        slots_are_symmetric_while_all_ranks_plan_together,
    )
}


@by_world(WORLDS)
def test_spare_memory(world, case):
    check(WORLDS, world, case)
