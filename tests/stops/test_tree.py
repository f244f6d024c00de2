"""A tree of ranks: what each passes comes to the first in order, and back; no rank waits for one that is gone."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_mfsdp.base.errors import CollectiveError
from lightning_mfsdp.base.tree import FAN_OUT, Tree, children_of

SIZE = 40


def together(store: Any, action: Callable[[Tree], Any], size: int = SIZE) -> list[Any]:
    """What each rank's thread returns, or its CollectiveError."""

    def run(rank: int) -> Any:
        tree = Tree.connected(store, "place", rank, size, limit_s=60, meeting_s=60)
        try:
            return action(tree)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 255, 4096])
def test_every_rank_has_one_parent_and_few_children_and_speaks_for_those_after_it(size: int) -> None:
    parents: dict[int, int] = {}
    for rank in range(size):
        parts = children_of(rank, size)
        assert len(parts) <= FAN_OUT
        ranks = [other for part in parts for other in part]
        assert ranks == list(range(rank + 1, rank + 1 + len(ranks)))
        assert all(part.start not in parents for part in parts)
        parents |= {part.start: rank for part in parts}
    assert sorted(parents) == list(range(1, size))

    def depth(rank: int) -> int:
        return 1 + depth(parents[rank]) if rank else 0

    assert max(map(depth, range(size))) <= 3


def test_what_ranks_pass_comes_to_the_first_in_order_and_back() -> None:
    def exchange(tree: Tree) -> list[Any]:
        numbers = tree.to_first({"rank": tree.rank})
        assert (numbers is None) == (tree.rank > 0)
        own = tree.for_each(None if numbers is None else [number["rank"] ** 2 for number in numbers])
        large = tree.from_first(b"x" * (1 << 22) if tree.rank == 0 else None)
        return [own, len(large), tree.decide(tree.rank, sum)]

    answers = together(dist.HashStore(), exchange)
    assert answers == [[rank**2, 1 << 22, sum(range(SIZE))] for rank in range(SIZE)]


def test_another_tree_of_the_same_ranks_has_connections_of_its_own() -> None:
    def exchange(tree: Tree) -> list[Any]:
        other = tree.another(limit_s=60, meeting_s=60)
        said = [other.decide(tree.rank, sum), tree.decide(tree.rank, max)]
        tree.close()
        return [*said, other.decide(tree.rank, len)]

    answers = together(dist.HashStore(), exchange)
    assert answers == [[sum(range(SIZE)), SIZE - 1, SIZE]] * SIZE
    assert Tree.alone().another(limit_s=None, meeting_s=1).decide(3, max) == 3


def test_ranks_that_want_another_tree_end_when_one_is_gone() -> None:
    def exchange(tree: Tree) -> Any:
        try:
            return None if tree.rank == 1 else tree.another(limit_s=60, meeting_s=1).decide(tree.rank, len)
        finally:
            tree.close()

    outcomes = together(dist.HashStore(), exchange)
    assert all(isinstance(outcome, CollectiveError) for outcome in outcomes[:1] + outcomes[2:])


def test_a_tree_that_was_closed_says_why_it_makes_no_other() -> None:
    def exchange(tree: Tree) -> Any:
        tree.close("was interrupted: KeyboardInterrupt")
        return tree.another(limit_s=60, meeting_s=60)

    outcomes = together(dist.HashStore(), exchange, 3)
    assert all("was interrupted: KeyboardInterrupt" in str(outcome) for outcome in outcomes), outcomes


def test_a_tree_that_fails_to_make_another_is_not_used_again() -> None:
    def exchange(tree: Tree) -> Any:
        with (
            mock.patch.object(tree, "_joined", side_effect=CollectiveError("no files")),
            contextlib.suppress(CollectiveError),
        ):
            tree.another(limit_s=60, meeting_s=60)
        return tree.decide(tree.rank, len)

    outcomes = together(dist.HashStore(), exchange, 3)
    assert all("could not make further connections" in str(outcome) for outcome in outcomes), outcomes


