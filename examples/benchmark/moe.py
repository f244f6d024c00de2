"""Measure mixtures of experts: one layer, training with experts divided among ranks, and training with everything sharded.

    python examples/benchmark/moe.py --size 8b                                 # on all GPUs present; about 8 minutes on 2
    python examples/benchmark/moe.py --size 2b --processes 1                   # on one
    python examples/benchmark/moe.py --rows experts --capacity 2 --ways ordinary stash
    python examples/benchmark/moe.py --device cpu --size tiny --processes 2    # no figures, but every line runs

    layer     GroupedExperts beside Hugging Face's eager, batched and grouped implementations, forward and backward, on one device
    experts   a decoder whose experts are divided among all ranks, with static buffers: activations saved as usual, in the paged stash (all
              on the device, or most of them on the host), or computed again; the step as it is, and as one CUDA graph
    sharded   the same decoder with everything sharded over all ranks, by this package and by FSDP2

Every row runs in processes of its own, with a time limit. Prints a line for each result, then which floors were reached; writes
results.json, report.md, what failed rows said (failures.log) and, where matplotlib is installed, a picture of the pages in use over a step.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from examples.benchmark.moe_layer import IMPLEMENTATIONS
from examples.benchmark.moe_report import PAGES, floor_table, short, write_report
from examples.benchmark.moe_rows import MEETING, SIZES, Row
from examples.benchmark.moe_step import ENGINES, WAYS

WORKER = Path(__file__).with_name("moe_rows.py")
FAILURES = "failures.log"
PAUSE_S = 0.1
# What the others have to end by themselves when one rank has failed.
GRACE_S = 5.0


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", choices=["experts", "sharded", "layer"], default=["experts", "sharded", "layer"]
    )
    parser.add_argument("--size", choices=[name for name in SIZES if name != "layer"], default="8b")
    parser.add_argument(
        "--capacity", type=float, nargs="+", default=[2.0, 4.0, 1.5], help="lengths of buffers, over what lives in them"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of keeping activations")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--no-graph", action="store_true", help="do not record steps")
    parser.add_argument("--processes", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="timed ones")
    parser.add_argument(
        "--device-factor", type=float, default=1.05, help="pages, relative to what four recorded steps needed"
    )
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds for a row")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no row is started")
    parser.add_argument("--out", type=Path, default=Path("mfsdp-runs/moe"))
    return parser.parse_args(arguments)


def rows_of(args: argparse.Namespace) -> list[Row]:
    """All that are asked for. Those that matter most come first, buffers of other lengths last."""
    on_gpu = args.device == "cuda"
    common: dict[str, Any] = {"device": args.device, "steps": args.steps, "device_factor": args.device_factor}

    def experts(capacity: float, *, is_traced: bool) -> list[Row]:
        pages = str(args.out.resolve() / PAGES)
        return [
            Row(
                kind="experts",
                name=name,
                size=args.size,
                capacity=capacity,
                graph=on_gpu and not args.no_graph and name != "stash keep",  # it decides on the host
                trace=pages if is_traced and name == "stash" else "",
                **common,
            )
            for name in args.ways
        ]

    # Symmetric memory exists on GPUs only.
    engines = [name for name in args.engines if on_gpu or not name.endswith("-symm")]
    rows = {
        "experts": experts(args.capacity[0], is_traced=True),
        "sharded": [Row(kind="sharded", name=name, size=args.size, **common) for name in engines],
        "layer": [
            Row(kind="layer", name=name, size="layer" if on_gpu else "tiny", **common) for name in IMPLEMENTATIONS
        ],
        "more": [row for capacity in args.capacity[1:] for row in experts(capacity, is_traced=False)],
    }
    wanted = [*args.rows, *(["more"] if "experts" in args.rows else [])]
    return [row for kind in wanted for row in rows[kind]]


def launch(
    row: Row, processes: int, timeout_s: float, failures: Path, device: int | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Measure a row in processes of its own.

    Args:
        row: What.
        processes: One for each rank.
        timeout_s: After which all are ended.
        failures: A file to which all that the rank that failed has said is added.
        device: The only GPU they see. `None`: all.

    Returns:
        The results of rank 0, and what went wrong, if something did.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, MEETING: f"{folder}/meet", "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(device)
        logs = [Path(folder, f"{rank}.{kind}") for rank in range(processes) for kind in ("out", "err")]
        started = []
        for rank in range(processes):
            with open(logs[2 * rank], "w") as out, open(logs[2 * rank + 1], "w") as err:
                command = [sys.executable, str(WORKER), json.dumps(asdict(row))]
                started.append(
                    subprocess.Popen(command, stdout=out, stderr=err, env={**environment, "RANK": str(rank)})
                )
        late = wait(started, timeout_s)
        output = logs[0].read_text()
        results = [json.loads(line[len("RESULT ") :]) for line in output.splitlines() if line.startswith("RESULT ")]
        return results, f"took more than {timeout_s:.0f} s" if late else problem_in(started, logs[1::2], failures)


def wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Until all have ended, or shortly after one has failed, or the time is over; then none is left. Returns whether the time was over."""
    limit, has_failed = time.monotonic() + timeout_s, False
    while any(process.poll() is None for process in processes) and time.monotonic() < limit:
        if not has_failed and any(process.poll() for process in processes):
            has_failed, limit = True, min(limit, time.monotonic() + GRACE_S)
        time.sleep(PAUSE_S)
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.kill()
        process.wait()
    return bool(alive) and not has_failed


