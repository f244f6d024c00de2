"""The operations on pages, as Triton kernels: nothing waits, addresses stay fixed, so a CUDA graph can hold all of it. See `PageOps`.

One program decides where a tensor goes, and moves the heads; the copies, many programs, follow it on the stream and
only read what it wrote. So no program can see heads that others have not published yet, and no barrier across a grid is needed.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_mfsdp.moe.stash.pages import PagePool, pages_in

__all__ = ["copy_in", "copy_out", "give_back", "place"]

# Sizes that change when pages are enlarged are not compiled into kernels: a graph may be recorded right after, and needs all compiled.
# One warp: a scalar that one warp has stored must not be loaded by another that is late.
_BOOKKEEPING: dict[str, Any] = {"block": 512, "num_warps": 1}
_TILE_BYTES = 8192
_MOST_COLUMNS = 1024


def place(pool: PagePool, header: Tensor, table: Tensor, live_rows: Tensor, capacity: int) -> None:
    """See `PageOps.place`."""
    _place[(1,)](
        live_rows,
        header,
        table,
        pool.counters,
        pool.free,
        pool.host_free,
        capacity,
        pool.size.pages,
        pool.size.host_pages,
        page_rows=pool.page_rows,
        **_BOOKKEEPING,
    )


def copy_in(pool: PagePool, header: Tensor, table: Tensor, rows: Tensor) -> None:
    """See `PageOps.copy_in`."""
    _copy(_copy_in, pool, header, table, rows)


def copy_out(pool: PagePool, header: Tensor, table: Tensor, rows: Tensor) -> None:
    """See `PageOps.copy_out`."""
    _copy(_copy_out, pool, header, table, rows)


def give_back(pool: PagePool, header: Tensor, table: Tensor) -> None:
    """See `PageOps.give_back`."""
    _give_back[(1,)](
        header,
        table,
        pool.counters,
        pool.free,
        pool.host_free,
        pool.size.pages,
        pool.size.host_pages,
        **_BOOKKEEPING,
    )


def _copy(kernel: Any, pool: PagePool, header: Tensor, table: Tensor, rows: Tensor) -> None:
    capacity, width = rows.shape
    if not rows.numel():
        return
    columns = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    height = max(1, min(triton.next_power_of_2(pool.page_rows), _TILE_BYTES // (columns * rows.element_size())))
    kernel[(pages_in(capacity, pool.page_rows), triton.cdiv(width, columns))](
        rows,
        header,
        table,
        pool.rows,
        # Without a host tier nothing is read there, but a kernel requires a valid device address.
        pool.host_rows if pool.size.host_pages else pool.rows,
        capacity,
        width,
        page_rows=pool.page_rows,
        height=height,
        columns=columns,
    )


@triton.jit(do_not_specialize=["live_rows", "capacity", "pages", "host_pages"])  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    live_rows, header, table, counters, free, host_free, capacity, pages, host_pages,
    page_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    asked = tl.load(live_rows)
    rows = tl.minimum(tl.maximum(asked, 0), capacity)
    needed = (rows + page_rows - 1) // page_rows
    head = tl.load(counters + 0)
    tail = tl.load(counters + 1)
    host_head = tl.load(counters + 2)
    host_tail = tl.load(counters + 3)
    on_device = needed <= tail - head
    on_host = (needed <= host_tail - host_head) & (on_device == 0)
    for start in range(0, needed, block):
        index = start + tl.arange(0, block)
        wanted = index < needed
        page = tl.load(free + (head + index) % tl.maximum(pages, 1), mask=wanted & on_device, other=0)
        host_page = tl.load(host_free + (host_head + index) % tl.maximum(host_pages, 1), mask=wanted & on_host, other=0)
        tl.store(table + index, tl.where(on_device, page, host_page), mask=wanted & (on_device | on_host))
    tier = tl.where(on_device, 0, tl.where(on_host, 1, 2)).to(tl.int64)
    tl.store(header + 0, tier)
    tl.store(header + 1, rows)
    tl.store(header + 2, needed)

    tl.debug_barrier()  # no thread stores before all have loaded
    head += tl.where(on_device, needed, 0)
    host_head += tl.where(on_host, needed, 0)
    now_wanted = tl.load(counters + 4) + needed
    tl.store(counters + 0, head)
    tl.store(counters + 2, host_head)
    tl.store(counters + 4, now_wanted)
    tl.store(counters + 5, tl.maximum(tl.load(counters + 5), now_wanted))
    tl.store(counters + 6, tl.maximum(tl.load(counters + 6), pages - (tail - head)))
    tl.store(counters + 7, tl.maximum(tl.load(counters + 7), host_pages - (host_tail - host_head)))
    tl.store(counters + 8, tl.load(counters + 8) + 1)
    tl.store(counters + 9, tl.load(counters + 9) + rows)
    tl.store(counters + 10, tl.load(counters + 10) + tl.where(tier < 2, rows, 0))
    tl.store(counters + 11, tl.load(counters + 11) + tl.where(tier == 1, 1, 0))
    tl.store(counters + 12, tl.load(counters + 12) + tl.where(tier == 2, 1, 0))
    tl.store(counters + 13, tl.load(counters + 13) + tl.where(asked != rows, 1, 0))
    tl.store(counters + 14, tl.load(counters + 14) + capacity)


@triton.jit(do_not_specialize=["pages", "host_pages"])  # type: ignore[untyped-decorator]
def _give_back(header, table, counters, free, host_free, pages, host_pages, block: tl.constexpr):  # type: ignore[no-untyped-def]
    tier = tl.load(header + 0)
    count = tl.load(header + 2)
    tail = tl.load(counters + 1)
    host_tail = tl.load(counters + 3)
    for start in range(0, count, block):
        index = start + tl.arange(0, block)
        held = index < count
        page = tl.load(table + index, mask=held & (tier < 2), other=0)
        tl.store(free + (tail + index) % tl.maximum(pages, 1), page, mask=held & (tier == 0))
        tl.store(host_free + (host_tail + index) % tl.maximum(host_pages, 1), page, mask=held & (tier == 1))
    tl.debug_barrier()
    tl.store(counters + 1, tail + tl.where(tier == 0, count, 0))
    tl.store(counters + 3, host_tail + tl.where(tier == 1, count, 0))
    tl.store(counters + 4, tl.load(counters + 4) - count)
    tl.store(header + 0, 3)
    tl.store(header + 2, 0)


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator]
def _copy_in(  # type: ignore[no-untyped-def]
    source, header, table, pages, host_pages, capacity, width,
    page_rows: tl.constexpr, height: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    tier = tl.load(header + 0)
    live = tl.load(header + 1)
    number = tl.program_id(0).to(tl.int64)
    first = number * page_rows
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    if (tier < 2) & (first < live):
        page = tl.load(table + number)
        for start in range(0, page_rows, height):
            within = start + tl.arange(0, height)
            row = first + within
            mask = ((within < page_rows) & (row < live))[:, None] & (column < width)[None, :]
            value = tl.load(source + row[:, None] * width + column[None, :], mask=mask)
            target = (page * page_rows + within)[:, None] * width + column[None, :]
            if tier == 0:
                tl.store(pages + target, value, mask=mask)
            else:
                tl.store(host_pages + target, value, mask=mask)


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator]
def _copy_out(  # type: ignore[no-untyped-def]
    target, header, table, pages, host_pages, capacity, width,
    page_rows: tl.constexpr, height: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    tier = tl.load(header + 0)
    live = tl.where(tier < 2, tl.load(header + 1), 0)
    number = tl.program_id(0).to(tl.int64)
    first = number * page_rows
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    page = tl.load(table + number, mask=first < live, other=0)
    for start in range(0, page_rows, height):
        within = start + tl.arange(0, height)
        row = first + within
        inside = (within < page_rows)[:, None] & (column < width)[None, :]
        mask = inside & (row < live)[:, None]
        source = (page * page_rows + within)[:, None] * width + column[None, :]
        value = tl.load(pages + source, mask=mask & (tier == 0), other=0)
        value += tl.load(host_pages + source, mask=mask & (tier == 1), other=0)
        tl.store(target + row[:, None] * width + column[None, :], value, mask=inside & (row < capacity)[:, None])
