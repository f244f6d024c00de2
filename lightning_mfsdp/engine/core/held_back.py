"""What `.grad` shows while `no_sync` holds gradients back: a stand-in that reduces them once it is used in a computation.

    p.grad = None, zero_grad()      what is held back of that parameter is dropped
    any arithmetic with p.grad      everything held back in the root is reduced first; `.grad` is then the gradient. Collective
    nothing                         the next backward that communicates reduces it, as usual

Without it `.grad` would be `None`, what is held back could not be cleared, and one microbatch with NaN would reach the next step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.engine.core.sharded_tensor import Rows
from lightning_mfsdp.engine.core.torch_functions import describes

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup
    from lightning_mfsdp.engine.core.parameter import Entry

__all__ = ["GradientRows", "HeldBackGradient", "HeldBackRows", "stand_in"]


class HeldBackGradient(Tensor):
    """Stands for the gradient of an optimizer's local rows, and has one element of memory."""

    _owner: tuple[weakref.ref[ParameterGroup], int]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {}, super().__torch_function__, types)


class HeldBackRows(Rows):
    """The same as a DTensor, for `parameters()`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(func, args, kwargs or {}, super().__torch_function__, types)

    # Methods of a DTensor besides torch's own functions.

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """See `DTensor.full_tensor`. Collective."""
        return cast("Rows", _reduced(self)).full_tensor(grad_placements=grad_placements)

    def to_local(self, **options: Any) -> Tensor:
        """See `DTensor.to_local`. Collective where the gradient is not reduced yet."""
        return cast("Rows", _reduced(self)).to_local(**options)

    def redistribute(self, *args: Any, **options: Any) -> Any:
        """See `DTensor.redistribute`. Collective."""
        return cast("Rows", _reduced(self)).redistribute(*args, **options)


class GradientRows(Rows):
    """A reduced gradient as a DTensor. It may be kept while later gradients are held back that are to be added to it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if not (describes(func) or name == "__get__"):
            for one in tensors_in((args, kwargs or {})):
                if isinstance(one, GradientRows):
                    one.have_all(zeroed=name in ("zero_", "_foreach_zero_"))
        return super().__torch_function__(func, types, args, kwargs)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """See `DTensor.full_tensor`. Collective."""
        self.have_all()
        return super().full_tensor(grad_placements=grad_placements)

    def to_local(self, **options: Any) -> Tensor:
        """See `DTensor.to_local`. Collective where a later gradient is not reduced yet."""
        self.have_all()
        return super().to_local(**options)

    def have_all(self, *, zeroed: bool = False) -> None:
        """Add what is held back to it, or zero both."""
        group, index = self._owner[0](), self._owner[1]
        if group is not None and group.is_behind(index, self._local_tensor):
            if zeroed:
                group.zero_held_back(index)
            else:
                group.reduce_held_back()


def stand_in(group: ParameterGroup, index: int) -> HeldBackGradient:
    """What the local rows of a parameter show as their gradient while it is held back."""
    local = group.entries[index].local
    with torch.inference_mode(False), torch.no_grad():
        number = torch.zeros((), dtype=local.grad_dtype or local.dtype, device=local.device)
        made = compat.as_kind(HeldBackGradient, number.expand(local.shape))
    made._owner = (weakref.ref(group), index)
    return made


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], describe: Any, types: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in ("zero_", "_foreach_zero_"):
        for tensor in tensors_in(args):
            if isinstance(tensor, (HeldBackGradient, HeldBackRows)):
                _zero(tensor)
            else:
                tensor.zero_()
        return args[0]
    if describes(func) or name == "detach_":  # what a `zero_grad` or an optimizer calls first
        return describe(func, types, args, kwargs)
    return func(*map_tensors(_reduced, args), **map_tensors(_reduced, kwargs))


def _zero(tensor: HeldBackGradient | HeldBackRows) -> None:
    """Zero what is held back. Whether any rank used the parameter is not known before the reduction, so it stays held back."""
    group = tensor._owner[0]()
    grad = _entry(tensor).local.grad
    if not isinstance(grad, HeldBackGradient) and grad is not None:
        grad.zero_()
    elif group is not None:
        group.zero_held_back(tensor._owner[1])


def _entry(tensor: HeldBackGradient | HeldBackRows) -> Entry:
    group = tensor._owner[0]()
    assert group is not None, "a parameter's gradient is read while its module exists"
    return group.entries[tensor._owner[1]]


def _reduced(tensor: Tensor) -> Tensor:
    """The gradient that a stand-in stands for; what is held back is reduced now if it is not yet."""
    if not isinstance(tensor, (HeldBackGradient, HeldBackRows)):
        return tensor
    group, entry = tensor._owner[0](), _entry(tensor)
    if isinstance(entry.local.grad, HeldBackGradient) and group is not None:
        group.reduce_held_back()
    shown: Tensor = entry.sharded if isinstance(tensor, HeldBackRows) else entry.local
    return shown.grad if shown.grad is not None else torch.zeros_like(shown.detach())
