"""Messages with which the engine may refuse a description, each with the reason why that is right. Kept by hand.

A refusal is said on every rank. What is refused here is work for somebody as long as FSDP2 or DDP does it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tests.fuzzing.description import Description
from tests.fuzzing.workers import Outcome

MOST = 0.10  # of all draws


class Refusal(NamedTuple):
    """A message, why it is right, and which cases may meet it."""

    pattern: str
    why: str
    fits: Callable[[Description], bool] = lambda case: True


def _goes_back_after_a_step(case: Description) -> bool:
    return any(micro.kind == "stale" for step in case.program.steps for micro in step.micros)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        r"its data cannot be replaced, because it is part of a buffer; copy values in place",
        "`.data =` at rest: shards lie in buffers, and the message says what to do",
    ),
    Refusal(
        r"has been modified by an inplace operation",
        "autocast saves copies of weights, so plain PyTorch goes back through the old ones after a step. Here the copy in the compute "
        "dtype is the gathered weight, which the step replaced; keeping old ones would take the memory that sharding saves",
        lambda case: case.configuration.precision == "mixed" and _goes_back_after_a_step(case),
    ),
    Refusal(
        r"an object whose tensors the engine cannot see, and the backward of that came after two other backwards",
        "nobody hears of such a backward before it reads weights, and they cannot wait for it forever; the message says what to return",
        lambda case: (
            _goes_back_after_a_step(case)
            and (case.model.hidden or any(b.result == "hidden" for b in case.model.blocks))
        ),
    ),
)


def refusal_of(case: Description, outcome: Outcome) -> str:
    """The pattern that all ranks' messages match; empty if there is none."""
    if set(outcome.messages) != set(range(case.configuration.ranks)):
        return ""
    for refusal in REFUSALS:
        if refusal.fits(case) and all(re.search(refusal.pattern, message) for message in outcome.messages.values()):
            return refusal.pattern
    return ""
