"""Casts a matrix to 8 bits with one scale, as it lies and transposed: one operator, which runs a kernel or its reference in PyTorch.

Shapes: a matrix is `[R, C]`. Its cast `[R, C]` is what a product reads along C. Its transposed cast is `[C, R16]`, where R16 is R
rounded up to a multiple of 16 and the rest is zeros: a product that sums over rows reads that one, and can read 16 bytes at a time only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mfsdp.base.kernels import has_triton
from lightning_mfsdp.float8.cast_rule import cast_

__all__ = ["ROWS_TOGETHER", "cast", "largest_magnitude"]

ROWS_TOGETHER = 16
_WITHOUT = "casts to 8 bits take several PyTorch operations, and more memory"


def largest_magnitude(matrix: Tensor) -> Tensor:
    """The largest magnitude of its numbers: 0-D, float32. NaN if one is NaN."""
    largest: Tensor = torch.linalg.vector_norm(matrix, float("inf"), dtype=torch.float32)
    return largest


@torch.library.custom_op("lightning_mfsdp::float8_cast", mutates_args=())
def cast(
    matrix: Tensor, largest: Tensor, dtype: torch.dtype, as_is: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in 8 bits.

    Args:
        matrix: `[R, C]`, of a floating-point dtype of at most 32 bits.
        largest: From `largest_magnitude`.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        as_is: Whether the cast is wanted.
        transposed: Whether its transpose is.

    Returns:
        The cast `[R, C]`, the transposed cast `[C, R16]`, each `[0]` if it is not wanted, and what a number is multiplied with to undo the
        scale: 0-D, float32.
    """
    out, out_transposed, inverse = _empty(matrix, dtype, as_is, transposed)
    if matrix.is_cuda and has_triton(_WITHOUT):
        from lightning_mfsdp.float8.cast_kernel import cast_in_one_pass_

        cast_in_one_pass_(matrix, largest, out, out_transposed, inverse)
    else:
        cast_(matrix, largest, out, out_transposed, inverse)
    return out, out_transposed, inverse


@cast.register_fake
def _(
    matrix: Tensor, largest: Tensor, dtype: torch.dtype, as_is: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(matrix, dtype, as_is, transposed)


def _empty(matrix: Tensor, dtype: torch.dtype, as_is: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = matrix.shape
    whole = (rows + ROWS_TOGETHER - 1) // ROWS_TOGETHER * ROWS_TOGETHER
    return (
        matrix.new_empty((rows, columns) if as_is else (0,), dtype=dtype),
        matrix.new_empty((columns, whole) if transposed else (0,), dtype=dtype),
        matrix.new_empty((), dtype=torch.float32),
    )
