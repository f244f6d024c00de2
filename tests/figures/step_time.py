"""Host time of a step and of a unit on CPU, of one checkout or of two against each other, to a percent.

    python tests/figures/step_time.py                       # this checkout, plain PyTorch and FSDP2
    python tests/figures/step_time.py OLD NEW               # NEW against OLD; --ranks 2 for real collectives

A chain of eight units of four parameters of 8 x 8 numbers and a root (nine units) trains with AdamW. Four things keep out what disturbs
a busy machine:

- Time is CPU time of the thread that trains (`time.thread_time`): what other processes take, and waiting, does not count. On one thread
  that is host time. Wall time is shown beside it.
- All engines live in one process and take turns: a round is a block of steps of each, in an order drawn for every round, so that none
  always follows the same one. OLD is there twice, as A and as A'. What counts is the median over rounds of ratios within a round, and
  the ratio of lower quartiles: others can only make a step slower.
- Processes differ by percents from start to start (addresses, hashes). So there are several, and the order in which packages are imported
  alternates: A B A', A' B A. Shown are the median of their medians and the lowest and highest of them.
- A' against A, the same code twice, says how far B against A can be trusted: a difference of B that is not well outside of what A' shows
  is none. For less noise use more `--processes` and `--rounds`.

One rank uses a real gloo group, in which the engine communicates nothing; `--ranks 2` starts two and reports rank 0; `--fake` is a group of
two in which every collective is called and none moves a byte: most of the engine's host time, least of the noise. With two checkouts FSDP2,
which takes most of the time, is left out unless `--fsdp2` is given.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

HERE = Path(__file__).resolve().parents[2]
BLOCKS = 8
UNITS = BLOCKS + 1
AGAIN = "A'"
CLOCKS = ("cpu", "wall")
# By engine and clock: microseconds a step, one figure for each round.
Times = dict[str, dict[str, list[float]]]


def measure(checkouts: dict[str, Path], rounds: int, steps: int, *, with_fsdp2: bool) -> Times:
    """Rounds of all engines; the first ones warm up."""
    import torch

    from tests.figures.subjects import Package, batch, fsdp2, plain

    torch.set_num_threads(1)
    packages = {label: Package(path) for label, path in checkouts.items()}
    subjects = {label: package.subject(BLOCKS) for label, package in packages.items()}
    subjects["plain"] = plain(BLOCKS)
    if with_fsdp2:
        subjects["fsdp2"] = fsdp2(BLOCKS)
    x, names = batch(), list(subjects)
    times: Times = {name: {clock: [] for clock in CLOCKS} for name in names}
    warm_up = 3
    draw = random.Random(0)  # the same on every rank
    gc.disable()
    for number in range(warm_up + rounds):
        for name in draw.sample(names, len(names)):
            if name in packages:
                packages[name].activate()
            step = subjects[name].step
            step(x)  # caches are this engine's again
            wall, cpu = time.perf_counter(), time.thread_time()
            for _ in range(steps):
                step(x)
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            if number >= warm_up:
                times[name]["cpu"].append(cpu / steps * 1e6)
                times[name]["wall"].append(wall / steps * 1e6)
        gc.collect()
    gc.enable()
    return times


def worker(arguments: argparse.Namespace) -> None:
    """One rank of one process group."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the "fake" backend

    rank, world, meeting = arguments.worker
    if arguments.fake:
        dist.init_process_group("fake", rank=0, world_size=2)
    else:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world))
    paths = [path.resolve() for path in arguments.checkouts] or [HERE]
    labels = {"A": paths[0], AGAIN: paths[0], **({"B": paths[1]} if len(paths) > 1 else {})}
    order = [label for label in ("A", "B", AGAIN) if label in labels]
    if arguments.backwards:
        order.reverse()
    times = measure(
        {label: labels[label] for label in order},
        arguments.rounds,
        arguments.steps,
        with_fsdp2=arguments.fsdp2 or len(paths) == 1,
    )
    if rank == "0":
        print("RESULT " + json.dumps(times), flush=True)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter


