"""Ranks that share weights gather the same units in the same order, or all end with an error; what repeats asks nobody."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import CollectiveError, EngineStateError, fully_shard, no_sync
from lightning_mfsdp.engine.api.units import fully_shard_units
from lightning_mfsdp.engine.comm import gather_order
from lightning_mfsdp.engine.comm.gather_order import BACKWARD, REDUCTION, GatherOrder, History
from tests.engine.test_different_blocks import built
from tests.helpers.chain import DIM, adamw, context, inputs, loss_of
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT

PATIENCE_S = 20.0
STEP = -1  # an optimizer steps
END = -2  # a backward that reduces is at its end
MOST_BLOCKS = 4

Program = Sequence[int]


# -- what is predicted -----------------------------------------------------------------------------------------------------


def microbatch(*blocks: int) -> list[int]:
    """Forward and backward of some blocks: events are three times their number, plus a kind."""
    backward = [event for block in reversed(blocks) for event in (3 * block + BACKWARD, 3 * block + REDUCTION)]
    return [0, *(3 * block for block in blocks), *backward]


@pytest.mark.parametrize(
    "repeated",
    [
        pytest.param([*microbatch(1, 2, 3), STEP], id="plain"),
        pytest.param([*microbatch(1, 2, 3) * 4, 100, STEP], id="accumulation-with-another-end"),
        pytest.param([100, *microbatch(1, 2, 3) * 4, STEP], id="accumulation-with-another-beginning"),
        pytest.param([*microbatch(1, 2), STEP, *microbatch(1, 2, 3, 4), STEP], id="two-optimizers-in-turn"),
        pytest.param(
            [*microbatch(1, 2), STEP, *microbatch(1, 2), STEP, 7, 7, STEP], id="two-steps-of-one-and-one-of-another"
        ),
        pytest.param([*microbatch(1, 1, 1, 2), STEP], id="a-block-called-often"),
        pytest.param([0, 3, 6] * 50, id="no-optimizer"),
    ],
)
def test_what_repeats_is_predicted(repeated):
    history = History()
    wrong = []
    for _ in range(6):
        wrong.append(0)
        for event in repeated:
            wrong[-1] += history.prediction != event
            history.stepped() if event == STEP else history.add(event)
    assert wrong[0] > 0
    assert not any(wrong[4:]), wrong


def test_an_evaluation_costs_questions_only_where_it_begins_and_ends():
    history, wrong = History(), 0
    for epoch in range(6):
        for event in [*([*microbatch(1, 2, 3), STEP] * 5), *([0, 3, 6, 9] * 5000)]:
            wrong += epoch > 2 and history.prediction != event
            history.stepped() if event == STEP else history.add(event)
    assert wrong <= 3 * 4
    assert len(history._numbers) < 100_000


# -- ranks in threads ------------------------------------------------------------------------------------------------------


class GoneError(Exception):
    """Another rank has raised."""


class Wire:
    """Gathers of all ranks: each waits until all have come, and they must have come for the same."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.broken = ""
        self.differ: list[object] = []
        self._changed = threading.Condition()
        self._begun: list[list[int]] = []
        self._done = [0] * size

    def gather(self, rank: int, event: int) -> None:
        with self._changed:
            number = self._done[rank]
            self._done[rank] += 1
            if number == len(self._begun):
                self._begun.append([])
            here = self._begun[number]
            here.append(event)
            if len(set(here)) > 1:
                self.differ.append(here)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.broken or len(here) == self.size, PATIENCE_S), "hung"
            if len(here) < self.size:
                raise GoneError(self.broken)

    def leave(self, why: str) -> None:
        with self._changed:
            self.broken = self.broken or why
            self._changed.notify_all()


