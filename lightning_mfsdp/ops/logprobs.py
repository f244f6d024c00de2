"""Computes log-probabilities and entropies over a large vocabulary, for reinforcement learning, distillation and scoring.

Both are those of `softmax(logits / temperature)`, and differentiable together.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.ops.inputs import SoftmaxOptions, flat_hidden, flat_target, refuse_integers, uncompiled
from lightning_mfsdp.ops.softmax_statistics import describe_linear, describe_logits, entropy, log_probability

__all__ = ["chunked_logprobs", "linear_logprobs"]


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    token_chunk: int | None = ...,
    sum_dtype: torch.dtype | None = ...,
    ignore_index: int = ...,
    vocab_group: dist.ProcessGroup | None = ...,
    return_entropy: Literal[False] = ...,
    entropy_requires_grad: bool = ...,
) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    token_chunk: int | None = ...,
    sum_dtype: torch.dtype | None = ...,
    ignore_index: int = ...,
    vocab_group: dist.ProcessGroup | None = ...,
    return_entropy: Literal[True],
    entropy_requires_grad: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@uncompiled
def linear_logprobs(
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
    return_entropy: bool = False,
    entropy_requires_grad: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target under `softmax(hidden @ weight.T + bias)`, without ever storing all logits.

    Logits are computed for a tile of tokens at a time, and recomputed in backward. Saved between the two are the arguments and four
    numbers for each token.

    Args:
        hidden: `[..., H]`; its dtype (or that of autocast) is the one of the products.
        weight: `[V, H]`. Parameters of a sharded module only while its unit runs (see `LinearLossHead`).
        target: Token ids, int64 of shape `[...]`. Outside the vocabulary: a ValueError on the CPU; elsewhere the result is not a number.
        bias: `[V]`.
        temperature: Logits are divided by it.
        softcap: Before that, logits become `softcap * tanh(logits / softcap)`.
        token_chunk: Tokens of a tile; one tile if there are no more. `None`: tiles of 64 MiB, or of a quarter of the memory of `hidden`
            and `weight` if that is more; in backward they are parts of the vocabulary if there are fewer tokens than token ids.
        sum_dtype: Dtype of the sum over tiles of the gradient to `weight` or, with such parts, to `hidden`. `None`: float32 (float64 for
            float64), rounded once. `torch.bfloat16`, for products in it: rounded once a tile, and for arguments in it half the memory.
        ignore_index: Targets with this value have log-probability 0, entropy 0, and no gradient.
        vocab_group: Its ranks have equal parts of the vocabulary, in order, and the same `hidden` and `target`. One all-gather of four
            numbers a token in forward; one all-reduce of the gradient to `hidden` in backward.
        return_entropy: Also the entropy of each distribution, in nats.
        entropy_requires_grad: False: the entropy is not differentiated.

    Returns:
        Log-probabilities `[...]`, float32 (float64 for float64); with `return_entropy` a pair of them and the entropies.

    Raises:
        ValueError: Shapes or dtypes that do not fit, a number out of its range, or a sharded weight.
    """
    options = SoftmaxOptions(
        temperature=temperature,
        softcap=softcap,
        token_chunk=token_chunk,
        sum_dtype=sum_dtype,
        ignore_index=ignore_index,
        vocab_group=vocab_group,
    )
    tokens = flat_hidden(hidden, weight, bias, "linear_logprobs")
    options.check_sums(tokens.dtype)
    ids = flat_target(target, hidden.shape[:-1], weight.shape[0], options, "linear_logprobs")
    statistics = describe_linear(tokens, weight, bias, ids, options)
    return _results(statistics, ids, target, weight.shape[0], options, return_entropy, entropy_requires_grad)


@overload
def chunked_logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = ...,
    softcap: float | None = ...,
    token_chunk: int | None = ...,
    ignore_index: int = ...,
    vocab_group: dist.ProcessGroup | None = ...,
    return_entropy: Literal[False] = ...,
    entropy_requires_grad: bool = ...,
) -> Tensor: ...
@overload
def chunked_logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = ...,
    softcap: float | None = ...,
    token_chunk: int | None = ...,
    ignore_index: int = ...,
    vocab_group: dist.ProcessGroup | None = ...,
    return_entropy: Literal[True],
    entropy_requires_grad: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@uncompiled
def chunked_logprobs(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    token_chunk: int | None = None,
    ignore_index: int = -100,
    vocab_group: dist.ProcessGroup | None = None,
    return_entropy: bool = False,
    entropy_requires_grad: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target under existing logits, without a copy of them in float32.

    Saved for backward are the logits themselves; nothing ever writes to them. If you have hidden states and a weight,
    `linear_logprobs` needs far less memory.

    Args:
        logits: `[..., V]`, in any floating-point dtype; need not be contiguous.
        target: As in `linear_logprobs`, as are the others.
        temperature: Logits are divided by it.
        softcap: Before that, logits become `softcap * tanh(logits / softcap)`.
        token_chunk: Tokens handled by one call of the kernel; `None`: as many as are contiguous in memory.
        ignore_index: Targets with this value have log-probability 0, entropy 0, and no gradient.
        vocab_group: Its ranks have equal parts of the last dim, in order. One all-gather of four numbers a token, in forward.
        return_entropy: Also the entropy of each distribution, in nats.
        entropy_requires_grad: False: the entropy is not differentiated.

    Returns:
        Log-probabilities `[...]`, float32 (float64 for float64); with `return_entropy` a pair of them and the entropies.

    Raises:
        ValueError: Shapes or dtypes that do not fit, or a number out of its range.
    """
    options = SoftmaxOptions(
        temperature=temperature,
        softcap=softcap,
        token_chunk=token_chunk,
        ignore_index=ignore_index,
        vocab_group=vocab_group,
    )
    refuse_integers(logits, "chunked_logprobs")
    ids = flat_target(target, logits.shape[:-1], logits.shape[-1], options, "chunked_logprobs")
    statistics = describe_logits(logits, ids, options)
    return _results(statistics, ids, target, logits.shape[-1], options, return_entropy, entropy_requires_grad)


def _results(
    statistics: Tensor,
    ids: Tensor,
    target: Tensor,
    num_ids: int,
    options: SoftmaxOptions,
    return_entropy: bool,
    entropy_requires_grad: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    logprobs = log_probability(statistics, ids, num_ids, options).view(target.shape)
    if not return_entropy:
        return logprobs
    numbers = statistics if entropy_requires_grad else statistics.detach()
    return logprobs, entropy(numbers, ids, num_ids, options).view(target.shape)