def start(arguments: argparse.Namespace, backwards: bool) -> Times:
    """Measure in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *map(str, arguments.checkouts)]
        command += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
        command += ["--backwards"] * backwards + ["--fake"] * arguments.fake + ["--fsdp2"] * arguments.fsdp2
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        world = 1 if arguments.fake else arguments.ranks
        ranks = [
            subprocess.Popen(
                [*command, "--worker", str(rank), str(world), f"{folder}/meeting"],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(world)
        ]
        outputs = [one.communicate()[0] for one in ranks]
    if any(one.returncode for one in ranks):
        raise SystemExit(f"a rank failed: exit codes {[one.returncode for one in ranks]}")
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
    found: Times = json.loads(line.removeprefix("RESULT "))
    return found


def ratios(runs: Sequence[Times], one: str, other: str, clock: str) -> list[float]:
    """For each process the median over rounds of `one` / `other`."""
    return [
        median(a / b for a, b in zip(times[one][clock], times[other][clock], strict=True))
        for times in runs
    ]  # fmt: skip


def quartile_ratios(runs: Sequence[Times], one: str, other: str, clock: str) -> list[float]:
    """For each process the ratio of lower quartiles of rounds."""
    return [quantiles(times[one][clock])[0] / quantiles(times[other][clock])[0] for times in runs]


def spread(values: Sequence[float]) -> str:
    """Median of processes, lowest to highest."""
    return f"{median(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def report(runs: Sequence[Times], arguments: argparse.Namespace) -> str:
    """Markdown."""
    lines = [
        "| engine | CPU us a step: median | minimum | wall: median | minimum | us a unit over plain | CPU / plain | CPU / FSDP2 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted(runs[0]):
        medians = {clock: median(median(times[name][clock]) for times in runs) for clock in CLOCKS}
        least = {clock: min(min(times[name][clock]) for times in runs) for clock in CLOCKS}
        over = median(
            (a - b) / UNITS
            for times in runs
            for a, b in zip(times[name]["cpu"], times["plain"]["cpu"], strict=True)
        )  # fmt: skip
        cells = [f"{medians['cpu']:.0f}", f"{least['cpu']:.0f}", f"{medians['wall']:.0f}", f"{least['wall']:.0f}"]
        cells.append(f"{over:.1f}")
        for other in ("plain", "fsdp2"):
            cells.append(f"{median(ratios(runs, name, other, 'cpu')):.3f}" if other in runs[0] else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    where = "fake group of 2" if arguments.fake else f"{arguments.ranks} rank(s), gloo"
    lines.append(f"\n{where}; {len(runs)} processes, {arguments.rounds} rounds of {arguments.steps} steps each")
    ways = {"median of ratios": ratios, "ratio of lower quartiles": quartile_ratios}
    for clock in CLOCKS:
        for word, way in ways.items():
            if "B" in runs[0]:
                first, again = way(runs, "B", "A", clock), way(runs, "B", "A'", clock)
                both = [(one + other) / 2 for one, other in zip(first, again, strict=True)]
                lines.append(f"B / A, {clock}, {word}: {spread(both)}")
            lines.append(f"A' / A, {clock}, {word}: {spread(way(runs, AGAIN, 'A', clock))}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", help="one or two roots of the repository (this one)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--fake", action="store_true", help="a group of two ranks without the other one")
    parser.add_argument("--fsdp2", action="store_true", help="with two checkouts as well")
    parser.add_argument("--processes", type=int, default=8, help="one after the other")
    parser.add_argument("--rounds", type=int, default=200, help="blocks of steps of each engine in each process")
    parser.add_argument("--steps", type=int, default=2, help="in a block")
    parser.add_argument("--backwards", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    if len(arguments.checkouts) > 2:
        parser.error("one or two checkouts")
    if arguments.worker:
        worker(arguments)
        return
    runs = [start(arguments, backwards=bool(number % 2)) for number in range(arguments.processes)]
    print(report(runs, arguments))


if __name__ == "__main__":
    main()