@contextmanager
def watched(orders: Sequence[GatherOrder]) -> Iterator[None]:
    """Inside, ranks that stand still are noticed, as by the thread of each process."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for order in orders:
                order.report_progress()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def run(
    programs: Sequence[Program],
    *,
    timeout_s: float = 60,
    store: dist.Store | None = None,
    expected: Sequence[Program] = (),
) -> tuple[list[BaseException | None], Wire, list[GatherOrder]]:
    """Run a program on each rank; returns what each raised. Each rank expects one of `expected`, the same where there is one."""
    size, store = len(programs), store or dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    wire, ranks = Wire(size), [10 * rank for rank in range(size)]
    orders = [GatherOrder(ranks, rank, store, "here", still_s=0.05, heard_s=0.5) for rank in range(size)]
    for order, step in zip(orders, itertools.cycle(expected), strict=False):
        order.expects = partial(list, [[divmod(event, 3) for event in step if event >= 0]] * 2)
    raised: list[BaseException | None] = [None] * size

    def work(rank: int) -> None:
        try:
            for event in programs[rank]:
                if event == STEP:
                    orders[rank].stepped()
                    continue
                if event == END:
                    orders[rank].end_backward()
                    continue
                orders[rank].note(event // 3, f"blocks.{event // 3}", event % 3)
                wire.gather(rank, event)
            wire.leave(f"rank {rank} is at its end")
        except BaseException as error:
            raised[rank] = error
            wire.leave(repr(error))

    with watched(orders):
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
    return raised, wire, orders


def of_blocks(draw: Callable) -> list[int]:
    blocks = [block for block in range(1, MOST_BLOCKS + 1) if draw(st.booleans())]
    return draw(
        st.sampled_from([microbatch(*blocks), [*microbatch(*blocks), STEP], [0, *(3 * block for block in blocks)]])
    )


@st.composite
def drawn_programs(draw: Callable) -> list[list[int]]:
    """What all ranks do, and one that does something else from some place on."""
    shared = [event for _ in range(draw(st.integers(1, 5))) for event in of_blocks(draw)] * draw(st.integers(1, 3))
    last = len(shared) - (shared[-1] == STEP)  # a step that one rank leaves out at the very end is not seen
    at = draw(st.integers(0, last - 1))
    how = draw(st.sampled_from(["leaves out", "does in addition", "does instead"]))
    least = STEP if at and shared[at - 1] != STEP else 0  # before the first gather, and again, anybody may step
    other = draw(st.integers(least, 3 * MOST_BLOCKS + 2).filter(lambda event: event != shared[at]))
    instead = {"leaves out": [], "does in addition": [other, shared[at]], "does instead": [other]}[how]
    odd = [*shared[:at], *instead, *shared[at + 1 :]]
    programs = [shared] * draw(st.integers(1, 2)) + [odd]
    return draw(st.permutations(programs))


# A rank that meets nobody waits a second.
EXAMPLES = 60 if NIGHT else 20
slow = settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))


def drawn_expectations(draw: Callable, programs: Sequence[Program]) -> list[Program]:
    """What ranks expect before they begin: the same or not, what one of them does or something else."""
    one = st.sampled_from([microbatch(1, 2), microbatch(2), microbatch(1, 2, 3), *programs])
    return draw(st.lists(one, min_size=1, max_size=3) | one.map(lambda step: [step]))


@slow
@given(st.data(), drawn_programs())
def test_ranks_that_do_the_same_go_on(data, programs):
    raised, wire, orders = run([programs[0]] * 3, expected=drawn_expectations(data.draw, programs))
    assert raised == [None] * 3
    assert not wire.differ
    assert len({order.asked for order in orders}) == 1


@slow
@given(st.data(), drawn_programs())
def test_no_rank_gathers_what_another_does_not(data, programs):
    raised, wire, _ = run(programs, timeout_s=1, expected=drawn_expectations(data.draw, programs))
    assert not wire.differ
    assert any(error is not None for error in raised), raised
    # None where a rank has done all of its own before the other came to what is different.
    assert all(error is None or isinstance(error, (EngineStateError, GoneError)) for error in raised), raised
    for error in raised:
        if isinstance(error, EngineStateError):
            assert "rank" in str(error)
            assert any(what in str(error) for what in ("blocks.", "its first unit", "the step of an optimizer"))
            assert 'sharding="optim_grads"' in str(error)


def test_ranks_ask_once_where_they_expect_what_they_do_and_as_often_as_ever_where_they_expect_different_steps():
    step = [*microbatch(1, 2, 3), END, STEP]
    (_, _, alike), (_, _, differing), (_, _, nothing) = (
        run([step * 4] * 2, expected=expected) for expected in ([step], [step, microbatch(1, 2)], [[]])
    )
    assert [order.asked for order in alike] == [1, 1]
    assert [order.asked for order in differing] == [order.asked for order in nothing]
    assert nothing[0].asked > len(microbatch(1, 2, 3))


def test_many_optimizers_ask_nobody_in_a_step_that_repeats():
    alike = [*microbatch(1, 2), *([STEP] * 12)]
    (_, _, few), (_, _, many) = run([alike * 4] * 2), run([alike * 8] * 2)
    assert few[0].asked == many[0].asked


def test_the_error_names_units_and_ranks():
    alike = [*microbatch(1, 2, 3), STEP] * 2
    raised, _, _ = run([[*alike, 0, 3, 6], [*alike, 0, 6]])
    (said,) = {str(error) for error in raised if isinstance(error, EngineStateError)}
    assert said.startswith(
        "rank 10 comes to the gather of blocks.2 in forward, and rank 0 has come to the gather of blocks.1 in forward."
    )
    raised, _, _ = run([[*alike, 9], [*alike, 6]])
    said = [str(error) for error in raised if isinstance(error, EngineStateError)]
    three, two = "rank 0 {} the gather of blocks.3 in forward", "rank 10 {} the gather of blocks.2 in forward"
    ways = (
        f"{three.format('comes to')}, and {two.format('to')}",
        f"{two.format('comes to')}, and {three.format('to')}",
    )
    assert any(way in one for one in said for way in ways), said


def test_a_step_is_not_taken_for_a_gather():
    alike = [*microbatch(1, 2), STEP] * 2
    raised, wire, _ = run([[*alike, 0, 3], [*alike, 0, STEP, 3]])
    (said,) = {str(error) for error in raised if isinstance(error, EngineStateError)}
    assert said.startswith(
        "rank 10 comes to the step of an optimizer, and rank 0 has come to the gather of blocks.1 in forward."
    )
    assert not wire.differ


def test_a_backward_that_gathers_nothing_is_not_taken_for_none():
    """All weights stay for it, and its reductions have a communicator of their own."""
    alike = [0, 3, END, STEP] * 2
    raised, wire, _ = run([[*alike, 0, 3, END, 0], [*alike, 0, 3, 0]])
    said = [str(error) for error in raised if isinstance(error, EngineStateError)]
    assert said
    assert all(
        "the reduction of a whole backward" in one and "the gather of blocks.0 in forward" in one for one in said
    )
    assert not wire.differ


class Clock:
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return sum(self.pauses)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


class LateStore:
    """The other rank has come after so many questions."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def add(self, key: str, amount: int) -> int:
        self.left -= 1
        return 1 if self.left > 0 else 2

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return desired.encode()

    def check(self, keys: list[str]) -> bool:
        return False

    def delete_key(self, key: str) -> bool:
        return True


