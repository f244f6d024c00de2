"""What a forward-only step does to the units, in order, so that a rank without data can do it again without computing.

Ranks issue the same gathers or wait for each other for ever. Which gathers a forward issues, also those in advance, follows from
the order in which units begin and end. A rank that has run out of batches goes through that order once for every step of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_mfsdp.engine.inspect import context_of
from lightning_mfsdp.engine.unit import Unit

__all__ = ["StepTrace", "traced_step"]


class StepTrace:
    """Units that began (True) and gave their weights back (False) in a step."""

    def __init__(self) -> None:
        self.events: list[tuple[Unit, bool]] = []

    def repeat(self) -> None:
        """Issue the gathers of the step again. Collective: on the other ranks, what the step called is called."""
        for unit, begins in self.events:
            if begins:
                unit.enter()
            else:
                unit.release()


@contextmanager
def traced_step(module: nn.Module) -> Iterator[StepTrace]:
    """Note what happens inside to the units of `module`'s root. For steps without a backward."""
    context = context_of(module)
    context.trace = trace = StepTrace()
    try:
        yield trace
    finally:
        context.trace = None
