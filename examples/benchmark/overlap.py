"""What hides behind what: device time of one engine's steps by kind, and communication that no computation hides.

    torchrun --standalone --nproc_per_node=4 examples/benchmark/overlap.py mfsdp 300m,1b --compile --reduce bfloat16

Rank 0 profiles three steps and prints one JSON line for each size, starting with RESULT. Engines and options are those of train.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from examples.benchmark.command import Plan, run
from examples.benchmark.engines import ENGINES, Options
from examples.benchmark.peers import PEERS
from examples.benchmark.train import prepare
from lightning_mfsdp.profile.intervals import Interval, length, merged

PROFILED_STEPS = 3


def is_communication(kernel: str) -> bool:
    """NCCL's kernels, and the copies between devices that its copy-engine gathers consist of."""
    return "nccl" in kernel.lower() or kernel.startswith(("Memcpy PtoP", "Memcpy P2P"))


def overlap(kernels: Iterable[tuple[str, float, float]], steps: int) -> dict[str, float]:
    """Milliseconds a step: computing, communicating, communicating while nothing computes, and doing nothing at all.

    Args:
        kernels: Name, start and end in microseconds of everything that ran on the device.
        steps: How many steps they belong to.
    """
    computing: list[Interval] = []
    communicating: list[Interval] = []
    for name, start, stop in kernels:
        (communicating if is_communication(name) else computing).append((start, stop))
    both = [*computing, *communicating]
    busy = length(merged(both))
    whole = max((stop for _, stop in both), default=0.0) - min((start for start, _ in both), default=0.0)
    spans = {
        "compute_ms": length(merged(computing)),
        "communication_ms": length(merged(communicating)),
        "exposed_ms": busy - length(merged(computing)),
        "idle_ms": whole - busy,
        "step_ms": whole,
    }
    return {name: round(span / steps / 1e3, 2) for name, span in spans.items()}


def measure(name: str, options: Options, plan: Plan) -> dict[str, object]:
    """Profile a few steps after the warm-up."""
    train_step, data = prepare(name, options, plan)
    for step in range(plan.warmup):
        train_step(data[step % 4])
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for step in range(PROFILED_STEPS):
            train_step(data[step % 4])
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return {
        "engine": name,
        "size": options.size,
        "world": dist.get_world_size(),
        "compiled": options.compiled,
        "reduce": str(options.reduce_dtype).removeprefix("torch."),
        "graph": plan.graph,
        **overlap(kernels, PROFILED_STEPS),
    }


if __name__ == "__main__":
    run([*ENGINES, *PEERS], measure, __doc__)
