"""Two nodes whose network or machine goes away in the middle of something: each rank says which host is missing, and ends.

A node is a network namespace with a host name of its own. Nothing here is faster than its time-outs, so a case takes some ten seconds.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.forked import Forked
from tests.lightning.test_launch import ROOT, environment
from tests.stops.network_script import BATCHES, HOOKS

SCRIPT = Path(__file__).with_name("network_script.py")
ENDED_WITHIN_S = 90  # 15 where nothing else runs
PORT = 29431
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def commanded(*words: str) -> str:
    """What a command printed."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def enter(name: str, host: str) -> None:
    """Move this process into a network namespace, under a host name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(host)


@dataclass
class Nodes:
    """Two namespaces, the processes in them, and a third one between them that forwards what they send."""

    names: tuple[str, str, str]
    processes: list[Forked | subprocess.Popen[bytes]] = field(default_factory=list)

    def up(self) -> None:
        between = self.names[2]
        for name in self.names:
            commanded("ip", "netns", "add", name)
            commanded("ip", "-n", name, "link", "set", "lo", "up")
        for number, name in enumerate(self.names[:2]):
            commanded(
                "ip", "link", "add", "cable", "netns", name, "type", "veth", "peer", f"cable{number}", "netns", between
            )
            commanded("ip", "-n", name, "addr", "add", f"10.77.{number}.1/24", "dev", "cable")
            commanded("ip", "-n", between, "addr", "add", f"10.77.{number}.254/24", "dev", f"cable{number}")
            commanded("ip", "-n", name, "link", "set", "cable", "up")
            commanded("ip", "-n", between, "link", "set", f"cable{number}", "up")
            commanded("ip", "-n", name, "route", "add", "default", "via", f"10.77.{number}.254")
        self.forward(True)

    def down(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)

    def start(self, folder: Path, phase: str, main: str = "10.77.0.1", interface: str = "cable") -> None:
        """Four ranks, two on each node."""
        for rank in range(4):
            node = rank // 2
            variables = environment(
                MASTER_ADDR=main,
                MASTER_PORT=str(PORT),
                WORLD_SIZE="4",
                NODE_RANK=str(node),
                LOCAL_RANK=str(rank % 2),
                GLOO_SOCKET_IFNAME=interface,
            )
            command, output = [str(SCRIPT), str(folder), phase], folder / f"output-{rank}"
            first = partial(enter, self.names[node], f"node{node}")
            self.processes.append(Forked(command, variables, output, ROOT, first))

    def forward(self, forwards: bool) -> None:
        """Whether packets reach the other node; links stay up."""
        commanded("ip", "netns", "exec", self.names[2], "sysctl", "-w", f"net.ipv4.ip_forward={int(forwards)}")

    def kill(self, node: int) -> None:
        for process in self.processes[2 * node : 2 * node + 2]:
            process.kill()

    def cut(self) -> None:
        commanded("ip", "-n", self.names[1], "link", "set", "cable", "down")


def named(word: str) -> Nodes:
    return Nodes((f"{word}{os.getpid()}a", f"{word}{os.getpid()}b", f"{word}{os.getpid()}c"))


def unable() -> str:
    """Why no network namespaces can be made here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    nodes = named("try")
    try:
        nodes.up()
    except (AssertionError, OSError) as error:
        return f"no network namespaces here: {error}"
    finally:
        nodes.down()
    return ""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    if reason := unable():
        pytest.skip(reason)
    made = named("node")
    try:
        made.up()
        yield made
    finally:
        made.down()


