"""Time one engine on one or more sizes: `torchrun --standalone --nproc_per_node=4 examples/benchmark/train.py mfsdp 300m,1b`.

Rank 0 prints one JSON line for each size, starting with RESULT. `report.py` turns such lines into a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from examples.benchmark.engines import ENGINES, Options
from examples.decoder import PRESETS, next_token_loss

MICROBATCH = {"tiny": 2, "300m": 4, "1b": 2, "8b": 1}


def measure(engine_name: str, options: Options, *, warmup: int, steps: int, accumulation: int) -> dict[str, object]:
    """Train on random tokens and time the steps; times in milliseconds, memory in GiB."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats()
    engine = ENGINES[engine_name](options, device)
    config = PRESETS[options.size]
    generator = torch.Generator(device).manual_seed(1234 + dist.get_rank())
    shape = (4, MICROBATCH[options.size], config.seq + 1)
    data = torch.randint(0, config.vocab, shape, generator=generator, device=device)
    losses, host, stamps = [], [], []
    for step in range(warmup + steps):
        if step == warmup:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        stamps.append(_stamp())
        start = time.perf_counter()
        for _ in range(accumulation):
            batch = data[step % 4]
            loss = next_token_loss(engine.forward(batch[:, :-1]), batch[:, 1:])
            (loss / accumulation).backward()
        engine.step()
        host.append(time.perf_counter() - start)
        losses.append(loss.detach())
    stamps.append(_stamp())
    torch.cuda.synchronize()
    times = [stamps[i].elapsed_time(stamps[i + 1]) for i in range(warmup, warmup + steps)]
    curve = torch.stack(losses)
    dist.all_reduce(curve, op=dist.ReduceOp.AVG)
    step_ms = (stamps[warmup].elapsed_time(stamps[-1])) / steps
    tokens = MICROBATCH[options.size] * config.seq * accumulation
    return {
        "engine": engine_name,
        "size": options.size,
        "world": dist.get_world_size(),
        "compiled": options.compiled,
        "reduce": str(options.reduce_dtype).removeprefix("torch."),
        "clip": options.clip,
        "accumulation": accumulation,
        "step_ms": round(step_ms, 2),
        "median_ms": round(median(times), 2),
        "host_ms": round(median(host[warmup:]) * 1e3, 2),
        "tokens_per_s_gpu": round(tokens / step_ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "losses": [round(value, 4) for value in curve.tolist()[:: max(1, len(losses) // 6)]],
    }


def _stamp() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def main() -> None:
    """Parse arguments, measure every size, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("sizes", help="comma-separated presets")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--reduce", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    for size in arguments.sizes.split(","):
        options = Options(
            size=size, compiled=arguments.compile, reduce_dtype=getattr(torch, arguments.reduce), clip=arguments.clip
        )
        result = measure(
            arguments.engine,
            options,
            warmup=arguments.warmup,
            steps=arguments.steps,
            accumulation=arguments.accumulation,
        )
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(result), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
