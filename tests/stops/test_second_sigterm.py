"""After SIGTERM a step or a save takes as long as it needs; a second SIGTERM ends a process wherever it is."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.launch import second_sigterm
from lightning_mfsdp.launch.second_sigterm import SecondSigterm
from tests.lightning.models import Classifier
from tests.stops.faults import fit, note, run_faulty

ARMED = "A further SIGTERM ends a process at once"
FAULT_AT = 3
LONG_S = 1.5  # several times what a second SIGTERM has to come later in these tests


def prepare(rank: int, folder: Path) -> None:
    second_sigterm.SECOND_S = 0.5
    output = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 2)  # where tracebacks of the second SIGTERM go
    os.close(output)


def printed(folder: Path, rank: int) -> str:
    return (folder / f"stderr-{rank}").read_text()


def is_armed(folder: Path) -> bool:
    return ARMED in printed(folder, 0)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


class Stopped(Classifier):
    """All ranks get SIGTERM in one batch, twice: from the scheduler and from the launcher. Then rank 1 does something in that step."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == FAULT_AT:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            if self.trainer.global_rank == self.trainer.world_size - 1:
                self.then()
        return super().training_step(batch, batch_idx)


def compute() -> None:
    started = time.monotonic()
    while time.monotonic() - started < LONG_S:
        torch.ones(64, 64).matmul(torch.ones(64, 64))


def keep_the_lock() -> None:
    """In C code, and no thread of Python runs meanwhile."""
    sum(range(60_000_000))


def nothing() -> None:
    pass


def write_with(action: Callable[[], None]) -> None:
    """A file system that is slow, or worse: `fsync` shows nothing of what it does."""
    fsync = os.fsync

    def sync(file: int) -> None:
        fsync(file)
        action()

    os.fsync = sync


def training(rank: int, world: int, folder: Path, where: str) -> None:
    prepare(rank, folder)
    then = {"computes": compute, "in C code": keep_the_lock}.get(where, nothing)
    if where.startswith("a save") and rank == 1:
        write_with(lambda: time.sleep(LONG_S))
    if where == "a save in a SLURM job":
        os.environ["SLURM_JOB_ID"] = "1"
        if rank == 1:
            write_with(lambda: os.kill(os.getpid(), signal.SIGTERM))  # after it has slept
    try:
        fit(rank, world, folder, Stopped(then), [ModelCheckpoint(folder / "steps", save_last=True, every_n_epochs=9)])
    finally:
        step = torch.load(folder / "steps" / "last.ckpt" / "meta.pt", weights_only=True)["global_step"]
        note(folder, rank, [step, ARMED in printed(folder, rank)])


@pytest.mark.parametrize(
    "where", ["a save", pytest.param("computes", marks=pytest.mark.nightly), "in C code", "a save in a SLURM job"]
)
def test_a_long_step_or_save_on_one_rank_is_ended_on_none(where: str) -> None:
    """Nor does SLURM's second SIGTERM end it, which comes when the GraceTime of a preempted job is over."""
    ends = run_faulty(training, 2, where)
    in_slurm = where.endswith("SLURM job")
    for rank, end in enumerate(ends):
        assert end.error.startswith("SIGTERMException"), ends
        assert end.notes == [[FAULT_AT + 1, rank == 0 and not in_slurm]], "saved, and the time had passed"


def stopped(rank: int, world: int, folder: Path, where: str) -> None:
    prepare(rank, folder)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    script = f"""until grep -q '{ARMED}' stderr-0; do sleep 0.1; done
        kill -TERM $(cat pid-0); sleep 1; kill -CONT $(cat pid-1)"""

    def stop() -> None:
        subprocess.Popen(["sh", "-c", script], cwd=folder)
        os.kill(os.getpid(), signal.SIGSTOP)

    if where == "save" and rank == 1:
        write_with(stop)
    try:
        fit(
            rank,
            world,
            folder,
            Stopped(stop if where == "step" else nothing),
            [ModelCheckpoint(folder / "steps", save_last=True, every_n_epochs=9)],
        )
    finally:
        note(folder, rank, printed(folder, 0))


@pytest.mark.parametrize("where", ["step", "save"])
def test_the_second_ends_a_rank_that_waits_for_one_that_does_nothing(where: str) -> None:
    waiting, silent = run_faulty(stopped, 2, where)
    assert (waiting.code, waiting.error) == (-signal.SIGTERM, ""), waiting
    assert silent.code == 1, silent
    output = silent.notes[0]
    assert "(most recent call first)" in output, output
    assert {"step": "engine/comm/collectives.py", "save": "checkpoint/lightning_io.py"}[where] in output, output


def held(rank: int, world: int, folder: Path) -> None:
    prepare(rank, folder)

    def hold() -> None:
        until(lambda: is_armed(folder))
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -TERM {os.getpid()}"])
        sum(itertools.repeat(0))  # for ever

    fit(rank, world, folder, Stopped(hold), [])


