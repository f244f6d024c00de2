"""Pages of one (dtype, width): their memory, the free lists and the counters, all on the device and at fixed addresses.

    rows         device tier [pages * page_rows, width]         host tier, pinned, the same with its own number of pages
    free         [pages]: a ring buffer of page numbers              one for each tier
    counters     head and tail of each ring, which only grow: entry i of a ring is at i modulo its length
                 head = pages ever taken, tail = pages ever put in, so tail - head are free

A tensor goes to one tier whole, or nowhere. The work is done by either of two modules with the same functions, `kernels` (Triton) and
`reference` (torch), see `PageOps`. They write their decision about a tensor into its record:

    header       [4]: tier, live rows, pages, unused            read by the copies, so that all programs act alike
    table        [most pages a tensor of this capacity needs]: its pages, in order
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.stash.side_stream import SideStream

__all__ = [
    "HEADER",
    "Counter",
    "Header",
    "PageKind",
    "PageOps",
    "PagePool",
    "PoolSize",
    "Tier",
    "host_memory",
    "pages_in",
    "replace_pools",
    "warm_up",
]

HEADER = 4


class Tier(IntEnum):
    """The tier of a tensor's rows."""

    DEVICE = 0
    HOST = 1
    NOWHERE = 2
    RETURNED = 3


class Header(IntEnum):
    """Indices in a record's header."""

    TIER = 0
    ROWS = 1
    PAGES = 2


class Counter(IntEnum):
    """Indices in a pool's counters. The first five are its state, the others are statistics of a step.

    Kernels use all but the last two: tensors without a place that a query over all ranks has covered, and those of earlier steps that
    no query has covered yet.
    """

    HEAD = 0
    TAIL = 1
    HOST_HEAD = 2
    HOST_TAIL = 3
    WANTED = 4
    MOST_WANTED = 5
    MOST_USED = 6
    MOST_HOST_USED = 7
    SAVES = 8
    LIVE_ROWS = 9
    STORED_ROWS = 10
    SPILLED = 11
    OVERFLOWED = 12
    OVER_CAPACITY = 13
    CAPACITY_ROWS = 14
    ASKED = 15
    CARRIED = 16


STATE = 5
COUNTERS = len(Counter)
# Copies move integers of an element's size, so every bit pattern survives.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PageKind:
    """The kind of tensors that fit into the same pages. `dtype` is an integer one: pages hold bits."""

    dtype: torch.dtype
    width: int

    @classmethod
    def of(cls, tensor: Tensor) -> PageKind:
        """The kind of a [rows, ...] tensor.

        Raises:
            EngineStateError: It has no rows, is not contiguous, or has elements of an unusual size.
        """
        if tensor.ndim == 0 or not tensor.is_contiguous() or tensor.element_size() not in _INTEGERS:
            raise EngineStateError(
                f"paged stash: expected contiguous tensors of shape [capacity, ...] with elements of 1, 2, 4 or 8 bytes, got "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}; call contiguous() before save"
            )
        return cls(_INTEGERS[tensor.element_size()], math.prod(tensor.shape[1:]))

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.width * self.dtype.itemsize

    def rows_of(self, tensor: Tensor) -> Tensor:
        """A tensor of this kind as [rows, width] integers, in the same memory."""
        return tensor.view(self.dtype).view(tensor.shape[0], self.width)


@dataclass(frozen=True)
class PoolSize:
    """Number of pages on each tier."""

    pages: int = 0
    host_pages: int = 0


