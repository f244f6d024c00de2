"""Where what one rank holds of a parameter lies in the whole parameter.

A rank has rows of a parameter. Where the parameter is divided over an axis along which ranks compute with different parts of it (experts,
tensor parallelism), they are rows of a part, and lie in the whole as one box or several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.base.part import Part, Strip

__all__ = ["Box", "Piece"]


class Box(NamedTuple):
    """A rectangle that a rank holds.

    Attributes:
        offsets: Where it begins in the whole parameter, one for each dim.
        sizes: Its shape.
        places: Where it begins in the rank's rows.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]

    def in_whole(self, whole: Tensor) -> Tensor:
        """A view of the whole parameter."""
        return _narrow(whole, self.offsets, self.sizes)

    def in_rows(self, rows: Tensor) -> Tensor:
        """A view of the rank's rows."""
        return _narrow(rows, self.places, self.sizes)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a parameter, or of a part of it.

    Attributes:
        shape: Of the whole parameter.
        rows: Of dim 0 of this rank's part; a 0-D parameter counts as one row.
        parts: Which part of the whole this rank computes with, the outermost division first; empty: all of it.
    """

    shape: torch.Size
    rows: range
    parts: tuple[Part, ...] = ()

    @cached_property
    def part_shape(self) -> torch.Size:
        """The shape of what this rank computes with."""
        shape = self.shape
        for part in self.parts:
            shape = part.local_shape(shape)
        return shape

    @property
    def has_whole_rows(self) -> bool:
        """Whether the rows are rows of the whole parameter, and not parts of those."""
        return all(part.dim == 0 for part in self.parts)

    @cached_property
    def row_ranges(self) -> tuple[range, ...]:
        """Which rows of the whole parameter these are, in the order they have here, or are parts of."""
        if not self.shape:
            return (self.rows,)
        return tuple(range(span.whole, span.whole + span.length) for span in self._spans(0))

    @property
    def row_range(self) -> range:
        """`row_ranges` where there is one; of several, as many rows from the first on."""
        return self.extent(0)

    def extent(self, dim: int) -> range:
        """Along one dim, what this rank holds of the whole parameter; of several strips, as many entries from the first on."""
        if not self.shape:
            return self.rows
        length, spans = len(self.rows) if dim == 0 else self.part_shape[dim], self._spans(dim)
        start = spans[0].whole if spans else self.rows.start
        return range(start, start + length)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """All of it; none without elements."""
        if not self.shape:
            return (Box((), (), ()),) if self.rows else ()
        if not math.prod((len(self.rows), *self.part_shape[1:])):
            return ()
        found = itertools.product(*(self._spans(dim) for dim in range(len(self.shape))))
        return tuple(
            Box(*zip(*((span.whole, span.length, span.local) for span in spans), strict=True)) for spans in found
        )

    def box_at(self, offsets: Sequence[int] | None) -> Box:
        """The box that begins there; `None`: the only one.

        Raises:
            EngineStateError: There is none.
        """
        found = [box for box in self.boxes if offsets is None or box.offsets == tuple(offsets)]
        if len(found) != 1:
            raise EngineStateError(
                f"a tensor of shape {tuple(self.shape)}: this rank holds {[box.offsets for box in self.boxes]}, asked for what begins at "
                f"{None if offsets is None else tuple(offsets)}; give the offset of one of those"
            )
        return found[0]

    def of(self, whole: Tensor) -> Tensor:
        """What this rank holds of a whole tensor of the parameter's shape; a view of it if it is one box.

        A tensor without elements is whole on every rank.
        """
        if not whole.dim():
            return whole if self.rows else whole.reshape(1)[:0]
        if self.has_whole_rows:
            return self.rows_of(whole)
        if not whole.numel():
            return whole
        if len(self.boxes) == 1:
            return self.boxes[0].in_whole(whole)
        own = whole.new_empty((len(self.rows), *self.part_shape[1:]))
        for box in self.boxes:
            box.in_rows(own).copy_(box.in_whole(whole))
        return own

    def own_part(self, whole: Tensor) -> Tensor:
        """All rows of this rank's part of a whole tensor; a copy, unless the whole is the part."""
        for part in self.parts:
            whole = part.own(whole)
        return whole

    def rows_of(self, whole: Tensor) -> Tensor:
        """The rows of a tensor with as many rows as the whole parameter and any other dims; a view if they are consecutive."""
        if not whole.numel():
            return whole
        ranges = self.row_ranges or (range(0),)
        found = [whole[rows.start : rows.stop] for rows in ranges]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _spans(self, dim: int) -> list[Strip]:
        """Along one dim: where the rank's rows lie in the whole."""
        spans = [Strip(whole=0, local=0, length=self.part_shape[dim])]
        for part in reversed(self.parts):
            if part.dim == dim:
                spans = [one for span in spans for one in _through(span, part.strips)]
        if dim == 0:
            held = Strip(whole=0, local=self.rows.start, length=len(self.rows))
            spans = [
                Strip(one.whole, one.local - self.rows.start, one.length)
                for span in spans
                for one in _within(span, held)
            ]
        return spans


def _through(span: Strip, strips: Sequence[Strip]) -> Iterator[Strip]:
    """A span of a part, in the whole that the part is of."""
    for strip in strips:
        start, stop = max(span.whole, strip.local), min(span.whole + span.length, strip.local + strip.length)
        if start < stop:
            yield Strip(strip.whole + start - strip.local, span.local + start - span.whole, stop - start)


def _within(span: Strip, held: Strip) -> Iterator[Strip]:
    """What of a span a rank holds."""
    start, stop = max(span.local, held.local), min(span.local + span.length, held.local + held.length)
    if start < stop:
        yield Strip(span.whole + start - span.local, start, stop - start)


def _narrow(tensor: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor
