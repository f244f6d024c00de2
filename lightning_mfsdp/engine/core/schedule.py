"""The order of units in a step: as it is recorded, for prefetching, and as it is expected before there has been one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from lightning_mfsdp.engine.comm.gather_order import BACKWARD, FORWARD, REDUCTION, Event
from lightning_mfsdp.engine.core.call import is_plain_lookup

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.unit import Unit

__all__ = ["Schedule", "expected_steps"]


class Schedule:
    """The order of units in a step, recorded while it runs. It only guides prefetching; execution may differ. Units are stored by number.

    Attributes:
        ran: Units whose forward ran in this pass, in the order in which they first did. When the first of them runs again, a pass begins.
        trace: What repeats the step that is running, if other ranks will repeat its gathers (step_trace.py).
        last_of_forward: The unit that ended the forward before the last backward: that backward needs it first.
    """

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.trace: list[Callable[[], object]] | None = None
        self.last_of_forward: int | None = None
        # The last unit whose forward began in this pass, or whose backward did in this backward.
        self._latest: int | None = None
        self._after: dict[int, int] = {}  # which unit ran after each, last time
        self._before: dict[int, int] = {}  # which unit ran before each, last time
        self._after_in_backward: dict[int, int] = {}  # whose backward began after that of each, last time

    def note_forward(self, unit: int) -> tuple[bool, int | None]:
        """A forward begins outside any backward.

        Returns:
            Whether a pass begins with it: it is the first unit, or runs again. And the unit that ran after this one last time.
        """
        begins = not self.ran or self.ran[0] == unit
        if begins:
            self.ran = [unit]
            self._before.pop(unit, None)
        else:
            if unit not in self.ran:
                self.ran.append(unit)
            if self._latest is not None and self._latest != unit:
                self._after[self._latest] = unit
                self._before[unit] = self._latest
        self._latest = unit
        return begins, self._after.get(unit)

    def note_backward(self, unit: int) -> int | None:
        """The backward of a call begins.

        Returns:
            The unit whose backward began after this one's last time; the first time, the unit that ran before it.
        """
        if self._latest is not None and self._latest != unit:
            self._after_in_backward[self._latest] = unit
        self._latest = unit
        following = self._after_in_backward.get(unit)
        return self._before.get(unit) if following is None else following

    def begin_backward(self) -> None:
        """A backward begins: the pass is over."""
        self.last_of_forward, self._latest = self._latest, None

    def forget_pass(self) -> None:
        """A backward has ended, or will not come: the next forward begins a pass, whichever unit it is."""
        self.ran, self._latest = [], None

    @contextmanager
    def traced(self) -> Iterator[list[Callable[[], object]]]:
        """Inside, what begins and ends is recorded, each as a function that repeats it. For steps without a backward."""
        self.trace = trace = list[Callable[[], object]]()
        try:
            yield trace
        finally:
            self.trace = None


def expected_steps(units: Sequence[Unit], *, has_reductions: bool) -> list[list[Event]]:
    """Gathers and reductions of the first two steps, if units run in the order in which they were sharded, the outermost one around them.

    A guess, which may differ between ranks: they compare it (`GatherOrder`).

    Args:
        units: Of a root, which is the last one.
        has_reductions: Whether the order of reductions between gathers counts.
    """
    *inside, root = units
    forward = [event for unit in (root, *inside) for event in _gathers(unit, FORWARD)]
    steps = []
    for is_first in (True, False):
        backward: list[Event] = []
        due: list[Event] = []  # reductions come after the prefetch of the next unit
        for unit in reversed(inside):
            is_kept = unit is inside[-1] and not is_first  # it ended the forward before
            if unit.reshard_after_forward and not is_kept and not _is_lookup(unit):
                backward += _gathers(unit, BACKWARD)
            backward += due if unit is not inside[-1] else []
            due = _reduction(unit) if has_reductions else []
        backward += due
        backward += _reduction(root) if has_reductions else []
        steps.append([*forward, *backward])
    return steps


def _gathers(unit: Unit, kind: int) -> list[Event]:
    return [(group.weights.number, kind) for group in unit.groups if group.weights.is_sharded]


def _reduction(unit: Unit) -> list[Event]:
    trained = [group for group in unit.groups if unit.is_trainable]
    return [(trained[0].weights.number, REDUCTION)] if trained else []


def _is_lookup(unit: Unit) -> bool:
    modules = unit.modules
    return len(modules) == 1 and isinstance(modules[0], nn.Embedding) and is_plain_lookup(modules[0])
