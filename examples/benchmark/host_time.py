"""Host time of sharding engines, without a GPU: `python examples/benchmark/host_time.py`.

A deep decoder with tiny matrices runs on CPU over a fake process group, so nearly all time is what Python and the
dispatcher spend. What the plain model takes is subtracted; what is left is divided by the number of blocks.

Engines take turns, step by step, in one process, and every figure is a median over such rounds: what disturbs the machine
disturbs all of them. Processes of their own differ by a tenth from start to start, which the subtraction triples. Milliseconds
differ from machine to machine; ratios hardly do.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the "fake" backend
from torch import nn

from examples.decoder import Decoder, DecoderConfig

WORLD = 8
BLOCKS = 24
CONFIG = DecoderConfig(dim=32, layers=BLOCKS, heads=2, kv_heads=2, ffn=64, vocab=64, seq=4)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One engine: the model to call, its optimizer, and its way to clip."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], object]


def plain(model: Decoder) -> Subject:
    """No engine at all."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Subject(
        model=model, optimizer=optimizer, clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    )


def ddp(model: Decoder) -> Subject:
    """DistributedDataParallel."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def no_reduction(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, no_reduction)  # the fake group's all-reduce has no result, which DDP does not take
    subject = plain(model)
    return Subject(model=wrapped, optimizer=subject.optimizer, clip=subject.clip)


def fsdp2(model: Decoder) -> Subject:
    """Torch's `fully_shard`, mixed precision as in training."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return plain(model)


def mfsdp(model: Decoder) -> Subject:
    """This package."""
    from lightning_mfsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, fully_shard_optimizer

    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, policy=policy)
    fully_shard(model, policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    return Subject(model=model, optimizer=optimizer, clip=lambda: clip_grad_norm_(model, 1.0))


SUBJECTS: dict[str, Callable[[Decoder], Subject]] = {
    "plain-fp32": plain,
    "plain": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "mfsdp": mfsdp,
}

# What an engine's own time is counted from: the same model in the dtype it computes in.
BASE = {"ddp": "plain-fp32", "fsdp2": "plain", "mfsdp": "plain"}


Phases = dict[str, float]


def one_step(subject: Subject, ids: torch.Tensor) -> Phases:
    """Milliseconds of forward, backward, clipping and optimizer step."""
    stamps = [time.perf_counter()]
    loss = subject.model(ids).float().square().mean()
    stamps.append(time.perf_counter())
    loss.backward()
    stamps.append(time.perf_counter())
    subject.clip()
    stamps.append(time.perf_counter())
    subject.optimizer.step()
    subject.optimizer.zero_grad()
    stamps.append(time.perf_counter())
    names = ("forward", "backward", "clip", "step")
    return {name: (stop - start) * 1e3 for name, start, stop in zip(names, stamps, stamps[1:], strict=False)}


def measure(names: Iterable[str], *, warmup: int, steps: int) -> list[dict[str, Phases]]:
    """Milliseconds by engine and phase, one entry a round; a round is one step of each engine."""
    torch.set_num_threads(1)
    subjects = {}
    for name in names:
        torch.manual_seed(0)
        model = Decoder(CONFIG)
        subjects[name] = SUBJECTS[name](model.to(torch.bfloat16) if name == "plain" else model)
    ids = torch.randint(0, CONFIG.vocab, (1, CONFIG.seq))
    gc.disable()
    rounds = []
    for _ in range(warmup + steps):
        rounds.append({name: one_step(subject, ids) for name, subject in subjects.items()})
        gc.collect()
    gc.enable()
    return rounds[warmup:]


def table(rounds: list[dict[str, Phases]]) -> str:
    """Markdown: medians of what each engine adds to the plain model, and of its ratio to FSDP2."""

    def unit(one: dict[str, Phases], name: str) -> float:
        own, base = one[name], one[BASE[name]]
        return (own["forward"] + own["backward"] - base["forward"] - base["backward"]) / BLOCKS

    def step(one: dict[str, Phases], name: str) -> float:
        return one[name]["clip"] + one[name]["step"]

    lines = [
        "| engine | forward + backward, ms a unit | / FSDP2 | clip + step, ms | / FSDP2 |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in (name for name in BASE if name in rounds[0]):
        cells = []
        for figure in (unit, step):
            cells.append(f"{median(figure(one, name) for one in rounds):.3f}")
            cells.append(f"{median(figure(one, name) / figure(one, 'fsdp2') for one in rounds):.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure every engine and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    print(table(measure(SUBJECTS, warmup=arguments.warmup, steps=arguments.steps)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