def test_a_tree_of_one_rank_passes_nothing() -> None:
    tree = Tree.connected(dist.HashStore(), "place", 0, 1, limit_s=None, meeting_s=1)
    unpicklable = threading.Lock()
    assert tree.to_first(unpicklable) == [unpicklable]
    assert tree.from_first(unpicklable) is unpicklable
    assert tree.decide(3, max) == 3


@pytest.mark.parametrize("gone", [0, 1, SIZE - 1])
def test_ranks_that_wait_end_when_one_is_gone(gone: int) -> None:
    """One next to it sees that its connection has ended, and ends its own."""

    def exchange(tree: Tree) -> Any:
        if tree.rank == gone:
            return tree.close()
        return tree.decide(tree.rank, len)

    outcomes = together(dist.HashStore(), exchange)
    others = outcomes[:gone] + outcomes[gone + 1 :]
    assert all(isinstance(outcome, CollectiveError) for outcome in others)
    assert any(f"lost rank {gone}" in str(outcome) for outcome in others)


def test_the_kernel_ends_connections_to_a_host_that_answers_nothing() -> None:
    """What was sent and is not acknowledged is not covered by keepalive (tcp(7))."""

    def options(tree: Tree) -> list[tuple[int, int]]:
        ends = [*tree._children, *([tree._parent] if tree._parent is not None else [])]
        return [
            (
                end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )
            for end in ends
        ]

    for found in together(dist.HashStore(), options, 3):
        assert found
        assert all(keeps == 1 and 0 < unanswered_ms <= 15_000 for keeps, unanswered_ms in found)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError("timed out"), r"waited 3 s for rank 1"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), r"lost rank 1: .*Connection timed out"),
    ],
)
def test_what_the_kernel_has_ended_is_not_called_a_limit(error: TimeoutError, words: str) -> None:
    ends = socket.socketpair(socket.AF_UNIX)
    with mock.patch("lightning_mfsdp.base.tree.end_if_unanswered"), mock.patch("socket.socket.setsockopt"):
        tree = Tree(0, 2, None, ends[:1], 3.0)
    with mock.patch("lightning_mfsdp.base.tree._read", side_effect=error), pytest.raises(CollectiveError, match=words):
        tree.to_first("first")
    ends[1].close()


def test_a_second_start_in_the_same_store_is_another_tree() -> None:
    store = dist.HashStore()
    assert [together(store, lambda tree: tree.decide(tree.rank, max), 3) for _ in range(2)] == [[2, 2, 2]] * 2


