"""Rows of the benchmark on the GPUs here, of one checkout or of two against each other in one visit.

    bash .ci/gpu_rows                                     # this checkout, all rows
    bash .ci/gpu_rows OLD NEW --rows 1b compiled graph    # NEW against OLD, rows whose names contain one of these words

Each row runs in processes of its own with a time limit, by its checkout's own `examples/benchmark`; two checkouts as OLD NEW NEW OLD.
A line is printed as soon as it is there: medians of rank 0 in ms, memory in GiB, the highest of all runs. `NEW / OLD` is of the means of
all runs; `again / OLD` is the last run of OLD against its first, and `spread` the slowest run of OLD against its fastest: a ratio closer
to 1 than these says nothing, and `--rounds` is for such rows. No row starts that has not
a third of its time limit left of the budget; `--rows` and `--from` run the rest in another visit. What did not run says why in its line;
its whole output is under `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """A command of the benchmark.

    Attributes:
        name: For the table and for `--rows`.
        words: Script and arguments, after `examples/benchmark/`.
        least: GPUs it needs.
        timeout_s: For one run.
        recorded: Which of a mixture's results to take.
    """

    name: str
    words: str
    least: int = 1
    timeout_s: float = 100.0
    recorded: bool = False


ROWS = (
    Row("300m eager", "train.py mfsdp 300m --steps 40"),
    Row("1b eager", "train.py mfsdp 1b --steps 20"),
    Row("8b eager", "train.py mfsdp 8b", least=2, timeout_s=150),
    Row("300m compiled", "train.py mfsdp 300m --compile --reduce bfloat16 --steps 40", timeout_s=180),
    Row("1b compiled", "train.py mfsdp 1b --compile --reduce bfloat16 --steps 20", timeout_s=180),
    Row("8b compiled", "train.py mfsdp 8b --compile --reduce bfloat16", least=2, timeout_s=240),
    Row("300m graph", "train.py mfsdp 300m --graph --compile --reduce bfloat16 --steps 40", timeout_s=180),
    Row("300m trainer", "through_trainer.py mfsdp 300m --steps 40"),
    Row("1b trainer", "through_trainer.py mfsdp 1b --steps 20"),
    Row("1b accumulation 4, clip", "train.py mfsdp 1b --accumulation 4 --clip 1.0"),
    Row("1b symmetric", "train.py mfsdp-symm 1b --steps 20", least=2),
    Row("1b offload", "train.py mfsdp-offload 1b", timeout_s=150),
    Row("1b fp8", "train.py mfsdp-te-fp8-weights-fused 1b --steps 20", timeout_s=150),
    Row("8b fp8", "train.py mfsdp-te-fp8-weights-fused 8b", least=2, timeout_s=180),
    Row("2b moe eager", "moe.py --size 2b --rows experts --capacity 2 --ways ordinary --timeout 150", timeout_s=170),
    Row(
        "2b moe graph",
        "moe.py --size 2b --rows experts --capacity 2 --ways stash --timeout 150",
        timeout_s=170,
        recorded=True,
    ),
)


@dataclass(frozen=True)
class Result:
    """Of one run: milliseconds and GiB, or what went wrong."""

    ms: float = float("nan")
    peak: float = float("nan")
    reserved: float = float("nan")
    problem: str = ""


def command_of(row: Row, gpus: int, out: Path) -> list[str]:
    """What is started in the checkout's root."""
    script, *arguments = row.words.split()
    path = f"examples/benchmark/{script}"
    if script == "moe.py":
        return [sys.executable, path, *arguments, "--processes", str(gpus), "--out", str(out)]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    return [sys.executable, *launch, path, *arguments]


