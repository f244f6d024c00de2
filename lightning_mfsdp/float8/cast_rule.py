"""The cast of a matrix to 8 bits in PyTorch, for every device; cast_kernel.py computes the same numbers on GPUs in one pass.

Numbers times the scale reach the largest of the 8-bit format exactly where they are largest, so nothing is clamped. An infinity or NaN is
NaN in the cast, and what undoes the scale is then not finite, so that every number of a product is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LARGEST", "LEAST", "cast_"]

# Weights and activations need precision, gradients range: 3 bits of mantissa and 2.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LEAST = (
    2.0**-100
)  # a tensor whose largest number is smaller is cast as if that were its largest: the scale stays finite


def cast_(matrix: Tensor, largest: Tensor, out: Tensor, out_transposed: Tensor, inverse: Tensor) -> None:
    """Fill what `casts.cast` returns: arguments as of `cast_kernel.cast_in_one_pass_`."""
    # A number over a tensor would be the number times its reciprocal, rounded twice.
    scale = torch.full_like(largest, LARGEST[out.dtype]) / largest.clamp(min=LEAST)
    inverse.copy_(scale.reciprocal())
    scaled = (matrix.float() * scale).to(out.dtype)
    if out.numel():
        out.copy_(scaled)
    if out_transposed.numel():
        rows = matrix.shape[0]
        out_transposed[:, :rows].copy_(scaled.t())
        out_transposed[:, rows:].zero_()