def test_what_has_no_token_is_not_taken_for_a_rank() -> None:
    store: Any = dist.HashStore()

    def first() -> Any:
        tree = Tree.connected(store, "place", 0, 2, limit_s=60, meeting_s=60)
        return tree.to_first("first")

    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(first)
        store.set("place/of 2/0/1/network", json.dumps("elsewhere"))  # until then the first does not listen
        _, port, *_ = json.loads(store.get("place/of 2/0/0/contact"))
        for greeting in (b"GET / HTTP/1.1\r\n\r\n" + b" " * 40, b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(greeting)
        second = Tree.connected(store, "place", 1, 2, limit_s=60, meeting_s=60)
        second.to_first("second")
        assert came.result() == ["first", "second"]


def test_what_answers_at_an_address_of_the_parent_is_not_taken_for_it() -> None:
    """Hosts may have the same address in networks of their own, and what listens there would be spoken to in the parent's stead."""
    store: Any = dist.HashStore()
    listener = socket.create_server(("127.0.0.1", 0))
    stranger = socket.create_server(("127.0.0.2", listener.getsockname()[1]))

    def answer() -> None:
        with stranger, stranger.accept()[0] as connection:
            connection.recv(64)
            connection.sendall(b"x" * 64)

    def passed(rank: int) -> Any:
        return Tree.connected(store, "place", rank, 2, limit_s=60, meeting_s=60).to_first(rank)

    with (
        mock.patch("lightning_mfsdp.base.tree.network_of_host", side_effect=["one", "another"]),
        mock.patch("lightning_mfsdp.base.tree.addresses_of_host", return_value=["127.0.0.2", "127.0.0.1"]),
        mock.patch("lightning_mfsdp.base.tree._listener", return_value=listener),
        ThreadPoolExecutor(3) as pool,
    ):
        answered = pool.submit(answer)
        assert list(pool.map(passed, range(2))) == [[0, 1], None]
        answered.result()


def test_a_rank_that_ended_before_is_named(tmp_path: Path) -> None:
    store: Any = dist.FileStore(str(tmp_path / "store"), 2)
    store.set_timeout(timedelta(seconds=0.1))
    for rank, other in ((0, 1), (1, 0)):
        with pytest.raises(
            CollectiveError, match=rf"^rank {rank} on .* learned nothing from rank {other}, .*ended before"
        ):
            Tree.connected(store, f"place {rank}", rank, 2, limit_s=None, meeting_s=60)


@pytest.mark.parametrize("lasts", [0, 1, 2])
def test_a_store_that_is_gone_is_said(lasts: int) -> None:
    """At each thing that a rank writes: its start, its network, and where it listens."""

    class Gone(dist.HashStore):  # type: ignore[misc]
        written = 0

        def note(self) -> None:
            if self.written == lasts:
                raise dist.DistNetworkError("Broken pipe")
            self.written += 1

        def add(self, key: str, number: int) -> int:
            self.note()
            return int(super().add(key, number))

        def set(self, key: str, value: str) -> None:
            self.note()
            super().set(key, value)

    store: Any = Gone()
    dist.HashStore.set(store, "place/of 18/0/17/network", "null")  # what its one child says
    with pytest.raises(
        CollectiveError, match=r"^rank 16 on .* cannot write to the store .*: Broken pipe\. .*MASTER_ADDR"
    ):
        Tree.connected(store, "place", 16, 18, limit_s=None, meeting_s=60)


def test_a_rank_that_does_not_come_is_named() -> None:
    store: Any = dist.HashStore()
    store.set("place/of 2/0/1/network", json.dumps("elsewhere"))
    with pytest.raises(CollectiveError, match=r"^rank 0 on .* waited 0\.1 s for ranks \[1\] to connect"):
        Tree.connected(store, "place", 0, 2, limit_s=None, meeting_s=0.1)


def test_what_connects_and_says_nothing_delays_no_rank() -> None:
    """Each stranger would be waited for longer than the ranks wait for each other."""
    store: Any = dist.HashStore()

    def first() -> Any:
        return Tree.connected(store, "place", 0, 2, limit_s=60, meeting_s=8).to_first("first")

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as strangers:
        came = pool.submit(first)
        store.set("place/of 2/0/1/network", json.dumps("elsewhere"))
        _, port, *_ = json.loads(store.get("place/of 2/0/0/contact"))
        for _ in range(3):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        second = Tree.connected(store, "place", 1, 2, limit_s=60, meeting_s=8)
        second.to_first("second")
        assert came.result() == ["first", "second"]


def test_a_rank_that_can_open_no_file_says_so() -> None:
    store: Any = dist.HashStore()
    store.set("place/of 2/0/1/network", json.dumps("elsewhere"))
    error = OSError(errno.EMFILE, "Too many open files")
    with mock.patch.object(socket.socket, "accept", side_effect=error), ThreadPoolExecutor(1) as pool:
        came = pool.submit(Tree.connected, store, "place", 0, 2, limit_s=None, meeting_s=20)
        _, port, *_ = json.loads(store.get("place/of 2/0/0/contact"))
        with socket.create_connection(("127.0.0.1", port)):
            problem = str(came.exception())
    assert "cannot accept connections of ranks [1]" in problem
    assert "Too many open files" in problem
    assert "ulimit -n" in problem
