"""One flat buffer: a layout, a range of shards, and memory; with views per tensor and per segment.

        segment 0                                segment 1
        | shard 0 | shard 1 | shard 2 | shard 3 ||  shard 0  |  shard 1  |  shard 2  |  shard 3  |     extent 0..4: full
                  | shard 1 |                   ||           |  shard 1  |                             extent 1..2: what
                  rank 1 keeps

A buffer holds the same shards of every segment, one segment after the other. A part of a buffer shares its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lightning_mfsdp.engine.core.storage import Slot
from lightning_mfsdp.engine.layout.layout import Layout

__all__ = ["FlatBuffer", "buffer_numel", "transient"]

_SMALL_GAPS = 1 << 16


def buffer_numel(layout: Layout, extent: range) -> int:
    """Elements of a buffer that holds the shards of `extent`, in every segment."""
    return sum(segment.shard_numel for segment in layout.segments) * len(extent)


class FlatBuffer:
    """The shards `extent` of a group's address space in memory.

    Attributes:
        layout: Where each tensor lies.
        extent: Which shards this buffer holds, `0 <= extent.start < extent.stop <= layout.num_shards`.
        dtype: Of its elements.
        zeros_for_gaps: By dtype, see `make_zeros_for_gaps`.
        segments: One 1-D tensor `[len(extent) * shard_numel]` per segment of the layout.
    """

    def __init__(self, layout: Layout, extent: range, segments: Sequence[Tensor]) -> None:
        self.layout = layout
        self.extent = extent
        self.segments = list(segments)
        self.dtype = self.segments[0].dtype
        self.zeros_for_gaps: dict[torch.dtype, list[Tensor]] = {}
        self._parts: dict[range, FlatBuffer] = {}
        self._base, self._addresses = -1, list[int]()

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

    @cached_property
    def views(self) -> list[Tensor]:
        """`view` of every tensor of the layout, in its order."""
        with torch.inference_mode(False):
            return [self.view(tensor) for tensor in range(len(self.layout.shapes))]

    def addresses(self) -> list[int]:
        """Where each view begins. Asked for in every step, so it is only looked up where the memory is another."""
        base = self.segments[0].data_ptr()
        if base != self._base:
            self._base, self._addresses = base, [view.data_ptr() for view in self.views]
        return self._addresses

    @cached_property
    def holds_rows(self) -> bool:
        """Whether any element belongs to a tensor."""
        return any(view.numel() for view in self.views)

    @cached_property
    def gaps(self) -> list[Tensor]:
        """The cells that belong to no tensor."""
        return [
            self.segments[index][start:stop]
            for index in range(len(self.segments))
            for start, stop in self.layout.gaps(index, self.extent.start, self.extent.stop)
        ]

    def make_zeros_for_gaps(self, dtype: torch.dtype) -> list[Tensor]:
        """What to copy into the gaps along with other copies, which is cheaper than a launch for them; empty where they are large."""
        small = sum(gap.numel() for gap in self.gaps) <= _SMALL_GAPS
        with torch.inference_mode(False):
            made = [torch.zeros_like(gap, dtype=dtype) for gap in self.gaps] if small else []
        self.zeros_for_gaps = {dtype: made}
        return made


def transient(layout: Layout, extent: range, dtype: torch.dtype, device: torch.device) -> tuple[Slot, FlatBuffer]:
    """A buffer whose memory is allocated and freed, and the slot that does so. Its views are made now and stay valid."""
    memory = Slot(buffer_numel(layout, extent) * dtype.itemsize, device, fixed=False)
    with torch.inference_mode(False):
        buffer = FlatBuffer.over(layout, extent, memory.memory.view(dtype))
        _ = buffer.views, buffer.gaps
    memory.discard()
    return memory, buffer
