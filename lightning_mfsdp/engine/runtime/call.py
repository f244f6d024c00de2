"""Calls: a call is one forward of a unit until its backward. And from which calls of a unit gradients may still come.

A unit is reduced once in a backward, so nothing may come after. It is therefore better to wait in vain, until the backward ends, than
not to wait. Everything is counted by the program and not by which graphs are alive: that differs from rank to rank. A unit waits for

    a call of this pass                       until the gradients of its inputs are there
    a call of an earlier backward             the same: the graph may have been retained, or have had another result
    a module that ran in the forward of an    until it was computed again with gradients (reentrant checkpointing), and that call has ended
    autograd function
    a call that was forgotten, and comes      until the backward ends

Nothing here keeps a unit alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.memory.storage import Slot

__all__ = ["Awaited", "Call", "Hook", "Inputs"]

Hook = Callable[[Any], None]


class Call:
    """One forward in grad mode, until its backward.

    Attributes:
        slots: Where its saved tensors expect the weights, by group.
        has_end: Some input needs a gradient, so its backward has a visible end.
        begun_in: The backward in which its own has begun and not ended, by `Context.backwards_finished`.
        ended_in: The backward whose gradients of all its inputs came last.
        reads_weights: Its backward needs the weights.
        hides: A result had no tensors to listen to.
        is_recomputed: Its forward ran inside a backward.
        is_inside_root: It ran in the forward of a root around its unit, or in a step of one.
        is_doubtful: Nobody knows whether its graph counts (`Awaited`), so it is not waited for.
        missed: Backwards that have ended without reaching it since one did.
        outlasts_pass: It may come after further forwards.
        given: What its inputs are views of, by identity.
        inputs: Several that need gradients, until there are results.
    """

    __slots__ = (
        *(
            "begun_in",
            "ended_in",
            "given",
            "has_end",
            "hides",
            "inputs",
            "is_doubtful",
            "is_inside_root",
            "is_recomputed",
        ),
        *("missed", "outlasts_pass", "reads_weights", "slots"),
    )

    def __init__(self) -> None:
        self.slots: list[Slot | None] = []
        self.has_end = False
        self.begun_in = self.ended_in = -1
        self.reads_weights = True
        self.hides = self.is_recomputed = self.is_doubtful = self.is_inside_root = False
        self.missed, self.outlasts_pass = 0, True
        self.given: set[int] = set()
        self.inputs: Inputs | None = None


class Inputs:
    """Where the graph of a call begins, if it begins in several places.

    Hooks of these nodes know it weakly and hooks of the results hold it. With `register_multi_grad_hook` the nodes' own hooks hold the
    nodes: a circle that keeps the whole graph before them alive for an unknown time, and a CUDA graph cannot be recorded while it lives.
    """

    __slots__ = ("__weakref__", "_backward", "_lock", "_missing", "_nodes")

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes
        self._backward, self._missing = -1, 0
        self._lock = threading.Lock()  # each device has a thread

    def has_all(self) -> bool:
        """Note one more gradient; whether the backward that runs brings no other."""
        with self._lock:
            running = compat.backward_task()
            if running != self._backward:
                self._backward, self._missing = running, sum(map(compat.is_due, self._nodes))
            self._missing -= 1
            return self._missing == 0

    def held_by(self, hook: Hook, result: Node) -> Hook:
        """A hook for the node of a result that keeps this alive, unless the graph begins there: the unit returned an input as it was."""
        if result in self._nodes:
            return hook

        def holding(gradient: Any, _held: Inputs = self) -> None:
            hook(gradient)

        return holding


class Awaited:
    """What one unit waits for.

    Attributes:
        calls: Those that no backward has come through.
        spent: Those of earlier backwards that may come again: of this pass, or kept by `retain_graph=True`, or not reached then.
        hides_calls: A result of one of `calls` had no tensors to listen to.
        hooks: By which gradients of weights tell that a backward runs.
    """

    __slots__ = ("_again", "_ended", "_forgotten_came", "_new_runs", "_runs", "calls", "hides_calls", "hooks", "spent")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.spent: list[Call] = []
        self.hides_calls = False
        self.hooks: list[RemovableHandle] = []
        self._ended: list[Call] = []
        self._runs = 0  # in forwards of autograd functions, and not computed again
        self._new_runs = 0  # since the last backward
        self._again = 0  # computed again in this backward
        self._forgotten_came = False  # and perhaps others come after it

    def is_over(self) -> bool:
        """Whether nothing comes any more in this backward."""
        return not (self.calls or self.spent or self._runs or self._forgotten_came)

    @property
    def will_be_computed_again(self) -> bool:
        """Whether a module ran without gradients, to be computed again with them in a backward."""
        return self._runs > 0

    def note_run(self) -> None:
        """A module runs in the forward of an autograd function. What does so inside a backward did so before it, too."""
        if compat.backward_task() == -1:
            self._runs += 1
            self._new_runs += 1

    def new_call(self) -> Call | None:
        """For a forward in grad mode that begins; `None` where its graph will be thrown away, so that nothing may listen to it.

        Inside a backward a forward is computed again. Under reentrant checkpointing the first one ran without gradients and the new graph
        counts; otherwise a call waits. Where both are true nobody knows: the call is listened to and not waited for.
        """
        if compat.backward_task() == -1:
            return Call()
        if not self._runs and (self.calls or self.spent):
            return None
        if not (self._runs or self.calls):
            self._forgotten_came = True
        call = Call()
        call.is_recomputed = True
        call.is_doubtful = bool(self.spent) or any(not waiting.is_recomputed for waiting in self.calls)
        if not call.is_doubtful:
            self._computed_again()
        return call

    def _computed_again(self) -> None:
        if self._runs:
            self._runs -= 1
            self._again += 1

    def add(self, call: Call) -> None:
        """A call has results whose gradients may come."""
        if not call.is_doubtful and call not in self.calls:
            self.calls.append(call)

    def came(self, call: Call) -> None:
        """A gradient of a result is there, the first of this backward."""
        if not (call.is_doubtful or call in self.calls or call in self.spent):
            self._forgotten_came = True

    def ended(self, call: Call) -> None:
        """The gradients of all inputs are there."""
        if call.is_doubtful:
            self._computed_again()
            return
        for waiting in (self.calls, self.spent):
            if call in waiting:
                waiting.remove(call)
                self._ended.append(call)

    def hidden_slots(self) -> list[Slot | None] | None:
        """Where weights must stay, or come again, because nobody would notice the moment at which a backward reads them."""
        if not (self.hides_calls or self.spent):
            return None
        return next((call.slots for call in (*self.calls, *self.spent) if call.hides), None)

    def begin_hidden(self, number: int) -> int:
        """A backward begins: how many calls whose results were hidden may be part of it; each of them has begun."""
        hidden = [call for call in (*self.calls, *self.spent) if call.hides and call.begun_in != number]
        for call in hidden:
            call.begun_in = number
        return len(hidden)

    def end_backward(self, number: int, *, keeps_graph: bool) -> None:
        """Nothing is waited for any more. What may come again is kept for the next backward.

        Args:
            number: Of the backward, as in `Call.begun_in`.
            keeps_graph: It ran with `retain_graph=True`.
        """
        if self.calls or self._ended or self.spent:
            kept = []
            for call in (*self.spent, *self.calls, *self._ended):
                reached = call in self._ended or (call.begun_in == number and not call.hides)
                call.missed = 0 if reached else call.missed + 1
                call.outlasts_pass = keeps_graph or not reached
                if call.missed < 2 and not call.is_recomputed:
                    kept.append(call)
            self.spent = kept
            self.calls.clear()
            self._ended.clear()
        if self._runs or self._again:
            self._runs = min(self._runs, self._new_runs) + (self._again if keeps_graph else 0)
        self._new_runs = self._again = 0
        self._forgotten_came = self.hides_calls = False

    def begin_pass(self) -> None:
        """A forward begins after a backward: of the graphs before, only those that are sure to be whole are waited for."""
        if self.spent:
            self.spent = [call for call in self.spent if call.outlasts_pass]
