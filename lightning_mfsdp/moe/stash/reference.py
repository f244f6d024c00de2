"""The operations on pages, in torch: for the CPU, and as the reference for the kernels, bit by bit. See `PageOps`."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mfsdp.moe.stash.pages import Counter, Header, PagePool, Tier, pages_in

__all__ = ["copy_in", "copy_out", "give_back", "place"]


def place(pool: PagePool, header: Tensor, table: Tensor, live_rows: Tensor, capacity: int) -> None:
    """See `PageOps.place`."""
    asked = int(live_rows)
    rows = min(max(asked, 0), capacity)
    needed = pages_in(rows, pool.page_rows)
    count = [int(value) for value in pool.counters]
    if needed <= count[Counter.TAIL] - count[Counter.HEAD]:
        tier = Tier.DEVICE
        table[:needed] = _taken(pool.free, count[Counter.HEAD], needed)
        count[Counter.HEAD] += needed
    elif needed <= count[Counter.HOST_TAIL] - count[Counter.HOST_HEAD]:
        tier = Tier.HOST
        table[:needed] = _taken(pool.host_free, count[Counter.HOST_HEAD], needed)
        count[Counter.HOST_HEAD] += needed
    else:
        tier = Tier.NOWHERE
    header[: len(Header)] = torch.tensor([tier, rows, needed], device="cpu")

    used = pool.size.pages - (count[Counter.TAIL] - count[Counter.HEAD])
    host_used = pool.size.host_pages - (count[Counter.HOST_TAIL] - count[Counter.HOST_HEAD])
    count[Counter.WANTED] += needed
    count[Counter.MOST_WANTED] = max(count[Counter.MOST_WANTED], count[Counter.WANTED])
    count[Counter.MOST_USED] = max(count[Counter.MOST_USED], used)
    count[Counter.MOST_HOST_USED] = max(count[Counter.MOST_HOST_USED], host_used)
    count[Counter.SAVES] += 1
    count[Counter.LIVE_ROWS] += rows
    count[Counter.STORED_ROWS] += rows * (tier != Tier.NOWHERE)
    count[Counter.SPILLED] += tier == Tier.HOST
    count[Counter.OVERFLOWED] += tier == Tier.NOWHERE
    count[Counter.OVER_CAPACITY] += asked != rows
    count[Counter.CAPACITY_ROWS] += capacity
    pool.counters.copy_(torch.tensor(count, device="cpu"))


def copy_in(pool: PagePool, header: Tensor, table: Tensor, rows: Tensor) -> None:
    """See `PageOps.copy_in`."""
    pages = _pages_of(pool, header, table)
    if pages is not None:
        storage, where = pages
        storage[where] = rows[: len(where)]


def copy_out(pool: PagePool, header: Tensor, table: Tensor, rows: Tensor) -> None:
    """See `PageOps.copy_out`."""
    rows.zero_()
    pages = _pages_of(pool, header, table)
    if pages is not None:
        storage, where = pages
        rows[: len(where)] = storage[where]


def give_back(pool: PagePool, header: Tensor, table: Tensor) -> None:
    """See `PageOps.give_back`."""
    tier, _, pages = (int(value) for value in header[: len(Header)])
    if tier in (Tier.DEVICE, Tier.HOST) and pages:
        free, tail = (pool.free, Counter.TAIL) if tier == Tier.DEVICE else (pool.host_free, Counter.HOST_TAIL)
        free[_circle(int(pool.counters[tail]), pages, len(free))] = table[:pages]
        pool.counters[tail] += pages
    pool.counters[Counter.WANTED] -= pages
    header[Header.TIER] = Tier.RETURNED
    header[Header.PAGES] = 0


def _circle(start: int, count: int, length: int) -> Tensor:
    return torch.arange(start, start + count, device="cpu") % length


def _taken(free: Tensor, head: int, pages: int) -> Tensor:
    return free[_circle(head, pages, len(free))] if pages else free[:0]


def _pages_of(pool: PagePool, header: Tensor, table: Tensor) -> tuple[Tensor, Tensor] | None:
    """Storage of a record's tier, and where in it each live row is; `None` if it is nowhere."""
    tier, rows, pages = (int(value) for value in header[: len(Header)])
    if tier not in (Tier.DEVICE, Tier.HOST):
        return None
    within = torch.arange(pool.page_rows, device="cpu")
    where = (table[:pages, None] * pool.page_rows + within).flatten()[:rows]
    return (pool.rows if tier == Tier.DEVICE else pool.host_rows), where
