"""Relays of several hosts, with real sockets: what ranks are told when a process, a relay or a host is gone, or a process is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_mfsdp.launch import relay as of_relay
from lightning_mfsdp.launch.relay import RELAY_KILLED, Hub, Line, Relay, connect, unanswered
from tests.stops.channel import LOOPBACK, wait_for

HOSTS = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
KILLED = "its process ended, perhaps killed"


class Tree:
    """Three hosts with two ranks each, whose relays are threads; all ranks are at work."""

    def __init__(self) -> None:
        self.relays: dict[str, Relay] = {}
        self.lines: dict[int, Line] = {}
        self.threads = []
        first: Any = None
        for host, ranks in HOSTS.items():
            listener = socket.create_server(("127.0.0.1", 0))
            relay = self.relays[host] = Relay(listener, host, host, ranks, None if self.relays else 6)
            contact = [LOOPBACK, listener.getsockname()[1], host]
            first = first or contact
            self.threads.append(threading.Thread(target=relay.run, daemon=True))
            self.threads[-1].start()
            for rank in ranks:
                line = connect(contact, [rank], host, first)
                assert line is not None
                self.lines[rank] = line
                line.send({"at work": True})
        self.lines[5].send(
            {"stop": True, "requeue": False}
        )  # once all have reported, the hub has heard the rest as well
        wait_for(list(self.lines.values()), "report")
        for line in self.lines.values():
            line.send({"begun": 1})
        wait_for(list(self.lines.values()), "stop after")

    def close(self) -> None:
        for line in self.lines.values():
            line.socket.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), "a relay stays without ranks"

    def told(self, ranks: list[int], key: str = "apart") -> Any:
        """What all of these ranks are told."""
        messages = wait_for([self.lines[rank] for rank in ranks], key)
        assert all(message == messages[0] for message in messages)
        return messages[0]

    def end(self, line: Line) -> None:
        """What a relay's connection is like whose other end is gone."""
        line.socket.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def tree() -> Iterator[Tree]:
    made = Tree()
    yield made
    made.close()


def failed(ranks: list[int], what: str, *hosts: str) -> dict[str, Any]:
    return {"ranks": ranks, "what": what, "hosts": list(hosts)}


