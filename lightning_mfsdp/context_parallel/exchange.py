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
        source = _buffer(pieces)
        for place, piece in zip(_places(source, pieces), pieces, strict=True):
            place.copy_(piece)
        received = _buffer(pieces)
        dist.all_to_all_single(received, source, group=group)
        return tuple(
            place.movedim(0, joined).flatten(joined, joined + 1).contiguous() for place in _places(received, pieces)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Swap.apply(ctx.group, ctx.joined, ctx.divided, *gradients)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Whole sequences from the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, sequence: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel, ctx.sequence = parallel, sequence
        pieces = [tensor[None] for tensor in tensors]
        own = _buffer(pieces)
        for place, piece in zip(_places(own, pieces), pieces, strict=True):
            place.copy_(piece)
        received = own.new_empty(parallel.size, own.shape[1])
        all_gather_flat(received.view(-1), own.view(-1), parallel.group)
        return tuple(torch.cat(_chunks(parts, parallel, sequence), dim=sequence) for parts in _places(received, pieces))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_Scatter.apply(ctx.parallel, ctx.sequence, *gradients)  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """The inverse: whole sequences of each rank, summed; each rank keeps its part."""

    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, sequence: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel, ctx.sequence = parallel, sequence
        pieces = [torch.unflatten(tensor, sequence, (parallel.size, -1)).movedim(sequence, 0) for tensor in tensors]
        source = _buffer(pieces)
        for parts, tensor in zip(_places(source, pieces), tensors, strict=True):
            for place, chunk in zip(
                _chunks(parts, parallel, sequence), tensor.chunk(parallel.chunk_count, sequence), strict=True
            ):
                place.copy_(chunk)
        own = source.new_empty(1, source.shape[1])
        reduce_scatter_flat(own.view(-1), source.view(-1), dist.ReduceOp.SUM, parallel.group)
        return tuple(place[0].contiguous() for place in _places(own, pieces))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_Gather.apply(ctx.parallel, ctx.sequence, *gradients)  # type: ignore[no-untyped-call]


def _buffer(pieces: Sequence[Tensor]) -> Tensor:
    """A new contiguous one, `[ranks, numbers of a rank]`, for pieces of shape `[ranks, ...]`."""
    return pieces[0].new_empty(pieces[0].shape[0], sum(piece[0].numel() for piece in pieces))


def _places(buffer: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Where the pieces lie in it, one after the other for each rank."""
    parts = torch.split(buffer, [piece[0].numel() for piece in pieces], dim=1)
    return [torch.unflatten(part, 1, piece.shape[1:]) for part, piece in zip(parts, pieces, strict=True)]


def _chunks(parts: Tensor, parallel: ContextParallel, sequence: int) -> list[Tensor]:
    """The chunks of whole sequences in their order, in the parts of all ranks, `[ranks, ...]`."""
    chunks: dict[int, Tensor] = {}
    for rank in range(parallel.size):
        own = parallel.chunks_of(rank)
        chunks.update(zip(own, parts[rank].chunk(len(own), sequence), strict=True))
    return [chunks[index] for index in range(parallel.chunk_count)]
