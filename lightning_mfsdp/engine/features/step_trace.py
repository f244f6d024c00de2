"""Records the collective operations of a forward-only step, so that a rank without data can repeat them without computing.

Ranks issue the same collectives or wait for each other forever. Which gathers a forward issues, also prefetched ones, follows from
the order in which units begin and end. A rank that has run out of batches repeats that order once for every step of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_mfsdp.engine.core.group import owner_of
from lightning_mfsdp.engine.core.inspect import context_of

__all__ = ["StepTrace", "note_collective", "traced_step"]


class StepTrace:
    """What was done in a step: units that began and resharded, and collectives of modules."""

    def __init__(self, events: list[Callable[[], object]]) -> None:
        self.events = events

    def repeat(self) -> None:
        """Repeat it. Collective: the other ranks issue the same calls by running the step."""
        for event in self.events:
            event()


def note_collective(parameter: Tensor, again: Callable[[], object]) -> None:
    """Record that a module is about to run a collective, which a rank without data repeats by calling `again`.

    Args:
        parameter: One of the module's. Its unit's weights are unsharded when `again` is called.
        again: Runs the same collective with the other ranks, and computes nothing.
    """
    owned = owner_of(parameter)
    context = owned[0].root() if owned is not None else None
    if context is not None and context.schedule.trace is not None:
        context.schedule.trace.append(again)


@contextmanager
def traced_step(module: nn.Module) -> Iterator[StepTrace]:
    """Record what happens inside to the units of `module`'s root. For steps without a backward."""
    with context_of(module).schedule.traced() as events:
        yield StepTrace(events)