@pytest.mark.parametrize("rank", range(6))
def test_the_end_of_any_rank_is_told_to_all_others_with_its_host(tree: Tree, rank: int) -> None:
    tree.lines[rank].socket.close()
    others = [other for other in range(6) if other != rank]
    assert tree.told(others) == {"apart": [{**failed([rank], KILLED, "abc"[rank // 2]), "missed": False}]}


def test_a_host_that_does_not_answer_is_named_with_all_its_ranks(tree: Tree) -> None:
    (line,) = (line for line in tree.relays["a"]._lines if line.host == "b")
    line.is_lost = True
    tree.end(line)
    assert tree.told([0, 1, 4, 5]) == {"apart": [{**failed([2, 3], unanswered("b"), "b"), "missed": False}]}
    assert tree.told([2, 3], "gone")["gone"]["ranks"] == [0, 1], "and each side of a cut network names the other"


@pytest.mark.parametrize("is_lost", [True, False])
def test_without_the_first_host_all_others_name_that_one(tree: Tree, is_lost: bool) -> None:
    for host in "bc":
        line = tree.relays[host]._first
        assert line is not None
        line.is_lost = is_lost
        tree.end(line)
    gone = failed([0, 1], unanswered("a")) if is_lost else failed([0, 1], RELAY_KILLED, "a")
    assert tree.told([2, 3, 4, 5], "gone") == {"gone": gone, "is lost": is_lost}


def test_a_relay_that_is_gone_stands_for_the_ranks_at_work_on_its_host(tree: Tree) -> None:
    tree.lines[3].send({"closing": True})
    (line,) = (line for line in tree.relays["a"]._lines if line.host == "b")
    wait_until_left(tree, 3)
    tree.end(line)
    assert tree.told([0, 1, 4, 5]) == {"apart": [{**failed([2], RELAY_KILLED, "b"), "missed": False}]}


def wait_until_left(tree: Tree, rank: int) -> None:
    hub = tree.relays["a"]._hub
    assert hub is not None
    until = time.monotonic() + 10
    while rank not in hub._left:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_alike_failures_of_many_ranks_are_one_message_and_consequences_come_last() -> None:
    told: list[Any] = []
    hub = Hub(4096, told.append)
    hub.came(range(2048), "a")
    hub.came(range(2048, 4096), "b")
    for rank in range(4095):
        hub.handle(rank, {"failed": {"where": None, "what": "CollectiveError", "missed": True}})
    hub.handle(4095, {"failed": {"where": [3, 3], "what": "ZeroDivisionError", "missed": False}})
    (message,) = told
    assert [failure["what"] for failure in message["apart"]] == ["ZeroDivisionError", "CollectiveError"]
    assert message["apart"][0]["hosts"] == ["b"]
    assert len(json.dumps(message)) < 30_000, (
        "a stopped process reads none, and what waits for it must fit into its socket"
    )


def test_one_message_has_few_of_failures_that_all_differ() -> None:
    told: list[Any] = []
    hub = Hub(4096, told.append)
    hub.came(range(4096), "a")
    for rank in range(4096):
        hub.handle(rank, {"failed": {"where": None, "what": f"{rank}" * 100, "missed": True}})
    assert len(json.dumps(told[0])) < 30_000


def test_a_relay_says_so_and_accepts_later_where_too_many_files_are_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def accept(self) -> None:
            raise OSError(24, "Too many open files")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener, "token", "node7", [0], 1)
        relay._accept(Full())  # type: ignore[arg-type]
        relay._accept(Full())  # type: ignore[arg-type]
        assert caplog.text.count("host node7 cannot accept another connection: [Errno 24] Too many open files") == 1
        with socket.create_connection(listener.getsockname()):
            relay._accept(listener)
        for key in list(relay._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        relay._selector.close()


def test_another_program_that_connects_is_not_taken_for_a_rank(tree: Tree) -> None:
    port = tree.lines[0].socket.getpeername()[1]
    for message in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"hello": [0], "host": "x", "token": "?"}\n{"stop": true, "requeue": true}\n',
    ):
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(message)
    tree.lines[2].socket.close()
    assert tree.told([0, 1, 3, 4, 5])["apart"][0]["ranks"] == [2]


def stranger(tree: Tree, message: bytes = b"") -> socket.socket:
    """Another program that has connected to the first host's relay, and sent this."""
    other = socket.create_connection(("127.0.0.1", tree.lines[0].socket.getpeername()[1]), timeout=30)
    other.sendall(message)
    return other


def is_closed(other: socket.socket) -> bool:
    """Whether the relay closes the connection."""
    try:
        return other.recv(1) == b""
    except ConnectionResetError:  # with bytes unread
        return True


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 100_000 + b"\n",
        b"[" * 8_000 + b"\n",
        b"x" * 1_000_000,
        b"[1]\n",
        b'{"hello": [0], "host": "x", "token": "?", "first": null}\n',
    ],
    ids=["deep and long", "deep", "endless", "no object", "wrong token"],
)
def test_what_has_no_token_is_closed_and_ends_nothing(tree: Tree, message: bytes) -> None:
    with stranger(tree) as other:
        with contextlib.suppress(ConnectionError):  # closed before all was sent
            other.sendall(message)
        assert is_closed(other)
    tree.lines[2].socket.close()
    assert tree.told([0, 1, 3, 4, 5])["apart"][0]["ranks"] == [2]


def test_what_sends_nothing_is_closed(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_relay, "_GREETING_S", 0.05)
    with stranger(tree) as other:
        assert is_closed(other)


def test_of_many_that_send_nothing_the_oldest_are_closed(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_relay, "_STRANGERS", 2)
    others = [stranger(tree) for _ in range(4)]
    assert all(is_closed(other) for other in others[:2])
    assert len(tree.relays["a"]._strangers) == 2
    for other in others:
        other.close()


def test_a_welcome_in_pieces_is_read_whole_and_what_follows_it_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            other, _ = listener.accept()
            with other:
                other.recv(65536)
                other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                welcome = json.dumps({"welcome": "token", "host": "node", "ranks": [0]}).encode()
                for piece in (welcome[:9], welcome[9:] + b'\n{"at work": true}\n{"rep', b'ort": true}\n'):
                    other.sendall(piece)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        line = connect([LOOPBACK, listener.getsockname()[1], "token"], [0], "node")
        thread.join(30)
    assert line is not None
    assert (line.host, line.ranks) == ("node", [0])
    received: list[Any] = []
    while (messages := line.receive()) is not None:
        received += messages
    assert received == [{"at work": True}, {"report": True}]
    line.socket.close()


@pytest.fixture
def started() -> Iterator[tuple[subprocess.Popen[str], list[Line]]]:
    """The rank that started the relay of its host, and connections of the two others."""
    command = [sys.executable, "-S", str(Path(__file__).with_name("starting_rank.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        contact = json.loads(first.stdout.readline())
        lines = [connect(contact, [rank], "node", contact) for rank in (1, 2)]
        ends = [line for line in lines if line is not None]
        assert len(ends) == 2
        for line in ends:
            line.send({"at work": True})
        ends[0].send({"stop": True, "requeue": False})
        wait_for(ends, "report")  # the relay has read it all
        yield first, ends
        for line in ends:
            line.socket.close()
        first.kill()


def test_a_killed_rank_that_had_started_the_relay_is_named_alone(
    started: tuple[subprocess.Popen[str], list[Line]],
) -> None:
    first, ends = started
    first.kill()
    assert [message["apart"] for message in wait_for(ends, "apart")] == [[{**failed([0], KILLED), "missed": False}]] * 2


def test_a_stopped_rank_that_had_started_the_relay_delays_nothing_and_is_not_named(
    started: tuple[subprocess.Popen[str], list[Line]],
) -> None:
    first, ends = started
    first.send_signal(signal.SIGSTOP)
    ends.pop().socket.close()
    expected = [{"apart": [{**failed([2], KILLED), "missed": False}]}]
    assert wait_for(ends, "apart") == expected
    first.send_signal(signal.SIGCONT)
    assert first.stdout is not None
    assert json.loads(first.stdout.readline()) == expected


def test_signals_to_all_processes_of_a_job_do_not_end_a_relay() -> None:
    with of_relay.start("node", [0], 1, is_reachable=False) as (port, token):
        contact = [LOOPBACK, port, token]
        line = connect(contact, [0], "node", contact)
    assert line is not None
    (relay,) = (
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if sockets_of(folder) & {f"socket:[{inode}]" for inode in listening(port)}
    )
    assert os.getsid(relay) == relay, "a terminal's signals reach its own session alone"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(relay, number)
    line.send({"at work": True})
    assert wait_for([line], "at work")
    line.socket.close()
    until = time.monotonic() + 10
    while Path(f"/proc/{relay}/fd").exists() and sockets_of(Path(f"/proc/{relay}")):
        assert time.monotonic() < until, "it stays without ranks"
        time.sleep(0.01)


@pytest.mark.parametrize("ended", ["process", "context"])
def test_a_relay_to_which_no_rank_has_connected_ends_with_what_started_it(ended: str) -> None:
    """Its output is that of the rank: who reads it waits for its end."""
    script = f"""import os
from channel import loaded_relay
relay = loaded_relay()
with relay.start("node", [0], 1, is_reachable=False) as (port, token):
    {"os._exit(7)" if ended == "process" else "pass"}
os._exit(7)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert (done.returncode, done.stderr) == (7, b"")


@pytest.mark.parametrize("closed", ["", "os.close(0)", "os.close(0); os.close(1)"])
def test_a_rank_without_standard_files_has_a_relay(closed: str) -> None:
    script = f"""import os
from channel import LOOPBACK, loaded_relay, wait_for
relay = loaded_relay()
{closed}
with relay.start("node", [0], 1, is_reachable=False) as (port, token):
    contact = [LOOPBACK, port, token]
    line = relay.connect(contact, [0], "node", contact)
line.send({{"at work": True}})
wait_for([line], "at work")
"""
    subprocess.run(
        [sys.executable, "-S", "-c", script],
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )


def sockets_of(folder: Path) -> set[str]:
    try:
        return {os.readlink(file) for file in (folder / "fd").iterdir()}
    except OSError:  # it has ended, or is another user's
        return set()


def listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on a port of IPv4."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}


def test_the_first_host_holds_connections_to_hosts_and_not_to_ranks() -> None:
    """256 ranks on 32 hosts: all agree where to stop, and all are told of the end of one."""
    command = [sys.executable, "-S", str(Path(__file__).with_name("channel.py")), "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["connections"] == 8 + 31
    assert measured["stops"] == [3]
    assert measured["told"] == 255
    assert measured["failures"] == [[{**failed([255], KILLED, "node31"), "missed": False}]]
