"""Host time of sharding engines, without a GPU: `python examples/benchmark/host_time.py`.

A deep decoder with tiny matrices runs on CPU over a fake process group, so nearly all time is what Python and the
dispatcher spend. Each engine runs in a process of its own. What the plain model takes is subtracted; what is left is
divided by the number of blocks. Milliseconds differ from machine to machine; ratios hardly do.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
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


def measure(name: str, *, warmup: int, steps: int) -> dict[str, float]:
    """Median milliseconds of forward, backward, clipping and optimizer step of one engine."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    if name == "plain":
        model = model.to(torch.bfloat16)
    subject = SUBJECTS[name](model)
    ids = torch.randint(0, CONFIG.vocab, (1, CONFIG.seq))
    spent: dict[str, list[float]] = {"forward": [], "backward": [], "clip": [], "step": []}
    gc.disable()
    for _ in range(warmup + steps):
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
        for key, start, stop in zip(spent, stamps, stamps[1:], strict=False):
            spent[key].append((stop - start) * 1e3)
        gc.collect()
    return {key: median(values[warmup:]) for key, values in spent.items()}


def in_own_process(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """`measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--only", name, f"--warmup={arguments.warmup}", f"--steps={arguments.steps}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))


def table(results: dict[str, dict[str, float]]) -> str:
    """Markdown: what each engine adds to the plain model, and its ratio to FSDP2."""

    def added(name: str) -> tuple[float, float]:
        own, base = results[name], results[BASE[name]]
        unit = own["forward"] + own["backward"] - base["forward"] - base["backward"]
        return unit / BLOCKS, own["clip"] + own["step"]

    reference = added("fsdp2")
    lines = [
        "| engine | forward + backward, ms a unit | / FSDP2 | clip + step, ms | / FSDP2 |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in BASE:
        unit, step = added(name)
        lines.append(f"| {name} | {unit:.3f} | {unit / reference[0]:.2f} | {step:.3f} | {step / reference[1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure every engine and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(SUBJECTS), help="measure one engine in this process")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many processes counts")
    arguments = parser.parse_args()
    if arguments.only:
        dist.init_process_group("fake", rank=0, world_size=WORLD)
        print("RESULT " + json.dumps(measure(arguments.only, warmup=arguments.warmup, steps=arguments.steps)))
        dist.destroy_process_group()
        return
    rounds = [{name: in_own_process(name, arguments) for name in SUBJECTS} for _ in range(arguments.rounds)]
    best = {name: {key: min(one[name][key] for one in rounds) for key in rounds[0][name]} for name in SUBJECTS}
    print(table(best))


if __name__ == "__main__":
    main()
