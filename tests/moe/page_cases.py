"""The same random history of saves and loads, done by either implementation of the page operations; rows in pages by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mfsdp.moe.saving import PagedRows
from lightning_mfsdp.moe.stash.pages import HEADER, Counter, PageKind, PageOps, PagePool, PoolSize, Tier, pages_in

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)


@dataclass(eq=False)
class Save:
    """A tensor, its record, and where it went."""

    rows: Tensor
    live: int
    header: Tensor
    table: Tensor
    tier: Tier
    pages: list[int]


def random_rows(capacity: int, width: int, live: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern at all in live rows; all ones, a NaN in every float, in the others."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (capacity, width * dtype.itemsize), dtype=torch.uint8, generator=generator)
    bits[min(max(live, 0), capacity) :] = 255
    return bits.view(dtype)


class History:
    """Saves and loads tensors through one pool."""

    def __init__(self, ops: PageOps, pool: PagePool, device: str = "cpu") -> None:
        self.ops, self.pool, self.device = ops, pool, device
        self.kept: list[Save] = []

    def save(self, rows: Tensor, live: int) -> Save:
        capacity = rows.shape[0]
        header = torch.full((HEADER,), -7, device=self.device)
        table = torch.full((max(pages_in(capacity, self.pool.page_rows), 1),), -7, device=self.device)
        rows = rows.to(self.device)
        self.ops.place(self.pool, header, table, torch.tensor(live, device=self.device), capacity)
        self.ops.copy_in(self.pool, header, table, self.pool.kind.rows_of(rows))
        tier, _, count, _ = header.tolist()
        save = Save(rows, live, header, table, Tier(tier), table[:count].tolist())
        self.kept.append(save)
        return save

    def load(self, save: Save) -> Tensor:
        found = torch.full_like(save.rows.view(torch.uint8), 171).view(save.rows.dtype)
        self.ops.copy_out(self.pool, save.header, save.table, self.pool.kind.rows_of(found))
        self.ops.give_back(self.pool, save.header, save.table)
        self.kept.remove(save)
        return found


def expected(save: Save) -> Tensor:
    """As bytes: live rows as they were, zeros after them; nothing but zeros from nowhere."""
    rows = save.rows.view(torch.uint8).clone()
    rows[min(max(save.live, 0), rows.shape[0]) if save.tier < Tier.NOWHERE else 0 :] = 0
    return rows


def make_pool(dtype: torch.dtype, width: int, page_rows: int, size: PoolSize, device: str = "cpu") -> PagePool:
    """Pages full of 170, so that what nobody wrote is seen."""
    pool = PagePool(PageKind.of(torch.empty(1, width, dtype=dtype)), page_rows, torch.device(device), size)
    pool.rows.view(torch.uint8).fill_(170)
    pool.host_rows.view(torch.uint8).fill_(170)
    return pool


def run_history(
    history: History, dtype: torch.dtype, *, steps: int, seed: int, check_each: bool = True
) -> list[Tensor]:
    """Random saves of random size and loads in random order; at last everything is loaded. Everything that came back, as bytes."""
    chance = random.Random(seed)
    width, results = history.pool.kind.width, []
    for step in range(steps):
        if history.kept and chance.random() < 0.48:
            save = chance.choice(history.kept)
            found = history.load(save).view(torch.uint8)
            if check_each:
                assert torch.equal(found, expected(save)), f"step {step}"
            results.append(found)
        else:
            capacity = chance.choice((1, 5, 16, 23))
            live = chance.choice((0, capacity, capacity + 3, -1, *range(capacity)))
            history.save(random_rows(capacity, width, live, dtype, seed=seed * 1000 + step), live)
    while history.kept:
        results.append(history.load(history.kept[0]).view(torch.uint8))
    return results


def available(pool: PagePool) -> tuple[list[int], list[int]]:
    """Page numbers that are free, on the device and on the host."""
    count = pool.counters.tolist()
    free, host_free = pool.free.tolist(), pool.host_free.tolist()
    return (
        [free[at % len(free)] for at in range(count[Counter.HEAD], count[Counter.TAIL])],
        [host_free[at % len(host_free)] for at in range(count[Counter.HOST_HEAD], count[Counter.HOST_TAIL])],
    )


def in_pages(rows: Tensor, live: int, page_rows: int, *, seed: int = 0, tier: Tier = Tier.DEVICE) -> PagedRows:
    """Rows in shuffled pages among pages of others, all ones, a NaN in every float, wherever they are not."""
    count, spare = pages_in(max(live, 0), page_rows), 5
    order = torch.randperm(count + spare, generator=torch.Generator().manual_seed(seed)).to(rows.device)
    pages = rows.new_empty((count + spare) * page_rows, *rows.shape[1:])
    pages.view(torch.uint8).fill_(255)
    for index, page in enumerate(order[:count].tolist()):
        part = rows[index * page_rows : min((index + 1) * page_rows, live)]
        if tier == Tier.DEVICE:
            pages[page * page_rows : page * page_rows + len(part)] = part
    # What nobody wrote is out of bounds by far.
    table = torch.full((max(pages_in(len(rows), page_rows), 1),), 2**40, device=rows.device)
    if tier == Tier.DEVICE:
        table[:count] = order[:count]
    header = torch.tensor([tier, live, count, -7], device=rows.device)
    return PagedRows(pages=pages, header=header, table=table, page_rows=page_rows, rows=len(rows))
