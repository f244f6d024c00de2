"""Who counts allocated bytes while a step is recorded."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["DeviceMemory", "MemoryCounter", "NoMemory"]


class MemoryCounter(Protocol):
    """Bytes in one part of a step after the other."""

    def begin(self) -> int:
        """A part begins; returns what is allocated."""

    def peak(self) -> int:
        """The most that was allocated since the part began."""


class DeviceMemory:
    """PyTorch's allocator of a CUDA device. Reading it waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> int:
        """As of `MemoryCounter`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """As of `MemoryCounter`."""
        return torch.cuda.max_memory_allocated(self._device)


class NoMemory:
    """Nobody counts, and every number is 0."""

    def begin(self) -> int:
        """As of `MemoryCounter`."""
        return 0

    def peak(self) -> int:
        """As of `MemoryCounter`."""
        return 0