def problem_in(processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[Path], failures: Path) -> str:
    """What the first rank that failed said last; empty if none did. Killed ones did not fail by themselves."""
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    failed.sort(key=lambda rank: processes[rank].returncode < 0)
    if not failed:
        return ""
    text = errors[failed[0]].read_text()
    with open(failures, "a") as file:
        file.write(f"{shlex.join(map(str, processes[failed[0]].args))}\n{text}\n")
    lines = [line for line in text.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else "nothing")
    return f"rank {failed[0]} ended with {processes[failed[0]].returncode}: {said[:300]}"


def setting_of(args: argparse.Namespace) -> str:
    """A line on machine, versions and work."""
    sizes = SIZES[args.size]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    model = f"{sizes.parameters / 1e9:.1f} billion parameters, {sizes.active / 1e9:.1f} active, top-{sizes.top_k} of {sizes.experts}"
    work = "bf16 compute, float32 reduction, fused AdamW" if args.device == "cuda" else "float32, fused AdamW"
    return (
        f"{args.processes} x {device}, torch {torch.__version__}. {args.size}: {model}, {sizes.tokens:,} tokens a rank, {work}; medians of "
        f"{args.steps} steps; pages for {args.device_factor:g} of what was needed."
    )


def measured(rows: Sequence[Row], args: argparse.Namespace) -> Iterator[tuple[Row, list[dict[str, Any]], str]]:
    """Rows with results and problems, as they come. Rows of one device run side by side, one on each."""
    end = time.monotonic() + args.budget
    devices = list(range(args.processes)) if args.device == "cuda" else [None]

    def one(row: Row, processes: int, device: int | None) -> tuple[Row, list[dict[str, Any]], str]:
        if time.monotonic() > end:
            return row, [], f"not started, the budget of {args.budget:.0f} s was used up"
        return row, *launch(row, processes, args.timeout, args.out / FAILURES, device)

    with ThreadPoolExecutor(len(devices)) as pool:
        for kind, group in groupby(rows, key=lambda row: row.kind):
            alike = list(group)
            if kind != "layer":
                yield from (one(row, args.processes, None) for row in alike)
                continue
            for start in range(0, len(alike), len(devices)):
                together = zip(alike[start:], devices, strict=False)
                running = [pool.submit(one, row, 1, device) for row, device in together]
                yield from (future.result() for future in running)


def main() -> None:
    """Run all rows, and write what is known after each."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in (PAGES, FAILURES):
        (args.out / name).unlink(missing_ok=True)
    setting = setting_of(args)
    print(setting, flush=True)
    results: list[dict[str, Any]] = []
    problems: list[str] = []
    start = time.monotonic()
    for row, found, problem in measured(rows_of(args), args):
        results += found
        for one in found:
            print(f"{time.monotonic() - start:4.0f} s  {short(one)}", flush=True)
        if problem:
            problems.append(f"{row}: {problem}")
            print(f"{time.monotonic() - start:4.0f} s  FAILED {problems[-1]}", flush=True)
        write_report(results, problems, setting, args.out)
    print("\n".join(["", *floor_table(results)]) + f"report in {args.out / 'report.md'}")


if __name__ == "__main__":
    main()
