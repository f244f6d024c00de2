"""WholeView: part of a sharded tensor as indexing, `view`, `T` or `chunk` show it. What is written to it is written to the sharded tensor.

    p.data[0].zero_(), p.grad[:2].mul_(0), nn.init.orthogonal_(p.data), r = p[:2] and later r.clamp_(...) under no_grad

Where ranks hold different rows, such a view lies in the whole tensor, gathered for this use. A write gathers anew, is done by every rank in
the same way, and each keeps its rows. Where every rank has all rows, the view lies in the tensor itself, and whoever reads it is told.

Alternatives considered: refusing such writes (DDP and plain PyTorch do them, and a program that freezes rows of an embedding has no other
way); functions told by name alone (`out=`, `foreach` and library code write without a name that says so: version counters tell).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.params.number import Number
from lightning_mfsdp.engine.params.placed_tensor import PlacedTensor

__all__ = ["WholeView", "in_memory_of", "is_in_place"]


def is_in_place(function: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function writes to an argument, as far as its name and `out=` tell."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None


def in_memory_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor is a view of another one's memory."""
    if tensor.layout is not torch.strided or not tensor.numel() or isinstance(tensor, PlacedTensor):
        return False
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class WholeView(Number):
    """The same on every rank; what is computed from it is an ordinary tensor, what is viewed of it one of these."""

    _source: PlacedTensor
    _whole: Tensor | None

    @staticmethod
    def of(view: Tensor, source: PlacedTensor, whole: Tensor | None) -> WholeView:
        """A plain tensor, with or without history, as a view of a sharded one.

        Args:
            view: The plain one.
            source: What it shows a part of.
            whole: All of it, in the view's memory; `None`: that is the memory of `source` itself.
        """
        made: WholeView = view.as_subclass(WholeView)
        made._source, made._whole = source, whole
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        views = [one for one in tensors_in((args, kwargs)) if isinstance(one, WholeView)]
        if any(issubclass(kind, PlacedTensor) for kind in types):
            args, kwargs = map_tensors(_whole, (args, kwargs))
        with compat.without_torch_function():
            if is_in_place(func, kwargs):
                for view in _written(func, args, kwargs):
                    view._prepare_write(func)
            before = [None if view.is_inference() else view._version for view in views]
            result = func(*args, **kwargs)
            written = [view for view, version in zip(views, before, strict=True) if view._was_written(func, version)]
            result = map_tensors(lambda one: _viewed(one, views), result)
        for source, whole in {id(view._source): (view._source, view._whole) for view in written}.values():
            if whole is None:
                source.note_write()
            else:
                with torch.no_grad():
                    source.copy_(whole)
        return result

    def _prepare_write(self, function: Any) -> None:
        """A write comes: have the present values around it."""
        if torch.is_grad_enabled() and self.requires_grad:
            raise EngineStateError(
                f"{function.__name__} on a view of parameter {self._source.described}: it needs a gradient, and autograd cannot follow a "
                "write in place; write under torch.no_grad(), or to a view of its data"
            )
        if self._whole is not None:
            with torch.no_grad():
                self._whole.copy_(self._source.full_tensor())

    def _was_written(self, function: Any, version: int | None) -> bool:
        if version is None:  # made in inference mode
            return is_in_place(function, {})
        return self._version != version

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor, to be read: what is written to an array is not seen."""
        found = self.full_tensor().detach().numpy(force=force)
        found.setflags(write=False)
        return found


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[WholeView]:
    """Views that a function writes to: its first argument, or `out`."""
    target = kwargs["out"] if kwargs.get("out") is not None else args[:1]
    return [one for one in tensors_in(target) if isinstance(one, WholeView)]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, PlacedTensor) else tensor


def _viewed(one: Tensor, views: list[WholeView]) -> Tensor:
    """What a function returned, as a view too if it shows the memory of one."""
    if isinstance(one, WholeView):
        return one
    for view in views:
        if in_memory_of(one, view):
            return WholeView.of(one, view._source, view._whole)
    return one
