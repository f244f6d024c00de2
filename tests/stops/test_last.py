"""What is saved when SIGTERM stops a run is what `fit(ckpt_path="last")` goes on from, whatever ModelCheckpoints there are."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.stops.slurm_jobs import BATCHES, EPOCHS, Job, Moment, noted

pytestmark = pytest.mark.timeout(600)

STOP = Moment("on_before_backward", 4, number=signal.SIGTERM, agree=True)  # after 5 steps; savers save every second
SAVED, LATER, END = "epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", f"epoch=1-step={EPOCHS * BATCHES}.ckpt"


class Newest(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "newest"


def every_second(folder: Path, kind: type[ModelCheckpoint] = ModelCheckpoint, **options: Any) -> ModelCheckpoint:
    return kind(folder / "own", every_n_train_steps=2, **options)


def with_last(folder: Path) -> list[Callback]:
    return [every_second(folder, save_last=True)]


def without_last(folder: Path) -> list[Callback]:
    return [every_second(folder)]


def linked(folder: Path) -> list[Callback]:
    return [every_second(folder, save_last="link")]


def renamed(folder: Path) -> list[Callback]:
    return [every_second(folder, Newest, save_last=True)]


def second_has_last(folder: Path) -> list[Callback]:
    return [ModelCheckpoint(folder / "other", every_n_epochs=1), every_second(folder, save_last=True)]


def weights_only(folder: Path) -> list[Callback]:
    return [every_second(folder, save_weights_only=True, save_last=True)]


def on_exception(folder: Path) -> list[Callback]:
    return [every_second(folder, save_on_exception=True)]


def best_two(folder: Path) -> list[Callback]:
    return [every_second(folder, monitor="step", mode="max", save_top_k=2, save_last=True)]


class Counted(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "{step}-final"


def counted(folder: Path) -> list[Callback]:
    return [every_second(folder, Counted, save_last=True)]


@dataclass
class Case:
    savers: Callable[[Path], list[Callback]]
    stopped: set[str]
    ended: set[str]
    last: str = "last.ckpt"


CASES = {
    case.savers.__name__: case
    for case in (
        Case(with_last, {SAVED, "last.ckpt"}, {END, "last.ckpt"}),
        Case(without_last, {SAVED, "last.ckpt"}, {END, "last.ckpt"}),
        Case(linked, {SAVED, "last.ckpt"}, {END, "last.ckpt"}),
        Case(renamed, {SAVED, "newest.ckpt"}, {END, "newest.ckpt"}, "newest.ckpt"),
        Case(second_has_last, {SAVED, "last.ckpt"}, {END, "last.ckpt"}),
        Case(weights_only, {SAVED, "last.ckpt"}, {END, "last.ckpt"}),
        Case(
            on_exception,
            {SAVED, "epoch=0-step=5.ckpt", "last.ckpt"},
            {"epoch=0-step=5.ckpt", END, "last.ckpt"},
        ),
        Case(
            best_two,
            {"epoch=0-step=2.ckpt", SAVED, "last.ckpt"},
            {"epoch=1-step=10.ckpt", END, "last.ckpt"},
        ),
    )
}


def job_of(folder: Path, savers: Callable[[Path], list[Callback]] | None, **options: Any) -> Job:
    return Job(folder, savers=savers, **{"environment": None, "ckpt_path": "last", **options})


def names(job: Job) -> set[str]:
    return {path.name for path in (job.folder / "own").iterdir()}


def step_of(path: Path) -> int:
    step: int = torch.load(path / "meta.pt", weights_only=True)["global_step"]
    return step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    job = job_of(tmp_path_factory.mktemp("undisturbed"), None, ckpt_path=None)
    ends = job.start()
    return job.weights(), noted(ends, "batch")


def assert_goes_on(job: Job, first: Any, undisturbed: Any, after: int = 5) -> None:
    second = job.start()
    weights, (expected, batches) = job.weights(), undisturbed
    assert weights is not None, second
    assert [len(read) for read in noted(first, "batch")] == [after, after]
    both = [before + after for before, after in zip(noted(first, "batch"), noted(second, "batch"), strict=True)]
    assert both == batches
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


PUSHED = ("without_last", "linked")


@pytest.mark.parametrize(
    "name", [name if name in PUSHED else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_last_is_the_step_that_was_stopped_after(name: str, undisturbed: Any, tmp_path: Path) -> None:
    case = CASES[name]
    job = job_of(tmp_path / "job", case.savers)
    first = job.start(STOP)
    assert names(job) == case.stopped, first
    last = job.folder / "own" / case.last
    meta = torch.load(last / "meta.pt", weights_only=True)
    assert (meta["global_step"], last.is_symlink()) == (5, False)
    paths = [state["last_model_path"] for state in meta["callbacks"].values() if "last_model_path" in state]
    assert str(last) in paths, "the resumed callback replaces it, and leaves none behind"
    assert_goes_on(job, first, undisturbed)
    assert names(job) == case.ended


def test_a_second_stop_replaces_the_first(undisturbed: Any, tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", without_last)
    first = job.start(STOP)
    again = job.start(Moment("on_before_backward", 3, number=signal.SIGTERM, agree=True))
    assert names(job) == {LATER, "last.ckpt"}
    assert step_of(job.folder / "own/last.ckpt") == 9
    for before, after in zip(first, again, strict=True):
        before.notes += after.notes
    assert_goes_on(job, first, undisturbed, 9)


def test_that_of_another_run_stays_beside_it(undisturbed: Any, tmp_path: Path) -> None:
    """As where ModelCheckpoint saves by itself; "last" takes the newest."""
    job = job_of(tmp_path / "job", with_last, ckpt_path=None)
    job.start()
    first = job.start(STOP)
    assert names(job) == {END, SAVED, "last.ckpt", "last-v1.ckpt"}
    assert step_of(job.folder / "own/last.ckpt") == EPOCHS * BATCHES
    assert step_of(job.folder / "own/last-v1.ckpt") == 5
    assert_goes_on(replace(job, ckpt_path="last"), first, undisturbed)


def test_a_last_one_of_another_name_is_removed(tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", counted, ckpt_path=None)
    job.start(STOP)
    assert names(job) == {SAVED, "step=5-final.ckpt"}


def test_what_is_there_is_not_saved_again(tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", with_last)
    ends = job.start(Moment("on_before_backward", 3, number=signal.SIGTERM, agree=True))
    assert noted(ends, "saved") == [[[2], [2], [4], [4]]] * 2
    assert step_of(job.folder / "own/last.ckpt") == 4


def for_exceptions(folder: Path) -> list[Callback]:
    return [every_second(folder), OnExceptionCheckpoint(folder / "exception")]


def test_a_checkpoint_of_exceptions_is_enough(undisturbed: Any, tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", for_exceptions)
    first = job.start(STOP)
    assert names(job) == {SAVED}
    assert noted(first, "saved") == [[[2], [4], [5]]] * 2
    assert_goes_on(job, first, undisturbed)


def test_without_callbacks_there_is_no_place(tmp_path: Path) -> None:
    ends = job_of(tmp_path / "job", None, ckpt_path=None).start(STOP)
    assert noted(ends, "saved") == [[], []]
    assert [end.error for end in ends] == ["SIGTERMException: "] * 2


@pytest.mark.parametrize("ckpt_path", [pytest.param("last", marks=pytest.mark.nightly), None])
def test_a_slurm_job_finds_it_either_way(ckpt_path: str | None, undisturbed: Any, tmp_path: Path) -> None:
    """Lightning looks for hpc checkpoints if `fit` is given no path."""
    job = job_of(tmp_path / "job", with_last, ckpt_path=ckpt_path, environment={})
    first = job.start(STOP)
    assert job.saved == ["hpc_ckpt_1.ckpt"]
    assert [step_of(job.folder / name) for name in ("hpc_ckpt_1.ckpt", "own/last.ckpt")] == [5, 5]
    assert_goes_on(job, first, undisturbed)
    assert names(job) == {END, "last.ckpt"}, "its state was that of this callback in both"
