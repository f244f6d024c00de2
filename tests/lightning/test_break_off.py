"""Where NCCL does not let go of communicators, a process ends all the same, soon and with its program's error. Here gloo stands for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        return [{"apart": [{"rank": 1, "what": str(error)}]}] if self.socket.recv(1) else None

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
        has_failed = True

        def failed(self, where, what):
            return False

    atexit.register(communication._abort_after_a_failure, Alone())
    raise error

def caught():
    communication.break_off(error)
    while dist.is_initialized():
        time.sleep(0.05)
    time.sleep(2 * communication._UNABORTED_S)

globals()[sys.argv[2]]()
"""


def run(waits: str, where: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, waits, where, *more]
    return subprocess.run(command, env=environment(RANK="0"), capture_output=True, text=True, timeout=50, cwd=ROOT)


@pytest.mark.parametrize(
    "where", ["in_a_fit", "in_two_threads", "without_output", "of_another_rank", "in_a_callback", "at_the_end"]
)
@pytest.mark.parametrize("waits", ["others run", "nobody runs"])
def test_a_process_ends_that_cannot_abort_its_communicators(waits, where):
    if (waits, where) == ("nobody runs", "in_two_threads"):
        pytest.skip("the second thread would not run")
    done = run(waits, where)
    assert done.returncode == 1, done.stderr
    assert "of the program" in done.stderr
    assert ("Timeout (0:00:02)!" in done.stderr) == (waits == "nobody runs")
    assert ("rank 0 is ended" in done.stderr) == (waits == "others run")


@pytest.mark.parametrize(
    "arguments",
    [
        ("late", "caught"),
        ("late", "in_a_callback", "4"),
        ("others run", "of_another_rank_after_the_work"),
        ("late", "of_another_rank_after_the_work"),
    ],
    ids="-".join,
)
def test_a_program_that_goes_on_is_not_ended(arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "is ended" not in done.stderr
