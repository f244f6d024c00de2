"""The two functions on tiles as Triton kernels: logits are read once, in their own dtype, and only the result is written.

Each kernel has its reference in tiles.py; tests/gpu/test_ops.py compares the two. Importing this file imports Triton, so only
`choice.math_for` does, once it gets logits on CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_mfsdp.ops.tiles import LOWEST, Shaping

__all__ = ["TritonMath"]

_BLOCK = 4096  # columns a program works on at once
_WARPS = 8


class TritonMath:
    """`TileMath` on CUDA for float16, bfloat16 and float32."""

    def statistics(self, logits: Tensor, target: Tensor, shaping: Shaping, first_id: int, out: Tensor) -> None:
        """See `TileMath`: a program for each row."""
        logits = _with_dense_rows(logits)
        num_rows, num_columns = logits.shape
        if num_rows:
            _statistics[(num_rows,)](
                logits,
                logits.stride(0),
                target,
                target.stride(0),
                out,
                out.stride(0),
                out.stride(1),
                num_columns,
                first_id,
                *_constants(shaping),
                num_warps=_WARPS,
            )

    def gradient(
        self,
        logits: Tensor,
        target: Tensor,
        lse: Tensor,
        factors: Tensor,
        shaping: Shaping,
        first_id: int,
        out: Tensor,
    ) -> None:
        """See `TileMath`: a program for each row and block of columns."""
        logits = _with_dense_rows(logits)
        num_rows, num_columns = logits.shape
        if num_rows:
            _gradient[(num_rows, triton.cdiv(num_columns, _BLOCK))](
                logits,
                logits.stride(0),
                target,
                target.stride(0),
                lse,
                lse.stride(0),
                factors,
                factors.stride(0),
                factors.stride(1),
                out,
                out.stride(0),
                num_columns,
                first_id,
                *_constants(shaping),
                num_warps=_WARPS,
            )


def _with_dense_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _constants(shaping: Shaping) -> tuple[float, float, bool, float, int]:
    """1 / temperature, softcap, whether there is one, `LOWEST` and the size of a block."""
    return 1 / shaping.temperature, shaping.softcap or 1.0, shaping.softcap is not None, LOWEST, _BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _shaped(logits, inverse_temperature, softcap, HAS_CAP: tl.constexpr, LOW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """`z` of logits in any dtype, float32."""
    z = logits.to(tl.float32)
    if HAS_CAP:
        folded = tl.exp(-2.0 * tl.abs(z / softcap))  # at most 1: the tanh cannot overflow
        tanh = (1.0 - folded) / (1.0 + folded)
        z = softcap * tl.where(z < 0, -tanh, tanh)
    z = z * inverse_temperature
    return tl.where(z < LOW, LOW, z)  # and not a maximum, which would hide NaN


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    target,
    target_stride,
    out,
    out_stride,
    out_row_stride,
    num_columns,
    first_id,
    inverse_temperature,
    softcap,
    HAS_CAP: tl.constexpr,  # noqa: N803
    LOW: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    # Sums of exp(z - peak), z * exp(z - peak) and z, lane by lane, so that only the peak is reduced in every round.
    peak = tl.full([], LOW, tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        valid = columns < num_columns
        z = _shaped(tl.load(start + columns, mask=valid, other=0.0), inverse_temperature, softcap, HAS_CAP, LOW)
        higher = tl.maximum(peak, tl.max(tl.where(valid, z, LOW), 0))
        fade = tl.exp(peak - higher)
        weight = tl.where(valid, tl.exp(z - higher), 0.0)
        weights = weights * fade + weight
        weighted = weighted * fade + weight * z
        total += tl.where(valid, z, 0.0)
        peak = higher
    weight_sum = tl.sum(weights, 0)
    column = tl.load(target + row * target_stride) - first_id
    inside = (column >= 0) & (column < num_columns)
    chosen = tl.load(start + column, mask=inside, other=0.0)
    chosen = _shaped(chosen, inverse_temperature, softcap, HAS_CAP, LOW)
    result = out + row * out_row_stride
    tl.store(result, peak + tl.log(weight_sum))
    tl.store(result + out_stride, tl.sum(weighted, 0) / weight_sum)
    tl.store(result + 2 * out_stride, tl.where(inside, chosen, 0.0))
    tl.store(result + 3 * out_stride, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    target,
    target_stride,
    lse,
    lse_stride,
    factors,
    factor_stride,
    factor_row_stride,
    out,
    out_stride,
    num_columns,
    first_id,
    inverse_temperature,
    softcap,
    HAS_CAP: tl.constexpr,  # noqa: N803
    LOW: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < num_columns
    z = tl.load(logits + row * row_stride + columns, mask=valid, other=0.0)
    z = _shaped(z, inverse_temperature, softcap, HAS_CAP, LOW)
    factor = factors + row * factor_row_stride
    a, b = tl.load(factor), tl.load(factor + factor_stride)
    c, d = tl.load(factor + 2 * factor_stride), tl.load(factor + 3 * factor_stride)
    log_p = z - tl.load(lse + row * lse_stride)
    column = tl.load(target + row * target_stride) - first_id
    grad = tl.exp(log_p) * (a + b * log_p) + d + tl.where(columns == column, c, 0.0)
    slope = inverse_temperature
    if HAS_CAP:
        tanh = z / (inverse_temperature * softcap)
        slope = (1.0 - tanh * tanh) * inverse_temperature
    tl.store(out + row * out_stride + columns, (grad * slope).to(out.dtype.element_ty), mask=valid)
