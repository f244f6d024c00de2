"""StepProfile: the steps that were asked for are recorded and reported once, under any strategy, and nothing stays behind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_mfsdp import record_ranges
from lightning_mfsdp.base import compat
from lightning_mfsdp.callbacks import StepProfile
from lightning_mfsdp.profile import read_trace
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, Classifier, loader, make_trainer, seeded, strict_warnings

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Named(Classifier):
    """Names its batches in the trace."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.profiler.record_function(f"batch {batch_idx}"):
            return super().training_step(batch, batch_idx)


def ranges_in(path: Path) -> list[tuple[str, float]]:
    """Names, and when they began, in order of time."""
    content = path.read_bytes()
    entries = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    found = [(entry["name"], float(entry["ts"])) for entry in entries if entry.get("cat") == "user_annotation"]
    return sorted(found, key=lambda one: one[1])


def names_in(path: Path) -> list[str]:
    return [name for name, _ in ranges_in(path)]


def steps_in(path: Path) -> list[list[str]]:
    """Batches and optimizers in each step, in order."""
    steps: list[list[str]] = []
    for name in names_in(path):
        if name.startswith("ProfilerStep#"):
            steps.append([])
        elif steps and name.startswith(("batch ", "mfsdp optimizer")):
            steps[-1].append(name.removeprefix("mfsdp "))
    return steps


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_steps_are_recorded_and_reported_once(
    accumulate: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fit ends with the last of them."""
    trace, picture = tmp_path / "new" / "step.json.gz", tmp_path / "step.png"
    monitor = StepProfile(3, steps=2, trace=trace, picture=picture)
    trainer = make_trainer(tmp_path, 1, callbacks=[monitor], accumulate_grad_batches=accumulate, max_steps=5)
    with caplog.at_level("INFO"):
        trainer.fit(seeded(Named), loader(8, size=8 * 7 * accumulate))
    said = [record.message for record in caplog.records if "StepProfile: rank 0" in record.message]
    assert len(said) == 1
    assert said[0].startswith("StepProfile: rank 0, after 3 steps of this fit; ")
    assert "ms each just before, without the profiler: 2 steps of " in said[0]
    expected = [[f"batch {step * accumulate + number}" for number in range(accumulate)] for step in (3, 4)]
    assert steps_in(trace) == [[*batches, "optimizer"] for batches in expected]
    found = monitor.breakdown
    assert found is not None
    assert found.steps == 2
    assert found.host["mfsdp optimizer"] > 0
    assert found.for_data > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_steps_are_counted_from_where_a_fit_goes_on(tmp_path: Path) -> None:
    path, trace = tmp_path / "first.ckpt", tmp_path / "step.json"
    first = make_trainer(tmp_path, 1, max_epochs=1)
    first.fit(seeded(), loader(8, size=24))
    first.save_checkpoint(path)
    monitor = StepProfile(1, steps=2, trace=trace)
    second = make_trainer(tmp_path, 1, callbacks=[monitor], max_epochs=2)
    second.fit(seeded(Named), loader(8, size=24), ckpt_path=path)
    assert [len(step) for step in steps_in(trace)] == [2, 2]
    assert monitor.breakdown is not None


def test_a_validation_is_no_part_of_a_step(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    monitor = StepProfile(1, steps=2, trace=trace)
    trainer = make_trainer(tmp_path, 1, callbacks=[monitor], val_check_interval=1, max_steps=4)
    trainer.fit(seeded(Named), loader(8), loader(8))
    assert [len(step) for step in steps_in(trace)] == [2, 2]
    recorded = read_trace(trace)
    inside = sum(event.end - event.start for event in recorded.named("mfsdp validation"))
    whole = sum(event.end - event.start for event in recorded.named("ProfilerStep#"))
    assert inside > 0
    assert monitor.breakdown is not None
    assert monitor.breakdown.step == pytest.approx((whole - inside) / 2, rel=1e-3)


def profile_on_ranks(rank: int, world_size: int, folder: str) -> tuple[list[str], bool]:
    strict_warnings()
    path = Path(folder, f"{rank}.json")
    monitor = StepProfile(2, steps=1, trace=path)
    trainer = make_trainer(folder, world_size, callbacks=[monitor])
    model = seeded()
    trainer.fit(model, loader(4, 64, rank, world_size))
    return (names_in(path) if path.exists() else []), monitor.breakdown is None


def test_rank_0_reports_what_units_gather_and_reduce(tmp_path: Path) -> None:
    (names, has_none), (others, other_has_none) = run_distributed(profile_on_ranks, 2, str(tmp_path))
    assert any(name.startswith("mfsdp gather ") for name in names)
    assert any(name.startswith("mfsdp reduce ") for name in names)
    assert not has_none
    assert others == []
    assert other_has_none


def test_any_strategy_is_profiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = StepProfile(1, steps=1)
    trainer = make_trainer(tmp_path, 1, callbacks=[monitor], strategy=SingleDeviceStrategy("cpu"))
    with caplog.at_level("INFO"):
        trainer.fit(seeded(), loader(8))
    assert "StepProfile: rank 0, after 1 steps of this fit: 1 step of " in caplog.text


class Manual(Classifier):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()  # type: ignore[union-attr]


def test_with_manual_optimization_a_step_is_a_batch(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    monitor = StepProfile(1, steps=2, trace=trace)
    make_trainer(tmp_path, 1, callbacks=[monitor]).fit(seeded(Manual), loader(8, size=64))
    assert monitor.breakdown is not None
    assert monitor.breakdown.steps == 2
    assert names_in(trace).count("mfsdp optimizer") == 4


def test_a_fit_that_ends_before_the_steps_says_so_and_leaves_no_profiler(tmp_path: Path) -> None:
    monitor = StepProfile(1, steps=9)
    with pytest.warns(UserWarning, match=r"StepProfile\(step=1, steps=9\): the fit ended after 3 steps of its own"):
        make_trainer(tmp_path, 1, callbacks=[monitor]).fit(seeded(), loader(8, size=24))
    assert not compat.is_profiled()
    make_trainer(tmp_path, 1, callbacks=[monitor]).fit(seeded(), loader(8, size=8 * 12))
    assert monitor.breakdown is not None


class Failing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("in the middle")
        return super().training_step(batch, batch_idx)


def test_a_fit_that_breaks_off_leaves_no_profiler(tmp_path: Path) -> None:
    monitor = StepProfile(1, steps=9)
    with pytest.raises(RuntimeError, match="in the middle"):
        make_trainer(tmp_path, 1, callbacks=[monitor]).fit(seeded(Failing), loader(8))
    assert not compat.is_profiled()


def test_what_cannot_be_profiled_is_refused(tmp_path: Path) -> None:
    for step, steps in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=rf"StepProfile\(step={step}, steps={steps}\): expected numbers from 1"):
            StepProfile(step, steps=steps)
    twice = make_trainer(tmp_path, 1, profiler=PyTorchProfiler(dirpath=tmp_path))
    with pytest.raises(ValueError, match=r"torch\.profiler runs once in a process; leave one of them out"):
        StepProfile().setup(twice, seeded(), "fit")
    StepProfile().setup(twice, seeded(), "validate")
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with other, pytest.raises(RuntimeError, match=r"another torch\.profiler is recording"):
        make_trainer(tmp_path, 1, callbacks=[StepProfile(1)]).fit(seeded(), loader(8))


def test_ranges_that_the_program_records_are_recorded_still(tmp_path: Path) -> None:
    model = seeded()
    make_trainer(tmp_path, 1, max_steps=1).fit(model, loader(8))
    for before in (True, False):
        record_ranges(model, before)
        make_trainer(tmp_path, 1, callbacks=[StepProfile(1, steps=1)]).fit(model, loader(8))
        assert record_ranges(model, before) == before
