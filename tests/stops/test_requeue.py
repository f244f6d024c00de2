"""SLURM's requeue signal, at any moment: one complete checkpoint, one requeue, and then the job comes to what an undisturbed one does."""

from __future__ import annotations

import inspect
import random
import signal
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_mfsdp.launch import slurm
from lightning_mfsdp.launch.processes import RUN_BEGINS
from lightning_mfsdp.trainer.stopped import next_hpc_path
from tests.stops.faults import End
from tests.stops.slurm_jobs import BATCHES, EPOCHS, Job, Moment, noted

pytestmark = pytest.mark.timeout(600)

Reference = tuple[dict[str, Tensor], list[list[Any]], list[list[Any]], list[list[Any]]]
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "sanity": {"num_sanity_val_steps": 1},
    "accumulates": {"accumulate_grad_batches": 4},
    "validates often": {"val_check_interval": 2},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights, samples, validations and end of a run without signals."""

    @cache
    def of(world: int, options: str, workers: int = 0) -> Reference:
        job = Job(tmp_path_factory.mktemp("undisturbed"), world, trainer=OPTIONS[options], workers=workers)
        ends = job.start()
        weights = job.weights()
        assert weights is not None, ends
        return weights, noted(ends, "batch"), noted(ends, "validation"), noted(ends, "end")

    return of


def assert_goes_on(job: Job, first: list[End], reference: Reference, *, batches: int | None = None) -> None:
    """The job that was stopped has saved and requeued once, and started again it ends as the undisturbed one, to the bit."""
    assert job.saved == ["hpc_ckpt_1.ckpt"], first
    assert job.requeues == ["requeue 4711"]
    assert {end.error for end in first} <= {"SIGTERMException: ", ""}, first
    if batches is not None:
        assert [len(read) for read in noted(first, "batch")] == [batches] * job.world
    second = job.start()
    weights = job.weights()
    assert weights is not None, second
    expected, batches_read, validations, ended = reference
    for what, values in (("batch", batches_read), ("validation", validations)):
        both = [before + after for before, after in zip(noted(first, what), noted(second, what), strict=True)]
        assert both == values, what
    assert noted(second, "end") == ended
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    assert job.requeues == ["requeue 4711"], "once"


# Where, and how many batches the job has completed when it stops.
MOMENTS: dict[str, tuple[str, Moment, int]] = {
    "in a forward": ("", Moment("on_before_backward", 2, agree=True), 3),
    "in an optimizer's step, several": ("", Moment("on_before_optimizer_step", 3, times=5, agree=True), 4),
    "in the last batch of an epoch": ("", Moment("on_train_batch_end", BATCHES - 1, agree=True), BATCHES),
    "between epochs": ("", Moment("on_train_epoch_end", agree=True), BATCHES),
    "in a sanity check": ("sanity", Moment("on_sanity_check_start", agree=True), 0),
    "before the first step": ("", Moment("on_train_epoch_start", agree=True), 0),
    "in a validation": ("validates often", Moment("on_validation_batch_start", 1, agree=True), 2),
    "in the last batch": ("", Moment("on_train_batch_start", EPOCHS * BATCHES - 1), EPOCHS * BATCHES),
    "at the end": ("", Moment("on_train_end"), EPOCHS * BATCHES),
    "at a step's end": ("accumulates", Moment("on_train_batch_start", 3, agree=True), 4),
    "on one rank": ("", Moment("on_before_backward", 2, ranks=(1,), agree=True), 3),
    "on one rank in the last batch": ("", Moment("on_before_backward", 11, ranks=(1,)), EPOCHS * BATCHES),
}


# Others come to the same claims by another way.
ON_A_PUSH = [
    "in an optimizer's step, several",
    "between epochs",
    "on one rank",
]
ALONE = ["in a validation"]


def nightly_but(some: list[str], names: Iterable[str]) -> list[Any]:
    return [name if name in some else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("name", nightly_but(ON_A_PUSH, MOMENTS))
def test_a_requeued_job_comes_to_what_an_undisturbed_one_does(name: str, undisturbed: Any, tmp_path: Path) -> None:
    options, moment, batches = MOMENTS[name]
    job = Job(tmp_path / "job", trainer=OPTIONS[options])
    assert_goes_on(job, job.start(moment), undisturbed(2, options), batches=batches)


OF_ALL_RANKS = [name for name, (_, moment, _) in MOMENTS.items() if moment.ranks is None]


@pytest.mark.parametrize("name", nightly_but(ALONE, OF_ALL_RANKS))
def test_a_rank_alone_does_so_as_well(name: str, undisturbed: Any, tmp_path: Path) -> None:
    options, moment, _ = MOMENTS[name]
    job = Job(tmp_path / "job", 1, trainer=OPTIONS[options])
    assert_goes_on(job, job.start(moment), undisturbed(1, options))


def random_moments(seed: int, number: int) -> list[Moment]:
    """On all ranks at about the same time, up to two steps after one has begun."""
    draws = random.Random(seed)
    batches = EPOCHS * BATCHES - 1
    return [Moment("on_train_batch_start", draws.randrange(batches), draws.uniform(1e-4, 2e-2)) for _ in range(number)]


@pytest.mark.nightly
@pytest.mark.parametrize("moment", random_moments(3, 1))
def test_no_moment_is_a_bad_one(moment: Moment, undisturbed: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    assert_goes_on(job, job.start(moment), undisturbed(2, ""))


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "moment"), list(enumerate(random_moments(7, 50))))
def test_no_moment_of_many_is_a_bad_one(seed: int, moment: Moment, undisturbed: Any, tmp_path: Path) -> None:
    options, world = ("", "sanity", "validates often")[seed % 3], 2 + seed % 2
    job = Job(tmp_path / "job", world, trainer=OPTIONS[options])
    assert_goes_on(job, job.start(moment), undisturbed(world, options))


def test_inside_an_accumulation_only_the_order_of_a_sum_changes(undisturbed: Any, tmp_path: Path) -> None:
    """Grace times are short: the job does not wait for the step's end."""
    job = Job(tmp_path / "job", trainer=OPTIONS["accumulates"])
    first = job.start(Moment("on_train_batch_start", 1, agree=True))
    assert [len(read) for read in noted(first, "batch")] == [2, 2]
    second = job.start()
    weights, (expected, *_) = job.weights(), undisturbed(2, "accumulates")
    assert weights is not None, second
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, rtol=1e-5, atol=1e-6), name


