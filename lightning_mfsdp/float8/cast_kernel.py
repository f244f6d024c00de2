"""The cast to 8 bits as a Triton kernel: a tile is read once and written as it lies and transposed. cast_rule.py is its reference.

Importing this file imports Triton, so only `casts.cast` does, once it gets a matrix on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mfsdp.float8.cast_rule import LARGEST, LEAST

__all__ = ["cast_in_one_pass_"]

_TILE_ROWS, _TILE_COLUMNS, _WARPS = 64, 128, 4
_LEAST = tl.constexpr(LEAST)


def cast_in_one_pass_(matrix: Tensor, largest: Tensor, out: Tensor, out_transposed: Tensor, inverse: Tensor) -> None:
    """Fill what `casts.cast` returns.

    Args:
        matrix: `[R, C]`, any strides.
        largest: 0-D, float32.
        out: `[R, C]` or `[0]`.
        out_transposed: `[C, R16]` or `[0]`.
        inverse: 0-D, float32.
    """
    if matrix.element_size() == 2 or not out_transposed.numel():
        _launch(matrix, largest, out, out_transposed, inverse)
        return
    # Triton 3.6 exchanges some layouts of 8 bits wrongly, and with 32 bits read it exchanges these.
    rows = matrix.shape[0]
    narrow = out if out.numel() else torch.empty_like(matrix, dtype=out.dtype, memory_format=torch.contiguous_format)
    _launch(matrix, largest, narrow, out_transposed.new_empty(0), inverse)
    out_transposed[:, :rows].copy_(narrow.t())
    out_transposed[:, rows:].zero_()


def _launch(matrix: Tensor, largest: Tensor, out: Tensor, out_transposed: Tensor, inverse: Tensor) -> None:
    rows, columns = matrix.shape
    whole = out_transposed.shape[1] if out_transposed.numel() else rows
    grid = (triton.cdiv(whole, _TILE_ROWS), triton.cdiv(columns, _TILE_COLUMNS))
    with torch.cuda.device(matrix.device):
        _cast[grid](
            *(matrix, largest, out.view(torch.uint8), out_transposed.view(torch.uint8), inverse),
            *(rows, columns, whole, matrix.stride(0), matrix.stride(1)),
            LARGEST=LARGEST[out.dtype],
            IS_E4M3=out.dtype is torch.float8_e4m3fn,
            AS_IS=out.numel() > 0,
            TRANSPOSED=out_transposed.numel() > 0,
            TILE_ROWS=_TILE_ROWS,
            TILE_COLUMNS=_TILE_COLUMNS,
            num_warps=_WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _cast(  # type: ignore[no-untyped-def]
    matrix,
    largest,
    out,
    out_transposed,
    inverse,
    rows,
    columns,
    whole,
    row_stride,
    column_stride,
    LARGEST: tl.constexpr,  # noqa: N803
    IS_E4M3: tl.constexpr,  # noqa: N803
    AS_IS: tl.constexpr,  # noqa: N803
    TRANSPOSED: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE_COLUMNS: tl.constexpr,  # noqa: N803
):
    most = tl.load(largest)
    scale = tl.div_rn(LARGEST, tl.where(most < _LEAST, _LEAST, most))  # of NaN it is NaN
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, tl.div_rn(1.0, scale))
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    row, column = row.to(tl.int64), column.to(tl.int64)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    read = tl.load(matrix + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    if AS_IS:
        tl.store(out + row[:, None] * columns + column[None, :], _eight_bits(read, scale, IS_E4M3), mask=inside)
    if TRANSPOSED:
        # Exchanged as they were read, in 16 bits.
        turned = _eight_bits(tl.trans(read), scale, IS_E4M3)
        mask = (column[:, None] < columns) & (row[None, :] < whole)
        tl.store(out_transposed + column[:, None] * whole + row[None, :], turned, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _eight_bits(read, scale, IS_E4M3: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    scaled = read.to(tl.float32) * scale
    return scaled.to(tl.float8e4nv if IS_E4M3 else tl.float8e5).to(tl.uint8, bitcast=True)
