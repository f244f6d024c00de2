"""Run a matrix of engines, sizes and options on the GPUs present, then write JSON, a Markdown report and charts.

    python examples/benchmark/matrix.py --sizes 300m,1b,8b --out mfsdp-runs/benchmark
    python examples/benchmark/matrix.py --sizes 1b,8b --te --out mfsdp-runs/fp8
    python examples/benchmark/matrix.py --rows "mfsdp fsdp2" "mfsdp fsdp2-tuned limit --compile --reduce bfloat16"

A row is a list of engines and the options they share; each engine runs in processes of its own, one after the other. Engines
that begin with `trainer:` go through Lightning's Trainer. One that is not installed, fails or takes too long is reported as
such, with the last line it printed, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from examples.benchmark.report import write_report

HERE = Path(__file__).parent
DEFAULT_ROWS = (
    "limit mfsdp fsdp2 ddp megatron-v1 deepspeed",
    "trainer:mfsdp trainer:fsdp trainer:model-parallel",
    "limit mfsdp fsdp2-tuned fsdp2-tuned-symm megatron-v2 --compile --reduce bfloat16",
    "mfsdp fsdp2-tuned --compile --reduce bfloat16 --accumulation 4 --clip 1.0",
    "mfsdp mfsdp-offload fsdp2-offload",
)
TE_ROWS = (
    "limit-te limit-te-fp8 mfsdp-te-bf16 mfsdp-te-fp8 mfsdp-te-fp8-weights mfsdp-te-fp8-weights-fused mfsdp-te-fp8-weights-fused-symm "
    "fsdp2-te-bf16 fsdp2-te-fp8 megatron-te-bf16 megatron-te-fp8 megatron-te-fp8-weights",
)


def split_row(row: str) -> tuple[list[str], list[str]]:
    """Engines and options of a row."""
    words = row.split()
    first = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    return words[:first], words[first:]


def run_one(
    engine: str, sizes: str, options: list[str], processes: int, timeout_s: float
) -> tuple[list[dict[str, object]], str]:
    """Results of one engine, and what went wrong if something did."""
    script = "through_trainer.py" if engine.startswith("trainer:") else "train.py"
    return run_script(script, [engine.removeprefix("trainer:"), sizes, *options], processes, timeout_s)


def run_script(
    script: str, arguments: Sequence[str], processes: int, timeout_s: float
) -> tuple[list[dict[str, object]], str]:
    """The RESULT lines of a script of this folder under torchrun, and what went wrong if something did."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"),
        *(str(HERE / script), *arguments),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        errors, code = f"took more than {timeout_s:.0f} s", -1
    results = [json.loads(line[len("RESULT ") :]) for line in output.splitlines() if line.startswith("RESULT ")]
    problem = "" if code == 0 else next((line for line in errors.splitlines() if "Error" in line), errors[-300:])
    return results, problem


def main() -> None:
    """Run everything, one engine at a time, and write what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="300m,1b,8b")
    parser.add_argument("--rows", nargs="+", default=list(DEFAULT_ROWS))
    parser.add_argument("--te", action="store_true", help="rows of Transformer Engine, in place of the usual ones")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count())
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one engine")
    parser.add_argument("--out", type=Path, default=Path("mfsdp-runs/benchmark"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, object]] = []
    problems: list[str] = []
    for row in TE_ROWS if arguments.te else arguments.rows:
        engines, options = split_row(row)
        for engine in engines:
            found, problem = run_one(engine, arguments.sizes, options, arguments.processes, arguments.timeout)
            results += found
            if problem:
                problems.append(f"{engine} {' '.join(options)}: {problem}")
            for result in found:
                print(json.dumps(result), flush=True)
            if problem:
                print(f"FAILED {problems[-1]}", flush=True)
            (arguments.out / "results.json").write_text(
                json.dumps({"results": results, "problems": problems}, indent=1)
            )
    write_report(results, problems, arguments.out)
    print(f"report in {arguments.out / 'report.md'}")


if __name__ == "__main__":
    main()
