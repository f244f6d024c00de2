"""How far and how fast a context axis goes: long sequences on all ranks together, against a sequence on each rank.

    torchrun --nproc-per-node 2 examples/benchmark/context.py --peaks 16384 32768 65536
    torchrun --nproc-per-node 2 examples/benchmark/context.py --speed 32768
    torchrun --nproc-per-node 2 examples/benchmark/context.py --longest 24 --tries 98304 106496 114688 122880

The decoder is that of the other benchmarks, with a loss that never has all logits; every block is recomputed in backward, and weights
are computed with in bfloat16, without autocast. "data" has one sequence on each rank, "context" divides every sequence over all ranks.
"FSDP2 + context_parallel" is PyTorch's own, with ring attention; it needs GPUs.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

# Run as a script, only this file's folder is on the path; the package and the other examples lie one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from examples.benchmark.processes import print_table, process_group
from examples.decoder import PRESETS, Attend, Decoder
from lightning_mfsdp import MixedPrecisionPolicy
from lightning_mfsdp.context_parallel import context_attention, context_positions
from lightning_mfsdp.fabric import MFSDPFabricPrecision, MFSDPFabricStrategy
from lightning_mfsdp.ops import LinearLossHead

GIB = 2**30
OURS = {
    "data": {},
    "context, ulysses": {"context_method": "ulysses"},
    "context, gather": {"context_method": "gather"},
}
PEER = "FSDP2 + context_parallel"


class LongDecoder(Decoder):
    """The mean loss of tokens, without all logits."""

    def __init__(self, size: str, attend: Attend, positions: Callable[[int, torch.device], Tensor] | None) -> None:
        super().__init__(PRESETS[size], attend, positions)
        head = LinearLossHead(self.config.dim, self.config.vocab)
        head.weight = self.head.weight
        self.head = head

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss, 0-D, of `tokens` and `targets`, both [B, S]."""
        x = self.embedding(tokens)
        return self.head(self.states(x, *self.rotary(x)), targets)


class Ours:
    """This package, through Fabric."""

    def __init__(self, name: str, size: str, device: torch.device) -> None:
        context = 1 if name == "data" else dist.get_world_size()
        self.divides = context > 1
        self.strategy = MFSDPFabricStrategy(
            context=context,
            context_dims={"0": 1, "1": 1},
            units=["Block", "Embedding", "LinearLossHead"],
            recompute={"method": "uniform", "modules": ["*blocks.*"]},
            **OURS[name],
        )
        # The policy alone, without autocast, as the peer computes.
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        self.fabric = Fabric(
            accelerator=device.type,
            devices=dist.get_world_size(),
            strategy=self.strategy,
            plugins=[MFSDPFabricPrecision("32-true", policy=policy)],
        )
        self.fabric.launch()
        torch.manual_seed(0)
        with device:
            module = LongDecoder(size, context_attention, context_positions)
        fused = device.type == "cuda"
        made = self.fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-5, fused=fused))
        self.model, self.optimizer = made

    def step(self, tokens: Tensor) -> None:
        """One, on whole sequences [B, S + 1]."""
        with self.strategy.divided((tokens[:, :-1], tokens[:, 1:])) as batch:
            self.fabric.backward(self.model(*batch))
        self.optimizer.step()
        self.optimizer.zero_grad()


def _attend(*args: Any, **options: Any) -> Tensor:
    # Looked up at each call: context_parallel replaces this attribute while it is active. A function that was looked up
    # before is not replaced, and attends within this rank's part of a sequence only.
    return F.scaled_dot_product_attention(*args, **options)


class Peer:
    """FSDP2 with PyTorch's context_parallel, which replaces attention by a ring and divides its buffers."""

    divides = True

    def __init__(self, name: str, size: str, device: torch.device) -> None:
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import init_device_mesh

        torch.manual_seed(0)
        with device:
            self.model = LongDecoder(size, _attend, None)
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
        for unit in (self.model.embedding, *self.model.blocks, self.model.head, self.model):
            fsdp.fully_shard(unit, mesh=self.mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, tokens: Tensor) -> None:
        """One, on whole sequences [B, S + 1]."""
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        # Made before it divides, as positions of whole sequences.
        cos, sin = self.model.rotary(torch.empty(1, inputs.size(1), 1, device=inputs.device, dtype=torch.bfloat16))
        with self._divided([inputs, targets, cos, sin], [1, 1, 0, 0]):
            self.model.rotary = lambda _: (cos, sin)  # type: ignore[method-assign]
            self.model(inputs, targets).backward()
            del self.model.rotary
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _divided(self, buffers: list[Tensor], dims: list[int]) -> AbstractContextManager[Any]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        stack = ExitStack()
        stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]))
        stack.enter_context(context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=dims))
        return stack


