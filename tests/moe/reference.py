"""Mixtures of experts the slow way: every choice of every token by itself, left to autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mfsdp.moe import GroupedExperts


def looped(
    hidden: Tensor, expert_index: Tensor, probabilities: Tensor, weight_in: Tensor, weight_out: Tensor, activation: str
) -> Tensor:
    """What `GroupedExperts` computes, of stacked weights."""
    output = torch.zeros_like(hidden)
    for token, experts in enumerate(expert_index.tolist()):
        for choice, expert in enumerate(experts):
            if not 0 <= expert < len(weight_in):
                continue
            projected = weight_in[expert] @ hidden[token]
            if activation == "swiglu":
                gate, up = projected.chunk(2)
                inner = F.silu(gate) * up
            else:
                inner = F.gelu(projected)
            row = torch.zeros_like(output)
            row[token] = probabilities[token, choice] * (weight_out[expert] @ inner)
            output = output + row
    return output


def routed(tokens: int, top_k: int, experts: int, hidden: int, *, seed: int = 0, dtype=torch.float64):
    """(hidden, expert_index, probabilities): different experts for each token, gradients wanted."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    probabilities, index = scores.topk(top_k)
    values = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    return values.to(dtype).requires_grad_(), index, probabilities.to(dtype).requires_grad_()


def made(activation: str = "swiglu", *, experts: int = 5, dtype=torch.float64, seed: int = 1, **options):
    """Experts with weights large enough for gradients to show."""
    torch.manual_seed(seed)
    sizes = {"num_experts": experts, "hidden_size": 6, "intermediate_size": 8, "init_std": 0.5}
    return GroupedExperts(**{**sizes, **options}, activation=activation, dtype=dtype)


def gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Of a sum that weighs every element differently."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    return list(torch.autograd.grad((output * weights).sum(), inputs))
