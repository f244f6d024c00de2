"""Number: the result of a reduction over all rows. A plain tensor, for logs and lists of numbers, that also has FSDP2's methods."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in

__all__ = ["Number"]


class Number(Tensor):
    """The same on every rank. What is computed from numbers alone is a Number too; with other tensors, an ordinary tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented  # sharded tensors handle it
        with compat.without_torch_function():
            result = func(*args, **(kwargs or {}))
            numbers = type(result) is Tensor and all(
                isinstance(one, Number) for one in tensors_in((args, kwargs or {}))
            )
            return result.as_subclass(Number) if numbers else result

    def full_tensor(self) -> Tensor:
        """Itself, as an ordinary tensor."""
        with compat.without_torch_function():
            return self.as_subclass(torch.Tensor)

    def to_local(self) -> Tensor:
        """See `full_tensor`."""
        return self.full_tensor()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.full_tensor(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)
