"""Tokens per second of grouped experts and of Hugging Face's own implementations, forward and backward of one layer, on one device.

    python examples/benchmark/moe.py
    python examples/benchmark/moe.py --experts 8 --top-k 2 --hidden 4096 --width 14336 --tokens 4096
    python examples/benchmark/moe.py --capacity 4

The layer is Qwen3-MoE's, with the same weights for all. Rounds alternate between the implementations. `--capacity` adds grouped experts
in a buffer that is so many times longer than what is live, as under expert parallelism: their cost should follow what is live.
Prints one JSON line for each, starting with RESULT, and a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from lightning_mfsdp.moe import GroupedExperts

THEIRS = ("eager", "batched_mm", "grouped_mm")


class Theirs(nn.Module):
    """Hugging Face's experts under one of its implementations."""

    def __init__(self, config: Qwen3MoeConfig, implementation: str, like: GroupedExperts) -> None:
        super().__init__()
        config._experts_implementation = implementation
        self.experts = Qwen3MoeExperts(config)
        self.experts.gate_up_proj, self.experts.down_proj = like.weight_in, like.weight_out

    def forward(self, hidden: Tensor, index: Tensor, probabilities: Tensor) -> Tensor:
        """As `GroupedExperts.forward`."""
        return self.experts(hidden, index, probabilities.to(hidden.dtype))


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Speed of one layer of experts.")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768, help="inner width of an expert")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--capacity", type=float, nargs="*", default=[4.0], help="lengths of buffers, relative to what is live"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def subjects(args: argparse.Namespace) -> dict[str, Any]:
    """What is measured, by name; all share their weights."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    sizes = {"num_experts": args.experts, "hidden_size": args.hidden, "intermediate_size": args.width}
    ours = GroupedExperts(**sizes, device=args.device, dtype=dtype)
    found: dict[str, Any] = {"GroupedExperts": ours}
    for capacity in args.capacity:
        found[f"GroupedExperts, buffer x {capacity:g}"] = in_longer_buffer(ours, capacity)
    for implementation in THEIRS:
        config = Qwen3MoeConfig(
            num_experts=args.experts,
            num_experts_per_tok=args.top_k,
            hidden_size=args.hidden,
            moe_intermediate_size=args.width,
        )
        with torch.device("meta"):
            found[f"transformers {implementation}"] = Theirs(config, implementation, ours)
    return found


def in_longer_buffer(experts: GroupedExperts, capacity: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same rows, and choices of experts elsewhere behind them."""

    def run(hidden: Tensor, index: Tensor, probabilities: Tensor) -> Tensor:
        more = int(index.shape[1] * (capacity - 1))
        index = torch.cat((index, index.new_full((len(index), more), -1)), dim=1)
        probabilities = torch.cat((probabilities, probabilities.new_zeros(len(index), more)), dim=1)
        return experts.compute(hidden, index, probabilities)

    return run


def measure(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], weights: list[Tensor]
) -> dict[str, float]:
    """Seconds of one forward and backward, GiB saved for backward, and the peak of what was allocated beyond inputs and weights."""
    on_gpu = inputs[0].is_cuda
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    known = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *weights)}
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(*inputs)
    output.backward(torch.ones_like(output))
    if on_gpu:
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    for tensor in (*inputs, *weights):
        tensor.grad = None
    return {
        "seconds": took,
        "saved_gib": sum(size for pointer, size in saved.items() if pointer not in known) / 2**30,
        "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else 0.0,
    }


def inputs_of(args: argparse.Namespace) -> list[Tensor]:
    """Tokens, routes to experts of uneven popularity, and their weights."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(args.device, dtype)
    scores = torch.randn(args.tokens, args.experts, generator=generator) + torch.linspace(0, 1, args.experts)
    best, index = scores.topk(args.top_k)
    return [hidden.requires_grad_(), index.to(args.device), best.softmax(-1).to(args.device).requires_grad_()]


def main() -> None:
    """Measure in alternating rounds and print."""
    args = parse_args()
    found, inputs = subjects(args), inputs_of(args)
    weights = list(found["GroupedExperts"].parameters())
    results: dict[str, list[dict[str, float]]] = {name: [] for name in found}
    failed: dict[str, str] = {}
    for attempt in range(args.rounds + 2):  # the first two compile and warm up
        for name, run in found.items():
            if name in failed:
                continue
            try:
                measured = measure(run, inputs, weights)
            except torch.OutOfMemoryError:
                failed[name] = "out of memory"
                continue
            if attempt >= 2:
                results[name].append(measured)
    base = results["GroupedExperts"]
    ours = median(one["seconds"] for one in base)
    print(
        "| implementation | ms | tokens/s | time relative to GroupedExperts | saved GiB | peak GiB |\n|---|--:|--:|--:|--:|--:|"
    )
    for name, measured in results.items():
        line: dict[str, Any] = {"implementation": name, **vars(args)}
        if name in failed:
            print("RESULT " + json.dumps({**line, "failed": failed[name]}))
            print(f"| {name} | {failed[name]} | | | | |")
            continue
        took = median(one["seconds"] for one in measured)
        figures = {"ms": took * 1e3, "tokens_per_s": args.tokens / took, "ratio": took / ours}
        print("RESULT " + json.dumps({**line, **figures, **measured[-1]}))
        print(
            f"| {name} | {figures['ms']:.2f} | {figures['tokens_per_s']:,.0f} | {figures['ratio']:.2f} | "
            f"{measured[-1]['saved_gib']:.2f} | {measured[-1]['peak_gib']:.2f} |"
        )


if __name__ == "__main__":
    main()
