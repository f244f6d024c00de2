"""How much of the reduction over the outer axis is hidden: behind the shard axis, and behind what is computed.

    torchrun --nproc-per-node 4 examples/benchmark/outer_axis.py --apart
    torchrun --nnodes 2 --nproc-per-node 8 ... examples/benchmark/outer_axis.py

The outer axis has as many ranks as there are nodes. With `--apart` it has two, and NCCL takes the halves of one machine for two hosts,
which it joins by sockets: a network that is slow beside that inside each half.

Three times are measured in turn: a forward and backward with reductions over both axes; one with those over the shard axis alone, as
`no_sync(keep_sharded=True)` leaves the others for later; and an all-reduce over the outer axis of the same bytes, unit by unit, with
nothing beside it. The first less the second is what the outer axis adds, and the rest of the third is hidden. On CPUs calls of gloo return
when they are done, so nothing is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from examples.benchmark.processes import print_table, process_group
from examples.decoder import PRESETS, Decoder
from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, no_sync, units

BOTH, SHARD, OUTER = "both axes", "shard axis alone", "outer axis alone"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(size: str, mesh: DeviceMesh, reduce: torch.dtype, device: torch.device) -> Decoder:
    """A decoder that is sharded over one axis and replicated over the other, computed with in bfloat16."""
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=reduce)
    torch.manual_seed(0)
    with device:
        model = Decoder(PRESETS[size])
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, mesh, policy=policy)
    return model


def outer_buffers(model: nn.Module, mesh: DeviceMesh, reduce: torch.dtype, device: torch.device) -> list[Tensor]:
    """As many bytes as each unit reduces over the outer axis."""
    ranks = mesh["shard"].size()
    return [torch.zeros(-(-view.num_parameters // ranks), dtype=reduce, device=device) for view in units(model)]


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each round, by what was measured."""
    world = dist.get_world_size()
    outer = 2 if args.apart else args.outer or world // int(os.environ.get("LOCAL_WORLD_SIZE", world))
    mesh = init_device_mesh(device.type, (outer, world // outer), mesh_dim_names=("outer", "shard"))
    reduce = DTYPES[args.reduce]
    model = build(args.size, mesh, reduce, device)
    buffers, group = outer_buffers(model, mesh, reduce, device), mesh["outer"].get_group()
    config = PRESETS[args.size]
    tokens = torch.randint(config.vocab, (args.batch, args.length + 1), device=device)

    def trained(*, over_both: bool) -> None:
        with nullcontext() if over_both else no_sync(model, keep_sharded=True):
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        model.zero_grad()

    def alone() -> None:
        for buffer in buffers:
            dist.all_reduce(buffer, group=group)

    runs: dict[str, Callable[[], None]] = {
        BOTH: lambda: trained(over_both=True),
        SHARD: lambda: trained(over_both=False),
        OUTER: alone,
    }
    synchronize = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.rounds + 1):
        for name, run in runs.items():
            synchronize()
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(args.steps):
                run()
            synchronize()
            if turn:  # the first is for caches and plans
                seconds[name].append((time.perf_counter() - begun) / args.steps)
    return seconds


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure what hides the reduction over the outer axis.")
    parser.add_argument("--size", choices=PRESETS, default="1b")
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--outer", type=int, help="ranks along the outer axis (default: the number of nodes)")
    parser.add_argument("--apart", action="store_true", help="the halves of one machine as two hosts")
    parser.add_argument("--reduce", choices=DTYPES, default="float32", help="dtype of gradients on the wire")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    parser.add_argument("--rounds", type=int, default=6)
    return parser.parse_args()


def main() -> None:
    """Measure, and print one row."""
    args = parse_args()
    if args.apart:
        half = int(os.environ["RANK"]) * 2 // int(os.environ["WORLD_SIZE"])
        os.environ |= {"NCCL_HOSTID": f"half {half}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    with process_group(args.accelerator) as device:
        seconds = {name: median(own) for name, own in measure(args, device).items()}
        hidden = f"{1 - (seconds[BOTH] - seconds[SHARD]) / seconds[OUTER]:.0%}" if device.type == "cuda" else "-"
        head = [f"{args.size}, {args.batch} x {args.length:,} tokens", *(f"{name} ms" for name in seconds), "hidden"]
        print_table(head, 1, [[args.reduce, *(f"{second * 1e3:,.1f}" for second in seconds.values()), hidden]])


if __name__ == "__main__":
    main()
