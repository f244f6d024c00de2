"""Ranges in a profile: named, balanced in every case, and not there unless asked for."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_mfsdp.base.errors import CollectiveError
from lightning_mfsdp.engine import fully_shard, record_ranges
from lightning_mfsdp.engine.comm.ranges import Ranges
from tests.engine.worlds import by_world, check
from tests.helpers.chain import adamw, context, inputs, loss_of, plain_chain, sharded_chain, train


def recorded(model: nn.Module, rank: int, step: int = 2) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss_of(model, inputs(step, rank)).backward()
    return Counter(event.name for event in profiler.events() if event.name.startswith("mfsdp "))


def nothing_is_named_by_default(rank, world):
    model = sharded_chain(layers=3)
    train(model, adamw(model), range(2), rank)
    assert not recorded(model, rank)


def everything_has_its_name(rank, world):
    model = sharded_chain(layers=3)
    train(model, adamw(model), range(2), rank)
    record_ranges(model)
    expected = Counter()
    for unit in ("Chain", *(f"layers.{index}" for index in range(3))):
        expected.update(
            [f"mfsdp forward {unit}", f"mfsdp backward {unit}", f"mfsdp gather {unit}[0]", f"mfsdp reduce {unit}[0]"]
        )
    # The root and the last layer keep their weights for the backward; the others are gathered again.
    expected.update(["mfsdp gather layers.0[0]", "mfsdp gather layers.1[0]"])
    assert recorded(model, rank) == expected
    record_ranges(model, False)
    assert not recorded(model, rank)


def grouped_modules_are_one_range(rank, world):
    model = plain_chain(layers=2)
    fully_shard(list(model.layers))
    record_ranges(fully_shard(model))
    found = recorded(model, rank)
    assert (found["mfsdp forward layers.0..layers.1"], found["mfsdp backward layers.0..layers.1"]) == (1, 1)


def failures_leave_no_range_open(rank, world):
    model = sharded_chain(layers=3)
    record_ranges(model)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            raise ValueError("made up")

    def in_forward(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x if layer is not model.layers[1] else x[:, :3])

    def in_backward(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(Failing.apply(x) if layer is model.layers[1] else x)

    for wrap, error in ((in_forward, RuntimeError), (in_backward, ValueError)):
        model.wrap = wrap
        with pytest.raises(error):
            loss_of(model, inputs(0, rank).requires_grad_()).backward()
        model.wrap = lambda layer, x: layer(x)
        loss_of(model, inputs(1, rank)).backward()
        assert context(model).lane.ranges.num_open == 0


@pytest.mark.parametrize(
    ("seen", "how"),
    [
        ("[buffer.cc:78] Timed out waiting 20000ms for recv operation to complete", "timed out after 20 s"),
        ("[pair.cc:547] Connection closed by peer", "failed"),
    ],
)
def test_an_error_says_whether_it_was_a_time_out_and_asks_no_store_that_does_not_answer(seen, how):
    """On a host that is cut off the store of ranks is out of reach, and a question to it takes minutes."""
    is_over = threading.Event()
    try:
        with (
            pytest.raises(
                CollectiveError,
                match=f"gather of layers.0 .collective 1 of this model. {how}, because another rank is gone",
            ),
            Ranges(lambda: str(is_over.wait())).around("gather", "layers.0"),
        ):
            raise RuntimeError(seen)
    finally:
        is_over.set()


WORLDS = {
    2: (
        nothing_is_named_by_default,
        everything_has_its_name,
        grouped_modules_are_one_range,
        failures_leave_no_range_open,
    )
}


@by_world(WORLDS)
def test_ranges(world, case):
    check(WORLDS, world, case)
