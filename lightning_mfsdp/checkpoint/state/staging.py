"""Copies in host memory of what a save will write, so that training may go on and change the originals."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.checkpoint.state.piece_shard import PieceShard

__all__ = ["Staging"]


class Staging:
    """Host buffers, pinned for tensors on a GPU. They are kept from one save to the next: pinning takes longer than copying."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, tree: Any) -> Any:
        """A copy of nested dictionaries, lists and tuples with tensors on the host; complete on return.

        The buffers of the previous copy are reused: it must no longer be in use.
        """
        devices: dict[torch.device, None] = {}
        copied = self._copy((), tree, devices)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copied

    def _copy(self, key: tuple[Any, ...], value: Any, devices: dict[torch.device, None]) -> Any:
        if isinstance(value, PieceShard):
            return value.with_local(self._copy(key, value.local, devices))
        if isinstance(value, Tensor):
            if value.is_cuda:
                devices[value.device] = None
            return self._buffer(key, value).copy_(value.detach(), non_blocking=True)
        if isinstance(value, dict):
            return {name: self._copy((*key, name), part, devices) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            parts = [self._copy((*key, number), part, devices) for number, part in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)
        return copy.deepcopy(value)

    def _buffer(self, key: tuple[Any, ...], value: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.is_cuda)
            self._buffers[key] = buffer
        return buffer
