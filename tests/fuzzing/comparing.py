"""What plain PyTorch and the engine saw, held against each other.

A difference is measured against the largest number of its tensor, or a tenth of the largest of its event where that is more: what is nearly
zero by cancellation has no digits to agree on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.fuzzing.description import Description
from tests.fuzzing.running import Event
from tests.fuzzing.workers import Outcome

TOLERANCES = {"float64": 1e-12, "float32": 2e-6}
BFLOAT16 = 8  # units in the last place
_SHARE = 0.1


def tolerance_of(case: Description) -> float:
    """Relative, or `BFLOAT16`; 0 where results are equal to the bit."""
    configuration = case.configuration
    if configuration.precision in ("mixed", "bfloat16") or (configuration.comm and configuration.ranks > 1):
        return BFLOAT16
    several_dtypes = any(block.dtype for block in case.model.blocks)  # gradients add up in the larger one
    if configuration.ranks == 1 and not several_dtypes and not _adds_in_pieces(case) and not _adds_in_any_order(case):
        return 0.0
    return TOLERANCES["float32" if configuration.precision == "float32" or several_dtypes else "float64"]


def _adds_in_pieces(case: Description) -> bool:
    """Whether reentrant checkpoints bring several gradients of a weight in one backward, or several backwards go unnoticed by units.

    Plain PyTorch adds each of them to `.grad`. The engine adds them up and then to what earlier microbatches left: another rounding.
    """
    micros = [micro for step in case.program.steps for micro in step.micros]
    unnoticed = any(block.keeps for block in case.model.blocks) and any(
        micro.side not in ("", "beside") for micro in micros
    )
    return unnoticed or any(block.checkpoint == "reentrant" for block in case.model.blocks)


def _adds_in_any_order(case: Description) -> bool:
    """Whether norms are taken on a GPU, whose kernel adds numbers up by where they lie in memory."""
    clips = any(step.edit in ("clip_norm", "torch_clip_norm") for step in case.program.steps)
    return case.configuration.device == "cuda" and (clips or case.program.optimizer == "lars")


def problems(case: Description, expected: Sequence[Event], outcome: Outcome, slack: Sequence[float] = ()) -> list[str]:
    """What differs, in words; empty if nothing does. `slack`: what is allowed in each event, relative, where it exceeds the tolerance."""
    found = []
    for rank, events in enumerate(outcome.events):
        found += [f"rank {rank}: {what}" for what in _of_rank(case, expected, events, slack)]
    found += [f"rank {rank}: {left} bytes outlived the model" for rank, left in enumerate(outcome.left) if left]
    return found


def differences(expected: Sequence[Event], others: Sequence[Event]) -> list[float]:
    """For each event the largest difference of a tensor, relative as in `problems`. Both are of one process."""
    found = []
    for event, other in zip(expected, others, strict=True):
        scale = max((_largest(value) for _, value in event.values.values()), default=0.0)
        relative = [
            _largest(other.values[name][1].double() - value.double()) / max(_largest(value), _SHARE * scale)
            for name, (_, value) in event.values.items()
            if value is not None and scale and name in other.values and other.values[name][1] is not None
        ]
        found.append(max(relative, default=0.0))
    return found


def _of_rank(
    case: Description, expected: Sequence[Event], events: Sequence[Event], slack: Sequence[float]
) -> Iterator[str]:
    tags, wanted = [event.tag for event in events], [event.tag for event in expected]
    if tags != wanted:
        yield f"saw {tags}, expected {wanted}"
        return
    tolerance = tolerance_of(case)
    for number, (event, reference) in enumerate(zip(events, expected, strict=True)):
        by_rank = event.tag.endswith(("loss", "evaluation", "input gradient", "weight gradient", "tangent"))
        if not by_rank and not event.tag.endswith("gradients") and event.tag not in ("weights", "optimizer state"):
            missing = reference.values.keys() ^ event.values.keys()
            if missing:
                yield f"{event.tag} (event {number}): only one of both has {sorted(missing)}"
        scale = max((_largest(value) for _, value in reference.values.values()), default=0.0)
        for name, (start, value) in event.values.items():
            if name not in reference.values:
                yield f"{event.tag} (event {number}): {name} is not there in plain PyTorch"
                continue
            whole = reference.values[name][1]
            size = max(_largest(whole), _SHARE * scale)
            allowed = max(_allowed(tolerance, size), slack[number] * size if slack else 0.0)
            problem = _difference(value, whole, start, allowed)
            if problem:
                yield f"{event.tag} (event {number}): {name}: {problem}"
        if event.tag == "optimizer state":
            yield from _missing_state(event, reference, number)


def _missing_state(event: Event, reference: Event, number: int) -> Iterator[str]:
    """State that plain PyTorch has of parameters of which this rank has state of another name."""
    here = {name.split(": ")[0] for name in event.values}
    for name in reference.values:
        if name.split(": ")[0] in here and name not in event.values:
            yield f"optimizer state (event {number}): {name} is missing"


def _largest(value: Tensor | None) -> float:
    if value is None or not value.numel():
        return 0.0
    return float(value.detach().double().nan_to_num().abs().max())


def _difference(value: Tensor | None, whole: Tensor | None, start: int, allowed: float) -> str:
    if value is None or whole is None:
        return "" if value is whole else f"is {_say(value)}, expected {_say(whole)}"
    rows = whole[start : start + value.shape[0]] if whole.dim() and value.dim() else whole
    if rows.shape != value.shape:
        return f"has shape {tuple(value.shape)}, expected {tuple(rows.shape)}"
    value, rows = value.cpu(), rows.cpu()
    if torch.equal(value, rows) or not value.numel():
        return ""
    a, b = value.double(), rows.double()
    if bool((a.isnan() != b.isnan()).any()):
        return f"is NaN in {int(a.isnan().sum())} places, expected {int(b.isnan().sum())}"
    worst = float((a - b).nan_to_num().abs().max())
    if worst <= allowed:
        return ""
    return f"differs by {worst:.3g}, allowed {allowed:.3g}, expected about {_largest(whole):.3g}"


def _allowed(tolerance: float, largest: float) -> float:
    if tolerance != BFLOAT16:
        return tolerance * largest
    return BFLOAT16 * 2.0 ** (math.floor(math.log2(largest)) - 7) if largest else 0.0


def _say(value: Tensor | None) -> str:
    return "None" if value is None else f"a tensor of at most {_largest(value):.3g}"