FAULTS = {
    "link down": Nodes.cut,
    "silent drop": lambda nodes: nodes.forward(False),
    "node killed": lambda nodes: nodes.kill(1),
    "first node killed": lambda nodes: nodes.kill(0),
}
MISSED = {
    "link down": ("ranks 2, 3 failed: host node1 has not answered", "ranks 0, 1 failed: host node0 has not answered"),
    "silent drop": ("ranks 2, 3 failed: host node1 has not answered", "ranks 0, 1 failed: host node0 has not answered"),
    "node killed": ("failed: its process ended, perhaps killed (on host node1)", ""),
    "first node killed": ("", "failed: its process ended, perhaps killed (on host node0)"),
}
ON_A_PUSH = {("save", "silent drop")}
CASES = [
    pytest.param(phase, fault, marks=[] if (phase, fault) in ON_A_PUSH else pytest.mark.nightly)
    for phase in HOOKS
    for fault in FAULTS
]


def wait_for(files: list[Path], nodes: Nodes, folder: Path) -> None:
    until = time.monotonic() + 400
    while not all(file.exists() for file in files):
        ended = [rank for rank, process in enumerate(nodes.processes) if process.poll()]
        if ended or time.monotonic() > until:
            pytest.fail("\n".join((folder / f"output-{rank}").read_text() for rank in ended or range(4)))
        time.sleep(0.05)


def finish(nodes: Nodes, folder: Path) -> list[int]:
    """Exit codes, once all have ended."""
    codes = []
    until = time.monotonic() + 400
    for process in nodes.processes:
        codes.append(process.wait(timeout=max(until - time.monotonic(), 1)))
    nodes.processes.clear()
    return codes


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("phase", "fault"), CASES)
def test_ranks_of_a_host_that_is_gone_are_named_and_none_waits(
    phase: str, fault: str, nodes: Nodes, tmp_path: Path
) -> None:
    if phase == "load":  # of something
        nodes.start(tmp_path, "none")
        assert finish(nodes, tmp_path) == [0] * 4
    nodes.start(tmp_path, phase)
    wait_for([tmp_path / f"reached-{rank}" for rank in range(4)], nodes, tmp_path)
    FAULTS[fault](nodes)
    (tmp_path / "happened").touch()
    began = time.monotonic()
    killed = {"node killed": [2, 3], "first node killed": [0, 1]}.get(fault, [])
    for rank, process in enumerate(nodes.processes):
        output = (tmp_path / f"output-{rank}").read_text
        try:
            code = process.wait(timeout=max(began + ENDED_WITHIN_S - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {rank} goes on after {fault} in {phase}: {output()}")
        assert code != 0
        if rank not in killed:
            assert MISSED[fault][rank // 2] in output(), output()
    print(f"{fault} in {phase}: all ranks had ended after {time.monotonic() - began:.1f} s")
    if before := {"save": "epoch=0-step=3.ckpt", "load": "last.ckpt"}.get(phase):  # a checkpoint that was complete
        names = {entry.name for entry in (tmp_path / "saved" / before).iterdir()}
        assert names == {"meta.pt", ".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}


@contextmanager
def slow_link(nodes: Nodes, *, delay_ms: float, loss_percent: float) -> Iterator[None]:
    """Another connection of both nodes. Skips the test where the kernel lets no program carry packets."""
    command = [
        sys.executable,
        "-S",
        str(SCRIPT.with_name("slow_link.py")),
        *nodes.names[:2],
        str(delay_ms),
        str(loss_percent),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as carrier:
        assert carrier.stdout is not None
        assert carrier.stderr is not None
        try:
            if carrier.stdout.readline() != "ready\n":
                pytest.skip(f"no slow link here: {carrier.stderr.read()[-300:]}")
            yield
        finally:
            carrier.kill()


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_slow_network_that_loses_packets_changes_nothing(nodes: Nodes, tmp_path: Path) -> None:
    with slow_link(nodes, delay_ms=20, loss_percent=1):
        nodes.start(tmp_path, "none", main="10.78.0.1", interface="slow")
        codes = finish(nodes, tmp_path)
    outputs = [(tmp_path / f"output-{rank}").read_text() for rank in range(4)]
    assert codes == [0] * 4, "\n".join(outputs)
    assert {(tmp_path / f"done-{rank}").read_text() for rank in range(4)} == {str(BATCHES)}
    assert not re.search("has not answered|cannot reach", "".join(outputs))
