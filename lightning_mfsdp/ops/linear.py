"""Computes logits tile by tile from hidden states and a weight, uses them, and discards them.

Shapes: T tokens, H width, V vocabulary (of this rank, where it is split). A tile is `[t, v]`, in the dtype of the hidden states.

    what                    tiles                                sums, in float32 unless specified otherwise
    statistics              some tokens, all V                   none
    gradients, T >= V       some tokens, all V                   to the weight, [V, H]
    gradients, T < V        all T, some of the vocabulary        to the hidden states, [T, H]

Each product has one dim that is whole, so it is rounded once; only the other gradient is summed over tiles. If one tile is enough there
is no such sum, except in float16: a gradient that has yet to be scaled may exceed float16's range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_mfsdp.ops.choice import math_for
from lightning_mfsdp.ops.tiles import NUMBERS, Shaping, slices, wide_dtype

__all__ = ["Projection", "ProjectionGradients", "Tiling", "Wanted"]

# Dtypes of the gradients to hidden states, weight and bias; `None`: that one is not needed.
Wanted: TypeAlias = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]

# A tile may take this much memory, or a quarter of the hidden states and the weight if that is more: next to them it is small, and
# products of 1,000 and more rows keep matrix units busy and the sums' traffic small.
_TILE_BYTES = 64 << 20
_TILE_SHARE = 4
_ALIGNMENT = 128
_NARROWING_NUMEL = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Largest tile.

    Args:
        tokens: Rows.
        vocabulary: Columns.
    """

    tokens: int
    vocabulary: int

    @classmethod
    def for_statistics(cls, hidden: Tensor, weight: Tensor, token_chunk: int | None) -> Tiling:
        """Some tokens by the whole vocabulary; `token_chunk` of them if that is given."""
        num_tokens, num_ids = hidden.shape[0], weight.shape[0]
        if token_chunk is None:
            token_chunk = _equal_parts(num_tokens, _tile_numel(hidden, weight) // max(1, num_ids))
        return cls(tokens=token_chunk, vocabulary=max(1, num_ids))

    @classmethod
    def for_gradients(cls, hidden: Tensor, weight: Tensor, token_chunk: int | None) -> Tiling:
        """The smaller of both sums: over tokens if the vocabulary is no larger than they are many, or if requested."""
        num_tokens, num_ids = hidden.shape[0], weight.shape[0]
        if token_chunk is not None or num_tokens >= num_ids:
            return cls.for_statistics(hidden, weight, token_chunk)
        columns = _equal_parts(num_ids, _tile_numel(hidden, weight) // max(1, num_tokens))
        return cls(tokens=max(1, num_tokens), vocabulary=columns)


def _tile_numel(hidden: Tensor, weight: Tensor) -> int:
    size_bytes = (hidden.numel() + weight.numel()) * hidden.element_size()
    return max(_TILE_BYTES, size_bytes // _TILE_SHARE) // hidden.element_size()


def _equal_parts(length: int, most: int) -> int:
    """Length of parts of about `most`, all nearly equal and multiples of a size that suits matrix units."""
    if length <= most:
        return max(1, length)
    aligned = max(_ALIGNMENT, most // _ALIGNMENT * _ALIGNMENT)
    even = -(-length // -(-length // aligned))
    return -(-even // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Hidden states and what makes logits of them, all of one dtype.

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]`.
        bias: `[V]`, or `None`.
        target: `[T]`, token ids of the whole vocabulary.
        shaping: Temperature and softcap.
        first_id: Token id of the weight's first row.
        sum_dtype: Dtype of gradients that are summed over tiles.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    shaping: Shaping
    first_id: int
    sum_dtype: torch.dtype

    def memory(self, tiling: Tiling) -> Tensor:
        """Memory for the largest tile, 1-D, which all tiles use in turn."""
        rows = min(tiling.tokens, self.hidden.shape[0])
        return self.hidden.new_empty(rows * min(tiling.vocabulary, self.weight.shape[0]))

    def logits(self, rows: slice, columns: slice, memory: Tensor) -> Tensor:
        """A tile `[t, v]` in `memory`."""
        hidden, weight = self.hidden[rows], self.weight[columns]
        tile = memory[: hidden.shape[0] * weight.shape[0]].view(hidden.shape[0], weight.shape[0])
        if self.bias is None:
            return torch.mm(hidden, weight.t(), out=tile)
        return torch.addmm(self.bias[columns], hidden, weight.t(), out=tile)

    def describe(self, rows: slice, tile: Tensor, out: Tensor) -> None:
        """Statistics of whole rows in `out` `[4, T]`."""
        math_for(tile).statistics(tile, self.target[rows], self.shaping, self.first_id, out[:, rows])

    def differentiate(self, rows: slice, columns: slice, tile: Tensor, lse: Tensor, factors: Tensor) -> None:
        """Put the gradient to logits in their place; `factors` `[4, T]` as in tiles.py."""
        first_id = self.first_id + columns.start
        math_for(tile).gradient(tile, self.target[rows], lse[rows], factors[:, rows], self.shaping, first_id, out=tile)

    def statistics(self, token_chunk: int | None) -> Tensor:
        """Statistics of all rows, `[4, T]` in the wide dtype."""
        statistics = self.hidden.new_empty(NUMBERS, self.hidden.shape[0], dtype=wide_dtype(self.hidden.dtype))
        tiling = Tiling.for_statistics(self.hidden, self.weight, token_chunk)
        memory, columns = self.memory(tiling), slice(0, self.weight.shape[0])
        for rows in slices(self.hidden.shape[0], tiling.tokens):
            self.describe(rows, self.logits(rows, columns, memory), statistics)
        return statistics

    def gradients(self, lse: Tensor, factors: Tensor, token_chunk: int | None, wanted: Wanted) -> ProjectionGradients:
        """The requested gradients, from `factors` `[4, T]`; logits are recomputed."""
        tiling = Tiling.for_gradients(self.hidden, self.weight, token_chunk)
        gradients, memory = ProjectionGradients(self, tiling, wanted), self.memory(tiling)
        for rows in slices(self.hidden.shape[0], tiling.tokens):
            for columns in slices(self.weight.shape[0], tiling.vocabulary):
                tile = self.logits(rows, columns, memory)
                self.differentiate(rows, columns, tile, lse, factors)
                gradients.add(self, rows, columns, tile)
        return gradients


class ProjectionGradients:
    """Gradients to hidden states, weight and bias, summed over tiles. It keeps no reference to any of the three.

    Args:
        projection: What they are gradients to.
        tiling: Of the tiles that will come.
        wanted: Dtypes of the results; `None` for those that are not needed.
    """

    def __init__(self, projection: Projection, tiling: Tiling, wanted: Wanted) -> None:
        hidden, weight = projection.hidden, projection.weight
        self._wanted = wanted
        self._hidden = _sum_for(hidden, wanted[0], projection.sum_dtype, tiling.vocabulary >= weight.shape[0])
        self._weight = _sum_for(weight, wanted[1], projection.sum_dtype, tiling.tokens >= hidden.shape[0])
        self._bias = hidden.new_zeros(weight.shape[0], dtype=wide_dtype(hidden.dtype)) if wanted[2] else None

    def add(self, projection: Projection, rows: slice, columns: slice, tile: Tensor) -> None:
        """Add the contribution of a tile of gradients to logits."""
        if self._hidden is not None:
            self._hidden.add(rows, tile, projection.weight[columns])
        if self._weight is not None:
            self._weight.add(columns, tile.t(), projection.hidden[rows])
        if self._bias is not None:
            self._bias[columns] += tile.sum(0, dtype=self._bias.dtype)

    def results(self, scale: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """All three, times `scale`. To be called once: the sums are used up."""
        to_hidden, to_weight, to_bias = self._wanted
        hidden = self._hidden.result(to_hidden, scale) if self._hidden is not None and to_hidden else None
        weight = self._weight.result(to_weight, scale) if self._weight is not None and to_weight else None
        bias = self._bias if self._bias is None or scale is None else self._bias * scale
        return hidden, weight, bias if bias is None else bias.to(to_bias)


def _sum_for(like: Tensor, wanted: torch.dtype | None, sum_dtype: torch.dtype, is_whole: bool) -> _Sum | None:
    """For gradients to `like`; `is_whole`: one product computes each row, which is rounded once in any dtype.

    Not in float16: before it is divided by the number of tokens, a gradient may exceed its range.
    """
    if wanted is None:
        return None
    return _Sum(like, wanted if is_whole and wanted is not torch.float16 else sum_dtype)


class _Sum:
    """A sum of products, each in some of the rows.

    Args:
        like: A tensor with the shape and the device.
        dtype: Of the sum.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._total = torch.empty(like.shape, dtype=dtype, device=like.device)
        self._begun: set[int] = set()
        if like.shape[0] == 0 or like.shape[1] == 0:
            self._total.zero_()

    def add(self, rows: slice, left: Tensor, right: Tensor) -> None:
        """Add `left @ right` to `rows`."""
        part, is_first = self._total[rows], rows.start not in self._begun
        if part.dtype is left.dtype:
            torch.mm(left, right, out=part) if is_first else part.addmm_(left, right)
        elif not part.is_cuda:  # there is no product with a wider result than its factors
            product = left.to(part.dtype) @ right.to(part.dtype)
            part.copy_(product) if is_first else part.add_(product)
        elif is_first:
            torch.mm(left, right, out_dtype=part.dtype, out=part)
        else:
            torch.addmm(part, left, right, out_dtype=part.dtype, out=part)
        self._begun.add(rows.start)

    def result(self, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
        """The sum in its final dtype. A narrower one uses the same memory: an additional copy would be the peak of a step."""
        total = self._total if self._begun else self._total.zero_()
        if dtype.itemsize > total.dtype.itemsize:
            total = total.to(dtype)
        if scale is not None:
            # As a vector, which keeps its dtype: a number would be rounded to that of the sum first, which all gradients would inherit.
            torch.mul(total, scale.view(1), out=total)
        if dtype.itemsize == total.dtype.itemsize:
            return total.to(dtype)
        flat = total.view(-1)
        narrow = flat.view(dtype)[: flat.numel()]
        for part in slices(flat.numel(), _NARROWING_NUMEL):
            narrow[part] = flat[part].to(dtype)  # written before what is yet to be read
        return narrow.view(total.shape)
