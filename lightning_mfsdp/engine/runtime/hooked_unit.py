"""What hooks know of a unit and of its root. `Unit` (unit.py) and `Context` (context.py) are what is meant; they are built on hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.engine.params.group import ParameterGroup
from lightning_mfsdp.engine.params.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.runtime.call import Awaited, Call

__all__ = ["Arguments", "HookedRoot", "HookedUnit", "Run"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Run(Protocol):
    """One after the other of several modules; see `Series`."""

    busy: bool

    def stop(self) -> None:
        """It ends before its last module."""


class HookedRoot(Protocol):
    """What the units of a root share."""

    def begin_backward(self) -> None:
        """A backward begins, or goes on."""

    def note_writes(self) -> None:
        """See what was written to local rows that are watched."""

    def note_series(self, series: Run | None) -> None:
        """A run stands between two of its modules, or runs one; `None`: it has ended."""

    def weights_changed(self, groups: Iterable[ParameterGroup] | None = None) -> None:
        """Main weights were written by somebody."""


class HookedUnit(Protocol):
    """A unit, whose forward and backward hooks begin and end."""

    name: str
    live: bool
    hears_end: bool
    leaf_hooks: list[RemovableHandle]

    policy: MixedPrecisionPolicy
    all_groups: list[ParameterGroup]
    awaited: Awaited

    @property
    def context(self) -> HookedRoot:
        """Shared by all units of a root."""

    @property
    def open_call(self) -> Call | None:
        """The call that is running; `None` without gradients."""

    @property
    def is_inside_root(self) -> bool:
        """Whether the forward of a root around it, or a step of one, is running."""

    @property
    def is_inside_forward_of_root(self) -> bool:
        """Whether the forward of a root around it is running."""

    # -- forward -------------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Before the forward."""

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After it, also if it raised, with `output` None."""

    def enter_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A module inside runs outside the unit's own forward."""

    def leave_inside(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Its forward has ended, or raised with `output` None."""

    def listen_to_result(self, call: Call | None, output: Any) -> list[Tensor]:
        """Have the backward of a call begin with the gradients of this."""

    def note_run(self) -> None:
        """One of several modules runs."""

    def close(self) -> None:
        """A run of several modules ended before its last."""

    # -- weights -------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wait for the gathers and show unsharded parameters."""

    def hide(self) -> None:
        """Show sharded parameters; unsharded ones stay where they are."""

    def release(self) -> None:
        """Show sharded parameters and give memory back."""

    def share_no_memory(self) -> None:
        """Nobody knows when its weights are read."""

    # -- backward ------------------------------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """A gradient of an output is there."""

    def post_backward(self, call: Call) -> None:
        """All gradients of the call's inputs are there."""
