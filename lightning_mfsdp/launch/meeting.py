"""Lets the ranks of one start of a job find each other in a store that may hold entries of an earlier start.

torchrun keeps its store when it starts workers again, and backends would read addresses of processes that are gone. So the ranks agree on
a name that was never used before, and connect under it. Its restart count cannot serve as the name: it does not rise when nodes come or go.

Rank 0 draws the name and writes it where all look. Every rank answers under this name with its number and a token of its own, new for each
call; when all numbers have answered, rank 0 tells the last token of each to go. A rank that read the name of an earlier start answers that
one, hears nothing, and finds the new one; and nothing of an earlier start is under a name that was drawn since. So rank 0 calls the store
a few times, however many ranks there are.
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
        announce_after: When to log, once, which ranks have not come yet: rank 0 does, or the others if it is rank 0.

    Raises:
        TimeoutError: Some rank did not arrive in time; on rank 0 with their numbers.
    """
    common = PrefixStore("lightning_mfsdp/meeting", store)
    waiting = _Waiting(timeout, announce_after, rank, world_size)
    name = _name_all(common, world_size, waiting) if rank == 0 else _find_name(common, rank, waiting)
    return PrefixStore(name, store)


def _name_all(common: PrefixStore, world_size: int, waiting: _Waiting) -> str:
    """Draw a name, and wait until the other ranks have answered."""
    name = uuid.uuid4().hex
    common.set("name", name)
    while True:
        answers = (_read(common, f"answers/{name}") or "").split()
        tokens = dict(answer.split(":") for answer in answers)  # the last of each rank
        absent = [other for other in range(1, world_size) if str(other) not in tokens]
        if not absent:
            break
        waiting.pause(f"ranks {number_ranges(absent)} of {world_size} did not come")
    common.set("name", "")  # a later start that waits for its rank 0 does not take this one for it
    common.delete_key(f"answers/{name}")
    keys = [f"go/{name}/{token}" for token in tokens.values()]
    for part in range(0, len(keys), _AT_ONCE):
        some = keys[part : part + _AT_ONCE]
        common.multi_set(some, ["go"] * len(some))  # type: ignore[attr-defined]
    return name


def _find_name(common: PrefixStore, rank: int, waiting: _Waiting) -> str:
    """Answer the names that rank 0 draws, until it says that all have."""
    token, last = uuid.uuid4().hex, ""
    while not (last and common.check([f"go/{last}/{token}"])):
        name = _read(common, "name") or ""
        if name and name != last:
            common.append(f"answers/{name}", f"{rank}:{token} ")  # type: ignore[attr-defined]
            last = name
        if not last:
            waiting.pause("rank 0 did not come")
        else:
            waiting.pause("rank 0 came, but not all others", announced=False)  # rank 0 knows which
    return last


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