def build(name: str, args: argparse.Namespace, device: torch.device) -> Ours | Peer:
    """A row's engine, by name."""
    return (Peer if name == PEER else Ours)(name, args.size, device)


def sequences(engine: Ours | Peer, args: argparse.Namespace, length: int, each: int, device: torch.device) -> Tensor:
    """Token ids [B, S + 1]: `each` sequences for every rank, which divided ones have together."""
    rows = each * dist.get_world_size() if engine.divides else each
    draw = torch.Generator(device).manual_seed(1 if engine.divides else 1 + dist.get_rank())
    return torch.randint(0, PRESETS[args.size].vocab, (rows, length + 1), generator=draw, device=device)


def forget(device: torch.device) -> None:
    """Free what is unused, and begin a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_of(device: torch.device) -> float:
    """GiB allocated at most since `forget`."""
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else float("nan")


def one_sequence(engine: Ours | Peer, args: argparse.Namespace, length: int, device: torch.device) -> float:
    """Peak GiB of two steps with one sequence: on each rank, or divided."""
    forget(device)
    tokens = sequences(engine, args, length, 1, device)[:1]
    for _ in range(2):
        engine.step(tokens)
    return peak_of(device)


def peaks(args: argparse.Namespace, device: torch.device) -> None:
    """GiB at several lengths, and bytes that a further token costs."""

    def rows() -> Any:
        for name in args.rows:
            engine = build(name, args, device)
            found = [one_sequence(engine, args, length, device) for length in args.peaks]
            slope = (found[-1] - found[0]) * GIB / (args.peaks[-1] - args.peaks[0]) if len(found) > 1 else float("nan")
            yield [name, *(f"{peak:.2f}" for peak in found), f"{slope:,.0f}"]
            del engine
            forget(device)

    print_table(["peak GiB, one sequence", *(f"{length:,}" for length in args.peaks), "bytes a token"], 1, rows())


def speed(args: argparse.Namespace, device: torch.device) -> None:
    """Tokens a second with as many sequences in a step as ranks, rows in turn."""
    engines = {name: build(name, args, device) for name in args.rows}
    seconds: dict[str, list[float]] = {name: [] for name in args.rows}
    synchronize = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    for turn in range(args.rounds + 1):
        for name, engine in engines.items():
            tokens = sequences(engine, args, args.speed, 1, device)
            synchronize()
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(args.steps):
                engine.step(tokens)
            synchronize()
            if turn:  # the first is for caches and plans
                seconds[name].append((time.perf_counter() - begun) / args.steps)
    world = dist.get_world_size()
    first = median(seconds[args.rows[0]])
    head = [f"{world} sequences of {args.speed:,}", "step ms", "spread", "tokens/s", f"against {args.rows[0]}"]
    rows = (
        [
            name,
            f"{median(own) * 1e3:,.0f}",
            f"{max(own) / min(own):.3f}",
            f"{world * args.speed / median(own):,.0f}",
            f"{first / median(own):.3f}",
        ]
        for name, own in seconds.items()
    )
    print_table(head, 1, rows)


def longest(args: argparse.Namespace, device: torch.device) -> None:
    """The longest sequence that trains two steps within a limit of memory: of those tried, which are given in tokens of a rank."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(args.longest * GIB / total)

    def rows() -> Any:
        for name in args.rows:
            engine = build(name, args, device)
            done, peak, failed = 0, 0.0, "none"
            for tokens in args.tries:
                length = tokens * dist.get_world_size() if engine.divides else tokens
                try:
                    peak = one_sequence(engine, args, length, device)
                except torch.OutOfMemoryError:
                    failed = f"{length:,}"
                    break
                done = length
            yield [name, f"{done:,}", f"{peak:.2f}", failed]
            del engine
            forget(device)

    print_table([f"within {args.longest:g} GiB", "longest", "its peak GiB", "out of memory"], 1, rows())


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure a context axis.")
    parser.add_argument("--size", choices=PRESETS, default="1b")
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", nargs="+", choices=[*OURS, PEER], default=[*OURS])
    parser.add_argument("--peaks", nargs="+", type=int, metavar="LENGTH", help="peak memory at these lengths")
    parser.add_argument("--speed", type=int, metavar="LENGTH", help="tokens a second at this length")
    parser.add_argument(
        "--longest", type=float, metavar="GIB", help="the longest sequence within this memory a process"
    )
    parser.add_argument(
        "--tries",
        nargs="+",
        type=int,
        default=[16384, 24576, 32768],
        help="tokens of a rank that --longest tries, in turn",
    )
    parser.add_argument("--steps", type=int, default=2, help="in a round")
    parser.add_argument("--rounds", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Measure what was asked for."""
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    with process_group(args.accelerator) as device:
        if args.peaks:
            peaks(args, device)
        if args.speed:
            speed(args, device)
        if args.longest:
            longest(args, device)


if __name__ == "__main__":
    main()
