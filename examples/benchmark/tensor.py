"""What a tensor axis costs and saves: one sequence on all ranks together, against a part of its tokens on each rank, and FSDP2.

    torchrun --nproc-per-node 2 examples/benchmark/tensor.py --speed 4096
    torchrun --nproc-per-node 2 examples/benchmark/tensor.py --memory 4096

The decoder is that of the other benchmarks, with a loss that never has all logits. Weights are computed with in bfloat16, without
autocast, AdamW is fused, and nothing is recomputed. In "tensor" each group of ranks divides the weights of each layer and computes one
sequence; in "data" each rank has a sequence of its own, shorter, so that a step has as many tokens. "FSDP2 + parallelize_module" is
PyTorch's own, with the same plan and logits that stay divided.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
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
from torch.distributed.tensor import DTensor

from examples.benchmark.context import GIB, LongDecoder, forget, peak_of
from examples.benchmark.processes import print_table, process_group
from examples.decoder import PRESETS, TENSOR_PLAN, Decoder
from lightning_mfsdp import MixedPrecisionPolicy
from lightning_mfsdp.fabric import MFSDPFabricPrecision, MFSDPFabricStrategy

DATA, TENSOR = "data", "tensor"
PEER, COMPILED_PEER = "FSDP2 + parallelize_module", "FSDP2 + parallelize_module, compiled"
# sharding="optim_grads": copies in the compute dtype stay on the device, and are cast once after each step.
DATA_KEPT, TENSOR_KEPT = "data, copies kept", "tensor, copies kept"
ROWS = (DATA, TENSOR, DATA_KEPT, TENSOR_KEPT, PEER, COMPILED_PEER)


class Ours:
    """This package, through Fabric."""

    def __init__(self, name: str, size: str, ranks: int, device: torch.device) -> None:
        self.strategy = MFSDPFabricStrategy(
            tensor=ranks if name in (TENSOR, TENSOR_KEPT) else 1,
            tensor_plan=TENSOR_PLAN if name in (TENSOR, TENSOR_KEPT) else None,
            sharding="optim_grads" if name in (DATA_KEPT, TENSOR_KEPT) else "optim_grads_params",
            units=["Block", "Embedding", "LinearLossHead"],
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
            module = LongDecoder(size, F.scaled_dot_product_attention, None)
        fused = device.type == "cuda"
        made = self.fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-5, fused=fused))
        self.model, self.optimizer = made

    def step(self, tokens: Tensor) -> Tensor:
        """One, on whole sequences [B, S + 1]. Returns the loss."""
        with self.strategy.divided((tokens[:, :-1], tokens[:, 1:])) as batch:
            loss = self.model(*batch)
            self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Peer:
    """FSDP2 over layers that PyTorch's `parallelize_module` has divided."""

    def __init__(self, name: str, size: str, ranks: int, device: torch.device) -> None:
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        torch.manual_seed(0)
        with device:
            self.model = Decoder(PRESETS[size])
        shape = (dist.get_world_size() // ranks, ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
        parallelize_module(self.model, mesh["tensor"], _torch_plan())
        if name == COMPILED_PEER:
            for block in self.model.blocks:
                block.compile()
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in (self.model.embedding, *self.model.blocks, self.model.head, self.model):
            fsdp.fully_shard(unit, mesh=mesh["data"], mp_policy=policy)
        # One fused step takes DTensors of one mesh: those of norms are not on the tensor axis.
        norms = {id(one) for one in self.model.parameters() if one.ndim == 1}
        groups = [
            [one for one in self.model.parameters() if (id(one) in norms) == is_norm] for is_norm in (True, False)
        ]
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-5, fused=fused)

    def step(self, tokens: Tensor) -> Tensor:
        """One, on whole sequences [B, S + 1]. Returns the loss."""
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().full_tensor()


def _torch_plan() -> dict[str, Any]:
    """As `TENSOR_PLAN`. Projections of one input share it as one DTensor, so that its gradients are added up before one all-reduce."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    whole, tables = Replicate(), (None, None)
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name: styles[style]() for name, style in TENSOR_PLAN.items() if style in styles}
    return plan | {
        "embedding": RowwiseParallel(input_layouts=whole),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(whole, *tables), desired_input_layouts=(whole, *tables)
        ),
        "blocks.*.feed_forward": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def build(name: str, args: argparse.Namespace, device: torch.device) -> Ours | Peer:
    """A row's engine, by name."""
    kind = Peer if name in (PEER, COMPILED_PEER) else Ours
    return kind(name, args.size, args.ranks, device)


