"""StandIn: a tensor that gets values only once something computes with it; until then it is a shape and a dtype."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors

__all__ = ["StandIn"]

_DESCRIBES = frozenset(
    (
        *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.ndim.__get__, Tensor.requires_grad.__get__),  # type: ignore[attr-defined]
        *(Tensor.nbytes.__get__, Tensor.itemsize.__get__, Tensor.layout.__get__),  # type: ignore[attr-defined]
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size),
        *(Tensor.__len__, Tensor.__hash__, Tensor.is_floating_point, Tensor.is_complex),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
    )
)
_MAKES_ALIKE = frozenset(
    (torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like)
)


class StandIn(Tensor):
    """Torch functions are called with the tensor that it stands for, and return ordinary tensors."""

    @classmethod
    def shaped(cls, shape: torch.Size, dtype: torch.dtype) -> Any:
        """One of this shape and dtype, on the CPU. It takes no memory."""
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)

    @abstractmethod
    def whole(self) -> Tensor:
        """The tensor that it stands for, which is the same one every time; on the CPU."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBES:
            with compat.without_torch_function():
                return func(*args, **kwargs)
        if func == Tensor.device.__get__:
            return torch.device("cpu")
        if func in _MAKES_ALIKE and isinstance(args[0], StandIn):
            kwargs = {"device": "cpu", **kwargs}
            return func(_outline(args[0]), *args[1:], **kwargs)
        args, kwargs = map_tensors(lambda leaf: leaf.whole() if isinstance(leaf, StandIn) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"


def _outline(tensor: Tensor) -> Tensor:
    """A tensor of that shape and dtype without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
