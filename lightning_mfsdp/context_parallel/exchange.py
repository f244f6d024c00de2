"""Differentiable collectives along a sequence dim: all-to-all between sequence parts and head parts, all-gather of whole sequences.

All ranks of a group must make the same calls in the same order, in forward and in backward. Buffers are contiguous by construction:
`empty_like` of a permuted gradient would keep its strides, and the collective would fill it in another order than it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base.compat import all_gather_flat, reduce_scatter_flat
from lightning_mfsdp.context_parallel.sharing import ContextParallel

__all__ = ["gather_sequence", "to_heads", "to_sequence"]


def to_heads(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, heads: int = 1, sequence: int = 2
) -> tuple[Tensor, ...]:
    """Give up a part of each sequence's heads for the rest of the sequence: `[B, H, S/c, D]` becomes `[B, H/c, S, D]`.

    Tensors of one dtype take one all-to-all together. Its backward is `to_sequence`.

    Args:
        tensors: Each with its own number of heads, divisible by the size of the group, and its own D.
        group: Of c ranks, which have consecutive parts of the sequences in the order of their ranks.
        heads: The dim of heads.
        sequence: The dim of tokens.
    """
    return _swapped(tensors, group, heads, sequence)


def to_sequence(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, heads: int = 1, sequence: int = 2
) -> tuple[Tensor, ...]:
    """The inverse of `to_heads`: `[B, H/c, S, D]` becomes `[B, H, S/c, D]`."""
    return _swapped(tensors, group, sequence, heads)


def gather_sequence(tensors: Sequence[Tensor], parallel: ContextParallel, *, sequence: int = 2) -> tuple[Tensor, ...]:
    """Whole sequences in order, from the parts of all ranks: `[B, H, S/c, D]` becomes `[B, H, S, D]`.

    Tensors of one dtype take one all-gather together. Its backward is a reduce-scatter, which sums the gradients of all ranks.

    Args:
        tensors: This rank's parts (`ContextParallel.part_of`).
        parallel: The ranks, and which chunks each has.
        sequence: The dim of tokens.
    """
    if len({tensor.dtype for tensor in tensors}) > 1:
        return tuple(whole for tensor in tensors for whole in gather_sequence((tensor,), parallel, sequence=sequence))
    return tuple(_Gather.apply(parallel, sequence, *tensors))  # type: ignore[no-untyped-call]


def _swapped(tensors: Sequence[Tensor], group: dist.ProcessGroup, divided: int, joined: int) -> tuple[Tensor, ...]:
    if len({tensor.dtype for tensor in tensors}) > 1:  # the buffer has one dtype
        return tuple(swapped for tensor in tensors for swapped in _swapped((tensor,), group, divided, joined))
    return tuple(_Swap.apply(group, divided, joined, *tensors))  # type: ignore[no-untyped-call]


class _Swap(torch.autograd.Function):
    """Divide one dim among the ranks and join the other from theirs."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, divided: int, joined: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.divided, ctx.joined = group, divided, joined
        ranks = dist.get_world_size(group)
        pieces = [torch.unflatten(tensor, divided, (ranks, -1)).movedim(divided, 0) for tensor in tensors]
        received = _all_to_all(_packed(pieces), group)
        return tuple(
            piece.movedim(0, joined).flatten(joined, joined + 1).contiguous()
            for piece in _unpacked(received, [piece.shape for piece in pieces])
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Swap.apply(ctx.group, ctx.joined, ctx.divided, *gradients)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, sequence: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel, ctx.sequence = parallel, sequence
        own = torch.cat([tensor.flatten() for tensor in tensors])
        received = own.new_empty(parallel.size, own.numel())
        all_gather_flat(received.view(-1), own, parallel.group)
        shapes = [torch.Size((parallel.size, *tensor.shape)) for tensor in tensors]
        return tuple(_in_order(parts, parallel, sequence) for parts in _unpacked(received, shapes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_Scatter.apply(ctx.parallel, ctx.sequence, *gradients)  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """The inverse: whole sequences of each rank, summed; each rank keeps its part."""

    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, sequence: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel, ctx.sequence = parallel, sequence
        parts = [_by_rank(tensor, parallel, sequence) for tensor in tensors]
        source = _packed(parts)
        own = source.new_empty(source.shape[1])
        reduce_scatter_flat(own, source.view(-1), dist.ReduceOp.SUM, parallel.group)
        return tuple(piece[0] for piece in _unpacked(own[None], [torch.Size((1, *part.shape[1:])) for part in parts]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_Gather.apply(ctx.parallel, ctx.sequence, *gradients)  # type: ignore[no-untyped-call]


def _packed(pieces: Sequence[Tensor]) -> Tensor:
    """One contiguous buffer, `[ranks, numbers for a rank]`."""
    return torch.cat([piece.flatten(1) for piece in pieces], dim=1)


def _unpacked(buffer: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    widths = [shape[1:].numel() for shape in shapes]
    return [
        torch.unflatten(piece, 1, shape[1:])
        for piece, shape in zip(torch.split(buffer, widths, dim=1), shapes, strict=True)
    ]


def _all_to_all(source: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    dist.all_to_all_single(received, source.contiguous(), group=group)
    return received


def _in_order(parts: Tensor, parallel: ContextParallel, sequence: int) -> Tensor:
    """Chunks in the order of the sequence, of `[ranks, ...]` in the order of ranks; contiguous."""
    chunks: dict[int, Tensor] = {}
    for rank in range(parallel.size):
        own = parallel.chunks_of(rank)
        chunks.update(zip(own, parts[rank].chunk(len(own), sequence), strict=True))
    return torch.cat([chunks[index] for index in range(parallel.chunk_count)], dim=sequence)


def _by_rank(whole: Tensor, parallel: ContextParallel, sequence: int) -> Tensor:
    """The inverse of `_in_order`."""
    chunks = whole.chunk(parallel.chunk_count, sequence)
    ranks = [[chunks[index] for index in parallel.chunks_of(rank)] for rank in range(parallel.size)]
    return torch.stack([torch.cat(own, dim=sequence) for own in ranks])
