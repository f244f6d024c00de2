"""Schedule: the order of units in a step, as it is recorded for prefetching."""

from __future__ import annotations

__all__ = ["Schedule"]


class Schedule:
    """The order of units in a step, recorded while it runs. It only guides prefetching; execution may differ. Units are stored by number.

    Attributes:
        ran: Units whose forward ran in this pass, in the order in which they first did.
        last_of_forward: The unit that ended the forward before the last backward: that backward needs it first.
    """

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.last_of_forward: int | None = None
        self._latest: int | None = None  # the last unit whose forward began in this pass
        self._latest_backward: int | None = None  # the last unit whose backward began in this one
        self._after: dict[int, int] = {}  # which unit ran after each, last time
        self._before: dict[int, int] = {}  # which unit ran before each, last time
        self._after_in_backward: dict[int, int] = {}  # whose backward began after that of each, last time

    def note_forward(self, unit: int) -> bool:
        """A forward begins outside any backward. Returns whether a pass begins with it: it is the first unit, or runs again."""
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
        return begins

    def note_backward(self, unit: int) -> None:
        """The backward of a call begins."""
        if self._latest_backward is not None and self._latest_backward != unit:
            self._after_in_backward[self._latest_backward] = unit
        self._latest_backward = unit

    def next_forward(self, unit: int) -> int | None:
        """The unit that ran after this one last time."""
        return self._after.get(unit)

    def next_backward(self, unit: int) -> int | None:
        """The unit whose backward began after this one's last time; the first time, the unit that ran before it."""
        following = self._after_in_backward.get(unit)
        return self._before.get(unit) if following is None else following

    def begin_backward(self) -> None:
        """A backward begins: the pass is over."""
        self.last_of_forward = self._latest

    def forget_pass(self) -> None:
        """The next forward begins a pass, whichever unit it is."""
        self.ran, self._latest = [], None

    def end_backward(self) -> None:
        """A backward has ended, or will not continue."""
        self.forget_pass()
        self._latest_backward = None
