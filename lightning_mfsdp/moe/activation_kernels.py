"""The activations of activations.py as Triton kernels: one pass over memory, and only over rows that count.

How many those are is read on the device, so the cost of a call depends on its live rows, not on the length of the buffer. Rows that do
not count are neither read nor written. Sums are in float32.

The backward reads the projection where it is: as a tensor, or in the pages of a saver.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mfsdp.moe.saving import PagedRows

__all__ = ["scaled_activation", "scaled_activation_backward"]

_LARGEST_BLOCK = 1024


def scaled_activation(name: str, projected: Tensor, probabilities: Tensor, live: Tensor) -> Tensor:
    """`Activation.forward` on a device; `projected` is contiguous, float32 or lower."""
    gated = name == "swiglu"
    rows, columns = projected.shape[0], projected.shape[1] // (2 if gated else 1)
    result = projected.new_empty(rows, columns)
    _forward[(rows,)](projected, probabilities, live, result, columns, GATED=gated, BLOCK=_block(columns))
    return result


def scaled_activation_backward(
    name: str, projected: Tensor | PagedRows, probabilities: Tensor, grad: Tensor, live: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`Activation.backward` on a device; all are contiguous, float32 or lower."""
    gated = name == "swiglu"
    rows, columns = grad.shape
    result, grad_projected = torch.empty_like(grad), grad.new_empty(projected.shape, dtype=projected.dtype)
    grad_probabilities = torch.empty(rows, dtype=torch.float32, device=grad.device)
    # For a tensor without pages, the placeholder addresses of its header and table are never read.
    source, header, table, page_rows = (
        (projected.pages, projected.header, projected.table, projected.page_rows)
        if isinstance(projected, PagedRows)
        else (projected, live, live, 0)
    )
    _backward[(rows,)](
        source,
        header,
        table,
        page_rows,
        probabilities,
        grad,
        live,
        result,
        grad_projected,
        grad_probabilities,
        columns,
        GATED=gated,
        BLOCK=_block(columns),
    )
    return result, grad_projected, grad_probabilities


def _block(columns: int) -> int:
    return int(min(_LARGEST_BLOCK, triton.next_power_of_2(columns)))


@triton.jit  # type: ignore[untyped-decorator]
def _forward(projected, probabilities, live, result, columns, GATED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(live):
        probability = tl.load(probabilities + row).to(tl.float32)
        first = projected + row * columns * (2 if GATED else 1)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            gate = tl.load(first + column, mask=inside, other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(first + columns + column, mask=inside, other=0.0).to(tl.float32)
                value = gate * tl.sigmoid(gate) * up
            else:
                value = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
            tl.store(result + row * columns + column, value * probability, mask=inside)


# One kernel for rows in pages and for others: a graph may be recorded as soon as there are pages, and needs it compiled.
@triton.jit(do_not_specialize=["header", "table", "page_rows"])  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    source,
    header,
    table,
    page_rows,
    probabilities,
    grad,
    live,
    result,
    grad_projected,
    grad_probabilities,
    columns,
    GATED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    number = tl.program_id(0)
    row = number.to(tl.int64)
    if row < tl.load(live):
        probability = tl.load(probabilities + row).to(tl.float32)
        begin = row * columns * (2 if GATED else 1)
        is_paged = page_rows > 0
        height = tl.maximum(page_rows, 1)
        has_pages = tl.load(header, mask=is_paged, other=0) == 0  # the tier of the device
        page = tl.load(table + number // height, mask=is_paged & has_pages, other=0)
        place = tl.where(is_paged, page * height + number % height, row)
        first = source + place * columns * (2 if GATED else 1)
        kept = tl.where(has_pages, columns, 0)  # rows without memory read as zero
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < columns
            from_above = tl.load(grad + row * columns + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(first + column, mask=column < kept, other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(first + columns + column, mask=column < kept, other=0.0).to(tl.float32)
                opened = tl.sigmoid(gate)
                value = gate * opened * up
                grad_gate = up * opened * (1.0 + gate * (1.0 - opened))
                grad_up = from_above * probability * gate * opened
                tl.store(grad_projected + begin + columns + column, grad_up, mask=inside)
            else:
                below = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
                value = gate * below
                grad_gate = below + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
            tl.store(grad_projected + begin + column, from_above * probability * grad_gate, mask=inside)
            tl.store(result + row * columns + column, value * probability, mask=inside)
            total += from_above * value
        tl.store(grad_probabilities + row, tl.sum(total))
