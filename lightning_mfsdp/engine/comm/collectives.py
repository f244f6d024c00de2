"""Axis: gathers and reduces flat tensors over one mesh axis.

Everything here takes lists of flat tensors, one per segment of a group, and issues them as one coalesced call. It runs
on the current stream and is independent of groups, schedules and strategies. On an axis of size 1 callers do not call
these functions at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base import compat

__all__ = ["TOGETHER_BYTES", "Axes", "Axis", "broadcast_from_first"]

TOGETHER_BYTES = 64 << 20  # at most that are broadcast in one call, which bounds the memory of copies


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of the mesh as this rank sees it.

    Attributes:
        name: For messages.
        size: Number of ranks along it.
        rank: This rank's position, `0 <= rank < size`.
        group: Carries gathers and reductions, unless the two below are set.
        reduce_group: A communicator of its own for reductions, so that a gather never queues behind one. `None`: share
            `group`.
        averages: The backend can divide by the number of ranks while it sums.
        gather_group: A communicator for gathers of weights into symmetric memory. `None`: `group`.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup
    averages: bool = False
    reduce_group: dist.ProcessGroup | None = None
    gather_group: dist.ProcessGroup | None = None

    def gather(self, outputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        """Fill each output with the pieces of all ranks in rank order. A piece may be the output's own part at this rank's place."""
        group = self.gather_group or self.group
        if not outputs[0].dtype.is_floating_point:  # backends do not support all integers
            outputs, pieces = ([tensor.view(torch.uint8) for tensor in part] for part in (outputs, pieces))
        if len(outputs) == 1:
            compat.all_gather_flat(outputs[0], pieces[0], group)
        else:
            compat.all_gather_coalesced(outputs, pieces, group)

    def reduce_scatter(self, pieces: Sequence[Tensor], sources: Sequence[Tensor], factor: float) -> None:
        """Sum `factor` times each source over the ranks; keep this rank's piece. Sources may be overwritten (scaled)."""
        group = self.reduce_group or self.group
        if sources[0].dtype.is_complex:
            pieces, sources = _as_real(pieces), _as_real(sources)
        op = self._scaled_sum(group, sources, factor)
        if len(pieces) == 1:
            compat.reduce_scatter_flat(pieces[0], sources[0], op, group)
        else:
            compat.reduce_scatter_coalesced(pieces, sources, op, group)

    def all_reduce(self, tensors: Sequence[Tensor], factor: float) -> None:
        """Replace each tensor by `factor` times its sum over the ranks."""
        group = self.reduce_group or self.group
        if tensors[0].dtype.is_complex:
            tensors = _as_real(tensors)
        op = self._scaled_sum(group, tensors, factor)
        compat.all_reduce_coalesced(tensors, op, group)

    def sum_scatter_high_precision(self, pieces: Sequence[Tensor], sources: Sequence[Tensor], factor: float) -> None:
        """Reduce-scatter with low precision on the wire and sums in the pieces' dtype: all-to-all, then a local sum.

        Args:
            pieces: `[L]` each, in the dtype of the sums.
            sources: `[size * L]` each, in the dtype on the wire.
            factor: Applied once, to the sum.

        Source:
            Megatron-LM pull request 3067 measures what fp32 sums are worth; the all-to-all form needs no support from
            NCCL.
        """
        group = self.reduce_group or self.group
        for piece, source in zip(pieces, sources, strict=True):
            received = torch.empty_like(source)
            dist.all_to_all_single(received, source, group=group)
            torch.sum(received.view(self.size, -1), dim=0, dtype=piece.dtype, out=piece)
            if factor != 1.0:
                piece.mul_(factor)

    def all_reduce_high_precision(self, tensors: Sequence[Tensor], factor: float) -> None:
        """All-reduce with low precision on the wire and float32 sums: scatter by all-to-all, sum, gather the rounded sums."""
        group = self.reduce_group or self.group
        for tensor in tensors:
            length = -(-tensor.numel() // self.size)
            padded = tensor.new_zeros(length * self.size)
            padded[: tensor.numel()].copy_(tensor)
            piece = torch.empty(length, dtype=torch.float32, device=tensor.device)
            self.sum_scatter_high_precision([piece], [padded], factor)
            compat.all_gather_flat(padded, piece.to(tensor.dtype), group)
            tensor.copy_(padded[: tensor.numel()])

    def _scaled_sum(self, group: dist.ProcessGroup, sources: Sequence[Tensor], factor: float) -> object:
        """The reduction op for `factor`; if the backend cannot scale, the sources are scaled here instead."""
        if factor == 1.0:
            return dist.ReduceOp.SUM
        if self.averages and factor == 1.0 / self.size:
            return dist.ReduceOp.AVG
        wide = sources[0].dtype.itemsize >= 4  # NCCL rounds the factor to the dtype on the wire
        if wide and compat.uses_nccl(group, sources[0].device):
            return compat.premul_sum(factor)
        for source in sources:
            source.mul_(factor)
        return dist.ReduceOp.SUM


def _as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of flat complex tensors, twice as long: backends do not support complex numbers."""
    return [torch.view_as_real(tensor).view(-1) for tensor in tensors]


@dataclass(eq=False)
class Axes:
    """The mesh axes of a group. They are replaced by axes with communicators of their own when the first backward begins.

    Attributes:
        shard: Along which parameters are sharded.
        outer: Along which they are replicated, or the main weight is sharded once more; `None` without one.
    """

    shard: Axis
    outer: Axis | None

    def replace(self, change: Callable[[Axis], Axis]) -> None:
        """Put what `change` returns of each axis in its place."""
        self.shard = change(self.shard)
        self.outer = change(self.outer) if self.outer else None


def broadcast_from_first(values: Iterable[Tensor], axes: Sequence[Axis]) -> None:
    """Overwrite contiguous tensors of any dtype with those of the first rank along some axes. Collective.

    They are sent as bytes, as backends lack some dtypes, and small ones together.
    """
    together: list[Tensor] = []
    for value in values if axes else ():
        content = value.detach().view(-1).view(torch.uint8)
        if together and sum(map(len, together)) + len(content) > TOGETHER_BYTES:
            _broadcast(together, axes)
            together = []
        together.append(content)
    if together:
        _broadcast(together, axes)


def _broadcast(contents: Sequence[Tensor], axes: Sequence[Axis]) -> None:
    sent = contents[0] if len(contents) == 1 else torch.cat(list(contents))
    for axis in axes:
        dist.broadcast(sent, group=axis.group, group_src=0)
    if sent is not contents[0]:
        for content, received in zip(contents, torch.split(sent, [len(content) for content in contents]), strict=True):
            content.copy_(received)
