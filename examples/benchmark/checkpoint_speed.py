"""Seconds and GiB/s of saving and loading a model with its AdamW state: this package, and PyTorch's FSDP2 with plain DCP.

    torchrun --standalone --nproc_per_node=2 examples/benchmark/checkpoint_speed.py 1b --folder checkpoints

Both write the same bytes to the same disk, one after the other, `--rounds` times in turn. The page cache is dropped before each load where
this process may do so. The asynchronous save reports what training waits for: the first time, which makes the host buffers, and after
that; and how long steps take meanwhile. Prints one JSON line for each engine and round, starting with RESULT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from examples.benchmark.command import MICROBATCH
from examples.benchmark.engines import Options, adamw, build
from examples.decoder import PRESETS
from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from lightning_mfsdp.checkpoint import lightning_io
from lightning_mfsdp.checkpoint.background import BackgroundSaver, Staging
from lightning_mfsdp.checkpoint.io.locate import locate
from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.checkpoint.state.index import ParameterIndex

STEPS_MEANWHILE = 8


def timed(action: Callable[[], object]) -> float:
    """Seconds until all ranks are done."""
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start


def drop_page_cache() -> bool:
    """Whether the next read comes from the disk."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def trained(
    size: str, device: torch.device, *, ours: bool
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model after one step, so that the optimizer has its state; and the step."""
    model = build(Options(size=size), device)
    if ours:
        policy: Any = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        shard: Callable[..., Any] = fully_shard
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
        from torch.distributed.fsdp import fully_shard as fsdp2_shard

        policy, shard = None, lambda part, policy: fsdp2_shard(part, mp_policy=Fsdp2Policy(param_dtype=torch.bfloat16))
    for part in (*model.blocks, model):
        shard(part, policy=policy)
    optimizer = adamw(model.parameters())
    if ours:
        fully_shard_optimizer(optimizer)
    preset = PRESETS[size]
    ids = torch.randint(preset.vocab, (MICROBATCH[size], preset.seq), device=device)

    def step() -> None:
        model(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def measure_fsdp2(size: str, folder: Path, device: torch.device) -> dict[str, float]:
    """State dicts by PyTorch's own functions, then DCP."""
    model, optimizer, _ = trained(size, device, ours=False)

    def save() -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer_0": states}, checkpoint_id=str(folder / "fsdp2"))

    def load() -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer_0": states}, checkpoint_id=str(folder / "fsdp2"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    saving = timed(save)
    return {"save_s": saving, "cold": dropped(), "load_s": timed(load)}


def measure_mfsdp(size: str, folder: Path, device: torch.device, *, background: bool) -> dict[str, float]:
    """This package: save, load, and two saves in the background."""
    model, optimizer, step = trained(size, device, ours=True)
    location = locate(folder / "mfsdp")

    def content() -> lightning_io.ShardedContent:
        index = ParameterIndex(model)
        parts = {"state_dict": model.state_dict(), "optimizer_states": [lightning_io.optimizer_state(index, optimizer)]}
        return lightning_io.ShardedContent.of(index, parts, Ranks())

    def load() -> None:
        lightning_io.load(location, model, [optimizer], strict=True, weights_only=True)

    saving = timed(lambda: lightning_io.save(location, content(), ranks=Ranks()))
    found = {"save_s": saving, "cold": dropped(), "load_s": timed(load)}
    if not background:
        return found
    found["step_ms"] = 1e3 * median(timed(step) for _ in range(STEPS_MEANWHILE))
    saver, staging, ranks = BackgroundSaver(), Staging(), Ranks(dist.new_group(backend="gloo"))
    for name in ("first", "second"):
        shutil.rmtree(folder / "mfsdp", ignore_errors=True)

        def start() -> None:
            staged = content().staged(staging)
            saver.start(lambda: lightning_io.save(location, staged, ranks=ranks))

        begun = time.perf_counter()
        found[f"{name}_stall_s"] = timed(start)
        found[f"step_ms_during_{name}"] = 1e3 * median(timed(step) for _ in range(STEPS_MEANWHILE))
        saver.wait()
        found[f"{name}_background_s"] = time.perf_counter() - begun
    saver.close()
    return found


def dropped() -> float:
    """1 if the page cache was dropped."""
    done = drop_page_cache() if int(os.environ["LOCAL_RANK"]) == 0 else True
    dist.barrier()
    return float(done)


def main() -> None:
    """Parse arguments, connect, measure in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=sorted(MICROBATCH))
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; emptied")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-background", action="store_true", help="leave out the saves in the background")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for number in range(arguments.rounds):
        ours = partial(measure_mfsdp, background=not arguments.no_background)
        for name, measure in (("fsdp2", measure_fsdp2), ("mfsdp", ours)):
            if dist.get_rank() == 0:
                shutil.rmtree(arguments.folder, ignore_errors=True)
                arguments.folder.mkdir(parents=True)
            dist.barrier()
            found = measure(arguments.size, arguments.folder, device)
            if dist.get_rank() == 0:
                gib = sum(file.stat().st_size for file in arguments.folder.rglob("*") if file.is_file()) / 2**30
                rates = {f"{what}_gib_per_s": gib / found[f"{what}_s"] for what in ("save", "load")}
                rounded = {key: round(value, 3) for key, value in {**found, "gib": gib, **rates}.items()}
                line = {"engine": name, "size": arguments.size, "world": dist.get_world_size(), "round": number}
                print("RESULT " + json.dumps({**line, **rounded}), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
