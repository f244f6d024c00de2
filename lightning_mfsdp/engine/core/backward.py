"""Backward: whether a backward runs, as far as the units of a root have noticed, and whether it has raised."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from lightning_mfsdp.base import compat

__all__ = ["Backward"]


class Backward:
    """The backward that the units of a root have noticed last.

    What autograd calls at its end exists as long as the backward runs. If it is freed without having been called, the backward has raised:

        at_end       state
        `None`       none was noticed since the last one ended
        alive        one runs
        dead         it has raised, and what it left was not dropped yet (`Context.recover`)

    Args:
        raised: Called as soon as one has raised.

    Attributes:
        at_end: What autograd calls at its end.
        keeps_graph: The current or last one keeps its graph for another one.
        task: Autograd's number of the current or last one; what is recomputed in it may run others. -1: only its end was noticed.
        num_ended: How many were noticed and have ended.
    """

    def __init__(self, raised: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._raised = raised
        self.at_end: weakref.ref[Callable[[], None]] | None = None
        self.keeps_graph = False
        self.task = -1
        self.num_ended = 0

    @property
    def is_noticed(self) -> bool:
        """Whether one was noticed that has neither ended nor been forgotten after it raised."""
        return self.at_end is not None

    @property
    def has_raised(self) -> bool:
        """Whether the one that was noticed has raised."""
        return self.at_end is not None and self.at_end() is None

    @property
    def is_running(self) -> bool:
        """Whether autograd runs a backward now whose end was not noticed yet: hooks after accumulation run behind that."""
        task = compat.backward_task()
        return task != -1 and (self.at_end is not None or self.task != task)

    def begin(self, at_end: Callable[[], None]) -> None:
        """One is noticed. `at_end` is called at its end: the caller has autograd hold it, and nothing else does."""
        this = weakref.ref(self)

        def gone(reference: weakref.ref[Callable[[], None]]) -> None:
            backward = this()
            if backward is not None and backward.at_end is reference and (raised := backward._raised()) is not None:
                raised()

        self.at_end = weakref.ref(at_end, gone)
        self.task = compat.backward_task()
        self.keeps_graph = self.task != -1 and compat.keeps_graph()

    def end(self) -> None:
        """It has ended, or is forgotten."""
        self.at_end = None
        self.num_ended += 1
