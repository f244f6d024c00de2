"""LiveMemory: counts the memory of what operations make, until it is freed."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in

__all__ = ["LiveMemory"]


class LiveMemory(compat.DispatchMode):
    """Inside, counts the storages of tensors that operations return; these may be without memory.

    Bytes (`torch.uint8`) are not counted: they are the engine's slots, buckets and gradients, which it allocates and frees without an
    operation, and which it counts itself. A number that has no value and is read (`item`, `tolist`, `bool`) is zero.

    Attributes:
        part: What new storages belong to.
    """

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self._live = Counter[str]()
        self._most = Counter[str]()
        self._sizes: dict[int, tuple[str, int]] = {}  # part and bytes of each storage that exists

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except compat.NumberWithoutValue:
            if func is not compat.READS_NUMBER:
                raise
            return 0.0 if args[0].is_floating_point() else 0
        for tensor in tensors_in(result):
            self._note(tensor)
        return result

    def forget(self) -> None:
        """What exists now is counted no more."""
        self._sizes = {key: (part, 0) for key, (part, _) in self._sizes.items()}
        self._live.clear()
        self._most.clear()

    def take_most(self) -> dict[str, int]:
        """Bytes by part when all parts together were most since the last call."""
        most, self._most = self._most, self._live.copy()
        return dict(most)

    def _note(self, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        size_bytes = 0 if local.dtype is torch.uint8 else storage.nbytes()
        self._sizes[key] = self.part, size_bytes
        weakref.finalize(storage, self._note_freed, key)
        self._live[self.part] += size_bytes
        if self._live.total() > self._most.total():
            self._most = self._live.copy()

    def _note_freed(self, key: int) -> None:
        part, size_bytes = self._sizes.pop(key)
        self._live[part] -= size_bytes