def test_the_second_ends_a_process_in_which_python_cannot_run() -> None:
    (end,) = run_faulty(held, 1)
    assert (end.code, end.error) == (-signal.SIGTERM, ""), end


def killed_in_a_save(rank: int, world: int, folder: Path, kind: str) -> None:
    strategy = MFSDPStrategy(
        async_save=kind == "in the background", state_dict_type="full" if kind == "of one file" else "sharded"
    )
    if rank == (0 if kind == "of one file" else 1):
        write_with(lambda: os.kill(os.getpid(), signal.SIGKILL))
    saves = ModelCheckpoint(folder / "steps", every_n_train_steps=2)
    fit(rank, world, folder, Classifier(), [saves], strategy=strategy)


@pytest.mark.parametrize(
    "kind", ["in directories", pytest.param("in the background", marks=pytest.mark.nightly), "of one file"]
)
def test_a_save_ends_with_a_rank_that_is_lost_in_it_which_is_named(kind: str) -> None:
    """Its group waits without a time-out, and the test's others for longer than this helper."""
    ends = run_faulty(killed_in_a_save, 3, kind)
    lost = 0 if kind == "of one file" else 1
    assert [end.code for end in ends] == [-signal.SIGKILL if rank == lost else 1 for rank in range(3)], ends
    for end in ends[:lost] + ends[lost + 1 :]:
        assert end.error.startswith("CollectiveError: rank "), ends
        assert f": rank {lost} failed: its process ended, perhaps killed" in end.error, ends


def first_handler(number: int, frame: Any) -> None:
    pass


def alone(rank: int, world: int, folder: Path, kind: str) -> None:
    prepare(rank, folder)
    signal.signal(signal.SIGTERM, first_handler)
    loop = asyncio.new_event_loop()
    if kind == "asyncio":
        loop.add_signal_handler(signal.SIGUSR1, nothing)
    own = signal.set_wakeup_fd(-1)
    if own != -1:
        signal.set_wakeup_fd(own)
    second = SecondSigterm(first_handler, tells=True)
    if kind == "asyncio":
        second.note_first()
        until(lambda: is_armed(folder))
    elif kind == "another handler":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        second.note_first()
    elif kind == "a fork":
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
    if kind != "asyncio":
        threading.Event().wait(LONG_S)
    second.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    note(folder, rank, [signal.set_wakeup_fd(-1) == own, is_armed(folder)])


@pytest.mark.parametrize(("kind", "arms"), [("asyncio", True), ("another handler", False), ("a fork", False)])
def test_what_belongs_to_others_stays(kind: str, arms: bool) -> None:
    """The wakeup descriptor of an event loop, where the handler notes the signal; a later handler; the signals of a fork."""
    (end,) = run_faulty(alone, 1, kind)
    assert end.notes == [[True, arms]], end


def released(rank: int, world: int, folder: Path) -> None:
    prepare(rank, folder)
    signal.signal(signal.SIGTERM, first_handler)
    descriptors = []
    for tells in (True, False):
        second = SecondSigterm(first_handler, tells=tells)
        if tells:
            second.note_first()
        second.release()
        descriptors.append(signal.set_wakeup_fd(-1))
    until(lambda: is_armed(folder))
    note(folder, rank, descriptors)


def test_a_run_that_was_stopped_gives_the_wakeup_descriptor_back_and_a_second_still_ends_it() -> None:
    (end,) = run_faulty(released, 1)
    assert end.notes == [[-1, -1]], end


class StoppedAlone(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def caught(rank: int, world: int, folder: Path) -> None:
    try:
        fit(rank, world, folder, StoppedAlone(), [])
    except BaseException as error:
        note(folder, rank, [type(error).__name__, signal.set_wakeup_fd(-1)])


def test_a_program_that_catches_the_end_of_a_run_has_its_wakeup_descriptor_back() -> None:
    (end,) = run_faulty(caught, 1)
    assert end.notes == [["SIGTERMException", -1]], end


def registered(rank: int, world: int, folder: Path) -> None:
    prepare(rank, folder)
    child = os.fork()
    if child == 0:
        with (folder / "own").open("w") as file:
            faulthandler.register(signal.SIGTERM, file=file, chain=True)
            signal.signal(signal.SIGTERM, first_handler)
            SecondSigterm(first_handler, tells=True).note_first()
            until(lambda: is_armed(folder))
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    note(folder, rank, [os.waitstatus_to_exitcode(status), "(most recent call first)" in printed(folder, rank)])


def test_the_second_prints_where_it_was_though_the_program_has_registered_faulthandler() -> None:
    (end,) = run_faulty(registered, 1)
    assert end.notes == [[-signal.SIGTERM, True]], end
