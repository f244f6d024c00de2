"""What ranks conclude from the end of rank 0, or of the relay: that it was killed, or nothing, if it had done what they do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import pytest

from lightning_mfsdp.base import sockets as of_sockets
from lightning_mfsdp.base.tree import RANKS, tree_of_all_ranks
from lightning_mfsdp.launch import peers as of_peers
from lightning_mfsdp.launch import relay as of_relay
from lightning_mfsdp.launch.peers import Peers
from lightning_mfsdp.launch.relay import RELAY_KILLED, Line, Relay, connect
from tests.helpers.distributed import run_distributed


class Ranks:
    """Ranks 0 and 1 of a host and its relay, in one process."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=2)
        self.relay = Relay(listener, "token", "host", [0, 1], 2)
        self.relay_thread = threading.Thread(target=self.relay.run, daemon=True)
        self.relay_thread.start()
        contact = (["127.0.0.1"], listener.getsockname()[1], "token")
        lines: list[Line] = []
        for rank in range(2):
            line = connect(contact, [rank], "host", contact)
            assert line is not None
            lines.append(line)
        self.first = Peers(0, 2, lines[0])
        self.second = Peers(1, 2, lines[1])
        self.aborted = threading.Event()
        self.second.abort = self.abort

    def abort(self) -> bool:
        self.aborted.set()
        return True

    def first_is_gone(self) -> None:
        """Its process has ended, and the other rank has heard of it."""
        with self.first._changed:  # it concludes nothing itself, and its thread closes the connection only afterwards
            self.first._line.socket.shutdown(socket.SHUT_RDWR)
            self.first.is_closed = True
        self.heard(lambda: self.second._gone is not None or self.second.has_failed)

    def relay_is_gone(self) -> None:
        for line in reversed(list(self.relay._lines)):  # or it would tell rank 1 that rank 0 is gone
            line.socket.shutdown(socket.SHUT_RDWR)
        self.heard(lambda: self.second._gone is not None)

    def heard(self, what: Callable[[], bool]) -> None:
        """Wait for what rank 1 knows."""
        with self.second._changed:
            while not what():
                self.second._changed.wait(0.01)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(
        of_peers, "ENDING_S", 600
    )  # else the process would be ended, and all of these ranks are in this one
    made = Ranks()
    yield made
    leave(made.first, made.second)


def enter(*ranks: Peers) -> None:
    for rank in ranks:
        rank.work_begins()


def leave(*ranks: Peers) -> None:
    for rank in ranks:
        rank.work_ends()


class Waiting(threading.Condition):
    """Calls a function before it first waits."""

    first: Callable[[], None]

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self.first()
        return super().wait_for(predicate, timeout)


def asked_to_stop(others: list[dict[str, Any]]) -> list[bool]:
    """Whether a rank that was asked to stop in its first batch begins further ones. Messages come when it waits for them, no sooner."""
    ours, hub = socket.socketpair()
    peers = Peers(0, 2, Line(ours))
    hub_end = Line(hub)

    def answer() -> None:
        for message in others:
            hub_end.send(message)

    peers._changed = Waiting()
    peers._changed.first = answer
    peers.work_begins()
    begun = [peers.may_begin_batch()]
    peers.ask_to_stop()
    begun += [peers.may_begin_batch() for _ in range(2)]
    peers.work_ends()
    peers.is_closed = True
    hub.close()  # ends the thread
    return begun


