"""One flat buffer: a layout, a range of shards, and memory; with views per tensor and per segment.

        segment 0                                segment 1
        | shard 0 | shard 1 | shard 2 | shard 3 ||  shard 0  |  shard 1  |  shard 2  |  shard 3  |     extent 0..4: full
                  | shard 1 |                   ||           |  shard 1  |                             extent 1..2: what
                  rank 1 keeps

A buffer holds the same shards of every segment, one segment after the other. A part of a buffer shares its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.layout.layout import Layout
from lightning_mfsdp.engine.memory.storage import Slot

__all__ = ["Filling", "FlatBuffer", "accumulate_segments", "buffer_numel", "copy_or_add", "transient"]

_SMALL_GAPS = 1 << 16


def buffer_numel(layout: Layout, extent: range) -> int:
    """Elements of a buffer that holds the shards of `extent`, in every segment."""
    return sum(segment.shard_numel for segment in layout.segments) * len(extent)


class FlatBuffer:
    """The shards `extent` of a group's address space in memory.

    Attributes:
        layout: Where each tensor lies.
        extent: Which shards this buffer holds, `0 <= extent.start < extent.stop <= layout.num_shards`.
        segments: One 1-D tensor `[len(extent) * shard_numel]` per segment of the layout.
    """

    def __init__(self, layout: Layout, extent: range, segments: Sequence[Tensor]) -> None:
        self.layout = layout
        self.extent = extent
        self.segments = list(segments)
        self._views: list[Tensor] | None = None
        self._gaps: list[Tensor] | None = None
        self._zeros: list[Tensor] | None = None
        self._parts: dict[range, FlatBuffer] = {}

    @classmethod
    def over(cls, layout: Layout, extent: range, memory: Tensor) -> FlatBuffer:
        """A buffer in `memory`, 1-D with at least `buffer_numel` elements."""
        segments, start = [], 0
        for segment in layout.segments:
            length = segment.shard_numel * len(extent)
            segments.append(memory[start : start + length])
            start += length
        return cls(layout, extent, segments)

    @classmethod
    def zeros(cls, layout: Layout, extent: range, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        """A buffer of its own, zero everywhere: gaps between tensors are defined from the start."""
        return cls.over(layout, extent, torch.zeros(buffer_numel(layout, extent), dtype=dtype, device=device))

    @classmethod
    def empty(cls, layout: Layout, extent: range, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
        """A buffer of its own that the caller fills at once."""
        return cls.over(layout, extent, torch.empty(buffer_numel(layout, extent), dtype=dtype, device=device))

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.segments[0].dtype

    @property
    def size_bytes(self) -> int:
        """Memory of all segments."""
        return sum(segment.numel() * segment.element_size() for segment in self.segments)

    def part(self, extent: range) -> FlatBuffer:
        """The shards `extent` of this buffer, sharing its memory; made once."""
        if extent == self.extent:
            return self
        known = self._parts.get(extent)
        if known is not None:
            return known
        pieces = []
        for segment, memory in zip(self.layout.segments, self.segments, strict=True):
            start = (extent.start - self.extent.start) * segment.shard_numel
            pieces.append(memory[start : start + len(extent) * segment.shard_numel])
        self._parts[extent] = FlatBuffer(self.layout, extent, pieces)
        return self._parts[extent]

    def view(self, tensor: int) -> Tensor:
        """The rows of one tensor that lie in this buffer: `[rows, *shape[1:]]`, or the whole shape where all of them do."""
        shape = self.layout.shapes[tensor]
        where = self.layout.segment_of[tensor]
        start, stop = self.layout.owned_elements(tensor, self.extent.start, len(self.extent))
        base = self.extent.start * self.layout.segments[where].shard_numel
        memory = self.segments[where]
        piece = memory[start - base : stop - base] if stop > start else memory[:0]
        if stop - start == self.layout.numel(tensor):
            return piece.view(shape)
        return piece.view(-1, *shape[1:]) if stop > start else piece.view(0, *shape[1:])

    def views(self) -> list[Tensor]:
        """`view` of every tensor of the layout, in its order; made once."""
        if self._views is None:
            with torch.inference_mode(False):
                self._views = [self.view(tensor) for tensor in range(len(self.layout.shapes))]
        return self._views

    def zeros_for_gaps(self, dtype: torch.dtype) -> list[Tensor]:
        """What to copy into the gaps along with other copies, which is cheaper than a launch for them; empty where they are large."""
        if self._zeros is None or (self._zeros and self._zeros[0].dtype is not dtype):
            gaps = self.gaps()
            small = sum(gap.numel() for gap in gaps) <= _SMALL_GAPS
            with torch.inference_mode(False):
                self._zeros = [torch.zeros_like(gap, dtype=dtype) for gap in gaps] if small else []
        return self._zeros

    def gaps(self) -> list[Tensor]:
        """The cells that belong to no tensor; made once."""
        if self._gaps is None:
            self._gaps = [
                self.segments[index][start:stop]
                for index in range(len(self.segments))
                for start, stop in self.layout.gaps(index, self.extent.start, self.extent.stop)
            ]
        return self._gaps


class Filling(NamedTuple):
    """Gradients on their way into the buffer they are reduced in.

    Kept until the reduction is done: the allocator knows nothing of the reduce stream.

    Attributes:
        grads: One for each parameter, full shapes, where there is one.
        unreduced: Those of earlier microbatches, full size.
        target: Full size, in the communication dtype.
        written: Which gradients are in the target already.
    """

    grads: list[Tensor | None]
    unreduced: FlatBuffer | None
    target: FlatBuffer
    written: frozenset[int] = frozenset()

    def filled(self) -> FlatBuffer:
        """Bring everything into the target, ready to be reduced.

        Parameters without a gradient count as zero, and so do gaps: every cell is defined. The copies run beside the rest of the
        backward, which is busy with matrix products and leaves memory bandwidth.
        """
        if self.unreduced is None:
            copy_or_add(self.target, self.grads, overwrite=True, written=self.written)
            return self.target
        copy_or_add(self.unreduced, self.grads, overwrite=False)
        if self.target is not self.unreduced:
            compat.foreach_copy_(self.target.segments, self.unreduced.segments)
        return self.target


def copy_or_add(
    target: FlatBuffer, grads: Sequence[Tensor | None], *, overwrite: bool, written: frozenset[int] = frozenset()
) -> None:
    """Copy or add gradients (full shapes, any float dtype) to a full-size buffer; overwriting defines every cell.

    Args:
        target: Full size.
        grads: One for each tensor of the layout.
        overwrite: What `target` holds does not count, except
        written: tensors that are there already.
    """
    views = target.views()
    if overwrite and written:
        there = [(view, grad) for index, (view, grad) in enumerate(zip(views, grads, strict=True)) if index in written]
        if late := [(view, grad) for view, grad in there if grad is not None]:
            compat.foreach_add_([view for view, _ in late], [grad for _, grad in late])
        views = [view for index, view in enumerate(views) if index not in written]
        grads = [grad for index, grad in enumerate(grads) if index not in written]
    targets = [view for view, grad in zip(views, grads, strict=True) if grad is not None]
    sources = [grad for grad in grads if grad is not None]
    if not overwrite:
        if sources:
            compat.foreach_add_(targets, sources)
        return
    gaps = target.gaps()
    if gaps and sources and len(sources) == len(views):
        zeros = target.zeros_for_gaps(sources[0].dtype)
        if zeros:
            targets, sources, gaps = targets + gaps, sources + zeros, []
    undefined = gaps + [view for view, grad in zip(views, grads, strict=True) if grad is None]
    if undefined:
        compat.foreach_zero_(undefined)
    if sources:
        compat.foreach_copy_(targets, sources)


def accumulate_segments(target: FlatBuffer, addend: FlatBuffer) -> None:
    """Add a buffer of the same extent, keeping the target's dtype."""
    for total, piece in zip(target.segments, addend.segments, strict=True):
        total.add_(piece)


def transient(layout: Layout, extent: range, dtype: torch.dtype, device: torch.device) -> tuple[Slot, FlatBuffer]:
    """A buffer whose memory comes and goes, and the slot to ask for it. Its views are made now and stay valid."""
    memory = Slot(buffer_numel(layout, extent) * dtype.itemsize, device, fixed=False)
    with torch.inference_mode(False):
        buffer = FlatBuffer.over(layout, extent, memory.memory.view(dtype))
        buffer.views()
        buffer.gaps()
    memory.discard()
    return memory, buffer
