"""Where each tensor of a group lives: shapes in, offsets out.

A layout gives every tensor one contiguous range of a *segment*. A segment is an address space of
`num_shards * shard_numel` elements, and shard `k` is its range `[k * shard_numel, (k + 1) * shard_numel)`. One
full-size buffer per segment then suffices to gather weights and reduce gradients without copies::

    segment 0   |--------shard 0--------|--------shard 1--------|--------shard 2--------|
                [ a: rows 0..3            rows 4..6  ][ b: row 0  rows 1..4  ][ c ]..gap..

Three rules hold, and `Layout` checks them when it is built:

* A shard boundary inside a tensor falls between two rows (a row is one index of dim 0), so every shard owns a plain
  range of rows; where `rows_together` is more than one, between two strips of so many rows, of which a tensor's last may be
  shorter.
* The shards of a segment are equally long, in multiples of `alignment_bytes`.
* Every tensor starts on a multiple of 16 bytes. No shape prevents that: boundaries are multiples of 16 bytes
  themselves, so a start that is congruent to one modulo lcm(row, 16 bytes) keeps this rule and the first one together.

This folder is pure arithmetic. It uses no torch, no process groups and no dtype beyond an item size; equal arguments
give equal layouts on every rank. The search is in packing.py; what it reaches on real models, in docs/design/layout.md.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mfsdp.engine.layout.packing import find_packing

START_ALIGNMENT_BYTES = 16  # widest vector load of a GPU thread
_NEGLIGIBLE_BYTES_PER_SHARD = 4096  # padding too small for advice


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One contiguous address space of `num_shards * shard_numel` elements.

    Attributes:
        shard_numel: Elements of one shard; positive.
        tensors: Indices into `Layout.shapes`, in address order.
    """

    shard_numel: int
    tensors: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Addresses of one group of tensors over one axis of shards.

    Offsets and lengths are in elements. A 0-D tensor counts as one row of one element. A tensor without elements
    occupies nothing; its rows, if it has any, belong to shard 0.

    Attributes:
        shapes: Global shape of each tensor.
        num_shards: Size of the axis the segments are divided over.
        segments: Longest shard first. At least one, even for a group without elements, so no shard is ever empty.
        segment_of: Per tensor, its index into `segments`.
        offset_of: Per tensor, its start inside that segment.
        itemsize: Bytes per element of the narrowest buffer that uses the layout.
        alignment_bytes: What the size of every shard is a multiple of, at `itemsize`.
        rows_together: Rows that are not divided.

    Raises:
        ValueError: A rule of the module docstring is broken.
    """

    shapes: tuple[tuple[int, ...], ...]
    num_shards: int
    segments: tuple[Segment, ...]
    segment_of: tuple[int, ...]
    offset_of: tuple[int, ...]
    itemsize: int = 2
    alignment_bytes: int = 128
    rows_together: int = 1

    def __post_init__(self) -> None:
        _check_arguments(self.shapes, self.num_shards, self.itemsize, self.alignment_bytes, self.rows_together)
        listed = sorted(tensor for segment in self.segments for tensor in segment.tensors)
        if listed != list(range(len(self.shapes))) or not len(listed) == len(self.segment_of) == len(self.offset_of):
            raise ValueError(f"each of {len(self.shapes)} tensors must lie in exactly one segment: got {listed}")
        for index, segment in enumerate(self.segments):
            if segment.shard_numel <= 0 or segment.shard_numel * self.itemsize % self.alignment_bytes:
                raise ValueError(
                    f"segment {index}: a shard must be a positive multiple of {self.alignment_bytes} bytes: "
                    f"got {segment.shard_numel} elements of {self.itemsize} bytes"
                )
            end = 0
            for tensor in segment.tensors:
                if self.segment_of[tensor] != index:
                    raise ValueError(f"tensor {tensor} is in segment {index} and in {self.segment_of[tensor]}")
                end = self._check_tensor(tensor, end)

    def _check_tensor(self, tensor: int, lowest: int) -> int:
        """Checks the rules for one tensor that must start at or after `lowest`; returns where it ends."""
        start, shard = self.offset_of[tensor], self._shard_of(tensor)
        row = _undivided_numel(self.shapes[tensor], self.rows_together)
        stop = start + self.numel(tensor)
        what = f"tensor {tensor} of shape {self.shapes[tensor]} at offset {start}"
        if start < lowest or stop > self.num_shards * shard:
            raise ValueError(f"{what} leaves [{lowest}, {self.num_shards * shard}), the free part of its segment")
        if start * self.itemsize % START_ALIGNMENT_BYTES:
            raise ValueError(f"{what} does not start on a multiple of {START_ALIGNMENT_BYTES} bytes")
        first_boundary = (start // shard + 1) * shard
        one_inside, two_inside = first_boundary < stop, first_boundary + shard < stop
        if (one_inside and (first_boundary - start) % row) or (two_inside and shard % row):
            raise ValueError(
                f"{what}: a boundary between shards of {shard} elements splits a row of {row}, or rows that belong together"
            )
        return stop

    def _shard_of(self, tensor: int) -> int:
        return self.segments[self.segment_of[tensor]].shard_numel

    def numel(self, tensor: int) -> int:
        """Number of elements of one tensor of the group; 1 for a 0-D one."""
        return math.prod(self.shapes[tensor])

    def row_numel(self, tensor: int) -> int:
        """Elements of one row (one index of dim 0) of one tensor."""
        return math.prod(self.shapes[tensor][1:])

    def owned_elements(self, tensor: int, shard: int, num_shards_spanned: int = 1) -> tuple[int, int]:
        """Part of one tensor inside the shards `[shard, shard + num_shards_spanned)`.

        Args:
            tensor: Index into `shapes`.
            shard: Position on the shard axis.
            num_shards_spanned: Consecutive shards seen as one, as when an outer axis divides a rank's shard further.

        Returns:
            Half-open range of offsets in the tensor's segment; both ends are equal where nothing is owned.

        Raises:
            ValueError: The shards are off the axis.
        """
        self._check_span(shard, shard + num_shards_spanned)
        shard_numel, start = self._shard_of(tensor), self.offset_of[tensor]
        stop = start + self.numel(tensor)
        low, high = shard * shard_numel, (shard + num_shards_spanned) * shard_numel
        return min(max(start, low), stop), max(min(stop, high), start)

    def owned_rows(self, tensor: int, shard: int, num_shards_spanned: int = 1) -> range:
        """Rows of dim 0 of one tensor inside the shards `[shard, shard + num_shards_spanned)`.

        Over all shards in order the ranges join up to `[0, R)` for a shape `[R, ...]`. Arguments and errors are those
        of `owned_elements`.
        """
        start, stop = self.owned_elements(tensor, shard, num_shards_spanned)
        offset, row = self.offset_of[tensor], self.row_numel(tensor)
        if row == 0:
            num_rows = self.shapes[tensor][0]
            return range(0 if shard == 0 else num_rows, num_rows)
        return range((start - offset) // row, (stop - offset) // row)

    @functools.cached_property
    def rows_by_shard(self) -> tuple[tuple[range, ...], ...]:
        """For each tensor, the rows in each shard: `owned_rows`, computed once."""
        shards = range(self.num_shards)
        return tuple(tuple(self.owned_rows(tensor, shard) for shard in shards) for tensor in range(len(self.shapes)))

    def gaps(self, segment: int, first_shard: int, last_shard: int) -> tuple[tuple[int, int], ...]:
        """Ranges of the shards `[first_shard, last_shard)` of one segment that belong to no tensor.

        Returns:
            Half-open, ascending, never empty, and relative to the start of `first_shard`.

        Raises:
            ValueError: The shards are off the axis.
        """
        self._check_span(first_shard, last_shard)
        shard_numel = self.segments[segment].shard_numel
        low, high = first_shard * shard_numel, last_shard * shard_numel
        taken = [(self.offset_of[t], self.offset_of[t] + self.numel(t)) for t in self.segments[segment].tensors]
        edges = [(0, 0), *taken, (self.num_shards * shard_numel, 0)]
        free = ((before, after) for (_, before), (after, _) in itertools.pairwise(edges))
        clipped = ((max(start, low) - low, min(stop, high) - low) for start, stop in free)
        return tuple((start, stop) for start, stop in clipped if start < stop)

    def _check_span(self, first: int, last: int) -> None:
        if not 0 <= first < last <= self.num_shards:
            raise ValueError(
                f"shards [{first}, {last}) are off the axis: rank {first} and the shards after it must lie in "
                f"[0, {self.num_shards}), the num_shards this layout was planned for"
            )

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, summed over the segments."""
        return sum(segment.shard_numel for segment in self.segments)

    @property
    def numel_total(self) -> int:
        """Number of elements of all tensors, without gaps between them."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def padded_numel(self) -> int:
        """Elements of all segments, gaps included."""
        return self.num_shards * self.shard_numel

    @property
    def padding_fraction(self) -> float:
        """Elements in gaps for each element in a tensor; 0.0 for a group without elements."""
        return self.padded_numel / self.numel_total - 1 if self.numel_total else 0.0

    @property
    def padding_bytes(self) -> int:
        """Bytes in gaps of the full-size buffers of `itemsize`."""
        return (self.padded_numel - self.numel_total) * self.itemsize


def plan_layout(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    itemsize: int = 2,
    alignment_bytes: int = 128,
    rows_together: int = 1,
) -> Layout:
    """Places a group of tensors in as few segments as keep its padding small.

    The fewest segments that waste at most 1 % win; where none do, the least padding found. Results are cached, so the
    equal blocks of a model are planned once.

    Args:
        shapes: Global shape of each tensor, `[R, ...]`; 0-D and empty tensors are allowed.
        num_shards: Size of the axis to divide over.
        itemsize: Bytes per element of the narrowest buffer that will use the layout: 1, 2, 4, 8 or 16.
        alignment_bytes: Every shard is a multiple of it; itself a positive multiple of 16.
        rows_together: Shard boundaries inside a tensor fall on multiples of so many rows.

    Raises:
        ValueError: An argument is out of range.
    """
    sizes = tuple(tuple(int(size) for size in shape) for shape in shapes)
    return _plan_cached(sizes, num_shards, itemsize, alignment_bytes, rows_together)


@functools.lru_cache(maxsize=1024)
def _plan_cached(
    shapes: tuple[tuple[int, ...], ...], num_shards: int, itemsize: int, alignment_bytes: int, rows_together: int
) -> Layout:
    _check_arguments(shapes, num_shards, itemsize, alignment_bytes, rows_together)
    filled = [tensor for tensor, shape in enumerate(shapes) if math.prod(shape)]
    packing = find_packing(
        [(math.prod(shapes[tensor]), _undivided_numel(shapes[tensor], rows_together)) for tensor in filled],
        num_shards,
        unit=alignment_bytes // math.gcd(alignment_bytes, itemsize),
        start_unit=START_ALIGNMENT_BYTES // itemsize,
    )
    places = dict.fromkeys(range(len(shapes)), (0, 0)) | dict(zip(filled, packing.places, strict=True))
    address_order = sorted(places, key=lambda tensor: (places[tensor], math.prod(shapes[tensor]), tensor))
    return Layout(
        shapes=shapes,
        num_shards=num_shards,
        segments=tuple(
            Segment(
                shard_numel=numel, tensors=tuple(tensor for tensor in address_order if places[tensor][0] == segment)
            )
            for segment, numel in enumerate(packing.shard_numels)
        ),
        segment_of=tuple(segment for segment, _ in places.values()),
        offset_of=tuple(offset for _, offset in places.values()),
        itemsize=itemsize,
        alignment_bytes=alignment_bytes,
        rows_together=rows_together,
    )


def _undivided_numel(shape: tuple[int, ...], rows_together: int) -> int:
    """Elements of the rows that must stay in one shard."""
    return min(rows_together, shape[0]) * math.prod(shape[1:]) if shape else 1


def padding_advice(layout: Layout, *, acceptable: float = 0.1) -> str:
    """What to tell the user about a layout that wastes more than `acceptable`; empty if there is nothing to report.

    Names the figure, the cause, and the longest halving of the shard axis that is acceptable, or else pads least. Plans
    those, so call it once per distinct group and not in a training step.
    """
    if layout.padding_fraction <= acceptable or layout.padding_bytes <= _NEGLIGIBLE_BYTES_PER_SHARD * layout.num_shards:
        return ""
    world, itemsize = layout.num_shards, layout.itemsize
    text = (
        f"Padding adds {layout.padding_fraction:.1%} to this group over {world} shards: "
        f"{layout.padding_bytes / 2**20:,.1f} MiB "
        f"in each full-size buffer of {itemsize} bytes per element. {_padding_cause(layout)}"
    )
    tried = [layout]
    while tried[-1].num_shards % 2 == 0 and tried[-1].padding_fraction > acceptable:
        half = tried[-1].num_shards // 2
        options = {"alignment_bytes": layout.alignment_bytes, "rows_together": layout.rows_together}
        tried.append(plan_layout(layout.shapes, half, itemsize=itemsize, **options))
    best = min(tried, key=lambda plan: plan.padding_fraction)
    if best is layout:
        return text + " Shard over fewer ranks, or shard several modules as one unit so that each rank has more rows."
    return text + (
        f" Cap the shard axis at {best.num_shards} ({best.padding_fraction:.1%}) and replicate over the other "
        f"{world // best.num_shards} (HSDP: a mesh of outer={world // best.num_shards}, shard={best.num_shards}), or "
        "shard several modules as one unit so that each rank has more rows."
    )


def _padding_cause(layout: Layout) -> str:
    """Names the tensor with the longest row in the segment that wastes most."""
    wasted = [
        segment.shard_numel * layout.num_shards - sum(layout.numel(tensor) for tensor in segment.tensors)
        for segment in layout.segments
    ]
    worst = layout.segments[wasted.index(max(wasted))]
    tensor = max(worst.tensors, key=lambda tensor: _undivided_numel(layout.shapes[tensor], layout.rows_together))
    row = layout.row_numel(tensor)
    share = sum(layout.numel(tensor) for tensor in worst.tensors) / (layout.num_shards * row)
    whole = "Rows" if layout.rows_together == 1 else f"Strips of {layout.rows_together} rows"
    return (
        f"{whole} of dim 0 stay whole and shards are equally long: with shape {layout.shapes[tensor]} a shard takes "
        f"{worst.shard_numel} elements, {worst.shard_numel / row:.3g} of its rows, where {share:.3g} would hold the "
        "segment."
    )


def _check_arguments(
    shapes: tuple[tuple[int, ...], ...], num_shards: int, itemsize: int, alignment_bytes: int, rows_together: int
) -> None:
    if num_shards < 1:
        raise ValueError(f"num_shards, the size of the shard axis, must be at least 1: got {num_shards}")
    if itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(f"itemsize must be 1, 2, 4, 8 or 16 bytes: got {itemsize}")
    if alignment_bytes < 1 or alignment_bytes % START_ALIGNMENT_BYTES:
        raise ValueError(
            f"alignment_bytes must be a positive multiple of {START_ALIGNMENT_BYTES}: got {alignment_bytes}"
        )
    if rows_together < 1:
        raise ValueError(f"rows_together must be positive: got {rows_together}")
    for tensor, shape in enumerate(shapes):
        if any(size < 0 for size in shape):
            raise ValueError(f"sizes must not be negative: got shape {shape} for tensor {tensor}")
