"""The question to all ranks whether some tensor found no place. It is asked on the side, and nobody waits until somebody wants to know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.moe.stash.pages import Counter, PagePool
from lightning_mfsdp.moe.stash.stream import Event, SideStream

__all__ = ["OverflowFlag", "most_overflowed"]


def most_overflowed(pools: Sequence[PagePool], device: torch.device) -> Tensor:
    """The most tensors without a place that any pool of any rank has counted: int64, 0-D, on the device. Collective."""
    counts = [pool.counters[Counter.OVERFLOWED] for pool in pools]
    most = torch.stack(counts).amax() if counts else torch.zeros((), dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most


class OverflowFlag:
    """Of one step; later questions take the place of earlier ones, since counts only grow within a step."""

    def __init__(self) -> None:
        self.is_submitted = self.was_read = False
        self._host: Tensor | None = None
        self._ready: Event = None

    def submit(self, pools: Sequence[PagePool], side: SideStream, device: torch.device) -> None:
        """Reduce over all ranks, and send the answer to the host."""
        if self._host is None:
            self._host = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")
        with side.fork():
            self._host.copy_(most_overflowed(pools, device), non_blocking=True)
            self._ready = side.record()
        side.join(self._ready)  # a graph that is replayed next may use the same communicator
        self.is_submitted, self.was_read = True, False

    def wait(self) -> bool:
        """The answer."""
        assert self._host is not None
        if self._ready is not None:
            self._ready.synchronize()
        self.was_read = True
        return bool(self._host.item())

    def clear(self) -> None:
        """A new step begins."""
        self.is_submitted = self.was_read = False
