"""Which experts drop rows with `over_capacity="drop"`: read on the host when the numbers have arrived there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.moe import GroupedExperts
from lightning_mfsdp.moe.capacity import CapacityWatch

__all__ = ["BudgetWatch"]


class BudgetWatch:
    """Watches experts with `over_capacity="drop"`.

    Args:
        layers: By name.
        device: Where they are.
    """

    def __init__(self, layers: Mapping[str, GroupedExperts], device: torch.device) -> None:
        self._watch = CapacityWatch(layers, device, lambda: False)
        self._factors: Tensor | None = None
        self._ready: Any = None  # torch.cuda.Event, or None on CPU

    def close(self) -> None:
        """Detach from the layers."""
        self._watch.close()

    def look(self) -> None:
        """Start copying what was found so far to the host, unless a copy is under way. Does not wait."""
        if not self._watch.names or not self._has_arrived:
            return
        needed = self._watch.needed
        if self._factors is None:
            self._factors = torch.zeros(needed.shape, dtype=needed.dtype, device="cpu", pin_memory=needed.is_cuda)
        self._factors.copy_(needed, non_blocking=True)
        if needed.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def seen(self, *, wait: bool = False) -> dict[str, float]:
        """Capacity factors that layers which dropped rows would have needed, as last read; none while a copy is under way."""
        if self._factors is None or not (wait or self._has_arrived):
            return {}
        if self._ready is not None:
            self._ready.synchronize()
        return {name: factor for name, factor in zip(self._watch.names, self._factors.tolist(), strict=True) if factor}

    @property
    def _has_arrived(self) -> bool:
        return self._ready is None or bool(self._ready.query())
