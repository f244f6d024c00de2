"""SharedOrder: ranks issue the same collectives in the same order, also where they run different units.

With sharded weights a gather needs every rank, and a rank that leaves a unit out cannot know who needs it. What all ranks share is
what was done before. So each rank keeps the collectives of earlier passes as segments, which end where a forward or a backward does, and:

    what comes next in the segment is wanted     it is issued; nobody is asked. A step that repeats an earlier one does nothing else
    it comes later in the segment                the rank takes part in what lies between, as ranks that need it expect
    it does not come in the segment              nobody can know whether all ranks do something new. The rank says so in the store and
                                                 takes part in what the others would issue next. When that has come through, the store
                                                 says who else did: if all, they tell each other what they want; if not, the others go
                                                 on as before, and so does this rank, until it wants what comes, or the pass is over,
                                                 which is an error
    nothing was done before                      all ranks tell each other what they want

What is chosen among different wants is taken part in by all. Nothing here depends on anything but what all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, NoReturn, Protocol

__all__ = ["BACKWARD", "KINDS", "NOTHING", "PAUSE", "REDUCTION", "Others", "SharedOrder", "Want"]

# An event is KINDS times the number of a group, plus what happens to it: a gather of plane 0 or 1, in a backward or not, or a reduction.
KINDS = 8
BACKWARD = 2
REDUCTION = 4
PAUSE = -KINDS  # a forward, or a backward, is over; nothing is communicated
NOTHING = -2 * KINDS

_SKIPS = (2, 3, 4)  # how often something is left out when it is asked whether anybody needs it; then at powers of 2
_MOST_SEGMENTS = 64  # that are searched
_MOST_PATHS = 4096
_MOST_PAUSES = 3


class Want(NamedTuple):
    """What a rank tells the others.

    Attributes:
        event: It needs.
        possible: A reduction that it may issue as well.
        differs: It knows that ranks run different units.
        pauses: That were expected last, and that it does not come to.
    """

    event: int
    possible: int = NOTHING
    differs: int = 0
    pauses: int = 0


class Others(Protocol):
    """The other ranks, and what is done together with them."""

    @property
    def size(self) -> int:
        """Of how many ranks, with this one."""

    def exchange(self, want: Want) -> list[Want]:
        """What every rank wants, by rank. Collective."""

    def take_part(self, event: int) -> None:
        """Issue what this rank does not need. A reduction comes back through `SharedOrder.note`."""

    def forget(self, event: int) -> None:
        """What came of taking part in a gather is not needed after all."""

    def spoil(self, event: int) -> None:
        """Issue a reduction without the gradients of this rank, which are not there yet: nobody must use what comes out."""

    def possible_reduction(self) -> int:
        """The reduction that this rank may issue at once, because no more gradients come; `NOTHING` if none."""

    def is_needless(self, event: int) -> bool:
        """Whether this rank is sure not to need a gather."""

    def is_seen_by_all(self, event: int) -> bool:
        """Whether every rank has issued an event once it has come through here."""

    def announce(self, place: str) -> None:
        """Say that this rank wants something else at a place."""

    def announced(self, place: str) -> int:
        """How many ranks said so, when all that was issued has come through."""

    def wait_for_all(self, place: str) -> None:
        """Wait until all ranks have said so."""

    def unused(self, seen: set[int]) -> list[tuple[int, int]]:
        """Groups below the outermost unit that are gathered and are not among those seen, each with the first one of its unit."""

    def refuse(self, want: int, expected: int | None, others: Sequence[int]) -> NoReturn:
        """Raise: ranks cannot go on together."""


class _Segment:
    """What all ranks issue between two pauses."""

    def __init__(self, steps: list[int], number: int) -> None:
        self.steps = steps
        self.number = number
        self.is_known = False

    @property
    def is_complete(self) -> bool:
        return bool(self.steps) and self.steps[-1] == PAUSE

    @cached_property
    def reduces(self) -> bool:
        """Whether gradients are reduced in it; asked for when it is complete, and never changes."""
        return any(step & REDUCTION for step in self.steps)

    def starts_with(self, steps: Sequence[int]) -> bool:
        return self.is_complete and self.steps[: len(steps)] == steps


class _Position(NamedTuple):
    """Where all ranks stand.

    Attributes:
        segment: In which.
        index: At which of its steps.
        keys: Under which the segment is found the next time.
        periods: The way to the last reductions but one, from there to the last ones, and since.
        recent: The last two segments.
    """

    segment: _Segment
    index: int
    keys: tuple[tuple[int, ...], ...]
    periods: tuple[int, int, int]
    recent: tuple[int, int]


class SharedOrder:
    """Where this rank stands in what all ranks do."""

    def __init__(self, others: Others) -> None:
        self._others = others
        self._differs = False
        self._made = 0
        self._segments: list[_Segment] = []
        self._starts: dict[tuple[int, ...], _Segment] = {}
        self._paths: dict[tuple[int, int], int] = {}
        self._skips: dict[tuple[int, int], int] = {}  # how often a step of a segment was left out on this rank
        self._unused_at_first: list[tuple[int, int]] = []
        self._closed = self._agreed = 0
        self._periods = (0, 0, 0)
        self._recent = (0, 0)
        self._steps: list[int] = []
        self._index = 0
        self._begin()

    def note(self, event: int) -> None:
        """An event is about to be issued by this rank, because it needs it, or `PAUSE`.

        Raises:
            EngineStateError: Ranks cannot go on together; see `Others.refuse`.
        """
        index = self._index
        steps = self._steps
        if index < len(steps) and steps[index] == event:
            self._advance()
        else:
            self._catch_up(event)

    def allows(self, event: int) -> bool:
        """Whether a gather may be issued in advance: it comes next, but for some that this rank does not need, or nothing is known."""
        index = self._index
        steps = self._steps
        if index == len(steps):
            return True
        while steps[index] != event:
            if steps[index] == PAUSE or steps[index] & REDUCTION or not self._others.is_needless(steps[index]):
                return False
            index += 1
        return True

    def expects(self, event: int) -> bool:
        """Whether it is known that an event comes next."""
        index = self._index
        steps = self._steps
        return index < len(steps) and steps[index] == event

    # -- the way to what is wanted -------------------------------------------------------------------------------------

    def _catch_up(self, want: int) -> None:
        passed: list[_Position] = []  # pauses that this rank does not come to, with nothing issued since
        pauses = 0
        while True:
            if self._index == len(self._steps):
                chosen = self._learn(want)
                self._issue(chosen, is_needed=chosen == want)
                if chosen == want:
                    return
                continue
            expected = self._steps[self._index]
            if expected == want:
                self._advance()
                return
            if expected == PAUSE:
                pauses += 1
                if len(passed) < _MOST_PAUSES:
                    passed.append(self._position)
                    self._advance()
                else:  # nothing follows in which to take part
                    self._others.wait_for_all(self._place)
                    self._change(want, expected, passed, was_issued=False)
                    passed = []
                continue
            comes_later = want in self._steps[self._index + 1 :]
            is_possible = self._is_possible(expected, want)
            if not is_possible or not (comes_later or expected & REDUCTION):
                self._look(want, expected, passed, pauses)
            elif comes_later and self._is_worth_asking(expected):
                self._look(want, expected, passed, pauses)
            else:
                self._issue(expected, is_needed=False)
            passed = []

    def _is_possible(self, event: int, want: int) -> bool:
        """Whether this rank may take part in an event before it does what it wants."""
        return not event & REDUCTION or event == self._possible(want)

    def _possible(self, want: int) -> int:
        return NOTHING if want & REDUCTION else self._others.possible_reduction()

    def _issue(self, event: int, *, is_needed: bool) -> None:
        """Take part in an event that comes next, unless the caller issues it."""
        if is_needed or event == PAUSE:
            self._advance()
        elif event & REDUCTION:
            self._others.take_part(event)  # notes it
        else:
            self._others.take_part(event)
            self._advance()

    def _is_worth_asking(self, event: int) -> bool:
        """Count that a gather is left out; perhaps nobody needs it any more. Less often if it was asked before."""
        if self._differs or event & REDUCTION or not self._others.is_seen_by_all(event):
            return False
        place = (self._segment.number, self._index)
        count = self._skips[place] = self._skips.get(place, 0) + 1
        return count in _SKIPS or (count > max(_SKIPS) and count & (count - 1) == 0)

    def _look(self, want: int, expected: int, passed: Sequence[_Position], pauses: int) -> None:
        """Take part in what others would issue next, and find out whether there are others."""
        others, place = self._others, self._place
        if not others.is_seen_by_all(expected):
            if not self._is_possible(expected, want):
                others.refuse(want, expected, ())
            self._issue(expected, is_needed=False)
            return
        others.announce(place)
        is_spoilt = bool(expected & REDUCTION)
        (others.spoil if is_spoilt else others.take_part)(expected)
        if others.announced(place) == others.size:
            self._change(want, expected, passed, was_issued=not is_spoilt)
            return
        self._differs = True
        if is_spoilt or pauses:
            others.refuse(want, expected, ())
        self._advance()

    @property
    def _place(self) -> str:
        return f"{self._closed}/{self._index}/{self._agreed}"

    # -- agreeing ------------------------------------------------------------------------------------------------------

    def _learn(self, want: int) -> int:
        """Nothing is known: agree on what comes next."""
        chosen = self._choose(want, None, self._exchanged(want, 0))
        known = self._known([*self._steps, chosen])
        if known is not None:
            self._enter(known)
        else:
            self._steps.append(chosen)
        return chosen

    def _change(self, want: int, expected: int, passed: Sequence[_Position], *, was_issued: bool) -> None:
        """No rank wants what was expected: agree on what comes in its place."""
        rows = self._exchanged(want, len(passed))
        self._agreed += 1
        if len({(row.event, row.pauses) for row in rows}) == 1:
            if was_issued:
                self._others.forget(expected)  # it comes again where it belongs
            if passed and not self._differs:
                self._go_back(passed[0])  # it comes before the pause
            index, steps = self._index, self._steps
            rest = steps[index:]
            if not (self._differs and want in rest):
                known = self._known([*steps[:index], want])
                if known is None:
                    known = self._new([*steps[:index], *(rest[rest.index(want) :] if want in rest else [want])])
                self._enter(known)
                return
        chosen = self._choose(want, expected, rows)
        if was_issued:
            self._advance()
        if chosen == PAUSE:
            return  # it comes in any case
        index, steps = self._index, self._steps
        if chosen in steps[index:]:
            del steps[steps.index(chosen, index)]
        steps.insert(index, chosen)

    def _exchanged(self, want: int, pauses: int) -> list[Want]:
        rows = self._others.exchange(Want(want, self._possible(want), int(self._differs), pauses))
        self._differs = any(row.differs for row in rows) or len({row.event for row in rows}) > 1
        return rows

    def _choose(self, want: int, expected: int | None, rows: Sequence[Want]) -> int:
        """One of the events that ranks want: a reduction that all can issue, else a gather, else a pause."""
        for event in sorted({event for row in rows for event in row[:2] if event & REDUCTION}):
            if all(event in row[:2] for row in rows):
                return event
        wants = {row.event for row in rows}
        gathers = [one for one in wants if one >= 0 and not one & REDUCTION]
        if gathers:  # forwards in the order of units, backwards in the reverse
            return min(gathers, key=lambda one: (one & BACKWARD, -one if one & BACKWARD else one))
        if PAUSE in wants:
            return PAUSE
        self._others.refuse(want, expected, [row.event for row in rows])

    def _known(self, steps: Sequence[int]) -> _Segment | None:
        return next((one for one in reversed(self._segments) if one.starts_with(steps)), None)

    # -- segments ------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._index += 1
        if self._steps[self._index - 1] == PAUSE:
            self._close()

    def _new(self, steps: list[int]) -> _Segment:
        self._made += 1
        return _Segment(steps, self._made)

    def _enter(self, segment: _Segment) -> None:
        """Go on in another segment, which is the same so far."""
        self._segment, self._steps = segment, segment.steps

    @property
    def _position(self) -> _Position:
        return _Position(self._segment, self._index, self._keys, self._periods, self._recent)

    def _go_back(self, position: _Position) -> None:
        segment, self._index, self._keys, self._periods, self._recent = position
        self._enter(segment)

    def _begin(self) -> None:
        """What follows a pause: as after the same way from the reductions before the last ones, else since the last, and so on."""
        self._index = 0
        _, before, since = periods = self._periods
        self._keys = (periods, (before, since), (since,), (0, 0, *self._recent), (0, 0, 0, self._recent[1]))
        known = next((self._starts[key] for key in self._keys if key in self._starts), None)
        self._enter(self._new([]) if known is None else known)

    def _close(self) -> None:
        segment = self._segment
        self._closed += 1
        if not segment.is_known:
            segment.is_known = True
            self._fill(segment.steps)
            self._segments = [*self._segments[1 - _MOST_SEGMENTS :], segment]
        for key in self._keys:
            self._starts[key] = segment
        earlier, before, since = self._periods
        since = self._paths.setdefault((since, segment.number), len(self._paths) + 1)
        self._periods = (before, since, 0) if segment.reduces else (earlier, before, since)
        self._recent = (self._recent[1], segment.number)
        if len(self._paths) > _MOST_PATHS:  # an evaluation may be long
            self._paths.clear()
            self._starts.clear()
            self._periods = (0, 0, 0)
        self._begin()

    def _fill(self, steps: list[int]) -> None:
        """Have units in a new segment that no rank used in it: if ranks differ, or at first, when nobody knows, some rank may soon.

        If all ranks go on to leave one out, it is gathered no more (`_is_worth_asking`).
        """
        seen = {step // KINDS for step in steps if step >= 0 and not step & REDUCTION}
        if not seen:
            return
        phase = BACKWARD if any(step & BACKWARD for step in steps) else 0
        is_first = not any(phase == (step & BACKWARD) and step >= 0 for known in self._segments for step in known.steps)
        missing = self._others.unused(seen) if self._differs or is_first else []
        if not self._differs:
            if phase:
                missing = [one for one in missing if one in self._unused_at_first]
            else:
                self._unused_at_first = missing
        for number, first in missing:
            event, reduction = KINDS * number + phase, KINDS * first + REDUCTION
            place = next(
                index
                for index, step in enumerate(steps)
                if step in (PAUSE, reduction)
                or (step % KINDS == phase and (step < event if phase else step > event))
            )  # fmt: skip
            steps.insert(place, event)
