"""Lets the ranks of one start of a job find each other in a store that may hold entries of an earlier start.

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

_PAUSE_S = (0.001, 0.1)  # between two looks into the store: the first pause, and the longest


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> PrefixStore:
    """A part of `store` that only the ranks alive now use. Collective.

    Raises:
        TimeoutError: Some rank did not arrive in time; on rank 0 with their numbers.
    """
    common = PrefixStore("lightning_mfsdp/meeting", store)
    token = uuid.uuid4().hex
    waiting = _Waiting(timeout, rank)
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
                waiting.pause(f"ranks {sorted(absent)} of {world_size} did not come")
        for other_token in tokens.values():
            common.set(f"go/{other_token}", name)
        return PrefixStore(name, store)
    last_name = None
    while (go := _read(common, f"go/{token}")) is None:
        name = _read(common, f"name/{token}") or ""
        if name and name != last_name:
            common.set(f"answer/{token}/{name}", "here")
            last_name = name
        waiting.pause("rank 0 did not come" if last_name is None else "rank 0 came, but not all others")
    return PrefixStore(go, store)


def _read(store: Store, key: str) -> str | None:
    value: bytes | None = store.get(key) if store.check([key]) else None
    return None if value is None else value.decode()


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
