"""A process that was asked to end and waits in C code is ended: by a second SIGTERM, or where nothing moves; one that works is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lightning_mfsdp.launch import overdue
from lightning_mfsdp.launch.overdue import EXIT_CODE
from tests.lightning.test_launch import ROOT, environment

# What the main thread does; none of it runs a handler of a signal, and the last two end by themselves.
WAITS = "lock = ctypes.CDLL(None).pthread_mutex_lock; mutex = bytes(64); lock(mutex); print('begins', flush=True); lock(mutex)"
COMPUTES = "print('begins', flush=True); worked(lambda: sum(range(100_000)))"
WRITES = (
    "print('begins', flush=True); worked(lambda: (os.write(file, bytes(1 << 20)), os.fsync(file), time.sleep(0.05)))"
)

PROGRAM = """
import ctypes, os, signal, sys, time
from lightning_mfsdp.launch import overdue
overdue.SECOND_S = 0.2
overdue.LOOKS_S = 0.1
overdue.COMPUTES_S = 0.01
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
def worked(work):
    until = time.monotonic() + 3
    while time.monotonic() < until:
        work()
    print("done", flush=True)
own = overdue.Overdue("rank 3", {grace})
{does}
own.close()
"""


def begun(does: str, folder: Path, grace: float) -> subprocess.Popen[str]:
    program = textwrap.dedent(PROGRAM).format(grace=grace, does=does)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder / "file")],
        env=environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


def test_one_that_waits_is_ended_after_the_grace(tmp_path: Path) -> None:
    process = begun(WAITS, tmp_path, grace=0.5)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE == 143
    assert "rank 3 is ended: SIGTERM came" in errors
    assert "for 0.5 s it has neither computed nor read or written files" in errors
    assert "handled" not in output, "the main thread was in C code"


def test_a_second_signal_ends_one_wherever_it_is(tmp_path: Path) -> None:
    process = begun(WAITS, tmp_path, grace=600)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)  # longer than what belongs to the first
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE
    assert "rank 3 is ended: a second SIGTERM came" in errors


@pytest.mark.parametrize("does", [COMPUTES, WRITES], ids=["computes", "writes"])
def test_one_that_works_is_not_ended(does: str, tmp_path: Path) -> None:
    process = begun(does, tmp_path, grace=1.0)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output.splitlines()[-1] == "done"


def test_signals_of_a_fork_are_not_taken_for_those_of_its_parent() -> None:
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    own = overdue.Overdue("rank 0", 600.0, ended.append)
    try:
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.alarm(60)  # it must not outlive a failed test
            os.write(tell, b".")
            signal.pause()
            os._exit(7)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)
        assert own._asked_at is None
        assert signal.set_wakeup_fd(own._writer.fileno()) == own._writer.fileno(), "the parent's is in place"
    finally:
        own.close()
        signal.signal(signal.SIGTERM, before)
    assert not ended
    assert signal.set_wakeup_fd(-1) == -1, "and what was before is back"
