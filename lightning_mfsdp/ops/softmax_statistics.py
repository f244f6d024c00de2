"""The autograd functions on which log-probabilities, entropies and losses are built.

Their result is the four numbers that describe each token (tiles.py), differentiable; what the public functions return are a few
operations on `[T]` tensors after that. One function for all of them means one backward: log-probability and entropy cannot interfere
with each other, and what was saved is never written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_mfsdp.ops.choice import math_for
from lightning_mfsdp.ops.inputs import SoftmaxOptions
from lightning_mfsdp.ops.linear import Wanted
from lightning_mfsdp.ops.tiles import LOWEST, LSE, MEAN, NUMBERS, TARGET, TOTAL, slices, wide_dtype
from lightning_mfsdp.ops.vocabulary import add_over_parts, whole_vocabulary

__all__ = ["counted", "describe_linear", "describe_logits", "entropy", "is_token", "log_probability", "wanted_by"]

# Lower values were minus infinity before they became `LOWEST`.
_MASKED = LOWEST / 2


def describe_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: SoftmaxOptions
) -> Tensor:
    """Statistics `[4, T]` of logits that are never all in memory. `hidden` is `[T, H]` in the compute dtype, the others in any."""
    with torch.autocast(hidden.device.type, enabled=False):
        return _Linear.apply(hidden, weight, bias, target, options)  # type: ignore[no-any-return]


def describe_logits(logits: Tensor, target: Tensor, options: SoftmaxOptions) -> Tensor:
    """Statistics `[4, T]` of existing logits `[..., V]`."""
    return _Logits.apply(logits, target, options)  # type: ignore[no-any-return]


def is_token(target: Tensor, num_ids: int, options: SoftmaxOptions) -> Tensor:
    """Which targets are token ids, bool `[T]`. The others are ignored, or errors detected too late to refuse."""
    return (target >= 0) & (target < num_ids * options.num_parts) & (target != options.ignore_index)


def counted(lse: Tensor, target: Tensor, num_ids: int, options: SoftmaxOptions) -> Tensor:
    """`[T]`: 1 for token ids, 0 for others; not a number where there are no probabilities, for all logits are minus infinity."""
    tokens = is_token(target, num_ids, options)
    return tokens.to(lse.dtype).masked_fill(tokens & (lse < _MASKED), torch.nan)


def log_probability(statistics: Tensor, target: Tensor, num_ids: int, options: SoftmaxOptions) -> Tensor:
    """`[T]`: 0 where ignored, and not a number where the target is invalid."""
    ignored = torch.where(target == options.ignore_index, 0.0, torch.nan)
    # Added instead of selected: a masked target has a gradient to the other logits.
    masked = torch.where(statistics[TARGET] < _MASKED, -torch.inf, 0.0).to(statistics.dtype)
    each = (statistics[TARGET] - statistics[LSE] + masked) * counted(statistics[LSE].detach(), target, num_ids, options)
    return torch.where(is_token(target, num_ids, options), each, ignored.to(statistics.dtype))


def entropy(statistics: Tensor, target: Tensor, num_ids: int, options: SoftmaxOptions) -> Tensor:
    """`[T]`: 0 where there is no target."""
    each = (statistics[LSE] - statistics[MEAN]) * counted(statistics[LSE].detach(), target, num_ids, options)
    return each.where(is_token(target, num_ids, options), 0)


def wanted_by(ctx: Any, tensors: tuple[Tensor, Tensor, Tensor | None]) -> Wanted:
    """Dtypes of those of the function's first three inputs that need a gradient."""
    needed = ctx.needs_input_grad[:3]
    first, second, third = (
        tensor.dtype if tensor is not None and need else None for tensor, need in zip(tensors, needed, strict=True)
    )
    return first, second, third


class _Linear(torch.autograd.Function):
    """Keeps its inputs and four numbers a token; logits are recomputed for the backward.

    The weight is saved as it was passed: a parameter of a sharded unit is gathered for the backward, and a copy would not be.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: SoftmaxOptions
    ) -> Tensor:
        part = options.projection(hidden, weight, bias, target).statistics(options.token_chunk)
        statistics = whole_vocabulary(part, options.vocab_group)
        ctx.save_for_backward(hidden, weight, bias, target, statistics)
        ctx.options = options
        return statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, statistics = ctx.saved_tensors
        options: SoftmaxOptions = ctx.options
        projection = options.projection(hidden, weight, bias, target)
        wanted = wanted_by(ctx, (hidden, weight, bias))
        sums = projection.gradients(statistics[LSE], _factors(grad, statistics), options.token_chunk, wanted)
        to_hidden, to_weight, to_bias = sums.results()
        return add_over_parts(to_hidden, options.vocab_group), to_weight, to_bias, None, None


class _Logits(torch.autograd.Function):
    """Saves the logits that it was passed; their gradient has memory of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: SoftmaxOptions) -> Tensor:
        num_ids = logits.shape[-1]
        part = logits.new_empty(NUMBERS, target.numel(), dtype=wide_dtype(logits.dtype))
        for rows, piece in _in_chunks(logits, options.token_chunk):
            math_for(piece).statistics(
                piece, target[rows], options.shaping, options.first_id(num_ids), out=part[:, rows]
            )
        statistics = whole_vocabulary(part, options.vocab_group)
        ctx.save_for_backward(logits, target, statistics)
        ctx.options = options
        return statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, statistics = ctx.saved_tensors
        options: SoftmaxOptions = ctx.options
        num_ids = logits.shape[-1]
        factors = _factors(grad, statistics)
        to_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        flat = to_logits.view(-1, num_ids)
        for rows, piece in _in_chunks(logits, options.token_chunk):
            math_for(piece).gradient(
                piece,
                target[rows],
                statistics[LSE, rows],
                factors[:, rows],
                options.shaping,
                options.first_id(num_ids),
                out=flat[rows],
            )
        return to_logits, None, None


def _factors(grad: Tensor, statistics: Tensor) -> Tensor:
    """The factors a, b, c and d of the one formula in tiles.py, from gradients to the four numbers.

    The derivative of the mean is p * (1 + z - mean) = p * (1 + entropy + log p).
    """
    factors = torch.empty_like(grad, memory_format=torch.contiguous_format)
    factors[0] = grad[LSE] + grad[MEAN] * (1 + statistics[LSE] - statistics[MEAN])
    factors[1] = grad[MEAN]
    factors[2] = grad[TARGET]
    factors[3] = grad[TOTAL]
    return factors


def _in_chunks(logits: Tensor, token_chunk: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Views `[t, V]` of logits `[..., V]`, which need not be contiguous, with their places among all rows."""
    start = 0
    for rows in _matrices(logits):
        for part in slices(rows.shape[0], token_chunk or max(1, rows.shape[0])):
            yield slice(start + part.start, start + part.stop), rows[part]
        start += rows.shape[0]


def _matrices(logits: Tensor) -> Iterator[Tensor]:
    """As few `[t, V]` views as possible without a copy: `logits[:, :-1]` of a batch is one for each row of the batch."""
    if logits.dim() == 1:
        logits = logits[None]
    while logits.dim() > 2 and logits.stride(-3) == logits.stride(-2) * logits.shape[-2]:
        logits = logits.flatten(-3, -2)
    if logits.dim() == 2:
        yield logits
        return
    for part in logits:
        yield from _matrices(part)
