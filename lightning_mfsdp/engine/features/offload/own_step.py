"""OwnStep: runs the `step` of an optimizer's class for one part of the parameters after the other.

To the optimizer each part is a step. What it counts in its parameter groups (`group["step"] += 1`) is still counted once: options
are restored after each part, and the outer call counts in the end.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp.base import compat

__all__ = ["OwnStep"]


class OwnStep:
    """Steps the parameters that show a gradient, without the optimizer's hooks.

    Args:
        optimizer: Whose `step` takes a closure.
        args: Arguments that `step` was called with, the optimizer itself first.
        kwargs: Likewise. The closure among them is left out: it was called.
    """

    def __init__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = compat.undecorated_step(type(optimizer))
        assert step is not None, "checked when the optimizer was adopted"
        self.optimizer = optimizer
        self._step = step
        self._args = (None, *args[2:]) if len(args) > 1 else ()
        self._kwargs = {name: value for name, value in kwargs.items() if name != "closure"}
        self._options = [_Options(group) for group in optimizer.param_groups]

    def __call__(self) -> None:
        """Step the parameters that show a gradient now, and restore the options of parameter groups."""
        self._step(self.optimizer, *self._args, **self._kwargs)
        for options in self._options:
            options.put_back()


class _Options:
    """A parameter group's current options; tensors (a rate, a counter) may be written in place."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._values = dict(group)
        self._copies = {name: value.clone() for name, value in group.items() if isinstance(value, Tensor)}

    def put_back(self) -> None:
        for name in self._group.keys() - self._values.keys():
            del self._group[name]
        self._group.update(self._values)
        for name, copy in self._copies.items():
            self._values[name].copy_(copy)