@pytest.mark.parametrize(
    ("others", "begun"),
    [
        ([{"report": True}, {"stop after": 1, "requeue": False}], [True, False, False]),
        ([{"report": True}, {"stop after": 2, "requeue": False}], [True, True, False]),
        ([{"together": True}], [True, True, True]),
        ([{"apart": [{"ranks": [1], "what": "killed", "missed": False, "hosts": []}]}], [True, True, True]),
    ],
)
def test_a_rank_that_was_asked_to_stop_begins_no_batch_until_it_knows_of_the_others(
    others: list[dict[str, Any]], begun: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly messages travel; and a failure, which the strategy raises, ends the waiting."""
    monkeypatch.setattr(Peers, "_stop_waiting", lambda self: None)  # would end the process
    assert asked_to_stop(others) == begun


def test_the_last_messages_before_a_connection_is_closed_arrive_though_something_is_unread() -> None:
    """A kernel resets such a connection, and sends nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closing = Line(socket.create_connection(listener.getsockname()))
        other = Line(listener.accept()[0])
    other.send({"unread": True})
    sent = [{"number": number} for number in range(30)]
    for message in sent:
        closing.send(message)
    end = threading.Thread(target=closing.close)
    end.start()
    received: list[dict[str, Any]] = []
    while (messages := other.receive()) is not None:
        received += messages
    other.socket.close()
    end.join(10)
    assert not end.is_alive()
    assert received == sent


def test_a_relay_that_is_killed_ends_what_works(ranks: Ranks) -> None:
    """Nobody would be told of failures, and with it all processes of the host may have been killed."""
    enter(ranks.first, ranks.second)
    ranks.heard(lambda: ranks.second._rank0_at_work)
    ranks.relay_is_gone()
    assert ranks.aborted.wait(10)
    assert ranks.second.failure_of_another == f"rank 0 failed: {RELAY_KILLED} (on host host)"


def test_the_end_of_the_program_of_rank_0_is_no_failure_for_a_rank_that_is_done(ranks: Ranks) -> None:
    enter(ranks.first, ranks.second)
    leave(ranks.first, ranks.second)
    ranks.first.program_ends()
    ranks.first_is_gone()
    assert not ranks.second.has_failed
    assert not ranks.aborted.is_set(), "an abort beside a destruction of process groups frees memory twice"
    enter(ranks.second)  # which rank 0 would have to do, too
    assert ranks.aborted.wait(10)
    assert ranks.second.failure_of_another == "rank 0 failed: its program has ended"


@pytest.mark.parametrize("entries", [0, 1, 2])
def test_a_killed_rank_0_is_missed_at_once_where_it_was_at_work(ranks: Ranks, entries: int) -> None:
    for _ in range(entries):
        enter(ranks.first, ranks.second)
        leave(ranks.first, ranks.second)
    enter(ranks.first, ranks.second)
    ranks.first_is_gone()
    assert ranks.aborted.wait(10)
    assert ranks.second.failure_of_another == "rank 0 failed: its process ended, perhaps killed"


class Timer(threading.Timer):
    """Ends when a test says so."""

    ends = threading.Event()
    made: ClassVar[list[threading.Timer]] = []

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        assert seconds == of_peers.LEAVING_S
        super().__init__(0.0, function)
        self.made[:] = [self]

    def run(self) -> None:
        self.ends.wait(10)
        super().run()


@pytest.mark.parametrize("where", ["in an entry point", "in your own loop", "at the end of an entry point"])
def test_others_have_time_to_end_after_rank_0(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(of_peers.threading, "Timer", Timer)
    Timer.ends.clear()
    if where != "in your own loop":
        enter(ranks.first, ranks.second)
        leave(ranks.first)
    ranks.first.program_ends()
    ranks.first_is_gone()
    assert not ranks.second.has_failed
    if where == "at the end of an entry point":
        leave(ranks.second)
        Timer.ends.set()
        Timer.made[0].join()
        assert not ranks.second.has_failed
        return
    Timer.ends.set()
    assert ranks.aborted.wait(10)
    assert ranks.second.failure_of_another == "rank 0 failed: its program has ended"


@pytest.mark.parametrize("entries", [0, 1, 2])
@pytest.mark.parametrize("second", ["is done", "is at work"])
def test_others_have_time_to_end_where_rank_0_ended_without_a_word(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, entries: int, second: str
) -> None:
    """`os._exit`: the others may be destroying their process groups, or wait for a rank that was killed."""
    monkeypatch.setattr(of_peers.threading, "Timer", Timer)
    Timer.ends.clear()
    for entry in range(entries):
        enter(ranks.first, ranks.second)
        leave(ranks.first)
        if second == "is done" or entry < entries - 1:
            leave(ranks.second)
    ranks.first_is_gone()
    assert not ranks.second.has_failed
    assert not ranks.aborted.is_set(), "an abort beside a destruction of process groups frees memory twice"
    Timer.ends.set()
    assert ranks.aborted.wait(10)
    assert ranks.second.failure_of_another == "rank 0 failed: its process ended, perhaps killed"


def of_rank(ranks: Ranks, rank: int) -> list[threading.Thread]:
    """Threads of a rank's end of the connection; all ranks are in this process."""
    own = (ranks.first, ranks.second)[rank]
    return [thread for thread in threading.enumerate() if getattr(thread, "_target", None) == own._run]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_has_made_another_process_group_closes_its_end_and_aborts_nothing_of_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    monkeypatch.setattr(of_peers.threading, "Timer", Timer)
    Timer.ends.clear()
    enter(ranks.first, ranks.second)
    leave(ranks.first, ranks.second)
    closing = [ranks.first, ranks.second] if is_first else [ranks.second, ranks.first]
    threads = of_rank(ranks, 0) + of_rank(ranks, 1)
    assert len(threads) == 2
    for rank in closing:
        rank.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    Timer.ends.set()
    for timer in Timer.made:
        timer.join()
    assert not ranks.aborted.is_set()
    assert not ranks.first.has_failed
    assert not ranks.second.has_failed


@pytest.mark.parametrize("closed", [0, 1])
@pytest.mark.parametrize("is_at_work", [True, False])
def test_others_that_have_not_closed_theirs_yet_notice_nothing(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, closed: int, is_at_work: bool
) -> None:
    """Ranks need not free what holds a process group at the same time."""
    monkeypatch.setattr(of_peers.threading, "Timer", Timer)
    Timer.made.clear()
    first, other = (ranks.first, ranks.second) if closed == 0 else (ranks.second, ranks.first)
    if is_at_work:
        enter(ranks.first, ranks.second)
        leave(first)
    (thread,) = of_rank(ranks, closed)
    first.close()
    thread.join(10)
    if is_at_work:
        leave(other)
    assert not other.has_failed
    assert not Timer.made
    assert not ranks.aborted.is_set()
    ranks.first.program_ends()  # and what rank 0 tells still comes
    ranks.heard(lambda: closed == 1 or ranks.second._rank0_leaves)


def test_the_relay_ends_with_the_last_rank(ranks: Ranks) -> None:
    ranks.first.close()
    ranks.second.close()
    ranks.relay_thread.join(10)
    assert not ranks.relay_thread.is_alive()


def test_a_rank_at_work_keeps_its_end_though_its_process_group_is_gone(ranks: Ranks) -> None:
    """It was aborted, and what is told of the failure is still to come."""
    enter(ranks.first, ranks.second)
    ranks.second.close()
    assert not ranks.second.is_closed
    ranks.first_is_gone()
    assert ranks.aborted.wait(10)


def started_relay(rank: int, world_size: int, boots: list[str]) -> list[Any]:
    """How this rank starts a relay, of ranks with equal host names; the boot of each rank's machine is given."""
    started: list[Any] = []
    start = of_relay.start

    def noted(*args: Any, is_reachable: bool) -> AbstractContextManager[tuple[int, str]]:
        started.extend([*args, is_reachable])
        return start(*args, is_reachable=is_reachable)

    patch, tree = pytest.MonkeyPatch(), tree_of_all_ranks(RANKS)
    with patch.context() as patched:
        patched.setattr(of_peers.relay, "start", noted)
        patched.setattr(of_sockets.socket, "gethostname", lambda: "node")
        patched.setattr(of_sockets.Path, "read_text", lambda _: boots[rank])
        patched.setattr(of_peers, "addresses_of_host", lambda: ["127.0.0.1"])  # this machine has one network
        connected = Peers.connected(tree)
    assert connected is not None
    connected.close()
    return started


@pytest.mark.parametrize(
    ("boots", "relays"),
    [
        (["a", "a", "a"], [["node", [0, 1, 2], 3, False], [], []]),
        (["a", "b", "b"], [["node", [0], 3, True], ["node", [1, 2], None, False], []]),
    ],
)
def test_equal_host_names_are_one_machine_only_with_one_boot(boots: list[str], relays: list[Any]) -> None:
    """A relay of several machines is reachable from others, and there is one on each."""
    assert run_distributed(partial(started_relay, boots=boots), len(boots)) == relays


def without_relay(rank: int, world_size: int, executable: str | None) -> list[str]:
    """What rank 0 logs."""
    logged: list[str] = []
    patch, tree = pytest.MonkeyPatch(), tree_of_all_ranks(RANKS)
    with patch.context() as patched:
        patched.setattr(of_relay.sys, "executable", executable)
        patched.setattr(of_peers._log, "warning", logged.append)
        assert Peers.connected(tree) is None
    return logged


@pytest.mark.parametrize("executable", [None, "/none", "/bin/false", "/bin/true"])
def test_a_host_that_cannot_start_a_relay_has_no_channel(executable: str) -> None:
    first, second = run_distributed(partial(without_relay, executable=executable), 2)
    assert f"no relay process on host {socket.gethostname()} (" in first[0]
    assert not second


def beyond_reach(rank: int, world_size: int) -> list[str]:
    logged: list[str] = []
    patch, tree = pytest.MonkeyPatch(), tree_of_all_ranks(RANKS)
    with patch.context() as patched:
        patched.setattr(of_peers, "network_of_host", lambda: (f"node{rank // 2}",))
        patched.setattr(of_peers, "addresses_of_host", lambda: ["127.0.0.2:no address"])
        patched.setattr(of_peers._log, "warning", logged.append)
        assert Peers.connected(tree) is None
    return logged


def test_hosts_that_cannot_reach_the_first_one_are_named() -> None:
    first, *others = run_distributed(beyond_reach, 4)
    assert first[0].startswith("ranks [2, 3] cannot reach rank 0 at ")
    assert others == [[], [], []]
