"""Gathering rows as a Triton kernel: only the live rows, whose number is read on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gather_live_rows"]

_LARGEST_BLOCK = 1024


def gather_live_rows(values: Tensor, index: Tensor, live: Tensor) -> Tensor:
    """`row_plan.gathered` on a device."""
    values = values.contiguous()
    columns = values.shape[1]
    result = torch.empty(index.shape[0], columns, dtype=values.dtype, device=values.device)
    block = min(_LARGEST_BLOCK, triton.next_power_of_2(max(columns, 1)))
    _gather[(index.shape[0],)](values, index, live, result, columns, BLOCK=block)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _gather(values, index, live, result, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(live):
        source = values + tl.load(index + row) * columns
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            tl.store(result + row * columns + column, tl.load(source + column, mask=inside), mask=inside)