def test_a_rank_that_waits_asks_the_store_less_and_less_often():
    clock = Clock()
    with mock.patch.object(gather_order, "time", clock):
        GatherOrder([0, 1], 0, LateStore(20), "here").note(1, "blocks.1", 0)
    assert len(clock.pauses) == 19
    assert clock.pauses == sorted(clock.pauses)
    assert 0 < clock.pauses[0] < 0.001
    assert clock.pauses[-1] == 0.02


def test_a_rank_that_came_late_is_not_taken_for_one_that_has_gone_on():
    """The last to come goes on, and stands still in the gather, before the first looks for it."""
    store, ranks = dist.HashStore(), [0, 1]
    first, last = (GatherOrder(ranks, rank, store, "here", still_s=0.05) for rank in ranks)
    place = "here/1"
    store.add("here/0/0", 1)  # the first has begun
    store.add(f"{place}/4", 1)  # and said what it comes to
    last.note(1, "blocks.1", 0)
    last.report_progress()
    last.report_progress()
    assert store.get("here/furthest") == b"2 rank 1 has come to the gather of blocks.1 in forward"
    first._count = 1
    first._check_peers(place, 4, "the gather of blocks.1 in forward", 1.0)


def test_agreements_leave_nothing_in_the_store():
    alike = [*microbatch(1, 2, 3), STEP, *microbatch(2, 1), STEP] * 3
    store = dist.HashStore()
    _, _, orders = run([alike, alike], store=store)
    assert orders[0].asked > 5
    assert store.num_keys() <= 4


