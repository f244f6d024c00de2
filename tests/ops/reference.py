"""What the functions of lightning_mfsdp.ops must equal: the same by plain PyTorch, with all logits in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def eager_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def eager_logprobs(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, 0 where ignored."""
    counted = target != IGNORED
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return picked.where(counted, 0), entropy.where(counted, 0)


def eager_loss(logits: Tensor, target: Tensor, reduction: str, label_smoothing: float, z_loss: float) -> Tensor:
    counted = target != IGNORED
    each = F.cross_entropy(
        logits, target, reduction="none", ignore_index=IGNORED, label_smoothing=label_smoothing
    ) + z_loss * logits.logsumexp(-1).square().where(counted, 0)
    return {"none": each, "sum": each.sum(), "mean": each.sum() / counted.sum()}[reduction]


def large_logits(offset: float, temperature: float) -> tuple[Tensor, Tensor, float]:
    """Float32 logits and targets, and what a rounding of the largest `z` is worth: no error of results may grow faster than `z`."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 64, generator=generator) + offset
    rounding = torch.finfo(torch.float32).eps * float(logits.abs().max()) / temperature
    return logits.requires_grad_(), torch.randint(64, (200,), generator=generator), rounding


LARGE = ((0.0, 1.0), (400.0, 1.0), (-1000.0, 1.0), (1000.0, 1.0), (0.0, 0.1), (100.0, 0.1))
"""Offsets of logits, and temperatures."""


def problem(
    tokens: int, width: int, vocab: int, *, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias (all wanting gradients) and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in ((tokens, width), (vocab, width), (vocab,))
    )
    target = torch.randint(vocab, (tokens,), generator=generator)
    target[::5] = IGNORED
    return hidden, weight, bias, target.to(device)
