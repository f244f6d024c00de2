"""How the ranks of one start of a job find each other in a store that may hold entries of an earlier start.

torchrun keeps its store when it starts workers again, and backends would read addresses of processes that are gone. So the ranks agree on
a name that was never used before, and connect under it. Its restart count cannot serve as the name: it does not rise when nodes come or go.

Every rank writes a token of its own, new for each call. Rank 0 draws the name, sends it to every token that it finds, and waits until all
ranks have answered with it; a token of a dead process is never answered, and is read again until its successor has written another.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from lightning_mfsdp.base.compat import PrefixStore, Store

__all__ = ["meet"]

_PAUSE_S = (0.001, 0.1)


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> PrefixStore:
    """A part of `store` that only the ranks alive now use. Collective.

    Raises:
        TimeoutError: Some rank did not arrive in time; on rank 0 with their numbers.
    """
    common = PrefixStore("lightning_mfsdp/meeting", store)
    word = uuid.uuid4().hex
    waiting = _Waiting(timeout, rank)
    common.set(f"word/{rank}", word)
    if rank == 0:
        name = uuid.uuid4().hex
        words: dict[int, str] = {}
        absent = set(range(world_size))
        while absent:
            for other in sorted(absent):
                found = _read(common, f"word/{other}")
                if found is not None and words.get(other) != found:
                    words[other] = found
                    common.set(f"name/{found}", name)
                if found is not None and (other == 0 or common.check([f"answer/{found}/{name}"])):
                    absent.discard(other)
            if absent:
                waiting.pause(f"ranks {sorted(absent)} of {world_size} did not come")
        for found in words.values():
            common.set(f"go/{found}", name)
        return PrefixStore(name, store)
    told = None
    while (go := _read(common, f"go/{word}")) is None:
        name = _read(common, f"name/{word}") or ""
        if name and name != told:
            common.set(f"answer/{word}/{name}", "here")
            told = name
        waiting.pause("rank 0 did not come" if told is None else "rank 0 came, but not all others")
    return PrefixStore(go, store)


def _read(store: Store, key: str) -> str | None:
    found: bytes | None = store.get(key) if store.check([key]) else None
    return None if found is None else found.decode()


class _Waiting:
    """Short pauses that grow, up to a limit."""

    def __init__(self, timeout: timedelta, rank: int) -> None:
        self._timeout_s, self._rank = timeout.total_seconds(), rank
        self._until = time.monotonic() + self._timeout_s
        self._pause_s = _PAUSE_S[0]

    def pause(self, missing: str) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError(
                f"connecting the processes: rank {self._rank} waited {self._timeout_s:g} s, and {missing}. Look for the first error in the "
                "output of the others, and whether all reach MASTER_ADDR"
            )
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
