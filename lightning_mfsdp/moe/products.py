"""Products of rows that are sorted by expert with stacked expert weights, on offsets that stay on the device.

    ends        int32 [experts]   expert e has the rows from ends[e - 1] to ends[e]; rows past the last of them are dead

Dead rows are neither read nor written: the result there is undefined.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_mfsdp.base import compat

__all__ = ["expert_products", "no_grouped_product_because", "outer_products", "product_dtype", "warn_where_it_waits"]

_ALIGNED_BYTES = 16  # of a row, for grouped products


def product_dtype(hidden: Tensor, weights: Tensor) -> torch.dtype:
    """Dtype of the products: autocast's, otherwise that of the weights."""
    kind, dtype = hidden.device.type, weights.dtype
    if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return dtype


def expert_products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each row times the matrix of its expert: `[rows, a]` and `[experts, a, b]` give `[rows, b]`."""
    if not no_grouped_product_because(rows, weights):
        return compat.grouped_mm(rows, weights, ends)
    result = rows.new_empty(rows.shape[0], weights.shape[2])
    for expert, start, end in _ranges(ends):
        torch.mm(rows[start:end], weights[expert], out=result[start:end])
    return result


def outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The sum of `left[row]` times `right[row]` over the rows of each expert: `[rows, a]` and `[rows, b]` give `[experts, a, b]`."""
    if not no_grouped_product_because(left, right):
        return compat.grouped_mm(left.t(), right, ends)
    result = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for expert, start, end in _ranges(ends):
        torch.mm(left[start:end].t(), right[start:end], out=result[expert])
    return result


def _ranges(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, row after its last), for experts that have rows. Waits for the device, if it is not the CPU."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, start, end
        start = end


def no_grouped_product_because(*operands: Tensor) -> str:
    """Why these are multiplied expert by expert, on offsets read by the host; empty if one kernel does it."""
    first = operands[0]
    if not first.is_cuda:
        return "it runs on the CPU"
    if first.dtype is not torch.bfloat16:
        return f"grouped products are made for torch.bfloat16, and it computes in {first.dtype}"
    if torch.cuda.get_device_capability(first.device) < (9, 0):
        return f"grouped products need compute capability 9.0, {torch.cuda.get_device_name(first.device)} has less"
    widths = [size for operand in operands for size in operand.shape[1:]]
    if any(width * first.element_size() % _ALIGNED_BYTES for width in widths):
        return f"grouped products need widths that are multiples of {_ALIGNED_BYTES} bytes, got {widths} elements of {first.dtype}"
    return ""


def warn_where_it_waits(*operands: Tensor) -> None:
    """Warn if products of these make the host wait for a device. From one place, so that Python shows it once."""
    if operands[0].is_cuda and (reason := no_grouped_product_because(*operands)):
        warnings.warn(
            f"mixture of experts: experts are computed one by one, and each call waits for the device: {reason}. Grouped products "
            'need bfloat16 (precision="bf16-mixed" or "bf16-true"), compute capability 9.0 and widths that are multiples of 8',
            stacklevel=2,
        )
