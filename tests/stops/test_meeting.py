"""Ranks meet in a store that holds what dead ones left: they find each other, and nobody else."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from lightning_mfsdp.launch.meeting import meet

TIMEOUT = timedelta(seconds=60)


def start(store: HashStore, ranks: list[int], world: int) -> list[Any]:
    """What each of the ranks that come now got."""
    with ThreadPoolExecutor(world) as pool:
        parts = list(pool.map(lambda rank: meet(store, rank, world, TIMEOUT), ranks))
    for rank, part in zip(ranks, parts, strict=True):
        part.set(f"from {rank}", "hello")
    return [sum(part.check([f"from {rank}"]) for rank in ranks) for part in parts]


def test_ranks_of_a_second_start_meet_under_another_name() -> None:
    store = HashStore()
    for world in (3, 3, 2):
        assert start(store, list(range(world)), world) == [world] * world


@pytest.mark.parametrize("last", ["name", "answer"])
def test_words_of_the_dead_are_not_taken_for_those_of_the_living(last: str) -> None:
    """A start broke off after rank 1 had been told a name, or had answered."""
    store = HashStore()
    common = PrefixStore("lightning_mfsdp/meeting", store)
    common.set("token/0", "old0")
    common.set("token/1", "old1")
    common.set("name/old1", "old name")
    if last == "answer":
        common.set("answer/old1/old name", "here")
    assert start(store, [0, 1], 2) == [2, 2]


def test_who_did_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.01 s, and ranks 1-2 of 3 did not come"):
        meet(store, 0, 3, timedelta(seconds=0.01))
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0.01 s, and rank 0 did not come"):
        meet(HashStore(), 1, 3, timedelta(seconds=0.01))


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1-3 of 4"), (1, "rank 0")])
def test_who_has_not_come_yet_is_announced_once(rank: int, missing: str, caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        meet(store, rank, 4, timedelta(seconds=0.05), announce_after=timedelta(0))
    (message,) = caplog.messages
    assert f"rank {rank} has waited 0 s, and {missing} did not come yet. It waits for 0.05 s in all" in message
