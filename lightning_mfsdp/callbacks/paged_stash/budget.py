"""Whether experts had more rows than their buffers: their flags, read on the host when they have arrived there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.moe import GroupedExperts

__all__ = ["BudgetWatch"]


class BudgetWatch:
    """Looks at the flags of experts with a capacity factor, and leaves them as they are.

    Args:
        layers: By name; others than `GroupedExperts` with a capacity factor are passed over.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._experts = {
            name: layer
            for name, layer in layers.items()
            if isinstance(layer, GroupedExperts) and layer.capacity_factor is not None
        }
        self._flags: Tensor | None = None
        self._ready: Any = None  # torch.cuda.Event, or None on CPU

    def look(self) -> None:
        """Send the flags as they are now on their way, unless others are under way. Nobody waits."""
        if not self._experts or not self._has_arrived:
            return
        flags = torch.stack([experts.over_budget for experts in self._experts.values()])
        if self._flags is None:
            self._flags = torch.zeros(flags.shape, dtype=torch.bool, pin_memory=flags.is_cuda)
        self._flags.copy_(flags, non_blocking=True)
        if flags.is_cuda:
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def seen(self, *, wait: bool = False) -> list[str]:
        """Names of layers whose flag was set when they were last looked at; none while that is under way, unless `wait`."""
        if self._flags is None or not (wait or self._has_arrived):
            return []
        if self._ready is not None:
            self._ready.synchronize()
        return [name for name, flag in zip(self._experts, self._flags.tolist(), strict=True) if flag]

    @property
    def _has_arrived(self) -> bool:
        return self._ready is None or bool(self._ready.query())
