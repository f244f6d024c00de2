"""Statistics of a stash: counted on the device, read on the host when the numbers have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mfsdp.moe.stash.pages import Counter, PageKind, PagePool
from lightning_mfsdp.moe.stash.side_stream import Event, SideStream
from lightning_mfsdp.moe.stash.sizing import Demand

__all__ = ["HeldBytes", "Occupancy", "Snapshot", "StashStatistics", "Trace"]


@dataclass(frozen=True, kw_only=True)
class StashStatistics:
    """One step of one rank.

    Attributes:
        saves: Tensors that went into pages, or would have. The last save of a forward stays in place and is not counted.
        live_rows: Their live rows.
        capacity_rows: Their total rows.
        fill: The largest part of the device pages that was in use at once, of the kind of pages where it was largest; 0 without pages.
        host_fill: The same in host memory.
        spilled: Tensors that went to host memory.
        overflowed: Tensors that found no place; 0 in recorded steps, which have none.
        over_capacity: Tensors whose number of live rows was negative or above their capacity.
        ordinary_bytes: Most memory that ordinary saves would have held at once.
        kept_bytes: Most memory that saved tensors held at once outside the pages when a backward began; in recorded steps, which have no
            pages, what they would have held.
        page_bytes: Memory of the pages on the device.
        host_bytes: Memory of the pages on the host.
        moved_bytes: Bytes copied into pages. What is not read there is also copied out of them.
    """

    saves: int
    live_rows: int
    capacity_rows: int
    fill: float
    host_fill: float
    spilled: int
    overflowed: int
    over_capacity: int
    ordinary_bytes: int
    kept_bytes: int
    page_bytes: int
    host_bytes: int
    moved_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Device memory that the stash saves; negative if it costs some."""
        return self.ordinary_bytes - self.kept_bytes - self.page_bytes


class HeldBytes:
    """Memory of saves, which is counted on the host.

    Attributes:
        ordinary: Of the last step: most that ordinary saves would have held at once.
        kept: Of the last step: most that stayed in place when a backward began.
        has_grown: Whether a backward is the first since there was one more save, or since the step began.
    """

    def __init__(self) -> None:
        self.ordinary = self.kept = 0
        self.has_grown = False
        self._now = self._most = self._most_kept = 0

    def add(self, nbytes: int) -> None:
        """A save was added."""
        self.has_grown = True
        self._now += nbytes
        self._most = max(self._most, self._now)

    def remove(self, nbytes: int) -> None:
        """It was loaded, or can no longer be loaded."""
        self._now -= nbytes

    def keep(self, nbytes: int) -> None:
        """This many bytes stay as a backward begins."""
        self.has_grown = False
        self._most_kept = max(self._most_kept, nbytes)

    def end_step(self) -> None:
        """The next step begins with the remaining saves. A step without saves was a replay, and is ignored."""
        self.has_grown = True
        if self._most:
            self.ordinary, self._most = self._most, self._now
            self.kept, self._most_kept = self._most_kept, 0

    def give_up(self) -> None:
        """All saves were dropped."""
        self._now = 0


class Snapshot:
    """A step's counters, being copied to the host."""

    def __init__(
        self,
        pools: Mapping[PageKind, PagePool],
        side: SideStream,
        held_bytes: HeldBytes,
        *,
        recorded: bool,
    ) -> None:
        self._pools = [(kind, pool.size, pool.size_bytes, pool.host_bytes) for kind, pool in pools.items()]
        self._ordinary_bytes, self._kept_bytes = held_bytes.ordinary, held_bytes.kept
        self._recorded = recorded
        with side.fork():
            counters = torch.stack([pool.counters for pool in pools.values()])
            self._host = torch.empty(counters.shape, dtype=torch.int64, device="cpu", pin_memory=counters.is_cuda)
            self._host.copy_(counters, non_blocking=True)
            self._ready: Event = side.record()

    @property
    def is_ready(self) -> bool:
        """Whether reading does not wait."""
        return self._ready is None or bool(self._ready.query())

    def demand(self) -> dict[PageKind, Demand]:
        """What tensors requested. Waits for the device."""
        return {
            kind: Demand(count[Counter.MOST_WANTED], count[Counter.OVERFLOWED] + count[Counter.CARRIED])
            for (kind, *_), count in zip(self._pools, self._read(), strict=True)
        }

    def statistics(self) -> StashStatistics:
        """The numbers. Waits for the device unless `is_ready`."""
        counts = self._read()
        total = {counter: sum(count[counter] for count in counts) for counter in Counter}
        fills = [
            (count[Counter.MOST_USED] / max(size.pages, 1), count[Counter.MOST_HOST_USED] / max(size.host_pages, 1))
            for (_, size, *_), count in zip(self._pools, counts, strict=True)
        ]
        return StashStatistics(
            saves=total[Counter.SAVES],
            live_rows=total[Counter.LIVE_ROWS],
            capacity_rows=total[Counter.CAPACITY_ROWS],
            fill=max(fill for fill, _ in fills),
            host_fill=max(fill for _, fill in fills),
            spilled=total[Counter.SPILLED],
            overflowed=0 if self._recorded else total[Counter.OVERFLOWED],
            over_capacity=total[Counter.OVER_CAPACITY],
            ordinary_bytes=self._ordinary_bytes,
            kept_bytes=self._kept_bytes,
            page_bytes=sum(size_bytes for _, _, size_bytes, _ in self._pools),
            host_bytes=sum(host_bytes for *_, host_bytes in self._pools),
            moved_bytes=sum(
                kind.row_bytes * count[Counter.STORED_ROWS]
                for (kind, *_), count in zip(self._pools, counts, strict=True)
            ),
        )

    def _read(self) -> list[list[int]]:
        if self._ready is not None:
            self._ready.synchronize()
        return self._host.tolist()


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Pages in use after one save or load."""

    layer: str
    event: str
    kind: PageKind
    used: int
    host_used: int
    wanted: int
    pages: int
    host_pages: int


class Trace:
    """Counters after every save and load of a step."""

    def __init__(self) -> None:
        self._noted: list[tuple[str, str, PagePool, Tensor]] = []

    def note(self, layer: str, event: str, pools: Sequence[PagePool], side: SideStream) -> None:
        """Copy the counters after the work issued on the side stream."""
        with side.fork():
            self._noted += [(layer, event, pool, pool.counters.clone()) for pool in dict.fromkeys(pools)]

    def read(self) -> list[Occupancy]:
        """In order. Waits for the device."""
        occupancies = []
        for layer, event, pool, counters in self._noted:
            count = counters.tolist()
            occupancies.append(
                Occupancy(
                    layer=layer,
                    event=event,
                    kind=pool.kind,
                    used=pool.size.pages - (count[Counter.TAIL] - count[Counter.HEAD]),
                    host_used=pool.size.host_pages - (count[Counter.HOST_TAIL] - count[Counter.HOST_HEAD]),
                    wanted=count[Counter.WANTED],
                    pages=pool.size.pages,
                    host_pages=pool.size.host_pages,
                )
            )
        return occupancies
