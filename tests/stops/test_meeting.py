"""Ranks meet in a store that holds what dead ones left: they find each other, and nobody else."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

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


@pytest.mark.parametrize("last", ["name", "answer", "go"])
def test_words_of_the_dead_are_not_taken_for_those_of_the_living(last: str) -> None:
    """A start broke off after rank 0 had drawn a name, after rank 1 had answered, or later."""
    store = HashStore()
    common = PrefixStore("lightning_mfsdp/meeting", store)
    common.set("name", "old name")
    if last != "name":
        common.append("answers/old name", "1:old1 ")
    if last == "go":
        common.set("go/old name/old1", "go")
    assert start(store, [0, 1], 2) == [2, 2]


def name_drawn(store: HashStore) -> str:
    """By rank 0, which runs."""
    common = PrefixStore("lightning_mfsdp/meeting", store)
    common.wait(["name"], TIMEOUT)
    return str(common.get("name").decode())


def test_the_last_of_two_processes_that_answer_as_the_same_rank_goes() -> None:
    """A process of the last start was still alive when rank 0 of this one drew its name."""
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        parts = [pool.submit(meet, store, 0, 3, TIMEOUT)]
        PrefixStore("lightning_mfsdp/meeting", store).append(f"answers/{name_drawn(store)}", "1:old1 ")
        parts += [pool.submit(meet, store, rank, 3, TIMEOUT) for rank in (1, 2)]
        parts[0].result().set("from 0", "hello")
        assert all(part.result().check(["from 0"]) for part in parts)


def test_rank_0_asks_the_store_no_more_often_for_thousands() -> None:
    store, ranks, calls = HashStore(), 4096, []

    class Counted:
        def __init__(self, *arguments: Any) -> None:
            self._store = PrefixStore(*arguments)

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(self._store, name)

    with ThreadPoolExecutor(1) as pool, mock.patch("lightning_mfsdp.launch.meeting.PrefixStore", Counted):
        first = pool.submit(meet, store, 0, ranks, TIMEOUT)
        common, name = PrefixStore("lightning_mfsdp/meeting", store), name_drawn(store)
        common.append(f"answers/{name}", "".join(f"{rank}:token{rank} " for rank in range(1, ranks)))
        first.result()
    assert common.check([f"go/{name}/token{rank}" for rank in range(1, ranks)])
    assert len(calls) < 100


def test_who_did_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.01 s, and ranks 1-2 of 3 did not come"):
        meet(store, 0, 3, timedelta(seconds=0.01))
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0.01 s, and rank 0 did not come"):
        meet(HashStore(), 1, 3, timedelta(seconds=0.01))


def test_rank_0_of_the_last_start_is_not_taken_for_that_of_this_one() -> None:
    store = HashStore()
    assert start(store, [0, 1], 2) == [2, 2]
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0.01 s, and rank 0 did not come"):
        meet(store, 1, 2, timedelta(seconds=0.01))


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1-3 of 4"), (1, "rank 0")])
def test_who_has_not_come_yet_is_announced_once(rank: int, missing: str, caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        meet(store, rank, 4, timedelta(seconds=0.05), announce_after=timedelta(0))
    (message,) = caplog.messages
    assert f"rank {rank} has waited 0 s, and {missing} did not come yet. It waits for 0.05 s in all" in message
