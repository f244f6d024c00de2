"""Calls: which forwards of a unit run, and which of their backwards are still to come.

A call (call.py) opens with a forward and ends with its backward, which may never come: a graph is thrown away, or kept for another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.call import Call

__all__ = ["Calls", "Recomputations"]


class Recomputations:
    """Modules of one unit that ran in the forward of an autograd function (reentrant checkpointing), to be recomputed in a backward.

    Each is recomputed in a backward of its own inside the backward, which leaves gradients, and others may follow. Waiting needlessly is
    safe, it lasts until the backward ends; so what was thrown away counts as long as that is not known.

    Attributes:
        expected: How many ran and were not recomputed.
        has_backward_around: The backward around that of a module which was recomputed leaves gradients of the unit, too.
    """

    __slots__ = ("_again", "_new", "expected", "has_backward_around")

    def __init__(self) -> None:
        self.expected = 0
        self.has_backward_around = False
        self._new = 0  # since the last backward
        self._again = 0  # recomputed in this backward

    def note_run(self) -> None:
        """A module runs in the forward of an autograd function. One that does so inside a backward did so before it, too."""
        if compat.backward_task() == -1:
            self.expected += 1
            self._new += 1

    def note_backward_around(self) -> None:
        """A module is recomputed, and the backward around leaves gradients of the unit, too."""
        self.has_backward_around = True

    def ended(self) -> None:
        """One was recomputed, and the gradients of its inputs have arrived."""
        if self.expected:
            self.expected -= 1
            self._again += 1

    def end_backward(self, *, keeps_graph: bool) -> None:
        """With `keeps_graph` those that were recomputed may be so again; what an earlier backward left out was thrown away."""
        if self.expected or self._again:
            self.expected = min(self.expected, self._new) + (self._again if keeps_graph else 0)
        self._new = self._again = 0
        self.has_backward_around = False


class Calls:
    """The calls of one unit.

    Attributes:
        open: Forwards that are running, innermost last; `None` without gradients.
        latest: The last call that has results.
        waiting: How many have results, and a backward that has not ended.
        hidden: How many forwards returned no tensors to hook and have not had their backward, as far as known: weights stay. Those that
            are stepped stay until then.
        running: Calls whose backward has begun and not ended.
        recomputations: Modules that ran without gradients, to be recomputed with them.
        parameter_hooks: Hooks by which gradients of weights show that a backward is running, where it may touch no result.
    """

    __slots__ = (
        "_ended",
        "_new",
        "hidden",
        "latest",
        "open",
        "parameter_hooks",
        "recomputations",
        "running",
        "waiting",
    )

    def __init__(self) -> None:
        self.open: list[Call | None] = []
        self.latest: Call | None = None
        self.waiting = 0
        self._new = 0  # of those that wait, how many came since the last backward
        self._ended = 0  # how many backwards of calls have ended in this backward
        self.hidden = 0
        self.running: dict[Call, None] = {}
        self.recomputations = Recomputations()
        self.parameter_hooks: list[RemovableHandle] = []

    @property
    def notice_their_end(self) -> bool:
        """Whether an input of the last call needs a gradient, so that the end of its backward is detected."""
        return self.latest is not None and bool(self.latest.given)

    def wait_for(self, call: Call) -> None:
        """A call has results whose gradients may arrive, or whose backward may begin undetected; in several modules, each has."""
        if call is self.latest:
            return
        self.waiting += 1
        self._new += 1
        self.latest = call

    def hide(self) -> None:
        """A call has returned nothing by which its backward could be detected."""
        self.hidden += 1

    def end_forwards(self) -> None:
        """No forward runs any more, and some have raised."""
        while self.open:
            if (call := self.open.pop()) is not None:
                call.end_following()
                call.fail()

    def begin_backward(self, call: Call) -> bool:
        """A gradient of a result has arrived. Returns whether the backward of the call begins with it."""
        if call in self.running or call.ended_in == compat.backward_task():
            return False
        self.running[call] = None
        return True

    def end_backward_of(self, call: Call) -> bool:
        """The gradients of all inputs of a call have arrived. Returns whether it was known that its backward had begun."""
        call.ended_in = compat.backward_task()
        if self.waiting:
            self.waiting -= 1
            self._ended += 1
        if call.is_recomputed:
            self.recomputations.ended()
        if call in self.running:
            del self.running[call]
            return True
        return False  # results were hidden

    def end_backward(self, *, keeps_graph: bool, is_stepped: bool) -> None:
        """A backward has ended, or failed: stop waiting for any part of it, and for calls of before the backward before it.

        Args:
            keeps_graph: It keeps its graph for another one, in which the same calls may end again.
            is_stepped: The step of an optimizer will tell of what is hidden.
        """
        new, ended, self._ended = self._new, self._ended, 0
        if keeps_graph:
            self.waiting += ended
        else:
            self._new = 0
            if self.hidden and not is_stepped:
                self.hidden = min(self.hidden - 1, new)  # forwards before the last backward had theirs, or never will
            if new < self.waiting:
                self.waiting = new
        if self.running:
            self.running = {}
        self.recomputations.end_backward(keeps_graph=keeps_graph)

    def forget_graphs(self) -> None:
        """Graphs of before are out of date."""
        self.waiting = self._new = 0
        self.latest = None

    def forget_hidden(self) -> None:
        """No backward that cannot be detected is waited for any more."""
        self.hidden = 0
