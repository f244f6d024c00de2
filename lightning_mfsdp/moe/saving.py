"""How the experts' autograd function keeps what its backward needs: exactly the expert input and the first projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["ActivationSaver", "OrdinarySaver", "SavesActivations", "has_saver", "wrong_saver_because"]


class ActivationSaver(Protocol):
    """Keeps activations of experts between forward and backward. Set one as `GroupedExperts.saver`.

    It is asked only for forwards that are recorded for a backward.
    """

    def save(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
        """Keep tensors of one call.

        Args:
            ctx: Of the autograd function: the place for anything that `load` will need.
            tensors: `[rows, width]` each, with the same number of rows. Only the first `live_rows` hold anything.
            live_rows: int64, 0-D, on the device.

        Returns:
            What autograd is to keep as it keeps all other saved tensors.
        """

    def load(self, ctx: Any, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of one call, in their order and shape.

        Args:
            ctx: The same as in `save`.
            kept: What `save` returned.
        """


@runtime_checkable
class SavesActivations(Protocol):
    """A module of experts that asks a saver, and may be given another one. `GroupedExperts` is one.

    Its forward calls `self.saver.save` in an autograd function where a backward will follow, and its backward `self.saver.load`.
    """

    saver: ActivationSaver


class OrdinarySaver:
    """Everything is kept by autograd, whole."""

    def save(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
        """Keep all of them."""
        return tensors

    def load(self, ctx: Any, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """All of them."""
        return kept


def has_saver(module: nn.Module) -> bool:
    """Whether a module is a `SavesActivations`; an attribute of that name alone may be something else."""
    return isinstance(module, SavesActivations) and not wrong_saver_because(module)


def wrong_saver_because(module: nn.Module) -> str:
    """Why a module's attribute `saver` is no `ActivationSaver`; empty if it is one, or if there is no such attribute."""
    if not isinstance(module, SavesActivations):
        return ""
    missing = [method for method in ("save", "load") if not callable(getattr(module.saver, method, None))]
    return (
        f"because its saver ({type(module.saver).__name__}) has no method {' and no '.join(missing)}" if missing else ""
    )