class PagePool:
    """The pages of one kind. See the module docstring for what its tensors hold."""

    def __init__(self, kind: PageKind, page_rows: int, device: torch.device, size: PoolSize) -> None:
        self.kind = kind
        self.page_rows = page_rows
        self.size = size
        self.rows = torch.empty(size.pages * page_rows, kind.width, dtype=kind.dtype, device=device)
        self.host_rows = host_memory(kind, size.host_pages * page_rows, device)
        self._numbers = torch.arange(size.pages, device=device)
        self._host_numbers = torch.arange(size.host_pages, device=device)
        self.free = self._numbers.clone()
        self.host_free = self._host_numbers.clone()
        self.counters = torch.zeros(COUNTERS, dtype=torch.int64, device=device)
        self._full = torch.tensor([0, size.pages, 0, size.host_pages, 0], device=device)
        self.reset()

    def reset(self) -> None:
        """All pages are free again; statistics stay. Copies of constants, so that a CUDA graph can hold it."""
        self.free.copy_(self._numbers)
        self.host_free.copy_(self._host_numbers)
        self.counters[:STATE].copy_(self._full)

    def clear_statistics(self) -> None:
        """Reset: nothing was counted, and no query is pending."""
        self.counters[STATE:].zero_()

    @property
    def overflowed(self) -> Tensor:
        """Tensors without a place that no step has accounted for yet: int64, 0-D, on the device."""
        return self.counters[Counter.OVERFLOWED] + self.counters[Counter.CARRIED]

    def note_asked(self) -> None:
        """The query over all ranks now covers what has overflowed so far."""
        self.counters[Counter.ASKED].copy_(self.overflowed)

    def begin_step(self) -> None:
        """Reset the counts. What overflowed after the query is left for the next one, and so is the number of pages it needed."""
        unasked = self.overflowed - self.counters[Counter.ASKED]
        wanted = self.counters[Counter.MOST_WANTED] * (unasked > 0)
        self.clear_statistics()
        self.counters[Counter.CARRIED].copy_(unasked)
        self.counters[Counter.MOST_WANTED].copy_(wanted)

    def inherit(self, counters: Tensor) -> None:
        """Take over the pending query counts of the pool that this one replaces."""
        for counter in (Counter.CARRIED, Counter.MOST_WANTED):
            self.counters[counter].copy_(counters[counter])

    @property
    def size_bytes(self) -> int:
        """Memory of the device tier."""
        return self.size.pages * self.page_rows * self.kind.row_bytes

    @property
    def host_bytes(self) -> int:
        """Memory of the host tier."""
        return self.size.host_pages * self.page_rows * self.kind.row_bytes


class PageOps(Protocol):
    """The operations on pages. Nothing here waits for the device; one pool's calls are on one stream."""

    def place(self, pool: PagePool, header: Tensor, table: Tensor, live_rows: Tensor, capacity: int) -> None:
        """Find pages for a tensor and write its record.

        Args:
            pool: The pool of the pages.
            header: int64 [HEADER], written.
            table: int64 [at least as many as `capacity` rows need], written as far as pages were found.
            live_rows: int64, one element. It is clamped to 0 and `capacity`, and the clamping is counted.
            capacity: Rows of the tensor.
        """
        ...

    def copy_in(self, pool: PagePool, header: Tensor, table: Tensor, rows: Tensor) -> None:
        """Copy live rows of `rows` [capacity, width] into the pages of a record, if it has any."""
        ...

    def copy_out(self, pool: PagePool, header: Tensor, table: Tensor, rows: Tensor) -> None:
        """Fill `rows` [capacity, width]: live rows from the pages of a record, zeros after them (everywhere if it has no pages)."""
        ...

    def give_back(self, pool: PagePool, header: Tensor, table: Tensor) -> None:
        """Return the pages of a record; doing it twice changes nothing."""
        ...


def warm_up(ops: PageOps, pool: PagePool) -> None:
    """Compile kernels before a CUDA graph needs them. The pool's pages are all free, before and after."""
    rows = torch.zeros(1, pool.kind.width, dtype=pool.kind.dtype, device=pool.rows.device)
    header, table = torch.zeros(2, HEADER, dtype=torch.int64, device=rows.device)
    ops.place(pool, header, table, torch.ones((), dtype=torch.int64, device=rows.device), 1)
    ops.copy_in(pool, header, table, rows)
    ops.copy_out(pool, header, table, rows)
    ops.give_back(pool, header, table)
    pool.reset()
    pool.clear_statistics()


def replace_pools(
    pools: dict[PageKind, PagePool],
    sizes: Mapping[PageKind, PoolSize],
    page_rows: int,
    device: torch.device,
    ops: PageOps,
    side: SideStream,
) -> None:
    """Replace `pools` by other ones, and free their memory before new memory is allocated. Pending query counts are kept."""
    side.join(side.record())
    before = {kind: pool.counters for kind, pool in pools.items()}
    pools.clear()
    for kind, size in sizes.items():
        pools[kind] = PagePool(kind, page_rows, device, size)
        with side.fork():
            warm_up(ops, pools[kind])
            if kind in before:
                pools[kind].inherit(before[kind])
    side.join(side.record())


def pages_in(rows: int, page_rows: int) -> int:
    """Pages that this many rows need."""
    return -(-rows // page_rows)


def host_memory(kind: PageKind, rows: int, device: torch.device) -> Tensor:
    """Rows in host memory that kernels on `device` can access.

    Raises:
        EngineStateError: The system refuses to pin them.
    """
    is_pinned = device.type == "cuda" and rows > 0
    try:
        return torch.empty(rows, kind.width, dtype=kind.dtype, device="cpu", pin_memory=is_pinned)
    except RuntimeError as error:
        raise EngineStateError(
            f"paged stash: kernels reach host pages only in pinned memory, and {rows * kind.row_bytes} bytes could not be pinned "
            f"({error}); lower host_factor, set it to 0, or raise the limit of locked memory (ulimit -l)"
        ) from error
