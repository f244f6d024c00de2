"""GatherOrder: ranks that share weights gather the same units in the same order, or end with an error that reports where they differ.

A gather needs every rank of the axis. If one rank skips a block, the others would wait for it forever, or would compute with
another unit's weights, because gathers of equal size match each other. So every rank predicts its next gather from the gathers before,
which are known to be the same on all ranks:

    it is the predicted one       no rank is queried; a step that repeats an earlier one costs half a microsecond for each gather
    it is another, or none was    the rank writes its gather into the store, and waits until all ranks have written the same. They do if
    predicted                     all begin something new, such as an evaluation
    a rank writes another one     no rank can go on: every rank gets an error with the units and the ranks
    a rank has gone on, as it     the same
    predicted

Where a process has one root, its first steps are predicted from the order in which units were sharded. Before its first gather each rank
writes a digest of what it expects, and predictions begin if all digests are equal. Ranks that run their units in that order ask each
other once, however many units there are; where they run some in another order, they ask about those.

A silent rank may be late, or may be waiting in a gather for this rank. Therefore a thread of each process writes into the store how
many gathers were begun, once that number has not changed for a second. Ends of backwards that reduce and steps of optimizers count like
gathers.

Not detected: a rank that skips the very last operation and goes on to another collective, and what ranks do while steps are
recorded as CUDA graphs, where nothing is checked.

Alternatives considered: ranks that join gathers of units they do not use (the order of reductions between the gathers has to be
agreed on as well, and every new order of an evaluation costs collectives); a number of the unit in every gather (the host has to wait for
it before the weights are used); agreeing before every gather. With sharding="optim_grads" weights are whole, and ranks may run any units.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import CollectiveError, EngineStateError
from lightning_mfsdp.base.kept_groups import kept
from lightning_mfsdp.base.threads import start_for
from lightning_mfsdp.engine.comm.collectives import Axis

__all__ = ["BACKWARD", "FORWARD", "REDUCTION", "Event", "GatherOrder", "History"]

Event: TypeAlias = tuple[int, int]  # number of the group among those of its root, and kind

FORWARD = 0
BACKWARD = 1
REDUCTION = 2
_STEP = 3  # of any optimizer, with number 0: the number of an event is that of the group, times the number of kinds, plus its kind
_KINDS = ("the gather of {} in forward", "the gather of {} in backward", "the reduction of {}", "the step of {}")
_NUM_KINDS = len(_KINDS)
# Groups are numbered from 1.
_WHOLE_BACKWARD = (0, "a whole backward", REDUCTION)
_FIRST = (0, "its first unit", FORWARD)  # whichever that is
_ANY_OPTIMIZER = "an optimizer"

_ADVICE = (
    "Ranks that share weights have to run the same units in the same order between the same steps, and as many backwards. Do so on all "
    'ranks. Where only the units differ, use sharding="optim_grads": it keeps weights whole on every rank'
)

_STILL_S = 1.0  # without progress, after which a rank reports how far it is, and checks on others
_HEARD_S = 3.0  # for others to read why a rank ends
_PAUSES_S = (0.02, 0.2)  # the longest pause between two reads of the store, at first and after `_STILL_S`

_STEPS = (8, 1, 0)  # how many steps a past goes back
_LONGEST_STEP = 4096  # gathers; from here on only the last few count, since an evaluation may go on for any time
_MOST_PASTS = 1 << 17  # then predictions begin again, so that memory is bounded where no step repeats an earlier one


class _Past:
    """What was gathered until now, as far back as it is recorded.

    Attributes:
        lengths: Numbers of what was gathered since the last step of an optimizer together with so many steps before (`_STEPS`); empty where
            only the last few gathers count.
        recent: The last few gathers.
        since: How many gathers came since the last step.
        expected: What came here last time.
        following: The past after that.
    """

    __slots__ = ("expected", "following", "lengths", "recent", "since")

    def __init__(self, lengths: tuple[int, ...], recent: tuple[int, ...], since: int) -> None:
        self.lengths, self.recent, self.since = lengths, recent, since
        self.expected: int | None = None
        self.following = self

    @property
    def keys(self) -> tuple[int | tuple[int, ...], ...]:
        """What `History` looks the next gather up by, the longest past first."""
        return (*self.lengths, self.recent)


class History:
    """The order of gathers so far. It is the same on ranks that gathered the same, and so are its predictions.

    What followed the longest known past is expected again.

    Args:
        step: What is predicted where an optimizer steps.
    """

    def __init__(self, step: int = -1) -> None:
        self._step = step
        self._forget((-1, -1, -1))

    def _forget(self, recent: tuple[int, ...]) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._pasts: dict[int | tuple[int, ...], _Past] = {}
        self._after: dict[int | tuple[int, ...], int] = {}  # what came, by shorter pasts
        self._steps = (0,) * max(_STEPS)
        self._past = self._past_of((0,) * len(_STEPS), recent, 0)

    @property
    def prediction(self) -> int | None:
        """What came last time; `None` if nothing is known."""
        past = self._past
        if past.expected is not None:
            return past.expected
        return next((event for key in past.keys if (event := self._after.get(key)) is not None), None)

    def follows(self, event: int) -> bool:
        """Record a gather if it is the predicted one. Returns whether it is."""
        past = self._past
        if past.expected == event:
            self._past = past.following
            return True
        if self.prediction != event:
            return False
        self.add(event)
        return True

    def add(self, event: int) -> None:
        """Record a gather, whether or not it is the predicted one, so that it is expected the next time."""
        past = self._past
        if past.expected != event:
            self._expect(event)
            past.following = self._past_after(past, event)
        self._past = past.following

    def foresee(self, steps: Iterable[Iterable[int]]) -> None:
        """Expect these gathers next, each list until an optimizer steps, as if they had come before."""
        past, before = self._past, self._steps
        for events in steps:
            for event in events:
                self.add(event)
            self.stepped()
        self._past, self._steps = past, before

    def stepped(self) -> None:
        """An optimizer stepped: a new sequence begins."""
        past = self._past
        self._expect(self._step)
        if len(self._numbers) > _MOST_PASTS:
            self._forget(past.recent)
        self._steps = (*self._steps[1:], past.lengths[-1] if past.lengths else 0)
        lengths = tuple(self._number((-1, *self._steps[len(self._steps) - count :])) for count in _STEPS)
        self._past = self._past_of(lengths, past.recent, 0)

    def _expect(self, event: int) -> None:
        """Expect this the next time as well, after what has been gathered until now."""
        past = self._past
        if past.expected != event:
            past.expected = event
            for key in past.keys:
                self._after[key] = event

    def _past_after(self, past: _Past, event: int) -> _Past:
        since = past.since + 1
        lengths = tuple(self._number((length, event)) for length in past.lengths)
        if since == _LONGEST_STEP:  # an evaluation, or no optimizer
            lengths = ()
        return self._past_of(lengths, (*past.recent[1:], event), since)

    def _number(self, past: tuple[int, ...]) -> int:
        return self._numbers.setdefault(past, len(self._numbers) + 1)

    def _past_of(self, lengths: tuple[int, ...], recent: tuple[int, ...], since: int) -> _Past:
        key = lengths[0] if lengths else recent
        past = self._pasts.get(key)
        if past is None:
            past = self._pasts[key] = _Past(lengths, recent, since)
        return past


class GatherOrder:
    """The gathers of one root's units on this rank.

    Args:
        ranks: Global ranks of those that share weights, this one among them.
        rank: Index of this one in them.
        store: The store that they share; `None`: nothing is checked.
        place: Prefix of the keys, the same on all ranks.
        expects: What this rank expects of its first steps: of each, gathers and reductions until the end of its backward.
        has_reductions: Whether reductions are recorded, too.
        others: All orders of this process, this one among them.
        still_s: Seconds after which a waiting rank checks on the others.
        heard_s: Maximum seconds that a rank waits for the others to read why it ends.

    Attributes:
        is_on: Whether there are other ranks.
        has_reductions: Whether reductions are recorded, too.
        asked: How often ranks were queried, for inspection.
        expects: As given.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        store: compat.Store | None,
        place: str,
        expects: Callable[[], Sequence[Sequence[Event]]] = list,
        *,
        has_reductions: bool = False,
        others: Callable[[], list[GatherOrder]] = list,
        still_s: float = _STILL_S,
        heard_s: float = _HEARD_S,
    ) -> None:
        self.is_on = len(ranks) > 1 and store is not None
        self.has_reductions = has_reductions
        self.asked = 0
        self.expects = expects
        self._others = others
        self._ranks, self._rank, self._place = ranks, rank, place
        self._store = store
        self._still_s, self._heard_s = still_s, heard_s
        self._history = History(_STEP)
        self._count = 0
        self._latest = (-1, "")
        self._agreed_on: list[str] = []  # keys of the last agreement
        self._count_at_check = -1  # how many gathers were begun when the thread last checked
        self._count_reported = -1  # how many were begun, by this rank or further ones, according to the store
        self._peer_error = ""

    @classmethod
    def over(cls, axis: Axis, device: torch.device, expects: Callable[[], Sequence[Sequence[Event]]]) -> GatherOrder:
        """Create the order for the weights of a new root. All ranks of an axis create theirs in the same order.

        Where calls wait for other ranks (gloo), the order of gathers and reductions between each other counts as well. Where calls queue on
        a device, reductions have a communicator of their own.
        """
        if axis.size == 1 or not compat.carries_data(axis.group):
            return cls([axis.rank], 0, None, "", expects)
        ranks, has_reductions = dist.get_process_group_ranks(axis.group), not compat.uses_nccl(axis.group, device)
        return kept(("gather order",), _Watch).order(ranks, axis.rank, expects, has_reductions=has_reductions)

    def note(self, number: int, name: str, kind: int) -> None:
        """This rank is about to gather a group, or to reduce its gradients.

        Args:
            number: Of the group among those of its root.
            name: Of the group.
            kind: `FORWARD`, `BACKWARD` or `REDUCTION`.

        Raises:
            EngineStateError: Another rank does something else.
        """
        if self.is_on:
            event = _NUM_KINDS * number + kind
            if not self._history.follows(event):
                if not self._count:
                    self._foresee()
                if not self._history.follows(event):
                    self._agree(event, name)
                    self._history.add(event)
            self._latest = event, name
            self._count += 1

    def _foresee(self) -> None:
        """Predict the first steps, if all ranks expect the same of them."""
        assert self._store is not None
        end = _WHOLE_BACKWARD[0], _WHOLE_BACKWARD[2]
        # Nothing orders the gathers of two roots against each other but what ranks ask.
        alone = all(other is self for other in self._others())
        steps = [
            [_NUM_KINDS * number + kind for number, kind in (*events, end)]
            for events in (self.expects() if alone else ())
        ]
        digest, place = hashlib.sha256(repr(steps).encode()).hexdigest(), f"{self._place}/expected"
        if self._store.compare_set(place, "", digest).decode() != digest:
            self._store.set(f"{place}/differs", digest)
        number, name, kind = _FIRST
        self._agree(_NUM_KINDS * number + kind, name)  # all have written what they expect
        self._count += 1
        if not self._store.check([f"{place}/differs"]):
            self._history.foresee(steps)

    def end_backward(self) -> None:
        """A backward that reduces gradients is at its end."""
        if self._count:  # otherwise weights are whole, and no reductions are recorded
            self.note(*_WHOLE_BACKWARD)

    def stepped(self) -> None:
        """An optimizer has stepped.

        Raises:
            EngineStateError: Another rank does something else.
        """
        # Of several steps in a row (perhaps one for each parameter) the first counts; nothing does where nothing is recorded before it.
        if self.is_on and self._count and self._latest[0] != _STEP:
            if self._history.prediction != _STEP:
                self._agree(_STEP, _ANY_OPTIMIZER)
            self._latest = _STEP, _ANY_OPTIMIZER
            self._count += 1
            self._history.stepped()

    def stop(self) -> None:
        """Stop checking. All ranks call it."""
        self.is_on = False

    def peer_error(self) -> str:
        """Why another rank could not go on; empty if none has reported that."""
        if not self._peer_error and self._store is not None:
            try:
                self._peer_error = self._read("end")
                if self._peer_error:
                    self._store.add(f"{self._place}/heard", 1)
            except RuntimeError:  # the store is gone with the rank that hosted it
                return ""
        return self._peer_error

    def report_progress(self) -> None:
        """If this rank has made no progress since the last call, write how far it is, and check whether others have ended.

        Another thread calls it every second.
        """
        count = self._count
        is_stuck = self.is_on and count and count == self._count_at_check
        if is_stuck and not self.peer_error() and self._count_reported < count:
            begun, _, _ = self._read("furthest").partition(" ")
            if begun and int(begun) >= count:
                self._count_reported = count
            else:  # checked again the next time, because another rank may write at the same time
                assert self._store is not None
                progress = f"{count} rank {self._ranks[self._rank]} has come to {_described(*self._latest)}"
                self._store.set(f"{self._place}/furthest", progress)
        self._count_at_check = count

    # -- agreeing ------------------------------------------------------------------------------------------------------

    def _agree(self, event: int, name: str) -> None:
        what = _described(event, name)
        try:
            self._agree_in_store(event, what)
        except dist.DistError as error:
            raise CollectiveError(
                f"{what} does not come about, because the process that has the store is gone. Look for the first error in the output of "
                "the other ranks"
            ) from error

    def _agree_in_store(self, event: int, what: str) -> None:
        assert self._store is not None
        self.asked += 1
        place = f"{self._place}/{self._count}"
        key, pause, longest = f"{place}/{event}", 0.0, _PAUSES_S[0]
        began = checked_at = time.monotonic()
        while self._store.add(key, 0 if pause else 1) < len(self._ranks):
            pause = min(2 * pause + 0.0002, longest)
            time.sleep(pause)
            if time.monotonic() - checked_at > self._still_s:
                longest = _PAUSES_S[1]
                self._check_peers(place, event, what, time.monotonic() - began)
                checked_at = time.monotonic()
        if self._rank == 0:
            for old in self._agreed_on:  # every rank has gone on to this one
                self._store.delete_key(old)
            self._agreed_on = [key, f"{place}/of"]

    def _check_peers(self, place: str, event: int, what: str, waited_s: float) -> None:
        """Raise if another rank ends, is about to do something else, or has gone on."""
        assert self._store is not None
        mine = self._ranks[self._rank]
        if error := self.peer_error():
            raise EngineStateError(f"{what} does not come about, because another rank ended: {error}")
        first = self._store.compare_set(f"{place}/of", "", f"{event} rank {mine} to {what}").decode()
        begun, _, other = self._read("furthest").partition(" ")
        # A rank that goes on after all have arrived has written before that it arrived.
        if self._store.add(f"{place}/{event}", 0) == len(self._ranks):
            return
        if int(first.partition(" ")[0]) != event:
            begun, other = str(self._count + 1), first.partition(" ")[2]
        if begun and int(begun) > self._count:
            message = f"rank {mine} comes to {what}, and {other}. {_ADVICE}"
            self._announce(message)
            raise EngineStateError(message)
        if waited_s > self._store.timeout.total_seconds():  # type: ignore[attr-defined]
            message = f"rank {mine} comes to {what} and has waited {waited_s:.0f} s for the other ranks to do so, too. {_ADVICE}"
            self._announce(message)
            raise EngineStateError(message)

    def _announce(self, message: str) -> None:
        """Record why this rank ends, and give the others time to read it: the store may end with this rank."""
        assert self._store is not None
        self._peer_error = message
        self._store.set(f"{self._place}/end", message)
        until = time.monotonic() + self._heard_s
        while self._store.add(f"{self._place}/heard", 0) < len(self._ranks) - 1 and time.monotonic() < until:
            time.sleep(_PAUSES_S[0])

    def _read(self, key: str) -> str:
        assert self._store is not None
        key = f"{self._place}/{key}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _described(event: int, name: str) -> str:
    return _KINDS[event % len(_KINDS)].format(name)


