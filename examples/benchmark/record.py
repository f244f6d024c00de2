"""The rows in which others publish their records, on the GPUs present: one table, in one count of FLOPs (flops.py).

    python examples/benchmark/record.py dense --out mfsdp-runs/record
    python examples/benchmark/record.py dense lora --contenders trainer:mfsdp-tuned single --processes 1

Each row states the shape of a published figure: model, tokens, microbatches. Contenders run it one after the other, each in processes of
its own. Peers have their best options of these: units for embedding and head, prefetch two deep, compiled blocks, reductions of each
microbatch (which fits) or of the last one. One that does not fit or fails is a line that says so, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from examples.benchmark.matrix import run_one, run_script

__all__ = ["ROWS", "Row", "table"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is trained, and who published a figure for it.

    Attributes:
        title: Model, length of rows, microbatches.
        published: The figure, with hardware and source.
        contenders: Engines of train.py and, after `trainer:`, of through_trainer.py; or strategies of `script`.
        options: Of the script.
        size: Preset of the decoder; empty where `script` has its own model.
        script: Empty: train.py or through_trainer.py.
    """

    title: str
    published: str
    contenders: Sequence[str]
    options: Sequence[str]
    size: str = ""
    script: str = ""

    def run(self, contender: str, more: Sequence[str], processes: int, timeout_s: float) -> tuple[list[Any], str]:
        """Results of a contender, and what went wrong if something did. Of an option that is given twice, the last counts."""
        if self.script:
            return run_script(self.script, [contender, *self.options, *more], processes, timeout_s)
        return run_one(contender, self.size, [*self.options, *more], processes, timeout_s)


_DENSE = ("trainer:mfsdp-tuned", "mfsdp-symm-auto-sharded", "fsdp2-tuned-sharded", "fsdp2-tuned", "limit")
_STEPS = ("--warmup", "2", "--steps", "2")
_AT_8K = ("--seq", "8192", "--accumulation", "16", "--clip", "1.0", "--reduce", "bfloat16", *_STEPS)

ROWS = {
    "dense": Row(
        title="Llama 3 8B, rows of 8,192 tokens, 16 microbatches of 1 row, bf16",
        published="torchtitan FSDP2, 8 H100, 2 rows, compiled: 6,667 tokens/s (benchmarks/llama3_h100_202412)",
        contenders=_DENSE,
        options=(*_AT_8K, "--compile"),
        size="8b",
    ),
    "dense-14": Row(
        title="the same with 14 of 32 blocks, which fits two GPUs of 80 GiB",
        published="-",
        contenders=_DENSE,
        options=(*_AT_8K, "--compile", "--layers", "14"),
        size="8b",
    ),
    "dense-bf16-moments": Row(
        title="Llama 3 8B, rows of 8,192 tokens, 16 microbatches of 1 row, bf16, moments of AdamW in bf16 everywhere",
        published="-",
        contenders=("trainer:mfsdp-tuned", "limit", "fsdp2-tuned-sharded"),
        options=(*_AT_8K, "--compile", "--state-dtype", "bfloat16"),
        size="8b",
    ),
    "dense-lean": Row(
        title="Llama 3 8B, rows of 8,192 tokens, 16 microbatches of 1 row, bf16; moments in 8 bits; lean: weights in bf16 with remainders",
        published="-",
        contenders=("trainer:mfsdp-lean", "trainer:mfsdp-tuned", "limit"),
        options=(*_AT_8K, "--compile", "--state-dtype", "8bit"),
        size="8b",
    ),
    "fp8-own": Row(
        title="Llama 3 8B, rows of 8,192 tokens, 16 microbatches of 1 row, FP8 of lightning_mfsdp.float8",
        published="Megatron-FSDP, 8 DGX-H100: 14,451 tokens/s, 744 TFLOP/s (Megatron-Bridge, performance-summary-archive.md, 25.11)",
        contenders=("trainer:mfsdp-tuned",),
        options=(*_AT_8K, "--compile", "--float8", "own"),
        size="8b",
    ),
    "fp8-own-lean": Row(
        title="Llama 3 8B, rows of 8,192 tokens, 16 microbatches of 1 row, FP8 of lightning_mfsdp.float8, moments in 8 bits; lean as above",
        published="Megatron-FSDP, 8 DGX-H100: 14,451 tokens/s, 744 TFLOP/s (Megatron-Bridge, performance-summary-archive.md, 25.11)",
        contenders=("trainer:mfsdp-lean", "trainer:mfsdp-tuned"),
        options=(*_AT_8K, "--compile", "--float8", "own", "--state-dtype", "8bit"),
        size="8b",
    ),
    "fp8": Row(
        title="Llama 3 8B, rows of 8,192 tokens, 16 microbatches of 1 row, FP8 of Transformer Engine",
        published="Megatron-FSDP, 8 DGX-H100: 14,451 tokens/s, 744 TFLOP/s (Megatron-Bridge, performance-summary-archive.md, 25.11)",
        contenders=(
            "mfsdp-te-fp8-weights-fused-symm",
            "mfsdp-te-fp8-weights-fused-symm-sharded",
            "fsdp2-te-fp8",
            "megatron-te-fp8-weights",
        ),
        options=_AT_8K,
        size="8b",
    ),
    "lora": Row(
        title="LoRA of rank 16 on all projections of Llama 3 8B, rows of 4,096 tokens, 16 microbatches of 2 rows, one GPU",
        published="NeMo AutoModel, one H100: 12,473 tokens/s (llama3_1_8b_peft_benchmark.yaml)",
        contenders=("mfsdp", "single"),
        options=("--base", "bf16", "--rows", "2", "--accumulation", "16", "--compile", *_STEPS),
        script="qlora.py",
    ),
}