def test_workers_of_loaders_live_on_where_slurm_signals_all_processes(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", workers=1, trainer={"max_epochs": 1})
    ends = job.start(Moment("on_before_backward", 2, workers=True))
    assert [end.error for end in ends] == ["", ""]
    assert [len(read) for read in noted(ends, "batch")] == [BATCHES, BATCHES]
    assert (job.saved, job.requeues) == ([], [])


def test_another_signal_and_an_array_of_jobs(undisturbed: Any, tmp_path: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "47", "SLURM_ARRAY_TASK_ID": "3"}
    job = Job(tmp_path / "job", environment={"requeue_signal": signal.SIGUSR2}, variables=array)
    job.start(Moment("on_before_backward", 2, number=signal.SIGUSR2))
    assert job.saved == ["hpc_ckpt_1.ckpt"]
    assert job.requeues == ["requeue 47_3"]


def test_sigterm_may_be_the_signal(tmp_path: Path) -> None:
    """scontrol sends another one."""
    job = Job(tmp_path / "job", environment={"requeue_signal": signal.SIGTERM})
    job.start(Moment("on_before_backward", 2, number=signal.SIGTERM))
    assert (job.saved, job.requeues) == (["hpc_ckpt_1.ckpt"], ["requeue 4711"])


def test_auto_requeue_can_be_off(tmp_path: Path) -> None:
    """Then the signal does what it does in any process, and SIGTERM saves nothing for a requeue."""
    job = Job(tmp_path / "job", environment={"auto_requeue": False})
    assert {end.code for end in job.start(Moment("on_before_backward", 2))} == {-signal.SIGUSR1}
    job.start(Moment("on_before_backward", 2, number=signal.SIGTERM))
    assert (job.saved, job.requeues) == ([], [])


class TakesSignals(Callback):
    """A handler of the program, which was there before the fit."""

    def __init__(self, folder: Path) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: (folder / "handled").touch())


def own_handler(folder: Path) -> list[Callback]:
    return [TakesSignals(folder)]


