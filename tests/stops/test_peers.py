"""What ranks conclude from the end of a connection to rank 0: that it was killed, or nothing, if it had done what they do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from lightning_mfsdp.launch import peers as of_peers
from lightning_mfsdp.launch.peers import Peers, _Hub, _joined, _Line


class Ranks:
    """Rank 0 with the hub, and rank 1, in one process."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=2)
        self.hub = _Hub(listener, 2, "token")
        lines: list[_Line] = []
        for rank in range(2):
            line = _joined(["127.0.0.1"], listener.getsockname()[1], "token", rank)
            assert line is not None
            lines.append(line)
        self.first = Peers(0, 2, lines[0], self.hub)
        self.second = Peers(1, 2, lines[1])
        self.aborted = threading.Event()
        self.second.abort = self.abort

    def abort(self) -> bool:
        self.aborted.set()
        return True

    def first_is_gone(self) -> None:
        """Its end of the connection; the other one has noticed."""
        self.hub._lines[1].socket.shutdown(socket.SHUT_RDWR)
        with self.second._changed:
            while not self.second._first_is_gone:
                self.second._changed.wait(0.01)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.second.work_ends()  # else its process would be ended


def test_the_end_of_rank_0_is_no_failure_once_it_has_ended_what_this_rank_began(ranks: Ranks) -> None:
    for _ in range(2):
        for rank in (ranks.second, ranks.first):
            rank.work_begins()
        for rank in (ranks.first, ranks.second):
            rank.work_ends()
    ranks.first_is_gone()
    assert not ranks.second.has_failed
    assert not ranks.aborted.is_set(), "an abort beside a destruction of process groups frees memory twice"
    ranks.second.work_begins()  # which rank 0 would have to do, too
    assert ranks.aborted.wait(10)
    assert "rank 0 failed: its process ended" in str(ranks.second.failure_of_another)


def test_a_slower_rank_ends_its_work_after_rank_0_is_gone(ranks: Ranks) -> None:
    for rank in (ranks.first, ranks.second):
        rank.work_begins()
    ranks.first.work_ends()
    ranks.first_is_gone()
    assert not ranks.second.has_failed
    ranks.second.work_ends()
    assert not ranks.aborted.is_set()


def test_a_killed_rank_0_is_missed_by_those_at_work(ranks: Ranks) -> None:
    for rank in (ranks.first, ranks.second):
        rank.work_begins()
        rank.work_ends()
        rank.work_begins()
    ranks.first_is_gone()
    assert ranks.aborted.wait(10)
    assert ranks.second.failure_of_another == "rank 0 failed: its process ended, perhaps killed"


def test_in_a_loop_of_ones_own_a_killed_rank_0_is_missed_at_once(ranks: Ranks) -> None:
    ranks.first_is_gone()
    assert ranks.aborted.wait(10)
    assert "perhaps killed" in str(ranks.second.failure_of_another)


def test_in_a_loop_of_ones_own_others_have_time_to_end_after_rank_0(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted = threading.Event()

    class Timer(threading.Timer):
        def __init__(self, seconds: float, function: object) -> None:
            assert seconds == of_peers.PARTING_S
            super().__init__(0.0, function)  # type: ignore[arg-type]

        def run(self) -> None:
            parted.wait(10)
            super().run()

    monkeypatch.setattr(of_peers.threading, "Timer", Timer)
    ranks.first.program_ends()
    ranks.first_is_gone()
    assert not ranks.second.has_failed
    parted.set()
    assert ranks.aborted.wait(10)
    assert ranks.second.failure_of_another == "rank 0 failed: its program has ended"