def table(row: Row, found: Sequence[tuple[str, dict[str, Any] | str]]) -> str:
    """Markdown.

    Args:
        row: What was run.
        found: Of each contender, its result or why there is none.
    """
    lines = [
        f"### {row.title}",
        "",
        f"Published: {row.published}",
        "",
        "| contender | GPUs | step s | tokens/s/GPU | TFLOP/s/GPU | MFU | peak GiB | reserved GiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for contender, result in found:
        if isinstance(result, str):
            lines.append(f"| {contender} | {result} | - | - | - | - | - | - |")
            continue
        memory = ["-" if result[key] is None else f"{result[key]:.1f}" for key in ("peak_gib", "reserved_gib")]
        cells = [
            *(contender, str(result["world"]), f"{result['step_ms'] / 1e3:.2f}", f"{result['tokens_per_s_gpu']:,}"),
            *(f"{result['tflops_gpu']:.0f}", f"{result['mfu']:.3f}", *memory),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run rows, one contender at a time, and write what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", choices=sorted(ROWS))
    parser.add_argument("--contenders", nargs="+", default=[], help="these alone")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count())
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one contender")
    parser.add_argument("--out", type=Path, default=Path("mfsdp-runs/record"))
    parser.add_argument("--options", default="", help="further ones for the scripts, such as '--steps 1'")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    tables: list[str] = []
    for name in arguments.rows:
        row, found = ROWS[name], list[tuple[str, dict[str, Any] | str]]()
        for contender in [each for each in row.contenders if not arguments.contenders or each in arguments.contenders]:
            got, problem = row.run(contender, arguments.options.split(), arguments.processes, arguments.timeout)
            found += [(contender, result) for result in got] or [(contender, problem)]
            results += [{"row": name, **result} for result in got]
            text = "\n\n".join([*tables, table(row, found)])
            (arguments.out / "record.md").write_text(text + "\n")
            (arguments.out / "record.json").write_text(json.dumps(results, indent=1))
        tables.append(table(row, found))
        print(tables[-1], end="\n\n", flush=True)


if __name__ == "__main__":
    main()
