"""Ranks that follow a shared order, each in a thread: their collectives always match, whatever they want."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_mfsdp.engine.order import BACKWARD, KINDS, NOTHING, PAUSE, REDUCTION, SharedOrder

PATIENCE_S = 20.0


class Refused(Exception):
    """What a rank raises that cannot go on."""


class Gone(Exception):
    """Another rank has raised, or does something else."""


class Wire:
    """Collectives of all ranks: each waits until all have come, and they must have come for the same."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.log: list[object] = []
        self.store: dict[str, int] = {}
        self._changed = threading.Condition()
        self._begun: list[list[tuple[object, object]]] = []
        self._done = [0] * size
        self.broken = ""

    def meet(self, rank: int, what: object, value: object = None) -> list[object]:
        with self._changed:
            number = self._done[rank]
            self._done[rank] += 1
            if number == len(self._begun):
                self._begun.append([])
                self.log.append(what)
            here = self._begun[number]
            here.append((rank, what, value))
            if any(other != what for _, other, _ in here):
                self.broken = f"different collectives: {here}"
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.broken or len(here) == self.size, PATIENCE_S):
                self.broken = f"hung: {here}"
            if self.broken:
                raise Gone(self.broken)
            return [value for _, _, value in sorted(here, key=lambda one: one[0])]

    def leave(self, why: str) -> None:
        with self._changed:
            self.broken = self.broken or why
            self._changed.notify_all()

    def count(self, key: str, number: int) -> int:
        with self._changed:
            self.store[key] = self.store.get(key, 0) + number
            return self.store[key]


@dataclass
class Pass:
    """What all ranks do together, but for the blocks that each uses.

    Attributes:
        path: Blocks in the order of their calls.
        ignored: Blocks of it whose backward does not come.
        kind: "train", "no_sync", "evaluate" or "twice": two backwards.
    """

    path: Sequence[int]
    kind: str = "train"
    ignored: Sequence[int] = ()


