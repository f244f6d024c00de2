"""Protocols of what joins the steps of an optimizer (`OptimizerDriver`), and of what chooses it (`OptimizerSupport`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.parameter import Entry

__all__ = ["OptimizerDriver", "OptimizerSupport"]


class OptimizerDriver(Protocol):
    """An object that is called around each step of one optimizer."""

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step begins. Returns other arguments for it, as a pre-hook returns them, or `None`."""

    def end(self, optimizer: Optimizer) -> bool:
        """A step has ended. Returns whether it was the user's step and not one of its parts."""


class OptimizerSupport(Protocol):
    """Support for optimizers beyond `torch.optim`; one for each optimizer that is adopted."""

    def writes_in_steps_alone(self, optimizer: Optimizer) -> bool:
        """Whether it is known to work on rows, and to write to them nowhere but in `step`, after its closure."""

    def prepare(
        self, optimizer: Optimizer, held: Mapping[ParameterGroup, Sequence[Entry]], *, local: bool
    ) -> Sequence[OptimizerDriver]:
        """The drivers of an optimizer that holds these parameters from now on.

        Args:
            optimizer: Its `param_groups` hold what it works on.
            held: Its parameters by group, in order.
            local: It works on plain local rows.

        Returns:
            What is called around its steps from now on, in this order.

        Raises:
            ShardingError: It cannot step them.
        """
        ...
