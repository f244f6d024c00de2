"""The planner: arithmetic on made-up records, and predictions against what a step with recompute keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import fully_shard
from lightning_mfsdp.recompute import (
    LayerRecord,
    Part,
    Recompute,
    StepRecord,
    apply_recompute,
    plan_recompute,
    record_step,
    remove_recompute,
)
from tests.helpers.distributed import run_distributed
from tests.recompute.counting import CountedMemory
from tests.recompute.models import Stack, batch, build, loss_of


def layer(number: int, stack: str = "layers", saved: int = 100, seconds: float = 1.0) -> LayerRecord:
    """Its input, of 10 bytes, is the result of the one before; its result is the next one's."""
    offset = 0 if stack == "layers" else 1000
    inputs = {offset + number: 10}
    own = {offset + 100 * (number + 1): saved - 10}
    return LayerRecord(name=f"{stack}.{number}", stack=stack, saved=inputs | own, inputs=inputs, seconds=seconds)


def parts_of(names: list[str], peaks: list[int] | None = None) -> tuple[Part, ...]:
    """All layers' forwards, and the backward of each. `peaks`: in that order."""
    waiting = [tuple(names), *(tuple(names[:index]) for index in reversed(range(len(names))))]
    return tuple(
        Part(layer=name, waiting=before, peak_bytes=peak)
        for name, before, peak in zip(["", *reversed(names)], waiting, peaks or [0] * len(waiting), strict=True)
    )


def record(layers: int = 4, peaks: list[int] | None = None, **options) -> StepRecord:
    made = tuple(map(layer, range(layers)))
    parts = parts_of([one.name for one in made], peaks)
    return StepRecord(layers=made, others={10_000: 7}, seconds=12.0, parts=parts, **options)


def test_rows_count_shared_memory_once_and_the_layer_that_is_computed_again() -> None:
    plan = plan_recompute(record(), 10_000)
    assert [row.num_layers for row in plan.rows] == [0, 1, 2, 3, 4]
    assert [row.saved_bytes for row in plan.rows] == [407, 317, 227, 137, 47]
    # All four: three inputs, and everything of the last.
    assert [row.peak_bytes for row in plan.rows] == [407, 317, 227, 137, 7 + 30 + 100]
    assert [row.step_seconds for row in plan.rows] == [12.0, 13.0, 14.0, 15.0, 16.0]
    assert [row.extra_seconds for row in plan.rows] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("budget", "count"), [(407, 0), (406, 1), (227, 2), (136 + 1, 3)])
def test_the_fewest_layers_that_fit_are_chosen(budget, count) -> None:
    plan = plan_recompute(record(), budget)
    assert plan.chosen.num_layers == count
    expected = Recompute(method="block", num_layers=count) if count else Recompute(method="none")
    assert plan.recompute == expected
    lines = str(plan).splitlines()
    assert len(lines) == 6
    assert [line.split()[0] for line in lines if "the first within" in line] == [str(count)]


def test_what_else_lies_on_the_device_is_added() -> None:
    plan = plan_recompute(record(peaks=[2407, 2400, 2300, 2200, 2100]), 2300)
    assert [row.peak_bytes for row in plan.rows] == [2407, 2317, 2227, 2137, 2130]
    assert plan.chosen.num_layers == 2


def test_what_the_loss_needs_beside_is_not_there_in_the_backward_of_layers_and_gradients_are() -> None:
    """A large loss: with all layers computed again the peak is still there. A small one: the peak is in the first layer's backward."""
    large = plan_recompute(record(peaks=[3407, 2400, 2300, 2200, 2100]), 10_000)
    assert [row.peak_bytes for row in large.rows] == [3407, 3317, 3227, 3137, 3047]
    small = plan_recompute(record(peaks=[2407, 2400, 2350, 2330, 2320]), 10_000)
    assert [row.peak_bytes for row in small.rows] == [2407, 2320, 2320, 2320, 2320]