def run(row: Row, checkout: Path, gpus: int, out: Path, timeout_s: float) -> Result:
    """One run; nothing it started is left."""
    shutil.rmtree(out, ignore_errors=True)  # of an earlier visit
    out.mkdir(parents=True)
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])  # Transformer Engine's place
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "4"}
    with open(out / "log", "w") as log:
        process = subprocess.Popen(
            command_of(row, gpus, out),
            cwd=checkout,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Result(problem=f"took more than {timeout_s:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return result_of(row, (out / "log").read_text(), out, process.returncode)


def result_of(row: Row, output: str, out: Path, code: int) -> Result:
    """Read what a run printed, or wrote."""
    found: list[dict[str, Any]]
    if (out / "results.json").exists():
        found = [
            one
            for one in json.loads((out / "results.json").read_text())["results"]
            if one.get("recorded", False) == row.recorded
        ]
    else:
        found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    if found:
        one = found[-1]
        return Result(one.get("median_ms", one["step_ms"]), one["peak_gib"], one["reserved_gib"])
    said = [line.strip() for line in output.splitlines() if "Error" in line or "FAILED" in line]
    return Result(problem=f"exit code {code}: {(said or ['no result'])[-1][:160]}")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def line(row: Row, results: dict[str, list[Result]]) -> str:
    """A row of the table; labels of `results` are OLD and NEW, or NEW alone."""
    problems = [f"{label}: {one.problem}" for label, ones in results.items() for one in ones if one.problem]
    if problems:
        return f"| {row.name} | {problems[0]} |"
    ms = {label: mean([one.ms for one in ones]) for label, ones in results.items()}
    cells = []
    for label, ones in results.items():
        cells += [
            f"{ms[label]:.2f}",
            f"{max(one.peak for one in ones):.2f}",
            f"{max(one.reserved for one in ones):.2f}",
        ]
    if "OLD" in results:
        first, last = results["OLD"][0], results["OLD"][-1]
        cells += [f"{ms['NEW'] / ms['OLD']:.4f}", f"{last.ms / first.ms:.4f}" if last is not first else "-"]
        times = [one.ms for one in results["OLD"]]
        cells.append(f"{max(times) / min(times):.4f}")
    return f"| {row.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", help="one or two roots of the repository (this one)")
    parser.add_argument("--rows", nargs="+", default=[""], help="words in names of rows (all)")
    parser.add_argument("--from", dest="first", default="", help="name of the first row to run")
    parser.add_argument("--gpus", type=int, default=0, help="processes (as many as there are GPUs)")
    parser.add_argument("--once", action="store_true", help="two checkouts as OLD NEW, without the second half")
    parser.add_argument("--rounds", type=int, default=1, help="how often OLD NEW NEW OLD")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for the whole visit")
    parser.add_argument("--out", type=Path, default=HERE / "mfsdp-runs" / "rows")
    parser.add_argument("--list", action="store_true", help="commands, without running them")
    arguments = parser.parse_args()
    paths = [path.resolve() for path in arguments.checkouts] or [HERE]
    if len(paths) > 2:
        parser.error("one or two checkouts")
    if not arguments.gpus:
        import torch

        arguments.gpus = torch.cuda.device_count()
    rows = [row for row in ROWS if any(word in row.name for word in arguments.rows) and row.least <= arguments.gpus]
    names = [row.name for row in rows]
    if arguments.first:
        rows = rows[names.index(arguments.first) :]
    if arguments.list:
        for row in rows:
            print(f"{row.name}: {' '.join(command_of(row, arguments.gpus, arguments.out)[1:])}")
        return
    labels = dict(zip(("OLD", "NEW") if len(paths) == 2 else ("NEW",), paths, strict=True))
    order = [*labels, *([] if arguments.once or len(paths) == 1 else ["NEW", "OLD"])] * arguments.rounds
    columns = [f"{label} {what}" for label in labels for what in ("ms", "peak", "reserved")]
    columns += ["NEW / OLD", "again / OLD", "spread"] if len(paths) == 2 else []
    print(f"| {arguments.gpus} GPUs | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}", flush=True)
    end = time.monotonic() + arguments.budget
    for row in rows:
        results: dict[str, list[Result]] = {label: [] for label in labels}
        for number, label in enumerate(order):
            left = end - time.monotonic()
            one = Result(problem="not started: the budget is used up")
            if left > row.timeout_s / 3:
                out = arguments.out / row.name.replace(" ", "-") / f"{number}-{label}"
                one = run(row, labels[label], arguments.gpus, out, min(row.timeout_s, left))
            results[label].append(one)
            if one.problem:
                break
        print(line(row, results), flush=True)


if __name__ == "__main__":
    main()
