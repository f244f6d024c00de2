"""One layer of experts, forward and backward, on one device: this package's, and Hugging Face's own implementations.

The layer is Qwen3-MoE's, with weights of the same distribution for all, and routes to experts of uneven popularity.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from examples.benchmark.logprobs import Clock, forget
from examples.benchmark.moe_rows import Row, Sizes
from lightning_mfsdp.moe import GroupedExperts

__all__ = ["IMPLEMENTATIONS", "OURS", "measure"]

# batched_mm copies the weights of every choice: 20 GB for 256 tokens, 1.2 TB for those of a step.
FEWER = 64

OURS = "GroupedExperts"
IMPLEMENTATIONS = (OURS, f"{OURS} in a buffer x 4", "eager", "batched_mm", "grouped_mm")


class Theirs(nn.Module):
    """Hugging Face's experts under one of its implementations."""

    def __init__(self, sizes: Sizes, implementation: str, like: GroupedExperts) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            num_experts=sizes.experts,
            num_experts_per_tok=sizes.top_k,
            hidden_size=sizes.dim,
            moe_intermediate_size=sizes.width,
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            self.experts = Qwen3MoeExperts(config)
        self.experts.gate_up_proj, self.experts.down_proj = like.weight_in, like.weight_out

    def forward(self, hidden: Tensor, index: Tensor, probabilities: Tensor) -> Tensor:
        """As `GroupedExperts.forward`."""
        return self.experts(hidden, index, probabilities.to(hidden.dtype))


class InLongerBuffer(nn.Module):
    """The same rows, and choices of experts elsewhere behind them: what a rank computes in a buffer made for more than it gets."""

    def __init__(self, experts: GroupedExperts, times: int) -> None:
        super().__init__()
        self.experts, self.times = experts, times

    def forward(self, hidden: Tensor, index: Tensor, probabilities: Tensor) -> Tensor:
        """As `GroupedExperts.forward`."""
        more = index.shape[1] * (self.times - 1)
        index = torch.cat((index, index.new_full((len(index), more), -1)), dim=1)
        probabilities = torch.cat((probabilities, probabilities.new_zeros(len(index), more)), dim=1)
        return self.experts(hidden, index, probabilities)


def made(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A layer by name."""
    torch.manual_seed(0)
    ours = GroupedExperts(
        num_experts=sizes.experts,
        hidden_size=sizes.dim,
        intermediate_size=sizes.width,
        device=device,
        dtype=dtype,
    )
    if name == OURS:
        return ours
    return InLongerBuffer(ours, 4) if name.startswith(OURS) else Theirs(sizes, name, ours)


def inputs_of(tokens: int, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Tokens, routes to experts of uneven popularity, and their weights."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, sizes.dim, generator=generator).to(device, dtype)
    scores = torch.randn(tokens, sizes.experts, generator=generator) + torch.linspace(0, 1, sizes.experts)
    best, index = scores.topk(sizes.top_k)
    return [hidden.requires_grad_(), index.to(device), best.softmax(-1).to(device).requires_grad_()]


def measure(row: Row, device: torch.device) -> Iterator[dict[str, Any]]:
    """For few tokens, where all implementations have memory enough, and for those of a step."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = made(row.name, row.sizes, device, dtype)
    for tokens in (max(1, row.sizes.tokens // FEWER), row.sizes.tokens):
        inputs = inputs_of(tokens, row.sizes, device, dtype)
        yield {"tokens": tokens, **timed(layer, inputs, row.steps, device)}


def timed(layer: nn.Module, inputs: list[Tensor], steps: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of one forward and backward, GiB saved for backward, and the peak beyond inputs and weights."""
    on_gpu = device.type == "cuda"
    leaves = [*layer.parameters(), *inputs]
    known = {tensor.untyped_storage().data_ptr() for tensor in leaves}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def once() -> Tensor:
        output = layer(*inputs)
        output.backward(torch.ones_like(output))
        for tensor in leaves:
            tensor.grad = None
        return output.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        size = float(once().float().square().mean())
    for _ in range(2):
        once()
    forget(device)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    clock = Clock(device)
    clock.stamp()
    for _ in range(steps):
        once()
        clock.stamp()
    step_ms = median(clock.between())
    return {
        "step_ms": step_ms,
        "tokens_per_s": len(inputs[0]) / step_ms * 1e3,
        "saved_gib": sum(saved.values()) / 2**30,
        "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else 0.0,
        "mean_square": size,
    }
