"""Time one engine in a plain loop: `torchrun --standalone --nproc_per_node=4 examples/benchmark/train.py mfsdp 300m,1b`.

Rank 0 prints one JSON line for each size, starting with RESULT. `matrix.py` runs many of these and writes a report.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmark.command import Plan, result_of, run, stamp
from examples.benchmark.engines import ENGINES, Options
from examples.benchmark.peers import PEERS
from examples.benchmark.te_engines import TE_ENGINES
from examples.decoder import next_token_loss


def prepare(name: str, options: Options, plan: Plan) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """An engine's step, from token ids `[B, S + 1]` to the loss, and four batches of random ids."""
    device = torch.device("cuda", torch.cuda.current_device())
    engine = {**ENGINES, **PEERS, **TE_ENGINES}[name](options, device)
    config = options.config
    generator = torch.Generator(device).manual_seed(1234 + dist.get_rank())
    shape = (4, options.microbatch, config.seq + 1)
    data = torch.randint(0, config.vocab, shape, generator=generator, device=device)

    def whole(batch: Tensor) -> Tensor:
        for micro in range(plan.accumulation):
            with nullcontext() if micro == plan.accumulation - 1 else engine.no_sync():
                loss = next_token_loss(engine.forward(batch[:, :-1]), batch[:, 1:])
                engine.backward(loss / plan.accumulation)
        engine.step()
        return loss.detach()

    train_step = whole
    if plan.graph:
        if engine.capture is None:
            raise SystemExit(f"Error: {name} cannot capture a step as a CUDA graph")
        train_step = engine.capture(whole)
    return train_step, data


def measure(name: str, options: Options, plan: Plan) -> dict[str, object]:
    """Train on random tokens and time the steps."""
    train_step, data = prepare(name, options, plan)
    losses, host, stamps = [], [], []
    for step in range(plan.warmup + plan.steps):
        if step == plan.warmup:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        stamps.append(stamp())
        start = time.perf_counter()
        losses.append(train_step(data[step % 4]))
        host.append(time.perf_counter() - start)
    stamps.append(stamp())
    return result_of(name, options, plan, stamps[plan.warmup :], host[plan.warmup :], losses)


if __name__ == "__main__":
    run([*ENGINES, *PEERS, *TE_ENGINES], measure, __doc__)
