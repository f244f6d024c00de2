"""Where NCCL does not let go of communicators, a process ends all the same, soon and with its program's error. Here gloo stands for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lightning.test_launch import ROOT, environment

PROGRAM = """
import ctypes, sys, time
import torch.distributed as dist
from lightning_mfsdp import communication
from lightning_mfsdp.engine import compat
from lightning_mfsdp.peers import Peers

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
waits = {"others run": lambda: time.sleep(60), "nobody runs": lambda: ctypes.PyDLL(None).sleep(60)}
compat.c10d._abort_process_group = waits[sys.argv[1]]
where = sys.argv[2]
if where == "in a fit":
    communication.break_off(ZeroDivisionError("of the program"))
    time.sleep(60)  # something waits for the GPU
if where == "of another rank":
    class Line:
        def __init__(self):
            import socket
            self.socket, self.other = socket.socketpair()
        def send(self, message):
            pass
        def receive(self):
            return [{"apart": [{"rank": 1, "what": "of the program"}]}] if self.socket.recv(1) else None
    line = Line()
    peers = Peers(0, 2, line)
    peers.abort = lambda: communication.break_off(None)
    peers.work_begins()
    line.other.send(b".")
    time.sleep(60)
if where == "at the end":
    import atexit
    class Alone:
        has_failed = True
        def failed(self, where, what):
            return False
    atexit.register(communication._abort_after_a_failure, Alone())
    raise ZeroDivisionError("of the program")
"""


@pytest.mark.parametrize("where", ["in a fit", "of another rank", "at the end"])
@pytest.mark.parametrize("waits", ["others run", "nobody runs"])
def test_a_process_ends_that_cannot_abort_its_communicators(waits, where):
    command = [sys.executable, "-c", PROGRAM, waits, where]
    done = subprocess.run(command, env=environment(RANK="0"), capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    if waits == "others run":
        assert "rank 0 is ended" in done.stderr
        assert done.stderr.count("of the program") == 1
    else:
        assert "Timeout (0:00:02)!" in done.stderr
