"""What belongs to a process is left by those that it forks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from lightning_mfsdp.base import children
from lightning_mfsdp.base.children import call_in_children
from lightning_mfsdp.launch.peers import Peers
from lightning_mfsdp.launch.relay import Line
from lightning_mfsdp.launch.second_sigterm import SecondSigterm


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What Python is to call in forked processes, instead of calling it."""
    functions: list[Callable[[], None]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda after_in_child: functions.append(after_in_child))
    monkeypatch.setattr(children, "_methods", children._methods.__wrapped__)
    kept = children._methods()
    monkeypatch.setattr(children, "_methods", lambda: kept)
    return functions


def test_many_fits_leave_one_function_with_the_process(registered: list[Callable[[], None]]) -> None:
    """Python takes none back: it would keep what each fit has given it, and call all of them in each worker of a loader."""
    for _ in range(3):
        ours, other = socket.socketpair()
        peers = Peers(0, 2, Line(ours))
        second = SecondSigterm(lambda number, frame: None, tells=False)
        second.close()
        peers.is_closed = True
        other.close()
        del peers, second
    assert len(registered) == 1
    assert len(children._methods()) <= 8, "of the newest fit, and of those whose threads have not ended"


def test_an_object_that_is_alive_is_called_whatever_happens_to_others(registered: list[Callable[[], None]]) -> None:
    class Called:
        def __init__(self, error: BaseException | None = None) -> None:
            self.count, self.error = 0, error

        def call(self) -> Any:
            self.count += 1
            if self.error is not None:
                raise self.error

    gone, broken, last = Called(), Called(OSError("closed")), Called()
    for called in (gone, broken, last):
        call_in_children(called.call)
    del gone, called
    (after_fork,) = registered
    after_fork()
    assert (broken.count, last.count) == (1, 1)