class _Watch:
    """All orders of a process, and the thread that reports their positions; one while a default process group lives."""

    def __init__(self) -> None:
        self._store = compat.default_store()
        self._num_orders: dict[tuple[int, ...], int] = {}
        self._sessions: dict[tuple[int, ...], int] = {}
        self._orders: list[weakref.ref[GatherOrder]] = []
        world = dist.group.WORLD
        assert world is not None, "a mesh has a process group"
        start_for(self, partial(_run, weakref.ref(self), weakref.ref(world)), "mfsdp-gathers")

    def order(
        self, ranks: list[int], rank: int, expects: Callable[[], Sequence[Sequence[Event]]], *, has_reductions: bool
    ) -> GatherOrder:
        members, key = tuple(ranks), f"mfsdp/gathers/{hash(tuple(ranks))}"
        if members not in self._sessions:  # a store may outlive a process group, and have keys of the previous one
            self._sessions[members] = (self._store.add(key, 1) - 1) // len(ranks)
        number = self._num_orders[members] = self._num_orders.get(members, 0) + 1
        place = f"{key}/{self._sessions[members]}/{number}"
        created = GatherOrder(
            ranks, rank, self._store, place, expects, has_reductions=has_reductions, others=self._living
        )
        self._orders = [*(reference for reference in self._orders if reference() is not None), weakref.ref(created)]
        return created

    def _living(self) -> list[GatherOrder]:
        return [order for reference in self._orders if (order := reference()) is not None]

    def report_progress(self) -> None:
        for order in self._living():
            order.report_progress()


def _run(watch: weakref.ref[_Watch], world: weakref.ref[dist.ProcessGroup], ended: threading.Event) -> None:
    while not ended.wait(_STILL_S):
        living_watch = watch()
        if living_watch is None or world() is None or dist.group.WORLD is not world():
            return
        try:
            living_watch.report_progress()
        except RuntimeError:  # the store is gone, and so is the run
            return
        del living_watch
