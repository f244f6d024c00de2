"""Differential fuzzing: drawn training programs under the engine, on 1 to 4 ranks, against plain PyTorch on one process.

    python tests/fuzz.py --minutes 60                 draw until the time is over
    python tests/fuzz.py --minutes 5 --ranks 1 2      on so many ranks
    python tests/fuzz.py --replay case.json           run a case that was kept, and shrink it if it fails
    python tests/fuzz.py --replay tests/data/corpus-2026-11-27.jsonl.xz    2,000 cases, drawn once: what a change is judged on

It prints how often each feature occurred, alone and in pairs, and the smallest failing case as a script.
"""

# ruff: noqa: E402 - the path is mended first

from __future__ import annotations

import argparse
import itertools
import lzma
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":  # Python looks for modules beside a script first, and tests/lightning is not Lightning
    sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != HERE)]

from tests.fuzzing.checking import Verdict, check
from tests.fuzzing.description import Description, features, from_json, size, to_json
from tests.fuzzing.drawing import drawn
from tests.fuzzing.known import REDUCED_TOO_OFTEN, known_items
from tests.fuzzing.refusals import MOST
from tests.fuzzing.script import as_script
from tests.fuzzing.shrinking import shrunk
from tests.fuzzing.workers import Workers

# Of all cases, those that low precision makes unstable.
MOST_SENSITIVE = 0.02


@dataclass
class Tally:
    """What happened in a run."""

    run: int = 0
    drawn: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    raised_alike: int = 0
    sensitive: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[tuple[Description, Verdict]] = field(default_factory=list)

    def count(self, case: Description) -> None:
        found = sorted(features(case))
        self.run += 1
        self.features.update(found)
        self.pairs.update(combinations(found, 2))

    @property
    def share_refused(self) -> float:
        return sum(self.refused.values()) / max(self.run, 1)


def on_device(case: Description, device: str) -> Description:
    """The same on a CPU or on GPUs."""
    return replace(case, configuration=replace(case.configuration, device=device))


def judge(case: Description, workers: Workers) -> Verdict:
    """Run a case. See also `REDUCED_TOO_OFTEN`."""
    return check(case, workers, counts_reductions=not REDUCED_TOO_OFTEN)


