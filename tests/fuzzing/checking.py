"""One description from end to end: run it plainly, run it on the engine, compare."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tests.fuzzing.comparing import BFLOAT16, TOLERANCES, differences, problems, tolerance_of
from tests.fuzzing.description import Description
from tests.fuzzing.plain import run_plainly
from tests.fuzzing.refusals import UNSEEN, is_loud_by_nan, refusal_of
from tests.fuzzing.running import Event
from tests.fuzzing.workers import Outcome, Workers

_OTHER_DATA = 2
# Half a unit in the last place, by tolerance.
_NUDGES = {BFLOAT16: 2.0**-9, TOLERANCES["float32"]: 2.0**-24}


@dataclass
class Verdict:
    """What came of a case.

    Attributes:
        problems: In words; empty where engine and plain PyTorch agree.
        refusal: Why the engine may refuse it; empty if it did not.
        raises: Plain PyTorch raises, and so does the engine.
        sensitive: What differs, where plain PyTorch differs as much from itself with weights that begin half a unit in the last place away.
        kind: "", "differs", "raised", "hung" or "did not raise", the first two with what: shrinking keeps to it.
    """

    problems: list[str] = field(default_factory=list)
    refusal: str = ""
    raises: str = ""
    sensitive: str = ""
    kind: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.problems)


def check(
    case: Description,
    workers: Workers,
    *,
    counts_reductions: bool = True,
    timeout_s: float | None = None,
) -> Verdict:
    """Run a case and judge it.

    What differs by a rounding has to differ with other data, too, and by more than what plain PyTorch comes to if its initial weights are
    changed by half a unit in the last place: in a few of some hundred cases it is rounding that grows from step to step. Float64 has
    digits enough to go without.

    Args:
        case: What to run.
        workers: Who runs it.
        counts_reductions: More of them than units and backwards are a difference.
        timeout_s: After which it hangs.
    """
    torch.set_num_threads(1)  # sums over rows depend on it
    verdict = Verdict()
    rounds = tolerance_of(case) in _NUDGES
    for data in range(_OTHER_DATA + 1 if rounds else 1):
        again = replace(case, program=replace(case.program, data=case.program.data + data))
        verdict = _checked(again, workers, counts_reductions, timeout_s)
        if not verdict.kind.startswith("differs"):
            return verdict
    if rounds and not _checked(again, workers, counts_reductions, timeout_s, growth_of_a_nudge(again)).failed:
        return Verdict(sensitive=verdict.problems[0])
    return verdict


def growth_of_a_nudge(case: Description) -> list[float]:
    """By how much plain PyTorch differs from itself if its weights begin half a unit in the last place away, for each event.

    The larger of two: weights that go up in one go down in the other.
    """
    nudge = _NUDGES[tolerance_of(case)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run_plainly(case)
        found = [differences(expected, run_plainly(case, one)) for one in (nudge, -nudge)]
    return [max(pair) for pair in zip(*found, strict=True)]


def _checked(
    case: Description, workers: Workers, counts_reductions: bool, timeout_s: float | None, slack: Sequence[float] = ()
) -> Verdict:
    workers.begin(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused, expected = _plainly(case)
    outcome = workers.finish(case, timeout_s)
    if not counts_reductions:
        outcome.events = [events and [one for one in events if one.tag != "reductions"] for events in outcome.events]
        expected = [one for one in expected if one.tag != "reductions"]
    return _judged(case, refused, expected, outcome, slack)


def _plainly(case: Description) -> tuple[str, Sequence[Event]]:
    try:
        return "", run_plainly(case)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", []


def _judged(
    case: Description, refused: str, expected: Sequence[Event], outcome: Outcome, slack: Sequence[float]
) -> Verdict:
    if outcome.errors:
        if refused and not outcome.hung:
            return Verdict(raises=refused)
        refusal = refusal_of(case, outcome)
        if refusal:
            return Verdict(refusal=refusal)
        said = [f"rank {rank}: {outcome.messages[rank]}\n{outcome.errors[rank]}" for rank in sorted(outcome.errors)]
        first = next((text for text in outcome.messages.values() if not text.startswith("waited")), "")
        return Verdict(said, kind="hung" if outcome.hung else f"raised {re.sub(r'[0-9]+', 'n', first)[:50]}")
    if refused:
        return Verdict([f"plain PyTorch raises, the engine does not: {refused}"], kind="did not raise")
    found = problems(case, expected, outcome, slack)
    if found and is_loud_by_nan(case, found):
        return Verdict(refusal=UNSEEN)
    return Verdict(found, kind=f"differs: {re.sub(r'rank [0-9]+: |[0-9]+| .event.*', '', found[0])}" if found else "")
