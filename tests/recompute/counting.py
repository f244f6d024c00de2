"""What operators do, seen one by one: how often they run, and how much memory lives, as the allocator of a device would count it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counting(TorchDispatchMode):
    """How often an operator ran."""

    def __init__(self, *operators: Any) -> None:
        super().__init__()
        self.operators, self.count = operators, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.operators and self.counts(args)
        return func(*args, **(kwargs or {}))

    def counts(self, args: Any) -> bool:
        return True


class CountedMemory(TorchDispatchMode):
    """Inside, a `MemoryCounter` of what operators allocate, in forward and backward of the same thread.

    Attributes:
        now: Bytes that are alive.
        most: The most of them since `begin()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, Any] = {}

    def begin(self) -> int:
        self.most = self.now
        return self.now

    def peak(self) -> int:
        return self.most

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity in self._alive or not size:
            return

        def gone(_: Any) -> None:
            del self._alive[identity]
            self.now -= size

        self._alive[identity] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)
