"""Messages with which the engine may refuse a description, each with the reason why that is right. Kept by hand.

A refusal is said on every rank. What is refused here is work for somebody as long as FSDP2 or DDP does it.
"""

from __future__ import annotations

import re

from tests.fuzzing.description import Description
from tests.fuzzing.workers import Outcome

MOST = 0.10  # of all draws

REFUSALS: tuple[tuple[str, str], ...] = (
    (
        r"its data cannot be replaced, because it is part of a buffer; copy values in place",
        "`.data =` at rest: shards lie in buffers, and the message says what to do",
    ),
)


def refusal_of(case: Description, outcome: Outcome) -> str:
    """The pattern that all ranks' messages match; empty if there is none."""
    if set(outcome.messages) != set(range(case.configuration.ranks)):
        return ""
    for pattern, _ in REFUSALS:
        if all(re.search(pattern, message) for message in outcome.messages.values()):
            return pattern
    return ""
