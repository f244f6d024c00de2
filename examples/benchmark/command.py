"""What train.py and through_trainer.py share: the command line, the process group, and the line that reports a result."""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmark.engines import MICROBATCH, Options
from examples.benchmark.flops import H100_BF16_TFLOPS, trained_flops

__all__ = ["MICROBATCH", "Plan", "result_of", "run", "stamp"]


class Plan(argparse.Namespace):
    """How to measure: `warmup` and `steps` optimizer steps of `accumulation` microbatches, captured as a `graph` or not."""

    warmup: int
    steps: int
    accumulation: int
    graph: bool


def stamp() -> torch.cuda.Event:
    """The moment at which the device gets here."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def result_of(
    engine: str,
    options: Options,
    plan: Plan,
    stamps: Sequence[torch.cuda.Event],
    host: Sequence[float],
    losses: Sequence[Tensor],
) -> dict[str, object]:
    """One line of a report; times in milliseconds, memory in GiB.

    Args:
        engine: Its name.
        options: What it was run with.
        plan: For the number of tokens.
        stamps: At the start of each timed step and after the last one.
        host: Seconds the host spent in each timed step.
        losses: Of every step since the start, 0-D.
    """
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(stamps)]
    step_ms = stamps[0].elapsed_time(stamps[-1]) / len(times)
    curve = torch.stack(list(losses))
    dist.all_reduce(curve, op=dist.ReduceOp.AVG)
    free, total = torch.cuda.mem_get_info()
    config = options.config
    tokens = options.microbatch * config.seq * plan.accumulation
    flops = tokens * trained_flops(config.multiplied, config.layers, config.dim, config.seq)
    tflops = flops / step_ms / 1e9
    return {
        "engine": engine,
        "size": options.size,
        "layers": config.layers,
        "seq": config.seq,
        "world": dist.get_world_size(),
        "compiled": options.compiled,
        "reduce": str(options.reduce_dtype).removeprefix("torch."),
        "clip": options.clip,
        "accumulation": plan.accumulation,
        "graph": plan.graph,
        "recipe": options.recipe,
        "float8": options.float8,
        "step_ms": round(step_ms, 2),
        "median_ms": round(median(times), 2),
        "host_ms": round(median(host) * 1e3, 2),
        "tokens_per_s_gpu": round(tokens / step_ms * 1e3),
        "tflops_gpu": round(tflops, 1),
        "mfu": round(tflops / H100_BF16_TFLOPS, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "device_gib": round((total - free) / 2**30, 2),
        "losses": [round(value, 4) for value in curve.tolist()[:: max(1, len(losses) // 6)]],
    }


def run(
    names: Sequence[str], measure: Callable[[str, Options, Plan], dict[str, object]], description: str | None
) -> None:
    """Parse arguments, connect the processes, measure every size, print on rank 0."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=names)
    parser.add_argument("sizes", help="comma-separated presets")
    parser.add_argument("--layers", type=int, default=0, help="blocks; the preset's if not given")
    parser.add_argument("--seq", type=int, default=0, help="tokens in a row; the preset's if not given")
    parser.add_argument("--rows", type=int, default=0, help="rows of a microbatch")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--reduce", choices=["float32", "bfloat16"], default="float32", help="gradients on the wire")
    parser.add_argument(
        "--recipe", choices=["current", "block", "delayed"], default="current", help="of engines that compute in FP8"
    )
    parser.add_argument(
        "--state-dtype", choices=["float32", "bfloat16", "8bit"], default="float32", help="of AdamW's moments"
    )
    parser.add_argument(
        "--float8",
        choices=["own", "tensorwise", "rowwise", "rowwise_with_gw_hp"],
        default="",
        help="linear layers of blocks multiply in FP8, by this package, or by torchao with such scales",
    )
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0: none")
    parser.add_argument("--accumulation", type=int, default=1, help="microbatches a step")
    parser.add_argument(
        "--graph",
        action="store_true",
        help="the whole step as one CUDA graph; through the Trainer: training_step and its backward",
    )
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    plan = parser.parse_args(namespace=Plan())
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    for size in plan.sizes.split(","):
        options = Options(
            size=size,
            layers=plan.layers,
            seq=plan.seq,
            rows=plan.rows,
            compiled=plan.compile,
            reduce_dtype=getattr(torch, plan.reduce),
            clip=plan.clip,
            recipe=plan.recipe,
            state_dtype=plan.state_dtype,
            float8=plan.float8,
        )
        result = measure(plan.engine, options, plan)
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(result), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()