def fuzz(
    workers: Workers,
    tally: Tally,
    *,
    first_seed: int,
    ranks: tuple[int, ...] = (1, 2, 3, 4),
    device: str = "cpu",
    deadline: float = float("inf"),
    most: int = sys.maxsize,
    most_failures: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Draw and run cases until the time is over, enough were run or enough have failed."""

    kinds: set[str] = set()
    for number in itertools.count():
        if time.monotonic() > deadline or tally.run >= most or len(tally.failures) >= most_failures:
            return
        case = on_device(drawn(Random(f"{first_seed} {number}"), ranks), device)
        tally.drawn += 1
        known = known_items(case)
        if known:
            tally.left_out.update(known)
            continue
        verdict = judge(case, workers)
        tally.count(case)
        tally.raised_alike += bool(verdict.raises)
        tally.sensitive += bool(verdict.sensitive)
        if verdict.refusal:
            tally.refused[verdict.refusal] += 1
        if verdict.failed and verdict.kind not in kinds:
            kinds.add(verdict.kind)
            tally.failures.append((case, verdict))
            say(f"{verdict.kind}: {to_json(case)}")


def smallest(
    case: Description, verdict: Verdict, workers: Workers, budget_s: float = 180.0
) -> tuple[Description, Verdict]:
    """The case shrunk as far as it fails alike, without becoming one of a known defect."""
    last = {case: verdict}

    def fails(candidate: Description) -> bool:
        if known_items(candidate):
            return False
        found = judge(candidate, workers)
        last[candidate] = found
        return found.kind == verdict.kind

    found = shrunk(case, fails, budget_s)
    return found, last[found]


def report(tally: Tally, elapsed_s: float) -> str:
    """Tables of features and of pairs."""
    lines = [
        f"{tally.run} cases in {elapsed_s / 60:.1f} minutes ({tally.run / max(elapsed_s, 1e-9) * 60:.0f} a minute), "
        f"{tally.drawn - tally.run} left out for known defects, {tally.share_refused:.1%} refused (at most {MOST:.0%}), "
        f"{tally.raised_alike} in which plain PyTorch raises as well, {tally.sensitive} in which it differs as much from itself "
        f"after half a unit in the last place (at most {MOST_SENSITIVE:.0%})",
        *(f"    left out for item {item}: {count}" for item, count in tally.left_out.most_common()),
        *(f"    refused {count}: {why}" for why, count in tally.refused.most_common()),
        "feature, cases, share, fewest cases together with another feature",
    ]
    for name, count in sorted(tally.features.items()):
        others = [other for other in tally.features if other != name and other.split(":")[0] != name.split(":")[0]]
        together = {other: tally.pairs[min(name, other), max(name, other)] for other in others}
        rarest = min(together, key=lambda other: (together[other], other), default="")
        mark = "" if count >= 0.05 * tally.run else "   below 5 %"
        lines.append(f"    {name:32} {count:6} {count / tally.run:6.1%} {together.get(rarest, 0):5} {rarest}{mark}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], choices=[1, 2, 3, 4])
    parser.add_argument(
        "--failures", type=int, default=1, help="go on until so many cases of different kinds have failed"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: with NCCL")
    parser.add_argument("--replay", type=Path, help="a file with a case on each line")
    parser.add_argument(
        "--pairs", action="store_true", help="print all pairs of features that occurred fewer than ten times"
    )
    given_arguments = parser.parse_args(arguments)
    began, tally = time.monotonic(), Tally()
    with Workers() as workers:
        if given_arguments.replay:
            kinds: Counter[str] = Counter()
            for line in filter(None, _text(given_arguments.replay).splitlines()):
                case = on_device(from_json(line), given_arguments.device)
                verdict = judge(case, workers)
                kinds[verdict.kind or ("is refused" if verdict.refusal else "agrees")] += 1
                print(f"{verdict.kind or 'agrees'} {verdict.refusal or verdict.raises}: {to_json(case)}")
                if verdict.failed:
                    tally.failures.append((case, verdict))
            print(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()))
        else:
            print(f"seed {given_arguments.seed}", flush=True)
            fuzz(
                workers,
                tally,
                first_seed=given_arguments.seed,
                ranks=tuple(given_arguments.ranks),
                device=given_arguments.device,
                deadline=began + 60 * given_arguments.minutes,
                most_failures=given_arguments.failures,
                say=lambda text: print(text, flush=True),
            )
            print(report(tally, time.monotonic() - began))
            if given_arguments.pairs:
                print(_rare_pairs(tally))
        small = [smallest(case, verdict, workers) for case, verdict in tally.failures]
    for case, verdict in sorted(small, key=lambda pair: size(pair[0])):
        print(f"\n{verdict.kind}: {to_json(case)}")
        print("\n".join(problem[-1500:] for problem in verdict.problems[:3]))
    if small:
        case, verdict = min(small, key=lambda pair: size(pair[0]))
        print(f"\n# The smallest failing case, as a script:\n{as_script(case, verdict.kind.capitalize() + '.')}")
    too_many = tally.share_refused > MOST or tally.sensitive > MOST_SENSITIVE * max(tally.run, 100)
    return 1 if small or too_many else 0


def _text(path: Path) -> str:
    """Of a file that may be compressed."""
    return lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()


def _rare_pairs(tally: Tally) -> str:
    names = sorted(tally.features)
    kinds = {name: name.split(":")[0] for name in names}
    rare = [(a, b) for a, b in combinations(names, 2) if kinds[a] != kinds[b] and tally.pairs[a, b] < 10]
    return "\n".join(
        [
            f"{len(rare)} pairs occurred fewer than ten times",
            *(f"    {a} with {b}: {tally.pairs[a, b]}" for a, b in rare),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
