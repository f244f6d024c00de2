"""Where NCCL does not let go of communicators, a process ends all the same, soon and with its program's error. Here gloo stands for it."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.lasting_ranks import forking
from tests.helpers.nights import NIGHT
from tests.lightning.test_launch import ROOT, environment

PROGRAM = """
import ctypes, socket, sys, threading, time
import torch.distributed as dist
from lightning_mfsdp.launch import communication
from lightning_mfsdp.base import compat
from lightning_mfsdp.launch.peers import Peers

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
dist.get_backend = lambda *_: "nccl"
abort = compat.c10d._abort_process_group
waits = {
    "others run": lambda: time.sleep(60),
    "nobody runs": lambda: ctypes.PyDLL(None).sleep(60),
    "late": lambda: (time.sleep(1.5 * compat._ABORT_S), abort()),
}
compat.c10d._abort_process_group = waits[sys.argv[1]]
error = ZeroDivisionError("of the " + "program")

def in_a_fit():
    communication.break_off(error)
    time.sleep(60)  # something waits for the GPU

def in_two_threads():
    threading.Thread(target=compat.abort_process_groups).start()
    time.sleep(0.5 * compat._ABORT_S)
    in_a_fit()

def without_output():
    sys.stdout.close()
    in_a_fit()

class Line:
    def __init__(self):
        self.socket, self.other = socket.socketpair()

    def send(self, message):
        pass

    def receive(self):
        return [{"apart": [{"ranks": [1], "what": str(error), "hosts": []}]}] if self.socket.recv(1) else None

def of_another_rank():
    line = Line()
    peers = Peers(0, 2, line)
    peers.abort = compat.abort_process_groups
    peers.work_begins()
    line.other.send(b".")
    time.sleep(60)

def in_a_callback():
    line = Line()
    peers = Peers(0, 2, line)
    peers.abort = compat.abort_process_groups
    peers.work_begins()
    line.other.send(b".")
    try:
        raise error
    except ZeroDivisionError:
        peers.failed(None, "seen by a callback", error)
    time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 60)  # saves, and waits for the GPU

def of_another_rank_after_the_work():
    line = Line()
    peers = Peers(0, 2, line)
    peers.abort = compat.abort_process_groups
    peers.work_begins()
    peers.work_ends()
    line.other.send(b".")
    time.sleep(5 * compat._ABORT_S)

def at_the_end():
    import atexit

    class Alone:
        has_failed, is_closed = True, False
        abort = compat.abort_process_groups

        def failed(self, where, what):
            return False

    atexit.register(communication._end_or_abort, Alone())
    raise error

def caught():
    communication.break_off(error)
    while dist.is_initialized():
        time.sleep(0.05)
    time.sleep(2 * communication._UNABORTED_S)

globals()[sys.argv[2]]()
"""


def forked(arguments: tuple[str, ...], said: Path) -> None:
    """The program in a forked process, ended as Python ends one of its own."""
    os.environ.update(RANK="0")
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv[1:] = arguments
    code = 0
    try:
        exec(PROGRAM, {"__name__": "__main__"})
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


WHERE = ("in_a_fit", "in_two_threads", "without_output", "of_another_rank", "in_a_callback", "at_the_end")
# In two threads somebody runs.
ENDED = [pair for pair in product(("others run", "nobody runs"), WHERE) if pair != ("nobody runs", "in_two_threads")]
GOING_ON = [
    ("late", "caught"),
    ("late", "in_a_callback", "4"),
    ("others run", "of_another_rank_after_the_work"),
    ("late", "of_another_rank_after_the_work"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], tuple[int, str]]:
    """Of each program the exit code and what it said. They wait most of the time, and run side by side.

    At night each is run by a Python of its own, which imports everything anew.
    """
    folder = tmp_path_factory.mktemp("said")
    if NIGHT:
        return {arguments: by_a_python_of_its_own(arguments) for arguments in (*ENDED, *GOING_ON)}
    started = {}
    for number, arguments in enumerate((*ENDED, *GOING_ON)):
        process = forking().Process(target=forked, args=(arguments, folder / str(number)))
        process.start()
        started[arguments] = process, folder / str(number)
    found = {}
    for arguments, (process, said) in started.items():
        process.join(50)
        process.kill()
        process.join()
        found[arguments] = process.exitcode, said.read_text()
    return found


def by_a_python_of_its_own(arguments: tuple[str, ...]) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(
        command, env=environment(RANK="0"), capture_output=True, text=True, timeout=50, cwd=ROOT, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", ENDED, ids="-".join)
def test_a_process_ends_that_cannot_abort_its_communicators(arguments, outcomes):
    code, said = outcomes[arguments]
    assert code == 1, said
    assert "of the program" in said
    assert ("Timeout (0:00:02)!" in said) == (arguments[0] == "nobody runs")
    assert ("is ended" in said) == (arguments[0] == "others run")


@pytest.mark.parametrize("arguments", GOING_ON, ids="-".join)
def test_a_program_that_goes_on_is_not_ended(arguments, outcomes):
    code, said = outcomes[arguments]
    assert code == 0, said
    assert "is ended" not in said
