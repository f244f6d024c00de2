"""CapacityWatch: how large the buffers of experts should have been, counted on the device for a caller that checks before the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_mfsdp.base import compat

__all__ = ["CapacityWatch", "rounded_up"]


class Watched(Protocol):
    """Experts with a capacity factor."""

    training: bool
    capacity_watch: CapacityWatch | None


class CapacityWatch:
    """Watches experts with a capacity factor. While it does, they never wait for the device, and it records what they drop.

    Args:
        layers: By name. Their `capacity_watch` becomes this, until `close`.
        device: Where they are.
        asks: Whether a step in which rows were dropped will be skipped.

    Attributes:
        names: Of the layers.
        needed: The least capacity factor with which each layer would have kept all its rows, 0 if it did; float64, `[layers]`.
    """

    def __init__(self, layers: Mapping[str, Watched], device: torch.device, asks: Callable[[], bool]) -> None:
        self.names = list(layers)
        self.needed = torch.zeros(len(layers), dtype=torch.float64, device=device)
        self._layers = dict(layers)
        self._place = {id(layer): index for index, layer in enumerate(layers.values())}
        self._asks = asks
        for layer in layers.values():
            layer.capacity_watch = self

    def close(self) -> None:
        """Detach from the layers."""
        for layer in self._layers.values():
            if layer.capacity_watch is self:
                layer.capacity_watch = None

    def asks(self, experts: Watched) -> bool:
        """Whether this call is watched. Evaluations and copies of the layers are not."""
        return experts.training and id(experts) in self._place and self._asks()

    def note(self, experts: Watched, is_short: Tensor, factor: Tensor) -> None:
        """A call dropped rows if `is_short`; `factor` would have been enough. Does not wait."""
        place = self._place.get(id(experts))
        if place is not None and compat.backward_task() == -1:  # a recomputing checkpoint was recorded before
            mine = self.needed[place]
            torch.maximum(mine, torch.where(is_short, factor, 0.0), out=mine)

    @property
    def hundredths(self) -> Tensor:
        """The largest of `needed`, rounded up to hundredths: int64, 0-D, a number of those."""
        largest = self.needed.amax() if self.names else self.needed.sum()
        return (largest * 100).ceil().long()

    def __deepcopy__(self, memo: dict[int, Any]) -> CapacityWatch:
        return self


def rounded_up(factor: float) -> str:
    """A capacity factor for messages, rounded so that it is enough."""
    return f"{math.ceil(factor * 100) / 100:.2f}"
