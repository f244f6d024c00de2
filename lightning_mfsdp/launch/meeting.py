"""Lets the ranks of one start of a job find each other in a store that may hold entries of an earlier start.

torchrun keeps its store when it starts workers again, and backends would read addresses of processes that are gone. So the ranks agree on
a name that was never used before, and connect under it. Its restart count cannot serve as the name: it does not rise when nodes come or go.

Each call of a rank draws a number that is higher than those before. Rank 0 draws the name, with its number in it, and writes it where all
look; names of lower numbers are those of earlier starts. Every rank answers a name with its own number, and when all have answered, rank 0
tells the highest number of each to go. A process of an earlier start that still looks has a lower number than its successor, or
answers for another number of ranks. Rank 0 calls the store a few times, however many ranks there are.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from datetime import timedelta

from lightning_mfsdp.base.compat import PrefixStore, Store
from lightning_mfsdp.base.tables import number_ranges

__all__ = ["meet"]

_log = logging.getLogger(__name__)

_PAUSE_S = (0.001, 0.1)  # between two looks into the store: the first pause, and the longest
_LOOKS_PER_S = 2560  # of all ranks together, in the end, and eight times as many at first: more keep the store busy
_AT_ONCE = 1024  # keys in a call of the store
_ANNOUNCE = timedelta(seconds=30)  # starts take that long where a node loads its libraries for the first time


def meet(
    store: Store, rank: int, world_size: int, timeout: timedelta, *, announce_after: timedelta = _ANNOUNCE
) -> PrefixStore:
    """A part of `store` that only the ranks alive now use. Collective.

    Args:
        store: Which all ranks reach.
        rank: Of this process.
        world_size: How many ranks there are.
        timeout: How long to wait for the others.
        announce_after: When to log, once, which ranks have not come yet: rank 0 does, or the others if it is rank 0. Rank 1 logs as well
            where it found a name, which may be that of a start that was killed.

    Raises:
        TimeoutError: Some rank did not arrive in time; on rank 0 with their numbers.
    """
    common = PrefixStore("lightning_mfsdp/meeting", store)
    waiting = _Waiting(timeout, announce_after, rank, world_size)
    name = _name_all(common, world_size, waiting) if rank == 0 else _find_name(common, rank, world_size, waiting)
    return PrefixStore(name, store)


def _name_all(common: PrefixStore, world_size: int, waiting: _Waiting) -> str:
    """Draw a name, and wait until the other ranks have answered."""
    number = common.add("calls", 1)
    name = f"{number}-{uuid.uuid4().hex}"
    common.set("name", name)
    try:
        while True:
            latest: dict[int, int] = {}
            for answer in (_read(common, f"answers/{name}") or "").split():
                rank, size, called = map(int, answer.split("/"))
                if size == world_size:
                    latest[rank] = max(called, latest.get(rank, 0))
            absent = [other for other in range(1, world_size) if other not in latest]
            if not absent:
                break
            if _number_of(_read(common, "name")) < number:  # written late by an earlier start
                common.set("name", name)
            waiting.pause(f"ranks {number_ranges(absent)} of {world_size} did not come")
    finally:  # a later start does not take this rank 0 for its own
        common.compare_set("name", name, "")
    common.delete_key(f"answers/{name}")
    keys = [f"go/{name}/{called}" for called in latest.values()]
    for part in range(0, len(keys), _AT_ONCE):
        some = keys[part : part + _AT_ONCE]
        common.multi_set(some, ["go"] * len(some))  # type: ignore[attr-defined]
    return name


def _find_name(common: PrefixStore, rank: int, world_size: int, waiting: _Waiting) -> str:
    """Answer the names that rank 0 draws, until it says that all have."""
    called, answered = common.add("calls", 1), ""
    while not (answered and common.check([f"go/{answered}/{called}"])):
        name = _read(common, "name") or ""
        if _number_of(name) > _number_of(answered):
            common.append(f"answers/{name}", f"{rank}/{world_size}/{called} ")  # type: ignore[attr-defined]
            answered = name
        if not answered:
            waiting.pause("rank 0 did not come")
        else:  # rank 0 knows which, unless it is that of a start that was killed
            waiting.pause("rank 0 of this start, or of one before, came, but not all others", announced=rank == 1)
    return answered


def _number_of(name: str | None) -> int:
    """Of the call that drew a name; 0: there is none."""
    return int((name or "0").partition("-")[0])


def _read(store: Store, key: str) -> str | None:
    value: bytes | None = store.get(key) if store.check([key]) else None
    return None if value is None else value.decode()


class _Waiting:
    """Short pauses that grow, up to a limit."""

    def __init__(self, timeout: timedelta, announce_after: timedelta, rank: int, world_size: int) -> None:
        self._timeout_s, self._rank = timeout.total_seconds(), rank
        self._began = time.monotonic()
        self._until = self._began + self._timeout_s
        self._announce_at = self._began + announce_after.total_seconds()
        share_s = world_size / _LOOKS_PER_S if rank else 0.0
        self._pause_s, self._longest_s = max(_PAUSE_S[0], share_s / 8), max(_PAUSE_S[1], share_s)

    def pause(self, missing: str, *, announced: bool = True) -> None:
        now = time.monotonic()
        if announced and now >= self._announce_at:
            self._announce_at = math.inf
            _log.warning(
                f"connecting the processes: rank {self._rank} has waited {now - self._began:.0f} s, and {missing} yet. It waits for "
                f"{self._timeout_s:g} s in all. Look whether all nodes have started, and for the first error in the output of the others"
            )
        if now > self._until:
            raise TimeoutError(
                f"connecting the processes: rank {self._rank} waited {self._timeout_s:g} s, and {missing}. Look for the first error in the "
                "output of the others, and whether all reach MASTER_ADDR"
            )
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._longest_s)
