"""What a stash says of itself: numbers of its last step, memory, and the pages in use over a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_mfsdp.moe.stash.pages import PageKind, PagePool
from lightning_mfsdp.moe.stash.statistics import Occupancy, Snapshot, StashStatistics, Trace
from lightning_mfsdp.moe.stash.stream import SideStream, is_capturing

__all__ = ["ObservedStash"]


class ObservedStash:
    """The pools of a stash, and what is counted in them.

    Args:
        device: Where tensors are.
        side: Where pages are worked on.
    """

    def __init__(self, device: torch.device, side: SideStream) -> None:
        self.device = device
        self._side = side
        self._pools: dict[PageKind, PagePool] = {}
        self._snapshot: Snapshot | None = None
        self._trace: Trace | None = None

    def statistics(self, *, wait: bool = False) -> StashStatistics | None:
        """Of the last step; `None` if there was none, or its numbers have not arrived and nobody is to wait."""
        if self._snapshot is None or not (wait or self._snapshot.is_ready):
            return None
        return self._snapshot.statistics()

    @property
    def page_bytes(self) -> int:
        """Memory of the pages on the device."""
        return sum(pool.size_bytes for pool in self._pools.values())

    @property
    def host_bytes(self) -> int:
        """Memory of the pages on the host."""
        return sum(pool.host_bytes for pool in self._pools.values())

    def start_trace(self) -> None:
        """Note the pages in use after every save and load from now on."""
        self._trace = Trace()

    def stop_trace(self) -> list[Occupancy]:
        """What was noted since. Waits for the device."""
        trace, self._trace = self._trace, None
        return trace.read() if trace is not None else []

    def _note(self, layer: str, event: str, pools: Sequence[PagePool]) -> None:
        if self._trace is not None and not is_capturing(self.device):
            self._trace.note(layer, event, pools, self._side)