def test_a_handler_of_the_program_is_kept(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", savers=own_handler)
    ends = job.start(Moment("on_before_backward", 2))
    assert [end.error for end in ends] == ["", ""]
    assert (job.folder / "handled").exists()
    assert job.requeues == []


def savers(folder: Path) -> list[Callback]:
    return [ModelCheckpoint(folder / "own", every_n_train_steps=2, save_last=True)]


@pytest.mark.parametrize(
    "strategy",
    [
        {"async_save": True},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"state_dict_type": "full"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_in_a_save(strategy: dict[str, Any], undisturbed: Any, tmp_path: Path) -> None:
    """That save is completed. What "last" finds is of the step that was stopped after as well."""
    job = Job(tmp_path / "job", savers=savers, strategy=strategy)
    first = job.start(Moment("on_save_checkpoint", 2, agree=True))
    assert {path.name for path in (job.folder / "own").iterdir()} == {"epoch=0-step=4.ckpt", "last.ckpt"}
    assert noted(first, "saved") == [[[2], [2], [4], [4], [4]]] * 2
    assert_goes_on(job, first, undisturbed(2, ""), batches=4)


def test_sigterm_before_it(undisturbed: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    first = job.start(
        Moment("on_train_batch_start", 2, number=signal.SIGTERM), Moment("on_before_backward", 2, agree=True)
    )
    assert_goes_on(job, first, undisturbed(2, ""), batches=3)


def test_preemption_is_sigterm_alone(undisturbed: Any, tmp_path: Path) -> None:
    """SLURM requeues the job itself, and what it finds is there."""
    job = Job(tmp_path / "job")
    first = job.start(Moment("on_before_backward", 2, number=signal.SIGTERM, agree=True))
    assert (job.saved, job.requeues) == (["hpc_ckpt_1.ckpt"], [])
    assert noted(first, "exit code") == [[[None]], [[None]]]
    job.start()
    weights, (expected, *_) = job.weights(), undisturbed(2, "")
    assert weights is not None
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_a_second_requeue_goes_on_from_the_first(undisturbed: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    for number in (1, 2):
        job.start(Moment("on_before_backward", 1, agree=True))
        assert len(job.requeues) == number
    assert job.saved == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]
    third = job.start()
    assert [len(read) for read in noted(third, "batch")] == [EPOCHS * BATCHES - 4] * 2
    weights, (expected, *_) = job.weights(), undisturbed(2, "")
    assert weights is not None
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_a_requeue_that_fails_is_no_success(tmp_path: Path) -> None:
    """The checkpoint is there, and whoever waits for the job to succeed is not told that it has."""
    job = Job(tmp_path / "job")
    job.folder.mkdir()
    (job.folder / "refuses").touch()
    ends = job.start(Moment("on_before_backward", 2))
    assert (job.saved, job.requeues) == (["hpc_ckpt_1.ckpt"], ["requeue 4711"])
    assert noted(ends, "exit code") == [[[1]], [[None]]]


def test_an_evaluation_is_requeued_and_saves_nothing(tmp_path: Path) -> None:
    """A checkpoint of an evaluation has no optimizer, and a fit would go on from it."""
    job = Job(tmp_path / "job", evaluates=True)
    ends = job.start(Moment("on_validation_batch_start", 1))
    assert all(end.error.startswith("SIGTERMException") for end in ends), ends
    assert (job.saved, job.requeues) == ([], ["requeue 4711"])


def test_why_a_job_was_not_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    with pytest.raises(
        RuntimeError, match=r"`scontrol requeue 12` failed \(.*No such file.*\), so the job is not in the queue"
    ):
        slurm.requeue()
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho Access denied >&2\nexit 3\n")
    (tmp_path / "scontrol").chmod(0o700)
    with pytest.raises(slurm.RequeueError, match=r"\(exit code 3: Access denied\).*--requeue"):
        slurm.requeue()


def test_the_number_is_above_all_that_lightning_looks_at(tmp_path: Path) -> None:
    assert next_hpc_path(str(tmp_path / "none")) == str(tmp_path / "none/hpc_ckpt_1.ckpt")
    for name in ("hpc_ckpt_2.ckpt", "hpc_ckpt_11.ckpt", "ckpt_best.pt", "hpc_ckpt_notes", "ckpt_99"):
        (tmp_path / name).mkdir()
    assert next_hpc_path(str(tmp_path)) == str(tmp_path / "hpc_ckpt_12.ckpt")
    assert next_hpc_path("memory://requeues") == "memory://requeues/hpc_ckpt_1.ckpt"


def test_lightning_installs_its_handlers_right_before_the_barrier_that_is_awaited() -> None:
    run = inspect.getsource(Trainer._run)
    assert run.index("register_signal_handlers()") < run.index("self._run_stage()")
    body = [
        line.strip() for line in inspect.getsource(Trainer._run_stage).splitlines() if not line.strip().startswith("#")
    ]
    assert body[1] == f'self.strategy.barrier("{RUN_BEGINS}")', "its first line"


def test_who_asks_for_a_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert slurm.requeue_signal(None) is None
    assert slurm.requeue_signal(SLURMEnvironment(auto_requeue=False)) is None
    assert slurm.requeue_signal(SLURMEnvironment()) == signal.SIGUSR1
    assert slurm.requeue_signal(SLURMEnvironment(requeue_signal=signal.SIGHUP)) == signal.SIGHUP
