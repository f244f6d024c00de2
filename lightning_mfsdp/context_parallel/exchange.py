"""Differentiable collectives along a sequence dim: all-to-all between sequence parts and head parts, all-gather of whole sequences.

All ranks of a group must make the same calls in the same order, in forward and in backward. Buffers are contiguous by construction:
`empty_like` of a permuted gradient would keep its strides, and the collective would fill it in another order than it is read.

Shapes in comments and docstrings: B batch, S tokens of a whole sequence, H heads, D width of a head, c ranks. The buffers of an all-to-all
are `[c, S/c, B, F]`, where F holds, for each tensor in turn, H/c heads of width D. What the ranks send are tokens in their order, so the
received buffer is `[S, B, F]` where heads were given up, and the results are views of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base.compat import all_gather_flat, reduce_scatter_flat
from lightning_mfsdp.context_parallel.sharing import ContextParallel

__all__ = ["gather_sequence", "to_heads", "to_sequence"]

_WIDE = {
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}  # elements of so many bytes, which a copy does not change


def to_heads(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, heads: int = 1, sequence: int = 2
) -> tuple[Tensor, ...]:
    """Give up a part of each sequence's heads for the rest of the sequence: `[B, H, S/c, D]` becomes `[B, H/c, S, D]`.

    Tensors of one dtype take one all-to-all together, as long as they differ in H and D only. Its backward is `to_sequence`.

    The results of one all-to-all are not copied: they share the memory of the received buffer `[S, B, F]`, where F is the sum of their
    H/c x D. Each has the strides `(F, D, B x F, 1)`, so it is contiguous in D alone. Autograd does not see them as views, and they may be
    changed in place.

    Args:
        tensors: Each with its own number of heads, divisible by the size of the group, and its own D. Strides are any.
        group: Of c ranks, which have consecutive parts of the sequences in the order of their ranks.
        heads: The dim of heads.
        sequence: The dim of tokens. The last one of the other dims is D, the ones before are B.
    """
    return _together(_ToHeads, tensors, group, heads, sequence)


def to_sequence(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, heads: int = 1, sequence: int = 2
) -> tuple[Tensor, ...]:
    """The inverse of `to_heads`: `[B, H/c, S, D]` becomes `[B, H, S/c, D]`. Its backward is `to_heads`.

    Each result has memory of its own, which is contiguous as `[B, S/c, H, D]`. A single tensor that lies in memory as `[S, B, H/c, D]`, as
    attention of the results of `to_heads` usually does, is sent from there, without a copy.
    """
    return _together(_ToSequence, tensors, group, heads, sequence)


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
    return tuple(_Gather.apply(parallel, sequence, *tensors))


def _together(
    function: Any, tensors: Sequence[Tensor], group: dist.ProcessGroup, heads: int, sequence: int
) -> tuple[Tensor, ...]:
    """The function of all tensors that fit into one buffer, for each buffer."""
    heads, sequence = heads % tensors[0].ndim, sequence % tensors[0].ndim
    numbers: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        order, at = _order(tensor, heads, sequence)
        numbers.setdefault((tensor.dtype, *(tensor.shape[dim] for dim in order[:at])), []).append(number)
    results: dict[int, Tensor] = {}
    for members in numbers.values():
        results.update(
            zip(members, function.apply(group, heads, sequence, *(tensors[number] for number in members)), strict=True)
        )
    return tuple(results[number] for number in range(len(tensors)))


class _ToHeads(torch.autograd.Function):
    """Divide heads among the ranks and join the tokens of theirs."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, heads: int, sequence: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = group, heads, sequence
        ranks = dist.get_world_size(group)
        order, at = _order(tensors[0], heads, sequence)
        # [c, S/c, B, H/c, D], for the rank that gets the heads
        pieces = [tensor.permute(order).unflatten(at, (ranks, -1)).movedim(at, 0) for tensor in tensors]
        whole = _exchanged(pieces, at + 1, group).flatten(0, 1)
        # Autograd would refuse to change views in place; columns of other tensors do not change with one's own.
        return tuple(place.permute(_inverse(order)).data for place in _columns(whole, pieces, at + 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_ToSequence.apply(*ctx.arguments, *gradients)


class _ToSequence(torch.autograd.Function):
    """Divide tokens among the ranks and join the heads of theirs."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, heads: int, sequence: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = group, heads, sequence
        ranks = dist.get_world_size(group)
        order, at = _order(tensors[0], heads, sequence)
        # [c, S/c, B, H/c, D], for the rank that gets the tokens
        pieces = [tensor.permute(order).unflatten(0, (ranks, -1)) for tensor in tensors]
        received = _exchanged(pieces, at + 1, group)
        results = []
        for place in _columns(received, pieces, at + 1):
            joined = place.movedim((1, 0), (at - 1, at))  # [B, S/c, c, H/c, D]
            result = joined.new_empty(joined.shape)
            _copy(result, joined)
            results.append(result.flatten(at, at + 1).movedim(at - 1, 0).permute(_inverse(order)).data)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_ToHeads.apply(*ctx.arguments, *gradients)


def _order(tensor: Tensor, heads: int, sequence: int) -> tuple[list[int], int]:
    """The dims of a tensor in the order in which it is sent, `[S, B, H, D]`, and the place of H in them."""
    others = [dim for dim in range(tensor.ndim) if dim not in (heads, sequence)]
    return [sequence, *others[:-1], heads, *others[-1:]], 1 + len(others[:-1])


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _exchanged(pieces: Sequence[Tensor], lead: int, group: dist.ProcessGroup) -> Tensor:
    """What all ranks sent to this one, `[c, S/c, B, F]`, of pieces `[c, S/c, B, H/c, D]`; F replaces the dims from `lead` on."""
    first = pieces[0]
    if len(pieces) == 1 and first.is_contiguous() and not _is_lazy(first):
        source = first.flatten(lead)
    else:
        source = first.new_empty(*first.shape[:lead], sum(math.prod(piece.shape[lead:]) for piece in pieces))
        for place, piece in zip(_columns(source, pieces, lead), pieces, strict=True):
            _copy(place, piece)
    received = source.new_empty(source.shape)
    dist.all_to_all_single(received, source, group=group)
    return received


def _columns(buffer: Tensor, pieces: Sequence[Tensor], lead: int) -> list[Tensor]:
    """Where the pieces lie in a buffer `[..., F]`: `[..., H/c, D]` of each."""
    shapes = [piece.shape[lead:] for piece in pieces]
    parts = buffer.split([math.prod(shape) for shape in shapes], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _copy(place: Tensor, piece: Tensor) -> None:
    """Copy into memory of the same shape and dtype, in the widest elements that both permit: each has an index to compute."""
    width = math.gcd(_width(place), _width(piece))
    wide = _WIDE.get(width) if width > piece.element_size() else None
    if wide is None:
        place.copy_(piece)
    else:
        place.view(wide).copy_(piece.view(wide))


def _width(tensor: Tensor) -> int:
    """Bytes, up to 16, that always lie and move together along the last dim: a power of two."""
    if tensor.stride(-1) != 1 or _is_lazy(tensor):
        return 1
    elements = math.gcd(tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return math.gcd(elements * tensor.element_size(), tensor.data_ptr(), 16)


def _is_lazy(tensor: Tensor) -> bool:
    """Whether its memory has what it was before it was conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


class _Gather(torch.autograd.Function):
    """Whole sequences from the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, sequence: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel, ctx.sequence = parallel, sequence
        pieces = [tensor[None] for tensor in tensors]
        sent = _buffer(pieces)
        for place, piece in zip(_places(sent, pieces), pieces, strict=True):
            _copy(place, piece)
        received = sent.new_empty(parallel.size, sent.shape[1])
        all_gather_flat(received.view(-1), sent.view(-1), parallel.group)
        return tuple(torch.cat(_chunks(parts, parallel, sequence), dim=sequence) for parts in _places(received, pieces))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_Scatter.apply(ctx.parallel, ctx.sequence, *gradients)


class _Scatter(torch.autograd.Function):
    """The inverse of `_Gather`: whole sequences of each rank, summed; each rank keeps its part."""

    @staticmethod
    def forward(ctx: Any, parallel: ContextParallel, sequence: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parallel, ctx.sequence = parallel, sequence
        pieces = [torch.unflatten(tensor, sequence, (parallel.size, -1)).movedim(sequence, 0) for tensor in tensors]
        source = _buffer(pieces)
        for parts, tensor in zip(_places(source, pieces), tensors, strict=True):
            for place, chunk in zip(
                _chunks(parts, parallel, sequence), tensor.chunk(parallel.chunk_count, sequence), strict=True
            ):
                _copy(place, chunk)
        reduced = source.new_empty(1, source.shape[1])
        reduce_scatter_flat(reduced.view(-1), source.view(-1), dist.ReduceOp.SUM, parallel.group)
        return tuple(place[0].contiguous() for place in _places(reduced, pieces))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_Gather.apply(ctx.parallel, ctx.sequence, *gradients)


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
        chunks_of_rank = parallel.chunks_of(rank)
        chunks.update(zip(chunks_of_rank, parts[rank].chunk(len(chunks_of_rank), sequence), strict=True))
    return [chunks[index] for index in range(parallel.chunk_count)]