def test_a_forward_that_needs_more_than_its_backward_needs_it_again() -> None:
    plain = record(peaks=[2407, 2400, 2300, 2200, 2100])
    layers = tuple(replace(one, forward_bytes=700) for one in plain.layers)
    parts = tuple(replace(part, start_bytes=2000 - 100 * index) for index, part in enumerate(plain.parts))
    rows = plan_recompute(replace(plain, layers=layers, parts=parts), 10_000).rows
    # The third begins with 1800 less three times 90 bytes, the fourth with 1900 less four times.
    assert [row.peak_bytes for row in rows] == [2407, 2317, 2227, 1530 + 700, 1540 + 700]


def test_stacks_are_counted_side_by_side() -> None:
    layers = (*map(layer, range(3)), layer(0, "head"))
    parts = parts_of([one.name for one in layers])
    rows = plan_recompute(StepRecord(layers=layers, others={}, seconds=1.0, parts=parts), 1000).rows
    assert [row.saved_bytes for row in rows] == [400, 220, 130, 40]
    assert [row.extra_seconds for row in rows] == [0.0, 2.0, 3.0, 4.0]
    # One layer of each: in the head's backward two layers of the other stack still have everything.
    assert [row.peak_bytes for row in rows] == [400, 10 + 100 + 100 + 100, 10 + 10 + 100 + 100, 30 + 100]


def test_a_plan_is_for_the_layers_that_were_recorded() -> None:
    model = build()
    with record_step(model, ["layers.*.up"]) as recorder:
        loss_of(model, batch(0)).backward()
    plan = plan_recompute(recorder.record, 2**30)
    chosen = replace(plan, chosen=plan.rows[1]).recompute
    assert apply_recompute(model, chosen) == [f"layers.{number}.up" for number in range(4)]


def test_no_plan_without_a_budget_a_fitting_choice_or_a_whole_record() -> None:
    with pytest.raises(ValueError, match="expected a positive number, got 0"):
        plan_recompute(record(), 0)
    with pytest.raises(ValueError, match="a step takes 137 B with 3 layers recomputed, which is the least"):
        plan_recompute(record(), 100)
    with pytest.raises(ValueError, match=r"in the recorded step layers\.0 was recomputed already"):
        plan_recompute(record(recomputed=("layers.0",)), 1000)
    model = build()
    with record_step(model) as recorder:
        model(batch(0))
    with pytest.raises(ValueError, match="no layer's backward ran in the recorded step"):
        plan_recompute(recorder.record, 1000)


def recorded(model: Stack, rank: int = 0) -> StepRecord:
    torch.manual_seed(4)
    with record_step(model) as recorder:
        loss_of(model, batch(0, rank, rows=64)).backward()
    return recorder.record


def check_predictions(model: Stack, rank: int = 0) -> None:
    """Within 5 % of what autograd keeps, for each number of layers."""
    plan = plan_recompute(recorded(model, rank), 2**30)
    assert plan.rows[-1].saved_bytes < 0.2 * plan.rows[0].saved_bytes
    for row in plan.rows:
        if row.num_layers:
            apply_recompute(model, Recompute(method="block", num_layers=row.num_layers))
        found = recorded(model, rank)
        assert len(found.recomputed) == row.num_layers
        assert abs(found.saved_bytes - row.saved_bytes) <= 0.05 * row.saved_bytes, (row, found.saved_bytes)
    remove_recompute(model)


def test_predicted_bytes_are_those_that_autograd_keeps() -> None:
    model = build(layers=5)
    check_predictions(model)
    found = recorded(model)
    # By hand: norm (x, mean, rstd), up (normed), tanh, dropout (mask), down (its input), times factor, times mask.
    rows, dim, width = 64, 8, 32
    assert {one.name for one in found.layers} == {f"layers.{number}" for number in range(5)}
    for one in found.layers:
        assert sum(one.inputs.values()) == 4 * (rows * dim + dim)
        assert sum(one.saved.values()) >= 4 * rows * (2 * dim + 2 * width)
        assert one.seconds > 0
    assert found.seconds > sum(one.seconds for one in found.layers)