def sequence(name: str, args: argparse.Namespace, length: int, device: torch.device) -> Tensor:
    """Token ids [1, S + 1]: of `length` tokens for a group of ranks, or of that part of them for one rank."""
    is_data = name in (DATA, DATA_KEPT)
    own = length // args.ranks if is_data else length
    place = dist.get_rank() if is_data else dist.get_rank() // args.ranks
    draw = torch.Generator(device).manual_seed(1 + place)
    return torch.randint(0, PRESETS[args.size].vocab, (1, own + 1), generator=draw, device=device)


def state_of(optimizer: Any) -> float:
    """GiB of what an optimizer updates on this rank and of its state."""
    held: list[Any] = [one for group in optimizer.param_groups for one in group["params"]]
    held += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in held]
    return sum(one.numel() * one.element_size() for one in local) / GIB


def memory(args: argparse.Namespace, device: torch.device) -> None:
    """GiB of each engine alone: weights and optimizer state, all that is allocated after two steps, and the peak of these."""

    def rows() -> Iterator[list[str]]:
        for name in args.rows:
            engine = build(name, args, device)
            forget(device)
            tokens = sequence(name, args, args.memory, device)
            losses = [engine.step(tokens).item() for _ in range(2)]
            peak = peak_of(device)
            gc.collect()
            left = torch.cuda.memory_allocated() / GIB if device.type == "cuda" else float("nan")
            figures = (state_of(engine.optimizer), left, peak)
            yield [name, *(f"{figure:.3f}" for figure in figures), *(f"{loss:.4f}" for loss in losses)]
            del engine
            forget(device)

    head = [f"{args.memory:,} tokens for {args.ranks} ranks", "weights and state GiB", "allocated after step 2", "peak"]
    print_table([*head, "first loss", "second loss"], 1, rows())


def speed(args: argparse.Namespace, device: torch.device) -> None:
    """Milliseconds of a step, rows in turn."""
    engines = {name: build(name, args, device) for name in args.rows}
    seconds: dict[str, list[float]] = {name: [] for name in args.rows}
    synchronize = torch.cuda.synchronize if device.type == "cuda" else nullcontext
    for turn in range(args.rounds + 1):
        for name, engine in engines.items():
            tokens = sequence(name, args, args.speed, device)
            synchronize()
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(args.steps):
                engine.step(tokens)
            synchronize()
            if turn:  # the first is for caches and plans
                seconds[name].append((time.perf_counter() - begun) / args.steps)
    groups = dist.get_world_size() // args.ranks
    others = [name for name in (DATA, PEER) if name in args.rows]
    head = [f"{groups} x {args.speed:,} tokens", "step ms", "spread", "tokens/s", *(f"of {name}" for name in others)]
    rows = (
        [
            name,
            f"{median(own) * 1e3:,.1f}",
            f"{max(own) / min(own):.3f}",
            f"{groups * args.speed / median(own):,.0f}",
            *(f"{median(own) / median(seconds[other]):.3f}" for other in others),
        ]
        for name, own in seconds.items()
    )
    print_table(head, 1, rows)


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure a tensor axis.")
    parser.add_argument("--size", choices=PRESETS, default="1b")
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[DATA, TENSOR, PEER, COMPILED_PEER])
    parser.add_argument("--ranks", type=int, help="of a tensor group (default: all)")
    parser.add_argument("--speed", type=int, metavar="LENGTH", help="time of a step with this many tokens in a group")
    parser.add_argument(
        "--memory", type=int, metavar="LENGTH", help="memory of a step with this many tokens in a group"
    )
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    parser.add_argument("--rounds", type=int, default=6)
    return parser.parse_args()


def main() -> None:
    """Measure what was asked for."""
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    with process_group(args.accelerator) as device:
        args.ranks = args.ranks or dist.get_world_size()
        if args.memory:
            memory(args, device)
        if args.speed:
            speed(args, device)


if __name__ == "__main__":
    main()
