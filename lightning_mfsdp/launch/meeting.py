"""Lets the ranks of one start of a job find each other in a store that may hold entries of an earlier start.

torchrun keeps its store when it starts workers again, and backends would read addresses of processes that are gone. So the ranks agree on
a name that was never used before, and connect under it. Its restart count cannot serve as the name: it does not rise when nodes come or go.

Every rank writes a token of its own, new for each call. Rank 0 draws the name, sends it to every token that it finds, and waits until all
ranks have answered with it; a token of a dead process is never answered, and is read again until its successor has written another.
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
_LOOKS_PER_S = 2560  # of all ranks together: more keep the store busy, and rank 0 waits for it as well
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
    token = uuid.uuid4().hex
    longest_s = _PAUSE_S[1] if rank == 0 else max(_PAUSE_S[1], world_size / _LOOKS_PER_S)
    waiting = _Waiting(timeout, announce_after, rank, longest_s)
    common.set(f"token/{rank}", token)
    if rank == 0:
        name = uuid.uuid4().hex
        tokens: dict[int, str] = {}
        absent = set(range(world_size))
        while absent:
            for other in sorted(absent):
                other_token = _read(common, f"token/{other}")
                if other_token is not None and tokens.get(other) != other_token:
                    tokens[other] = other_token
                    common.set(f"name/{other_token}", name)
                if other_token is not None and (other == 0 or common.check([f"answer/{other_token}/{name}"])):
                    absent.discard(other)
            if absent:
                waiting.pause(f"ranks {number_ranges(absent)} of {world_size} did not come")
        for other_token in tokens.values():
            common.set(f"go/{other_token}", name)
        return PrefixStore(name, store)
    last_name = None
    while (go := _read(common, f"go/{token}")) is None:
        name = _read(common, f"name/{token}") or ""
        if name and name != last_name:
            common.set(f"answer/{token}/{name}", "here")
            last_name = name
        if last_name is None:
            waiting.pause("rank 0 did not come")
        else:
            waiting.pause("rank 0 came, but not all others", announced=False)  # rank 0 knows which
    return PrefixStore(go, store)


def _read(store: Store, key: str) -> str | None:
    value: bytes | None = store.get(key) if store.check([key]) else None
    return None if value is None else value.decode()


class _Waiting:
    """Short pauses that grow, up to a limit."""

    def __init__(self, timeout: timedelta, announce_after: timedelta, rank: int, longest_s: float) -> None:
        self._timeout_s, self._rank = timeout.total_seconds(), rank
        self._began = time.monotonic()
        self._until = self._began + self._timeout_s
        self._announce_at = self._began + announce_after.total_seconds()
        self._pause_s, self._longest_s = _PAUSE_S[0], longest_s

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