def waiting(model: nn.Module) -> int:
    """Bytes that operators of a forward left for its backward."""
    with CountedMemory() as memory:
        loss = loss_of(model, batch(0, rows=512))
        found = memory.now
    assert loss.requires_grad
    return found


@pytest.mark.parametrize("frozen", [(0, 1, 2), (4, 5)])
def test_frozen_layers_before_all_that_trains_keep_nothing(frozen) -> None:
    """What they would keep, computed again, is nothing, and no time goes into that; those after a layer that trains count as others."""
    model = build(layers=6)
    model.requires_grad_(False)
    for number in {*range(6)} - {*frozen}:
        model.layers[number].requires_grad_(True)
    first = min({*range(6)} - {*frozen})
    with record_step(model) as recorder:
        loss_of(model, batch(0, rows=512)).backward()
    plan = plan_recompute(recorder.record, 2**30)
    plain = waiting(model)
    for row in plan.rows:
        assert (row.extra_seconds > 0) == (row.num_layers > first), row
        if row.num_layers:
            apply_recompute(model, Recompute(method="block", num_layers=row.num_layers))
        saved = row.saved_bytes - plan.rows[0].saved_bytes
        assert abs(waiting(model) - plain - saved) <= 0.02 * plain, (row, saved, waiting(model) - plain)
    remove_recompute(model)


def most(model: nn.Module, x: Tensor) -> int:
    """Bytes that operators of a step had allocated at once."""
    model.zero_grad()
    with CountedMemory() as memory:
        loss_of(model, x).backward()
    return memory.most


@pytest.mark.parametrize("rows", [2048, 64], ids=["activations", "gradients"])
def test_the_predicted_peak_is_that_of_a_step(rows) -> None:
    """Where activations are most of it, and where gradients are, so that the peak moves from the loss to the first layer."""
    model, x = build(layers=6, dim=64), batch(0, rows=rows, dim=64)
    with CountedMemory() as memory, record_step(model, memory=memory) as recorder:
        loss_of(model, x).backward()
    plan = plan_recompute(recorder.record, 2**40)
    assert len({row.peak_bytes for row in plan.rows}) > 2
    for row in plan.rows:
        if row.num_layers:
            apply_recompute(model, Recompute(method="block", num_layers=row.num_layers))
        found = most(model, x)
        assert abs(found - row.peak_bytes) <= 0.05 * found, (row, found)


def sharded(rank: int, world: int) -> None:
    """Gathered weights are no activations."""
    for reshard in (True, False):
        model = build(layers=3)
        for one in model.layers:
            fully_shard(one, reshard_after_forward=reshard)
        fully_shard(model)
        plain = recorded(build(layers=3), rank)
        assert recorded(model, rank).saved_bytes == plain.saved_bytes
        check_predictions(model, rank)


def test_predictions_hold_for_sharded_models() -> None:
    run_distributed(sharded, 2)


class Timed(nn.Module):
    """Its last product keeps nothing of its result; `clock` says how long each half of it takes."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.up, self.down, self.clock = nn.Linear(8, 8), nn.Linear(8, 8), clock

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.clock[0] += 2
        result = self.down(hidden)
        self.clock[0] += 7
        return result


def test_time_counts_as_far_as_a_layer_is_computed_again(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("lightning_mfsdp.recompute.recorder.time.perf_counter", lambda: clock[0])
    model = nn.Sequential(Timed(clock), Timed(clock))
    model[1].inside = nn.SyncBatchNorm(8)  # ranks wait for each other in it, so it runs to its end
    with record_step(model) as recorder:
        model(torch.zeros(2, 8)).sum().backward()
    assert [one.seconds for one in recorder.record.layers] == [2, 9]
    assert recorder.record.seconds == 18


def test_a_failing_step_leaves_no_hooks() -> None:
    model = build()
    with pytest.raises(RuntimeError, match="the step failed"), record_step(model):
        raise RuntimeError("the step failed")
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
