"""MemoryReport: bytes that the engine's buffers have, and the tables that follow from an allocator's counters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp import MFSDPStrategy, fully_shard, fully_shard_optimizer
from lightning_mfsdp.callbacks import MemoryReport
from lightning_mfsdp.callbacks.memory_report import draw, report
from lightning_mfsdp.engine import MemorySample, MemoryTimeline
from tests.engine.internals import context_of
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, Classifier, loader, make_trainer, seeded, strict_warnings

MIB = 2**20
STEPS = 4

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


def watch_a_step(rank: int, world_size: int) -> dict[str, Any]:
    """Square layers whose rows divide evenly, so that sizes are known in advance."""
    strict_warnings()
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    def step(timeline: MemoryTimeline | None = None) -> None:
        model(torch.randn(4, 64)).square().mean().backward()
        if timeline is not None:
            timeline.sample("gradients complete")
        optimizer.step()
        optimizer.zero_grad()
        if timeline is not None:
            timeline.sample("optimizer stepped")

    step()
    step()
    with MemoryTimeline(model, [optimizer]) as timeline:
        step(timeline)
    watches = list(context_of(model).reductions.watches)
    step()
    return {"samples": timeline.samples, "watches": len(watches)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(watch_a_step, 2)


def test_samples_follow_the_units_through_a_step(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert [(one.unit, one.phase) for one in found["samples"]] == [
            ("step begins", ""),
            ("Sequential", "forward begins"),
            ("0", "forward begins"),
            ("0", "forward ended"),
            ("1", "forward begins"),
            ("1", "forward ended"),
            ("Sequential", "forward ended"),
            ("1", "backward ended"),
            ("0", "backward ended"),
            ("Sequential", "backward ended"),
            ("gradients complete", ""),
            ("optimizer stepped", ""),
        ]


def test_samples_have_the_bytes_of_shards_slots_and_state(ranks: list[dict[str, Any]]) -> None:
    weight = 64 * 64 * 4
    for found in ranks:
        first, *_, complete, _ = found["samples"]
        assert {one.weights for one in found["samples"]} == {weight}, "half of two layers"
        assert first.optimizer >= 2 * weight, "two moments of what the rank owns, and counts of steps"
        assert first.optimizer < 2 * weight + 4096
        assert complete.gradients == weight, "half of two layers"
        assert max(one.unsharded for one in found["samples"]) == 2 * weight, "both layers meet in memory"
        assert (complete.allocated, complete.peak, complete.rest, complete.peak_rest) == (None,) * 4, (
            "a CPU does not count"
        )


def test_nothing_is_left_behind(ranks: list[dict[str, Any]]) -> None:
    assert [found["watches"] for found in ranks] == [0, 0]


def sample(unit: str, phase: str, allocated: int, peak: int, **kinds: int) -> MemorySample:
    sizes = {"weights": 10 * MIB, "unsharded": 4 * MIB, "gradients": 0, "optimizer": 20 * MIB, **kinds}
    return MemorySample(unit=unit, phase=phase, allocated=allocated * MIB, peak=peak * MIB, **sizes)


STEP = [
    sample("step begins", "", 34, 34),
    sample("GPT", "forward begins", 35, 35),
    sample("blocks.0", "forward begins", 36, 40),
    sample("blocks.0", "forward ended", 46, 50),
    sample("blocks.1", "forward begins", 46, 46),
    sample("blocks.1", "forward ended", 56, 60),
    sample("GPT", "forward ended", 57, 66),
    sample("blocks.1", "backward ended", 52, 75, gradients=5 * MIB),
    sample("blocks.0", "backward ended", 46, 64, gradients=10 * MIB),
    sample("optimizer stepped", "", 44, 45, gradients=10 * MIB),
]


def test_the_tables_say_what_was_there_at_the_peak_and_what_units_add() -> None:
    assert report(STEP, 2).splitlines() == [
        "MemoryReport: rank 0 in step 2, in MiB at the peak (blocks.1 backward ended)",
        "weights                10.0",
        "gradients               5.0",
        "optimizer state        20.0",
        "unsharded weights       4.0",
        "activations and other  36.0",
        "all                    75.0",
        "unit      peak in forward  peak in backward  left by forward",
        "blocks.1             60.0              75.0             10.0",
        "GPT                  66.0                 -             22.0",
        "blocks.0             50.0              64.0             10.0",
    ]


def test_a_forward_that_is_recomputed_in_backward_counts_as_backward() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), fully_shard(nn.Linear(4, 4))))
    x = torch.ones(2, 4, requires_grad=True)
    with MemoryTimeline(model) as timeline:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    phases = [one.phase for one in timeline.samples if one.unit == "1"]
    # The last unit ends early: nothing after the last tensor that backward needs is recomputed.
    assert phases == ["forward begins", "forward ended", "recompute begins", "backward ended"]
    again = sample("blocks.1", "recompute ended", 50, 90)
    (line,) = [line for line in report([*STEP, again], 2).splitlines() if line.startswith("blocks.1 ")]
    assert line.split() == ["blocks.1", "60.0", "90.0", "10.0"]


def test_the_second_table_has_the_largest_units_only() -> None:
    many = [sample(f"blocks.{number}", "backward ended", 40, 40 + number) for number in range(20)]
    lines = report(many, 0).splitlines()
    assert lines[8].split()[0] == "blocks.19"
    assert lines[-2].split()[0] == "blocks.8"
    assert lines[-1] == "and 8 units with smaller peaks"


def test_symmetric_memory_is_not_taken_from_what_the_allocator_counts() -> None:
    assert STEP[0].rest == 0
    assert replace(STEP[0], outside=STEP[0].unsharded).rest == 4 * MIB


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_step_of_a_fit_is_reported(accumulate: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "memory.png"
    monitor = MemoryReport(step=1, picture=path)
    trainer = make_trainer(tmp_path, 1, callbacks=[monitor], accumulate_grad_batches=accumulate)
    with caplog.at_level("INFO"):
        trainer.fit(seeded(), loader(8, size=8 * STEPS * accumulate))
    said = [record.message for record in caplog.records if "MemoryReport: rank 0 in step 1" in record.message]
    assert len(said) == 1
    assert "a CPU counts neither activations nor peaks, so there is no table of units" in said[0]
    assert sum((one.unit, one.phase) == ("Classifier", "forward begins") for one in monitor.samples) == accumulate
    assert path.read_bytes().startswith(b"\x89PNG")


def test_steps_are_those_of_this_fit_also_where_it_continues_another(tmp_path: Path) -> None:
    path = tmp_path / "first.ckpt"
    first = make_trainer(tmp_path, 1)
    first.fit(seeded(), loader(8))
    first.save_checkpoint(path)
    monitor = MemoryReport(step=2)
    second = make_trainer(tmp_path, 1, max_epochs=2, callbacks=[monitor])
    second.fit(seeded(), loader(8), ckpt_path=path)
    assert monitor.samples
    second.fit_loop.max_epochs = 3
    second.fit(seeded(), loader(8), ckpt_path=path)
    assert monitor.samples


def test_state_of_an_optimizer_may_be_anything() -> None:
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["all"] = torch.zeros(8)  # type: ignore[index, assignment]
    optimizer.state["names"] = ["a"]  # type: ignore[index, assignment]
    with MemoryTimeline(model, [optimizer]) as timeline:
        pass
    assert timeline.samples[0].optimizer == 32


def test_a_step_that_breaks_off_is_reported_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

    monitor = MemoryReport(step=1)
    trainer = make_trainer(tmp_path, 1, callbacks=[monitor])
    with caplog.at_level("INFO"), pytest.raises(torch.OutOfMemoryError):
        trainer.fit(seeded(Failing), loader(8, size=32))
    assert "The step broke off after this." in caplog.text
    assert monitor.samples[-1].phase == "forward ended"


def test_a_fit_that_ends_before_the_step_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, callbacks=[MemoryReport(step=7)], max_steps=1)
    with pytest.warns(UserWarning, match=r"MemoryReport\(step=7\): the fit ended before that step"):
        trainer.fit(seeded(), loader(8))


def test_a_picture_shows_peaks_where_they_are_counted(tmp_path: Path) -> None:
    assert draw(STEP, tmp_path / "a" / "step.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step=-1"):
        MemoryReport(step=-1)
    plain = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[MemoryReport()],
        default_root_dir=tmp_path,
    )
    with pytest.raises(TypeError, match='reads the buffers of strategy="mfsdp"; got SingleDeviceStrategy'):
        plain.fit(seeded(), loader(8))
    graphed = make_trainer(tmp_path, 1, callbacks=[MemoryReport()], strategy=MFSDPStrategy(cuda_graph=True))
    with pytest.raises(ValueError, match="MemoryReport with cuda_graph=True"):
        graphed.fit(seeded(), loader(8))
