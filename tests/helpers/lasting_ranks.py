"""Processes that serve one call after the other: ranks of a new process group each time, as if they had been started for it.

A pytest process has at most one for each rank; calls of two ranks take the first two. When one rank fails or hangs, all that took part are
killed and the next call gets new ones. A rank that a call leaves changed beyond repair (see `ProcessState`) is replaced as well.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

from tests.helpers.process_state import ProcessState

PRELOADED = ["tests.helpers.preloaded"]
GRACE_S = 10  # for ranks to fail as well, once one has


def forking() -> Any:
    """A context whose processes are forked from a server that has imported what is heavy."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Ranks:
    """Those of one pytest process.

    Attributes:
        replaced: Calls that left a rank changed, with what they left.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[Any, Connection]] = {}
        self.replaced: Counter[tuple[str, str]] = Counter()

    def call(self, function: Callable[..., str], arguments: list[tuple[Any, ...]], timeout_s: float) -> list[str]:
        """`function(*arguments[rank])` on each rank, which returns an error's text or nothing; what each came to, "" for well.

        Raises:
            TimeoutError: Some rank did not come back; says which.
        """
        ranks = range(len(arguments))
        calls = [pickle.dumps((function, own)) for own in arguments]
        for rank in ranks:
            if rank in self._ranks and not self._ranks[rank][0].is_alive():  # killed from outside since the last call
                self._end(rank)
            if rank not in self._ranks:
                self._ranks[rank] = self._start()
        for rank, sent in enumerate(calls):
            self._ranks[rank][1].send_bytes(sent)
        outcome: dict[int, str] = {}
        left: dict[int, list[str]] = {}
        pipes = {self._ranks[rank][1]: rank for rank in ranks}
        deadline = time.monotonic() + timeout_s
        try:
            while pipes and (remaining := deadline - time.monotonic()) > 0:
                for pipe in wait(list(pipes), remaining):
                    rank = pipes.pop(pipe)  # type: ignore[arg-type]
                    try:
                        outcome[rank], left[rank] = pipe.recv()  # type: ignore[union-attr]
                    except (EOFError, ConnectionError):
                        self._ranks[rank][0].join()
                        outcome[rank] = f"rank {rank} died: exit code {self._ranks[rank][0].exitcode}"
                    if outcome[rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:  # also when a time limit of pytest ends the wait
            failed = len(outcome) < len(ranks) or any(outcome.values())
            for rank in ranks:
                for what in left.get(rank, ()):
                    self.replaced[_name_of(arguments[rank]), what] += 1
                if failed or left[rank]:
                    self._end(rank, kill=failed)
        for rank in pipes.values():
            outcome[rank] = f"rank {rank} was still running"
        return [outcome[rank] for rank in ranks]

    def stop(self) -> None:
        for rank in list(self._ranks):
            self._end(rank)

    def _start(self) -> tuple[Any, Connection]:
        context = forking()
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        return process, here

    def _end(self, rank: int, *, kill: bool = False) -> None:
        process, pipe = self._ranks.pop(rank)
        pipe.close()  # which ends its loop
        if kill:
            process.kill()
        process.join(GRACE_S)
        process.kill()


def _name_of(arguments: tuple[Any, ...]) -> str:
    return ", ".join(f"{one.__module__}.{one.__qualname__}" for one in arguments if hasattr(one, "__qualname__"))


def _serve(pipe: Connection) -> None:
    state = ProcessState()
    while True:
        try:
            sent = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            os._exit(0)
        error = _call(sent)
        if error:
            pipe.send((error, []))
            os._exit(1)  # the others, which wait in a collective, hear of it at once
        gc.collect()
        gc.freeze()  # what is left has been imported: the collections of the next call need not look at it
        pipe.send(("", state.restore()))


def _call(sent: bytes) -> str:
    function, arguments = pickle.loads(sent)
    return str(function(*arguments))
