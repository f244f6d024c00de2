"""linear_cross_entropy: the loss of a linear layer over a large vocabulary, without keeping its logits.

The gradient of a mean or a sum is known up to one number, the gradient of the loss itself. So it can be computed in forward, while the
logits exist; backward multiplies it by that number. That is three products with the weight instead of four. It needs tiles that hold
the whole vocabulary, and with them a sum as large as the weight. In bfloat16 that is the gradient to such a weight itself. In float32 it is
twice that, so if tokens are fewer than token ids, four products with the smaller sum need less memory
(docs/benchmarks/2026-11-22-logprobs.md has both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_mfsdp.ops.inputs import (
    SoftmaxOptions,
    check_choice,
    check_fraction,
    check_not_negative,
    flat_hidden,
    flat_target,
    uncompiled,
)
from lightning_mfsdp.ops.linear import Projection, ProjectionGradients, Tiling, Wanted
from lightning_mfsdp.ops.softmax_statistics import counted, describe_linear, is_token, log_probability, wanted_by
from lightning_mfsdp.ops.tiles import LSE, NUMBERS, TARGET, TOTAL, slices, wide_dtype

__all__ = ["linear_cross_entropy"]


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """The loss of one token: `lse - (1 - smoothing) * z[target] - smoothing * mean(z) + z_loss * lse ** 2`."""

    options: SoftmaxOptions
    smoothing: float
    z_loss: float
    num_ids: int  # of this rank

    def of_tokens(self, statistics: Tensor, target: Tensor) -> Tensor:
        """`[T]` from statistics `[4, T]`; 0 where ignored."""
        loss = -log_probability(statistics, target, self.num_ids, self.options)
        if self.smoothing:
            spread = statistics[TARGET] - statistics[TOTAL] / (self.num_ids * self.options.num_parts)
            loss = loss + self.smoothing * self._where_counted(spread, target)
        if self.z_loss:
            loss = loss + self.z_loss * self._where_counted(statistics[LSE].square(), target)
        return loss

    def _where_counted(self, values: Tensor, target: Tensor) -> Tensor:
        return values.where(is_token(target, self.num_ids, self.options), 0)

    def factors(self, lse: Tensor, target: Tensor) -> Tensor:
        """`[4, T]`: the factors a, b, c and d of the sum over tokens, in the formula of tiles.py."""
        each = counted(lse, target, self.num_ids, self.options)
        factors = lse.new_zeros(NUMBERS, *lse.shape)
        factors[0] = each * (1 + 2 * self.z_loss * lse)
        factors[2] = each * (self.smoothing - 1)
        factors[3] = each * (-self.smoothing / self.num_ids)
        return factors


@uncompiled
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    token_chunk: int | None = None,
    sum_dtype: torch.dtype | None = None,
    ignore_index: int = -100,
    vocab_group: dist.ProcessGroup | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy of `softmax(hidden @ weight.T + bias)`, without ever storing all logits.

    A mean or sum of no fewer tokens than token ids has its gradients computed in forward, tile by tile of tokens; so has one whose logits
    fit into one tile, and one with `token_chunk` or sums in bfloat16. Anything else (fewer tokens, a second backward by
    `retain_graph=True`, `reduction="none"`, a split vocabulary) recomputes logits in backward, as `linear_logprobs` does.

    Args:
        hidden: As in `linear_logprobs`, as are the others that are not documented here.
        weight: `[V, H]`.
        target: Token ids, int64 of shape `[...]`.
        bias: `[V]`.
        temperature: Logits are divided by it.
        softcap: Before that, logits become `softcap * tanh(logits / softcap)`.
        token_chunk: Tokens of a tile; `None`: tiles of 64 MiB, or of a quarter of the memory of `hidden` and `weight` if that is more.
        sum_dtype: Dtype in which a gradient is summed over tiles; see `linear_logprobs`.
        ignore_index: Targets with this value count neither for the loss nor for the mean.
        vocab_group: Its ranks have equal parts of the vocabulary, in order.
        reduction: "mean" over the tokens that count, "sum", or "none" for the loss of each token.
        label_smoothing: Share of each target that is spread over the whole vocabulary.
        z_loss: Adds `z_loss * log(sum(exp(logits))) ** 2` to each token's loss, which keeps logits from drifting.

    Returns:
        The loss in float32 (float64 for float64): 0-D, or `[...]` for "none". If every target is ignored it is 0, and differentiable.

    Raises:
        ValueError: Shapes or dtypes that do not fit, a number out of its range, or a sharded weight.
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    check_fraction("label_smoothing", label_smoothing)
    check_not_negative("z_loss", z_loss)
    options = SoftmaxOptions(
        temperature=temperature,
        softcap=softcap,
        token_chunk=token_chunk,
        sum_dtype=sum_dtype,
        ignore_index=ignore_index,
        vocab_group=vocab_group,
    )
    tokens = flat_hidden(hidden, weight, bias, "linear_cross_entropy")
    options.check_sums(tokens.dtype)
    ids = flat_target(target, hidden.shape[:-1], weight.shape[0], options, "linear_cross_entropy")
    loss = _Loss(options=options, smoothing=label_smoothing, z_loss=z_loss, num_ids=weight.shape[0])
    has_whole_rows = Tiling.for_gradients(tokens, weight, token_chunk).vocabulary >= weight.shape[0]
    makes_logits_once = has_whole_rows or sum_dtype is torch.bfloat16
    if reduction == "none" or vocab_group is not None or not (makes_logits_once and torch.is_grad_enabled()):
        each = loss.of_tokens(describe_linear(tokens, weight, bias, ids, options), ids)
        if reduction == "none":
            return each.view(target.shape)
        total = each.sum()
    else:
        with torch.autocast(hidden.device.type, enabled=False):
            total = _SumOfLosses.apply(tokens, weight, bias, ids, loss)
    if reduction == "sum":
        return total
    return total / (ids != ignore_index).sum().clamp(min=1)


class _SumOfLosses(torch.autograd.Function):
    """Its forward has computed the gradients of the sum. The first backward takes them; another one recomputes them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: _Loss) -> Tensor:
        projection = loss.options.projection(hidden, weight, bias, target)
        statistics, gradients = _forward_and_backward(projection, loss, wanted_by(ctx, (hidden, weight, bias)))
        ctx.save_for_backward(hidden, weight, bias, target, statistics)
        ctx.loss, ctx.gradients = loss, gradients
        return loss.of_tokens(statistics, target).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients: ProjectionGradients | None = ctx.gradients
        ctx.gradients = None
        if gradients is not None:
            return *gradients.results(grad), None, None
        hidden, weight, bias, target, statistics = ctx.saved_tensors
        loss: _Loss = ctx.loss
        projection = loss.options.projection(hidden, weight, bias, target)
        factors = loss.factors(statistics[LSE], target) * grad
        wanted = wanted_by(ctx, (hidden, weight, bias))
        again = projection.gradients(statistics[LSE], factors, loss.options.token_chunk, wanted)
        return *again.results(), None, None


def _forward_and_backward(projection: Projection, loss: _Loss, wanted: Wanted) -> tuple[Tensor, ProjectionGradients]:
    """Statistics `[4, T]` and the gradients of the sum of losses, each tile of logits being computed once."""
    hidden, weight = projection.hidden, projection.weight
    tiling = Tiling.for_statistics(hidden, weight, loss.options.token_chunk)
    statistics = hidden.new_empty(NUMBERS, hidden.shape[0], dtype=wide_dtype(hidden.dtype))
    factors = torch.empty_like(statistics)
    gradients, memory, columns = (
        ProjectionGradients(projection, tiling, wanted),
        projection.memory(tiling),
        slice(0, len(weight)),
    )
    for rows in slices(hidden.shape[0], tiling.tokens):
        tile = projection.logits(rows, columns, memory)
        projection.describe(rows, tile, statistics)
        factors[:, rows] = loss.factors(statistics[LSE, rows], projection.target[rows])
        if any(wanted):
            projection.differentiate(rows, columns, tile, statistics[LSE], factors)
            gradients.add(projection, rows, columns, tile)
    return statistics, gradients
