"""Ranks meet in a store that holds what dead ones left: they find each other, and nobody else."""

from __future__ import annotations

import contextlib
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
    """A start was killed after rank 0 had drawn a name, after rank 1 had answered, or later."""
    store = HashStore()
    common = PrefixStore("lightning_mfsdp/meeting", store)
    common.add("calls", 2)
    common.set("name", "1-old")
    if last != "name":
        common.append("answers/1-old", "1/2/2 ")  # type: ignore[attr-defined]
    if last == "go":
        common.set("go/1-old/2", "go")
    assert start(store, [0, 1], 2) == [2, 2]


def name_drawn(store: HashStore) -> str:
    """By rank 0, which runs."""
    common = PrefixStore("lightning_mfsdp/meeting", store)
    common.wait(["name"], TIMEOUT)
    return str(common.get("name").decode())


@pytest.mark.parametrize("answers_last", [False, True])
def test_of_two_processes_of_a_rank_the_one_that_began_last_goes(answers_last: bool) -> None:
    """A process of the last start still looks, or was stopped and goes on."""
    store = HashStore()
    common = PrefixStore("lightning_mfsdp/meeting", store)
    old = common.add("calls", 1)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, store, 0, 3, TIMEOUT)
        key = f"answers/{name_drawn(store)}"
        if not answers_last:
            common.append(key, f"1/3/{old} ")  # type: ignore[attr-defined]
        second = pool.submit(meet, store, 1, 3, TIMEOUT)
        common.wait([key], TIMEOUT)
        if answers_last:
            common.append(key, f"1/3/{old} ")  # type: ignore[attr-defined]
        parts = [first, second, pool.submit(meet, store, 2, 3, TIMEOUT)]
        assert_together([part.result() for part in parts])


def test_a_process_of_a_start_of_more_ranks_is_not_told_to_go() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        old = pool.submit(meet, store, 1, 3, timedelta(seconds=1))
        parts = [pool.submit(meet, store, rank, 2, TIMEOUT) for rank in (0, 1)]
        assert_together([part.result() for part in parts])
        with pytest.raises(TimeoutError, match="rank 0"):
            old.result()


@pytest.mark.parametrize("late", ["an earlier name", "nothing"])
def test_a_rank_0_of_before_that_goes_on_hinders_nobody(late: str) -> None:
    """It writes the name that it drew before this start began, or takes it back."""
    store = HashStore()
    common = PrefixStore("lightning_mfsdp/meeting", store)
    common.add("calls", 1)
    with ThreadPoolExecutor(3) as pool:
        parts = [pool.submit(meet, store, rank, 3, TIMEOUT) for rank in (0, 1)]
        common.wait([f"answers/{name_drawn(store)}"], TIMEOUT)
        if late == "nothing":
            common.compare_set("name", "1-old", "")
        else:
            common.set("name", "1-old")
        parts.append(pool.submit(meet, store, 2, 3, TIMEOUT))
        assert_together([part.result() for part in parts])


def assert_together(parts: list[Any]) -> None:
    parts[0].set("from one", "hello")
    assert all(part.check(["from one"]) for part in parts)


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
        common.append(f"answers/{name}", "".join(f"{rank}/{ranks}/{rank} " for rank in range(1, ranks)))
        first.result()
    assert common.check([f"go/{name}/{rank}" for rank in range(1, ranks)])
    assert len(calls) < 100


def test_who_did_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.01 s, and ranks 1-2 of 3 did not come"):
        meet(store, 0, 3, timedelta(seconds=0.01))
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0.01 s, and rank 0 did not come"):
        meet(HashStore(), 1, 3, timedelta(seconds=0.01))


@pytest.mark.parametrize("came", [[0, 1], [0]])
def test_rank_0_of_the_last_start_is_not_taken_for_that_of_this_one(came: list[int]) -> None:
    """All had met, or it waited for the others in vain."""
    store = HashStore()
    with contextlib.suppress(TimeoutError), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: meet(store, rank, 2, timedelta(seconds=2 if len(came) > 1 else 0.01)), came))
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0.01 s, and rank 0 did not come"):
        meet(store, 1, 2, timedelta(seconds=0.01))


@pytest.mark.parametrize(("rank", "missing"), [(0, "ranks 1-3 of 4"), (1, "rank 0")])
def test_who_has_not_come_yet_is_announced_once(rank: int, missing: str, caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        meet(store, rank, 4, timedelta(seconds=0.05), announce_after=timedelta(0))
    (message,) = caplog.messages
    assert f"rank {rank} has waited 0 s, and {missing} did not come yet. It waits for 0.05 s in all" in message