def test_nothing_is_checked_once_an_order_was_stopped():
    store = dist.HashStore()
    order = GatherOrder([0, 1], 0, store, "here")
    order.stop()
    order.note(1, "blocks.1", 0)
    assert order.asked == store.num_keys() == 0


# -- processes -------------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Tokens, blocks and a head; the root owns what is not in a block. Blocks may run in any order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order, self.tokens = order, nn.Embedding(5, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in order)
        self.head = nn.Linear(DIM, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return self.head(x)


def asked_in_steps(
    rank: int,
    world: int,
    order: list[int],
    tokens_are_a_unit: bool = False,
    evaluations: int = 0,
    resharded_on: int = -1,
) -> tuple[list[int], int]:
    """How often ranks asked each other by the end of each of four steps, and how many gathers and reductions there were."""
    torch.manual_seed(0)
    model = Stack(order)
    if tokens_are_a_unit:
        fully_shard(model.tokens)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=resharded_on in (-1, rank))
    fully_shard(model)
    optimizer, gathers, found = adamw(model), context(model).lane.order, []
    with mock.patch.object(gathers, "note", wraps=gathers.note) as note:
        with torch.no_grad():
            for _ in range(evaluations):
                model(torch.tensor([0, rank]))
        for step in range(4):
            model(torch.tensor([step, rank])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(gathers.asked)
    return found, note.call_count


@pytest.mark.parametrize("tokens_are_a_unit", [False, True])
def test_ranks_ask_each_other_once_where_units_run_in_the_order_they_were_sharded(tokens_are_a_unit):
    for found, noted in run_distributed(asked_in_steps, 2, [*range(8)], tokens_are_a_unit):
        assert found == [1] * 4
        assert noted > 4 * 20


@pytest.mark.parametrize("evaluations", [0, 2])
def test_how_often_ranks_ask_does_not_grow_with_the_units_that_run_as_expected(evaluations):
    few, many = (
        run_distributed(asked_in_steps, 2, [0, 1, 2, 4, 3, *range(5, length)], False, evaluations)[0]
        for length in (8, 16)
    )
    assert few[1] < many[1]
    assert few[0][0] == many[0][0] > 1
    assert few[0][-1] == few[0][-2]


def one_rank_keeps_weights(rank: int, world: int) -> str:
    try:
        asked_in_steps(rank, world, [*range(4)], resharded_on=0)
    except EngineStateError as error:
        return str(error)
    return ""


def test_a_rank_whose_units_are_not_resharded_is_told_of_and_not_paired_with_another_unit():
    for said in run_distributed(one_rank_keeps_weights, 2):
        assert "in backward" in said, said


def asked_of_two_roots(rank: int, world: int) -> list[int]:
    models = [Stack([*range(3)]) for _ in range(2)]
    for model in models:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    losses = [model(torch.tensor([0, 1])).square().mean() for model in models]
    for loss in losses:
        loss.backward()
    return [context(model).lane.order.asked for model in models]


def test_of_two_roots_no_gather_is_predicted_from_the_start():
    """Nothing else would tell that they run in another order on another rank."""
    for asked in run_distributed(asked_of_two_roots, 2):
        assert min(asked) > 4


def train(rank: int, world: int, *paths: list[int], sharding: object = "optim_grads_params") -> dict[str, str]:
    """Steps alike, in which nobody is asked any more in the end; then each rank goes its own path."""
    found = {}
    model = built()
    fully_shard_units(model, list(model.layers), sharding=sharding)
    optimizer, order = adamw(model), context(model).lane.order
    for step in range(3):
        asked = order.asked
        loss_of(model, inputs(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert order.asked == asked, "a step that repeats"
    model.path = paths[rank]
    try:
        loss_of(model, inputs(0, rank)).backward()
    except (EngineStateError, CollectiveError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
        compat.abort_process_groups()
    return found


def noted(rank: int, world: int) -> list[list[tuple[str, int]]]:
    """What a step notes where reductions are noted and where not: of two microbatches, the first under `no_sync`."""
    model = built(1)
    optimizer, order = adamw(model), context(model).lane.order
    found = []
    for order.has_reductions in (True, False):
        for step in range(3):
            with mock.patch.object(order, "note", wraps=order.note) as note:
                for sync in (no_sync(model), nullcontext()):
                    with sync:
                        loss_of(model, inputs(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([(name, kind) for (_, name, kind), _ in note.call_args_list])
    return found


def test_the_end_of_a_backward_that_reduces_is_noted_once():
    for with_reductions, without in run_distributed(noted, 2):
        assert without.count(("a whole backward", REDUCTION)) == 1
        assert without[-1] == ("a whole backward", REDUCTION)
        assert not any(kind == REDUCTION for _, kind in without[:-1])
        others = [event for event in with_reductions if event[1] == REDUCTION]
        assert len(others) > 1
        assert [event for event in with_reductions if event not in others] == without[:-1]


def test_a_rank_that_leaves_a_block_out_ends_all_ranks_with_an_error():
    errors = [result["error"] for result in run_distributed(train, 2, [0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5])]
    for error in errors:
        assert (
            "rank 1 comes to the reduction of layers.3[0], and rank 0 has come to the gather of layers.2[0] in backward"
            in error
        ), errors
    assert errors[1].startswith("EngineStateError: rank 1")


def test_a_rank_that_leaves_a_block_with_whole_weights_out_ends_all_ranks_with_an_error():
    """Its gradients are reduced between gathers of the others, so that ranks would wait for each other forever."""
    sharding = {"layers.2": "optim", "*": "optim_grads_params"}
    errors = [
        found["error"]
        for found in run_distributed(partial(train, sharding=sharding), 2, [0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5])
    ]
    for error in errors:
        assert "rank 0 has come to the reduction of layers.2[0]" in error, errors


def back_often(rank: int, world: int) -> str:
    """Steps with whole weights, in which rank 0 goes back twice."""
    model = built()
    fully_shard_units(model, list(model.layers), sharding="optim_grads")
    optimizer = adamw(model)
    try:
        for _ in range(2):
            for _ in range(2 - rank):
                loss_of(model, inputs(0, rank)).backward()
            optimizer.step()
    except (EngineStateError, CollectiveError) as error:
        compat.abort_process_groups()
        return str(error)
    return ""


def test_ranks_with_whole_weights_that_go_back_more_often_end_with_an_error_that_says_so():
    errors = run_distributed(back_often, 2)
    assert all("and as many backwards" in error for error in errors), errors


def test_ranks_that_run_equally_many_blocks_of_one_size_end_with_an_error_where_these_differ():
    errors = [result["error"] for result in run_distributed(train, 2, [0, 2], [0, 3])]
    for error in errors:
        assert (
            "rank 1 comes to the gather of layers.3[0] in forward, and rank 0 has come to the gather of layers.2[0] in forward"
            in error
        ), errors
