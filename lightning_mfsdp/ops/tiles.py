"""Computations on one tile of logits: numbers that describe each row, and the gradient of any function of them.

A tile is `[t, v]`, some tokens by some of the vocabulary. `z` are its logits after softcap and temperature, `p = softmax(z)` over the
whole vocabulary. Each row is described by four numbers (`LSE`, `MEAN`, `TARGET`, `TOTAL`); log-probability, entropy, cross-entropy with
label smoothing and z-loss are all functions of them. So one formula gives the gradient of all of them:

    dz[j] = p[j] * (a + b * log p[j]) + c * [j is the target] + d

This file is the reference, for every device and dtype. triton_softmax.py computes the same on CUDA without temporary memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["LSE", "MEAN", "NUMBERS", "TARGET", "TOTAL", "Shaping", "TileMath", "TorchMath", "slices", "wide_dtype"]

# Rows of a `[4, T]` tensor of statistics.
LSE, MEAN, TARGET, TOTAL = range(
    4
)  # log sum exp z; sum of p * z; z of the target, 0 if it is not in the tile; sum of z
NUMBERS = 4

# Masked logits are minus infinity, and 0 * inf is NaN. This is low enough for a probability of exactly 0.
LOWEST = -1e30

# Temporary memory of the reference, in elements of the wide dtype.
_BLOCK_NUMEL = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """How logits become `z`, of which the softmax is taken.

    Args:
        temperature: `z = logits / temperature`, after the softcap.
        softcap: `softcap * tanh(logits / softcap)` instead of the logits; `None`: none.
    """

    temperature: float = 1.0
    softcap: float | None = None


class TileMath(Protocol):
    """Both functions on tiles; `first_id` is the token id of a tile's first column, so a target may lie outside it."""

    def statistics(self, logits: Tensor, target: Tensor, shaping: Shaping, first_id: int, out: Tensor) -> None:
        """Describe the rows of `logits` `[t, v]` in `out` `[4, t]`."""

    def gradient(
        self,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        factors: Tensor,
        shaping: Shaping,
        first_id: int,
        out: Tensor,
    ) -> None:
        """Write to `out` `[t, v]` the gradient to `logits`; it may be the same memory. `factors` `[4, t]` are a, b, c and d."""


class TorchMath:
    """The reference, a few rows at a time."""

    def statistics(self, logits: Tensor, target: Tensor, shaping: Shaping, first_id: int, out: Tensor) -> None:
        """Describe the rows of `logits` `[t, v]` in `out` `[4, t]`, in float32 or better."""
        for rows in _blocks(logits):
            z = _shaped(logits[rows], shaping)
            column, inside = _columns(target[rows], first_id, z.shape[1])
            out[TARGET, rows] = torch.where(inside, z.gather(1, column[:, None])[:, 0], 0)
            out[TOTAL, rows] = z.sum(-1)
            # Relative to the peak, and by their own sum: probabilities of a rounded lse do not add up to 1, and z may be large.
            peak = z.amax(-1)
            weights = z.sub_(peak[:, None]).exp()
            weight_sum = weights.sum(-1)
            out[MEAN, rows] = torch.linalg.vecdot(weights, z).div_(weight_sum).add_(peak)
            out[LSE, rows] = weight_sum.log_().add_(peak)

    def gradient(
        self,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        factors: Tensor,
        shaping: Shaping,
        first_id: int,
        out: Tensor,
    ) -> None:
        """Write to `out` `[t, v]` the gradient to logits, `p * (a + b * log p) + c * [target] + d` times the slope of `z`."""
        for rows in _blocks(logits):
            z = _shaped(logits[rows], shaping)
            slope = _slope(z, shaping)
            a, b, c, d = factors[:, rows, None]
            log_p = z.sub_(lse[rows, None])
            grad = log_p.exp().mul_(log_p.mul_(b).add_(a)).add_(d)
            column, inside = _columns(target[rows], first_id, grad.shape[1])
            grad.scatter_add_(1, column[:, None], torch.where(inside[:, None], c, 0))
            out[rows] = grad.mul_(slope)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def slices(length: int, step: int) -> Iterator[slice]:
    """Consecutive slices of `range(length)`, of `step` numbers each; the last one may be shorter."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _blocks(logits: Tensor) -> Iterator[slice]:
    return slices(logits.shape[0], max(1, _BLOCK_NUMEL // max(1, logits.shape[1])))


def _shaped(logits: Tensor, shaping: Shaping) -> Tensor:
    """`z`, in memory of its own."""
    z = logits.to(wide_dtype(logits.dtype), copy=True)
    if shaping.softcap is not None:
        z.div_(shaping.softcap).tanh_().mul_(shaping.softcap)
    if shaping.temperature != 1.0:
        z.div_(shaping.temperature)
    return z.clamp_(min=LOWEST)


def _slope(z: Tensor, shaping: Shaping) -> Tensor | float:
    """Derivative of `z` with respect to the logits."""
    if shaping.softcap is None:
        return 1 / shaping.temperature
    capped = z * (shaping.temperature / shaping.softcap)  # the tanh
    return capped.square_().neg_().add_(1).div_(shaping.temperature)


def _columns(target: Tensor, first_id: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Each target's column, clamped into the tile, and whether it is in it."""
    column = target - first_id
    inside = (column >= 0) & (column < num_columns)
    return column.clamp(0, num_columns - 1), inside
