"""Compares numbers that must be equal on several ranks on the device, and raises once the device is done, so that no step waits."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base.containers import leaves_in

__all__ = ["Comparisons", "fingerprint"]

_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(value: Any, device: torch.device, *, contents: bool = True) -> Tensor:
    """`[1]`, int64: a number of all tensors, or of their shapes alone, numbers and strings in `value`; almost surely another for others."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for path, leaf in leaves_in(value):
        described = f"{path} {leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else None
        if described is None and isinstance(leaf, (str, bytes, int, float, bool)):
            described = f"{path} {leaf!r}"
        if described is None:
            continue
        salt = zlib.crc32(described.encode())
        total = total * 1_000_003 + salt
        if contents and isinstance(leaf, Tensor) and leaf.numel():
            numbers = _numbers(leaf).to(device)
            places = torch.arange(1, numbers.numel() + 1, device=device)
            total = total + ((numbers + salt) * (places * 2_654_435_761 % 2_147_483_647)).sum()
    return total


def _numbers(leaf: Tensor) -> Tensor:
    flat = leaf.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(_UNSIGNED[flat.element_size()]).to(torch.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    extremes: Tensor  # in host memory: the largest number, and the largest of its negatives
    arrived: torch.cuda.Event | None
    error: Callable[[int, int], Exception | None]


class Comparisons:
    """The comparisons of one run, in the order in which they were begun, which is the same on all ranks."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()

    def compare(
        self, number: Tensor, group: dist.ProcessGroup | None, error: Callable[[int, int], Exception | None]
    ) -> None:
        """Ask whether a number is equal on the ranks of a group; an answer raises in a later call. Collective.

        Args:
            number: `[1]`, int64.
            group: `None`: all ranks.
            error: Makes what is raised, on all ranks, from the smallest and the largest number; `None`: nothing.
        """
        extremes = torch.cat([number, -number])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        arrived = None
        if extremes.is_cuda:
            on_host = torch.empty(2, dtype=torch.int64, pin_memory=True, device="cpu")
            extremes = on_host.copy_(extremes, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._pending.append(_Pending(extremes=extremes, arrived=arrived, error=error))

    def look(self, *, wait: bool = False) -> None:
        """Raise for the first comparison that is known to have failed.

        Args:
            wait: For all that were asked for.
        """
        while self._pending:
            first = self._pending[0]
            if first.arrived is not None and not first.arrived.query():
                if not wait:
                    return
                first.arrived.synchronize()
            self._pending.popleft()
            largest, negative = first.extremes.tolist()
            if largest != -negative:
                if (error := first.error(-negative, largest)) is None:
                    continue
                self._pending.clear()
                raise error