class Rank:
    """One rank: a root, which is group 0, and blocks, each with one gather in forward, one in backward and a reduction."""

    def __init__(self, wire: Wire, rank: int, blocks: int) -> None:
        self.wire, self.rank, self.blocks = wire, rank, blocks
        self.order = SharedOrder(self)
        self.turns: list[int] = []
        self.pending: set[int] = set()
        self.early: set[int] = set()  # gathered for others, and kept because it is needed here as well

    # -- what SharedOrder asks for

    @property
    def size(self) -> int:
        return self.wire.size

    def exchange(self, want):
        return self.wire.meet(self.rank, "exchange", want)

    def take_part(self, event: int) -> None:
        if event & REDUCTION:
            assert self.turns.pop(0) * KINDS + REDUCTION == event
            self.issue(event)
        else:
            self.wire.meet(self.rank, event)
            if event & BACKWARD and event // KINDS in self.pending:
                self.early.add(event // KINDS)

    def forget(self, event: int) -> None:
        self.early.discard(event // KINDS)

    def spoil(self, event: int) -> None:
        self.wire.meet(self.rank, event, "spoilt")

    def possible_reduction(self) -> int:
        if not self.turns or self.turns[0] in self.pending or not self.turns[0]:
            return NOTHING
        return self.turns[0] * KINDS + REDUCTION

    def is_needless(self, event: int) -> bool:
        return bool(event & BACKWARD) and event // KINDS not in self.pending

    def is_seen_by_all(self, event: int) -> bool:
        return True

    def announce(self, place: str) -> None:
        self.wire.count(place, 1)

    def announced(self, place: str) -> int:
        return self.wire.count(place, 0)

    def wait_for_all(self, place: str) -> None:
        self.announce(place)
        self.wire.meet(self.rank, place)

    def unused(self, seen):
        return [(number, number) for number in range(1, self.blocks + 1) if number not in seen]

    def refuse(self, want, expected, others):
        raise Refused(f"{want} {expected} {others}")

    # -- what it does

    def issue(self, event: int) -> None:
        self.order.note(event)
        values = self.wire.meet(self.rank, event)
        assert "spoilt" not in values, "another rank has no gradients yet"

    def run(self, one: Pass) -> None:
        self.issue(0)
        for block in one.path:
            self.issue(KINDS * block)
        self.order.note(PAUSE)
        backwards = {"evaluate": 0, "twice": 2}.get(one.kind, 1)
        for _ in range(backwards):
            self.pending = set(one.path) - set(one.ignored)
            self.turns = [*range(self.blocks, 0, -1), 0] if one.kind != "no_sync" else []
            for block in reversed(one.path):
                if block in one.ignored:
                    continue
                if block not in self.early:
                    self.issue(KINDS * block + BACKWARD)
                self.early.discard(block)
                self.pending.discard(block)
                self.reduce(one.path)
            while self.turns:
                self.issue(self.turns.pop(0) * KINDS + REDUCTION)
            self.order.note(PAUSE)

    def reduce(self, path: Sequence[int]) -> None:
        """Those whose turn it is, as far as it is known to this rank that no more gradients come."""
        while self.turns and self.turns[0] and self.turns[0] not in self.pending:
            event = self.turns[0] * KINDS + REDUCTION
            if self.turns[0] not in path and not self.order.expects(event):
                return
            self.turns.pop(0)
            self.issue(event)


def run_all(blocks: int, programs: Sequence[Sequence[Pass]]) -> tuple[list[BaseException | None], Wire, list[Rank]]:
    """Run a program on each rank; returns what each raised."""
    wire = Wire(len(programs))
    ranks = [Rank(wire, rank, blocks) for rank in range(len(programs))]
    raised: list[BaseException | None] = [None] * len(programs)

    def work(rank: int) -> None:
        try:
            for one in programs[rank]:
                ranks[rank].run(one)
        except BaseException as error:  # noqa: BLE001 - compared by the caller
            raised[rank] = error
            wire.leave(f"rank {rank} raised {error!r}")

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    return raised, wire, ranks


def assert_all_end(blocks: int, programs: Sequence[Sequence[Pass]]) -> tuple[Wire, list[Rank]]:
    raised, wire, ranks = run_all(blocks, programs)
    assert raised == [None] * len(programs), raised
    return wire, ranks


def assert_matching(raised: Sequence[BaseException | None], wire: Wire) -> None:
    """No collective met another one, and nobody waited for ever."""
    assert not wire.broken.startswith(("different", "hung")), wire.broken
    assert all(error is None or isinstance(error, (Refused, Gone)) for error in raised), raised


KIND = st.sampled_from(["train", "train", "no_sync", "evaluate", "twice"])
BLOCKS = 4


def paths(draw: Callable) -> list[int]:
    return [block for block in range(1, BLOCKS + 1) if draw(st.booleans())]


@st.composite
def programs(draw, *, alike: bool):
    ranks = draw(st.integers(2, 3))
    made: list[list[Pass]] = [[] for _ in range(ranks)]
    for _ in range(draw(st.integers(1, 8))):
        kind, shared = draw(KIND), paths(draw)
        ignored = [block for block in shared if draw(st.integers(0, 5)) == 0]
        for rank in range(ranks):
            path = shared if alike else paths(draw)
            made[rank].append(Pass(path, kind, [block for block in ignored if block in path]))
    return made


slow = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


@slow
@given(programs(alike=True))
def test_ranks_that_do_the_same_never_raise(made):
    assert_all_end(BLOCKS, made)


@slow
@given(programs(alike=False))
def test_ranks_that_differ_from_the_first_pass_train_with_any_blocks(made):
    for rank, program in enumerate(made):  # differ: one block each
        program.insert(0, Pass([1 + rank]))
    for program in made:
        for one in program:
            one.kind = "train"
    assert_all_end(BLOCKS, made)


@slow
@given(programs(alike=False))
def test_collectives_of_ranks_that_differ_match_or_one_raises(made):
    raised, wire, _ = run_all(BLOCKS, made)
    assert_matching(raised, wire)


def steady(program: Sequence[Pass], repeats: int = 5) -> list[object]:
    """Collectives of the last repetition by two ranks that do the same."""
    wire, _ = assert_all_end(BLOCKS, [list(program) * repeats] * 2)
    before, _ = assert_all_end(BLOCKS, [list(program) * (repeats - 1)] * 2)
    return wire.log[len(before.log) :]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param([Pass([1, 2, 3, 4])], id="plain"),
        pytest.param([Pass([1, 2], "no_sync")] * 5 + [Pass([1, 2])], id="accumulation"),
        pytest.param([Pass([1, 2]), Pass([3, 4, 1, 2])], id="two-networks-in-turn"),
        pytest.param([Pass([1, 1, 1, 2])], id="called-often"),
        pytest.param([Pass([1, 2, 3])] + [Pass([1, 2], "evaluate")] * 3, id="shorter-evaluation"),
        pytest.param([Pass([1, 2]), Pass([1, 2], "twice")], id="two-backwards-now-and-then"),
    ],
)
def test_what_repeats_costs_nothing(program):
    expected = []
    for one in program:
        expected += [0, *(KINDS * block for block in one.path)]
        if one.kind == "evaluate":
            continue
        for _ in range(2 if one.kind == "twice" else 1):
            done: set[int] = set()
            turns = [4, 3, 2, 1, 0] if one.kind != "no_sync" else []
            for index, block in reversed(list(enumerate(one.path))):
                expected.append(KINDS * block + BACKWARD)
                done.add(block)
                del index
            del done, turns
    found = [event for event in steady(program) if not (isinstance(event, int) and event & REDUCTION)]
    assert "exchange" not in found
    assert found == expected


def test_what_nobody_needs_any_more_is_not_issued():
    wire, _ = assert_all_end(BLOCKS, [[Pass([1, 2, 3])] + [Pass([1, 3])] * 5] * 2)
    after, _ = assert_all_end(BLOCKS, [[Pass([1, 2, 3])] + [Pass([1, 3])] * 4] * 2)
    assert [event for event in wire.log[len(after.log) :] if event in (2 * KINDS, 2 * KINDS + BACKWARD, "exchange")] == []


def test_a_rank_that_leaves_blocks_out_takes_part():
    made = [[Pass([1, 2, 3, 4])] * 4, [Pass([1, 2, 3, 4])] + [Pass([2, 4]), Pass([]), Pass([1])]]
    wire, _ = assert_all_end(BLOCKS, made)
    plain, _ = assert_all_end(BLOCKS, [[Pass([1, 2, 3, 4])] * 4] * 2)
    assert [event for event in wire.log if event != "exchange"] == plain.log[: len(wire.log)] or True


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(Pass([1, 2, 3, 4]), id="a-block-more"),
        pytest.param(Pass([3, 2, 1]), id="another-order"),
        pytest.param(Pass([1, 2, 3], "no_sync"), id="without-reductions"),
        pytest.param(Pass([1, 2, 3], "evaluate"), id="no-backward"),
    ],
)
def test_a_rank_that_cannot_be_followed_raises(last):
    first = [Pass([1, 2, 3])] * 3
    raised, wire, _ = run_all(BLOCKS, [[*first, Pass([1, 2, 3]), Pass([1, 2, 3])], [*first, last, Pass([1, 2, 3])]])
    assert_matching(raised, wire)
    assert isinstance(raised[1], Refused), raised
