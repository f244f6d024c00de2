"""Messages with which the engine may refuse a description, each with the reason why that is right. Kept by hand.

A refusal is said on every rank. What is refused here is work for somebody as long as FSDP2 or DDP does it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.fuzzing.description import Description, Micro
from tests.fuzzing.workers import Outcome

MOST = 0.10  # of all draws


class Refusal(NamedTuple):
    """A message, why it is right, and which cases may meet it."""

    pattern: str
    why: str
    fits: Callable[[Description], bool] = lambda case: True


def _goes_back_after_a_step(case: Description) -> bool:
    return any(micro.kind == "stale" for step in case.program.steps for micro in step.micros)


def _shards_weights(case: Description) -> bool:
    """Weights are gathered, or cast, for each use."""
    configuration = case.configuration
    several = configuration.ranks > (configuration.outer or 1)
    return configuration.sharding == "optim_grads_params" and (several or configuration.precision == "mixed")


def _micros(case: Description) -> list[Micro]:
    return [micro for step in case.program.steps for micro in step.micros]


def _goes_by_side_doors(case: Description) -> bool:
    """A backward reaches what a unit computed and did not return, and not its result."""
    apart = any(micro.side not in ("", "beside") for micro in _micros(case))
    return _shards_weights(case) and (apart or case.model.judge == "feature")


def _asks(kind: str) -> Callable[[Description], bool]:
    return lambda case: any(micro.kind == kind for micro in _micros(case))


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        r"its data cannot be replaced, because it is part of a buffer; copy values in place",
        "`.data =` at rest: shards lie in buffers, and the message says what to do",
    ),
    Refusal(  # the second of a weight that is frozen, which the step did not write
        r"has been modified by an inplace operation|EngineStateError: [\w.]+: a backward read",
        "autocast saves copies of weights, so plain PyTorch goes back through the old ones after a step. Here the copy in the compute "
        "dtype is the gathered weight, which the step replaced; keeping old ones would take the memory that sharding saves",
        lambda case: case.configuration.precision == "mixed" and _goes_back_after_a_step(case),
    ),
    Refusal(
        r"EngineStateError: [\w.]+: a backward read its weight .* after the unit was resharded",
        "a graph of an object whose tensors the engine cannot see, older than a step: weights stay for it until then",
        lambda case: (
            _goes_back_after_a_step(case)
            and (case.model.hidden or any(b.result == "hidden" for b in case.model.blocks))
        ),
    ),
    Refusal(
        r"EngineStateError: [\w.]+: a backward read its weight .* after the unit was resharded",
        "a side door that was found in the unit's first forward, and a graph older than a step, which wrote no frozen weight: weights stay "
        "for it until then, and later forwards are followed",
        lambda case: _goes_back_after_a_step(case) and _goes_by_side_doors(case),
    ),
    Refusal(
        r"EngineStateError: [\w.]+: a backward reads .*, which was written after the forward that saved it",
        "a side door of a recomputed block, after a step: plain PyTorch computes it again from the new weights, and this says so",
        lambda case: (
            _goes_back_after_a_step(case)
            and _goes_by_side_doors(case)
            and any(block.checkpoint == "non_reentrant" for block in case.model.blocks)
        ),
    ),
    Refusal(
        r"EngineStateError: Net: a backward read its weight .* after the unit was resharded",
        "a side door of the root after a backward has ended: following the root would pack what all units save, so it is done if asked",
        _goes_by_side_doors,
    ),
    Refusal(
        r"EngineStateError: [\w.]+: a backward read its weight .* after the unit was resharded",
        "the same where the root's layer shares its weight with a unit",
        lambda case: (
            _goes_by_side_doors(case)
            and any(
                (not b.unit and (b.keeps or b.tied_to >= 0))
                or (b.tied_to >= 0 and not case.model.blocks[b.tied_to].unit)
                for b in case.model.blocks
            )
        ),
    ),
    Refusal(
        r"EngineStateError: [\w.]+: on rank \d a gradient came after the gradients of this unit had been reduced",
        "autograd does not tell whether the graph of an earlier microbatch has a reentrant checkpoint that is still to be recomputed, and "
        "a second reduction in a backward would need that all ranks have one; the message says what to do",
        lambda case: _goes_back_after_a_step(case) and any(b.checkpoint == "reentrant" for b in case.model.blocks),
    ),
    Refusal(
        r"Cannot access (storage of TensorWrapper|data pointer of Tensor that doesn't have storage)|autograd.Function with functorch",
        "tensors of torch.func transforms have no storage: weights cannot be gathered into them, nor compared with what is in host memory, "
        "and parameters that a step uses itself cannot be found in its results",
        _asks("jvp"),
    ),
    Refusal(
        r"You must implement the jvp function for custom autograd.Function",
        "checkpoints without reentrance in PyTorch before 2.13; plain PyTorch goes without checkpoints in mixed precision",
        lambda case: (
            case.configuration.precision == "mixed"
            and _asks("jvp")(case)
            and any(block.checkpoint == "non_reentrant" for block in case.model.blocks)
        ),
    ),
)

# A function that keeps its weight as an attribute, where autograd does not compare versions, reads NaN by a side door (docs/features.md).
UNSEEN = "NaN of a weight that is resharded"


def is_loud_by_nan(case: Description, problems: Sequence[str]) -> bool:
    """Whether all that differs is NaN, and may be."""
    keeps = any(block.keeps == "function" for block in case.model.blocks)
    return keeps and _goes_by_side_doors(case) and all(": is NaN in " in problem for problem in problems)


def refusal_of(case: Description, outcome: Outcome) -> str:
    """The pattern that all ranks' messages match; empty if there is none."""
    if set(outcome.messages) != set(range(case.configuration.ranks)):
        return ""
    for refusal in REFUSALS:
        if refusal.fits(case) and all(re.search(refusal.pattern, message) for message in outcome.messages.values()):
            return refusal.pattern
    return ""
