"""What `.grad` shows while `no_sync` holds gradients back: a stand-in that reduces them once it is used in a computation.

    p.grad = None, zero_grad()      what is held back of that parameter is dropped
    any arithmetic with p.grad      everything held back in the root is reduced first; `.grad` is then the gradient. Collective
    nothing                         the next backward that communicates reduces it, as usual

What a program has kept of it is the gradient from the reduction on. Of one that was cleared before, nothing is left: it raises, or is NaN
from the next backward on where it is the memory of gradients that had been reduced earlier.

Without it `.grad` would be `None`, what is held back could not be cleared, and one microbatch with NaN would reach the next step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.torch_functions import describes, zeroes

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = ["HeldBackGradient"]


class HeldBackGradient(Tensor):
    """Stands for the gradient of an optimizer's local rows, and has one element of memory.

    `parameters()` show a sharded tensor over it, which takes the gradient's rows in its place once it is used.
    """

    _owner: tuple[weakref.ref[ParameterGroup], int]
    _gradient: Tensor | None  # what it became

    @staticmethod
    def of(group: ParameterGroup, index: int) -> HeldBackGradient:
        """The stand-in for the gradient of one parameter."""
        local = group.entries[index].local
        with torch.inference_mode(False), torch.no_grad():
            number = torch.zeros((), dtype=local.grad_dtype or local.dtype, device=local.device)
            gradient = compat.as_kind(HeldBackGradient, number.expand(local.shape))
        gradient._owner, gradient._gradient = (weakref.ref(group), index), None
        return gradient

    def become(self, gradient: Tensor | None) -> None:
        """What it stands for is reduced; `None`: no rank has used the parameter, which counts as zeros."""
        self._gradient = torch.zeros(self.shape, dtype=self.dtype, device=self.device) if gradient is None else gradient

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if describes(func) or func is Tensor.detach_:  # what a `zero_grad` or an optimizer calls first
            return super().__torch_function__(func, types, args, kwargs)
        if zeroes(func):
            for tensor in tensors_in(args):
                if isinstance(tensor, HeldBackGradient):
                    tensor.zero()
                else:
                    tensor.zero_()
            return args[0]

        def reduced(tensor: Tensor) -> Tensor:
            return tensor.reduced() if isinstance(tensor, HeldBackGradient) else tensor

        return func(*map_tensors(reduced, args), **map_tensors(reduced, kwargs))

    def reduced(self) -> Tensor:
        """The gradient that it stands for; what is held back is reduced now if it is not yet. Collective if so.

        Raises:
            EngineStateError: A backward runs, in which nothing held back can be reduced, or the gradient was cleared before.
        """
        group, index = self._place()
        if self._is_incomplete(group, index):
            group.reduce_held_back()
        if self._gradient is None:
            self._refuse(group, index)
        return self._gradient

    def zero(self) -> None:
        """Zero what is held back. Whether any rank used the parameter is not known before the reduction, so it stays held back."""
        group, index = self._place()
        if self._gradient is None and group.entries[index].local.grad is not self:
            self._refuse(group, index)
        if self._is_incomplete(group, index):
            group.gradients.zero_held_back(index)
        elif self._gradient is not None:
            self._gradient.zero_()

    def _is_incomplete(self, group: ParameterGroup, index: int) -> bool:
        """Whether it stands for something that is held back, or a later gradient, to be added to what it became, is."""
        if self._gradient is None:
            return group.gradients.is_held(index, self)
        return group.gradients.is_behind(index, self._gradient)

    def _place(self) -> tuple[ParameterGroup, int]:
        group = self._owner[0]()
        assert group is not None, "a parameter's gradient is read while its module exists"
        return group, self._owner[1]

    def _refuse(self, group: ParameterGroup, index: int) -> NoReturn:
        name = group.entries[index].name
        if group.gradients.is_held(index, self):
            raise EngineStateError(
                f"the gradient of parameter {name} is read or changed while a backward runs, and earlier backwards under no_sync hold "
                "parts of it back; do it after the backward"
            )
        raise EngineStateError(
            f"a gradient of parameter {name} is used that was held back under no_sync and was cleared or replaced before ranks had reduced "
            "it, so its values are gone. Use it once before it is cleared: kept = parameter.grad * 1"
        )
