"""context_attention: attention over whole sequences whose queries, keys and values are parts of sequences, for modules of your own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.context_parallel.exchange import gather_sequence, to_heads, to_sequence
from lightning_mfsdp.context_parallel.pattern import Pattern, mask_of, padding_to_mask
from lightning_mfsdp.context_parallel.sharing import ContextParallel, Cut, active

__all__ = [
    "AttentionCall",
    "as_computed",
    "check_length",
    "context_attention",
    "context_positions",
    "gathered_attention",
    "heads_and_sequences",
]


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention: Callable[..., Tensor] | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Scaled dot-product attention over whole sequences, of which this rank has a part.

    With a context axis it exchanges tensors with the other ranks, so all of them must call it equally often. Where sequences are whole
    (no context axis, or a batch that was not divided) it calls `attention` alone. Padding and documents of a divided batch are
    respected. Outputs of padding are unspecified.

    Args:
        query: `[B, H, S/c, D]`.
        key: `[B, Hkv, S/c, D]`; Hkv other than H takes `enable_gqa`.
        value: `[B, Hkv, S/c, Dv]`.
        attention: With the arguments of `F.scaled_dot_product_attention`, which is the default: `(query, key, value, *, attn_mask,
            dropout_p, is_causal, scale, enable_gqa)`. With `context_method="gather"`, `attn_mask` can be a
            `torch.nn.attention.bias.CausalBias`. With "ulysses", queries, keys and values are contiguous in D alone.
        is_causal: Queries attend to no later tokens.
        window: To how many tokens a query attends at most on one side, itself included. `None`: no limit.
        scale: Of products of queries and keys. `None`: 1 / sqrt(D).
        enable_gqa: Several query heads share a key and value head.
        dropout_p: Of attention weights. Each rank draws for its own heads or queries, from the random state of its process: processes with
            equal seeds draw equal masks.

    Returns:
        `[B, H, S/c, Dv]`.

    Raises:
        ShardingError: H is not divisible by the number of context ranks, with `context_method="ulysses"`; a part has another length
            than the batch's division says.
    """
    if window is not None and window < 1:
        raise ShardingError(f"context_attention: window={window} counts the query's own token: expected at least 1")
    pattern = Pattern(causal=is_causal, reach=None if window is None else window - 1)
    function = attention or F.scaled_dot_product_attention
    call = AttentionCall(function, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
    parallel = active()
    if parallel is None or parallel.cut is None:
        return _of_one_rank(call, query, key, value, pattern)
    output: Tensor = _of_parts(parallel, parallel.cut, call, query, key, value, pattern)
    return output


def context_positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Places in whole sequences of the tokens that this rank has.

    Args:
        length: Of this rank's part of a sequence.
        device: Of the result.

    Returns:
        `[length]`, int64; `arange(length)` where sequences are whole.

    Raises:
        ShardingError: The part has another length than the batch's division says.
    """
    parallel = active()
    if parallel is None or parallel.cut is None:
        return torch.arange(length, device=device)
    check_length(parallel, parallel.cut, length, "context_positions")
    chunks = parallel.chunks()
    width = length // len(chunks)
    return torch.cat([torch.arange(index * width, (index + 1) * width, device=device) for index in chunks])


def as_computed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype that attention computes in: autocast would convert them, but after they were exchanged."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors)


def check_length(parallel: ContextParallel, cut: Cut, length: int, where: str) -> None:
    """Refuse sequences that are not this rank's parts of the batch's."""
    if length * parallel.size != cut.length:
        raise ShardingError(
            f"{where}: got sequences of {length} tokens, but this step's batch has {cut.length} tokens divided over {parallel.size}"
            f" context ranks, {cut.length // parallel.size} each. Sequences of other lengths cannot attend here: compute them in"
            " a batch that is not divided."
        )


class AttentionCall:
    """An attention function with its options.

    Args:
        function: With the arguments of `F.scaled_dot_product_attention`.
        dropout_p: Of attention weights.
        scale: Of products; `None`: 1 / sqrt(D).
        enable_gqa: Several query heads may share a key and value head.
    """

    def __init__(
        self, function: Callable[..., Tensor], *, dropout_p: float, scale: float | None, enable_gqa: bool
    ) -> None:
        self._function = function
        self._options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        self._enable_gqa = enable_gqa

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Attention with a mask, or a causal one of queries and keys at the same places, or one of all to all."""
        shared = query.shape[1] // key.shape[1]
        if shared > 1 and not self._enable_gqa:
            raise ShardingError(
                f"context_attention: query has {query.shape[1]} heads and key {key.shape[1]}: pass enable_gqa=True"
            )
        if shared > 1 and type(mask) is Tensor:  # fused kernels take no mask with shared heads
            key, value, shared = _repeated(key, shared), _repeated(value, shared), 1
        return self._function(
            query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=shared > 1, **self._options
        )


def _repeated(tensor: Tensor, times: int) -> Tensor:
    return tensor.repeat_interleave(times, dim=1) if times > 1 else tensor


def _of_one_rank(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
    length = query.shape[2]
    pattern = pattern.within(length)
    if pattern.reach is None:
        return call(query, key, value, None, is_causal=pattern.causal)
    return call(query, key, value, pattern.mask(query.device, (0, length), (0, length)))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_parts(
    parallel: ContextParallel,
    cut: Cut,
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
) -> Tensor:
    with parallel.attending():
        check_length(parallel, cut, query.shape[2], "context_attention")
        check_length(parallel, cut, key.shape[2], "context_attention")
        query, key, value = as_computed(query, key, value)
        pattern = pattern.within(cut.length)
        if parallel.method == "gather":
            return gathered_attention(parallel, cut, call, query, key, value, pattern)
        query, key, value = heads_and_sequences(parallel, query, key, value, "context_attention")
        if _needs_mask(cut, pattern):
            every = (0, cut.length)
            output = call(query, key, value, mask_of(cut, pattern, query.device, every, every))
        else:
            output = call(query, key, value, None, is_causal=pattern.causal)
        return to_sequence((output,), parallel.group)[0]


def _needs_mask(cut: Cut, pattern: Pattern) -> bool:
    return pattern.reach is not None or cut.document is not None or padding_to_mask(cut, pattern) is not None


def heads_and_sequences(
    parallel: ContextParallel, query: Tensor, key: Tensor, value: Tensor, where: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Some heads of whole sequences, of all heads of parts of sequences: `[B, H/c, S, D]` of `[B, H, S/c, D]`.

    Key and value heads are repeated as little as makes their number divisible by c.

    Raises:
        ShardingError: The number of query heads is not divisible by c.
    """
    ranks = parallel.size
    if query.shape[1] % ranks:
        raise ShardingError(
            f"{where}: {query.shape[1]} query heads cannot be divided over {ranks} context ranks. Use context_method='gather', which"
            " divides no heads, or a number of context ranks that divides them."
        )
    times = ranks // math.gcd(key.shape[1], ranks)
    return to_heads((query, _repeated(key, times), _repeated(value, times)), parallel.group)  # type: ignore[return-value]


def gathered_attention(
    parallel: ContextParallel,
    cut: Cut,
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
) -> Tensor:
    """Attention of this rank's queries to all keys: one call for each of its chunks, with the keys that the chunk can attend to."""
    key, value = gather_sequence((key, value), parallel)
    masked = _needs_mask(cut, pattern)
    if not masked and not pattern.causal:
        return call(query, key, value, None)
    outputs = []
    for index, part in zip(parallel.chunks(), query.chunk(len(parallel.chunks()), dim=2), strict=True):
        width = part.shape[2]
        start, stop = index * width, (index + 1) * width
        keys = pattern.keys_of(start, stop, cut.length)
        near = key[:, :, slice(*keys)], value[:, :, slice(*keys)]
        if masked:
            outputs.append(call(part, *near, mask_of(cut, pattern, part.device, (start, stop), keys)))
        elif start == 0:
            outputs.append(call(part, *near, None, is_causal=True))
        else:
            outputs.append(call(part, *near, causal_lower_right(width, stop)))
    return torch.cat(outputs, dim=2)
