"""One rank fails: all end soon, each with the right error, and what was saved stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.lightning.models import Classifier
from tests.stops.faults import End, Faulty, fit, note, run_faulty

LOST = "CollectiveError"


def training(rank: int, world: int, folder: Path, kind: str, faulty_rank: int, saves: list[str]) -> None:
    callbacks = []
    if "steps" in saves:
        callbacks.append(ModelCheckpoint(folder / "steps", every_n_train_steps=2, save_top_k=-1))
    if "on exception" in saves:
        callbacks += [
            ModelCheckpoint(folder / "exception", save_on_exception=True, every_n_epochs=9, filename="{step}"),
            OnExceptionCheckpoint(folder / "other"),
        ]
    try:
        fit(rank, world, folder, Faulty(folder, kind, faulty_rank), callbacks)
    finally:
        for path in sorted(folder.rglob("*.ckpt")):
            step = torch.load(path / "meta.pt", weights_only=True)["global_step"]
            note(folder, rank, [path.parent.name, path.name, step])


def told(end: End, by: int, what: str) -> bool:
    return end.error.startswith(LOST) and f"rank {by} failed: {what}" in end.error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("exception", "ZeroDivisionError"),
        pytest.param("out of memory", "OutOfMemoryError", marks=pytest.mark.nightly),
    ],
)
def test_an_exception_on_one_rank_ends_all_and_stays_what_it_was(kind: str, error: str) -> None:
    faulty, other = (ends := run_faulty(training, 2, kind, 0, ["steps", "on exception"]))
    assert faulty.error.startswith(f"{error}: "), faulty
    assert told(other, 0, error), ends
    assert "in step 3" in other.error
    for end in ends:
        assert end.notes == [["steps", "epoch=0-step=2.ckpt", 2]], "no save after the fault, and the one before stays"


def test_a_killed_rank_is_named_by_the_others() -> None:
    ends = run_faulty(training, 3, "SIGKILL", 1, ["steps"])
    assert ends[1].code == -9
    for end in (ends[0], ends[2]):
        assert told(end, 1, "its process ended, perhaps killed"), ends
        assert [name for _, name, _ in end.notes] == ["epoch=0-step=2.ckpt"]


@pytest.mark.parametrize("faulty_rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_sigterm_on_one_rank_saves_the_same_step_on_all(faulty_rank: int) -> None:
    """Also without a callback that saves on exceptions."""
    for saves, found in ((["steps", "on exception"], "step=4"), (["steps"], "epoch=0-step=4")):
        ends = run_faulty(training, 2, "SIGTERM", faulty_rank, saves)
        for end in ends:
            assert end.error.startswith("SIGTERMException"), ends
            assert all(step <= 4 for _, _, step in end.notes)
            assert [name for _, name, step in end.notes if step == 4 and name.startswith(found)], end


def unequal(rank: int, world: int, folder: Path) -> None:
    model = Classifier()
    options = {"limit_train_batches": 2 + 2 * rank}
    fit(rank, world, folder, model, [], **options)


def test_unequal_loaders_are_named_as_a_cause() -> None:
    ends = run_faulty(unequal, 2)
    assert ends[0].code == 0
    assert ends[1].error.startswith(LOST), ends
    assert "gather of " in ends[1].error
    assert "equally many training batches" in ends[1].error


class Whole(Classifier):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.trainer.is_global_zero:
            self.blocks[0].linear.weight.full_tensor()
        return super().training_step(batch, batch_idx)


def one_gathers(rank: int, world: int, folder: Path) -> None:
    fit(rank, world, folder, Whole(), [])


def test_a_collective_on_one_rank_only_is_named() -> None:
    ends = run_faulty(one_gathers, 2, timeout_s=5)  # they wait for each other until then
    errors = [end.error for end in ends]
    assert any("full_tensor" in error for error in errors), ends
    for end in ends:
        assert end.code == 1
        assert end.error.startswith(LOST), ends
