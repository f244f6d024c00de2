"""What the strategy asks of callbacks beyond Lightning's own hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_mfsdp.checkpoint.parameter_state import ParameterState

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_mfsdp.recompute import Recompute

__all__ = ["ChoosesRecompute", "HasParameterState", "PreparesOptimizers", "SeesTrainingSteps"]


class ChoosesRecompute(ABC):
    """A callback that says which activations are computed again; the strategy sees to it before it shards the model."""

    @property
    @abstractmethod
    def recompute(self) -> Recompute:
        """What it says."""


class HasParameterState(ABC):
    """A callback that keeps a tensor for each parameter, sharded as it is.

    Saving is its own doing: `checkpoint["parameter_states"][key] = trainer.strategy.parameter_state(state)` in `on_save_checkpoint`.
    Reading is the strategy's: rows are checked with everything else before anything changes, and then given to the state.
    """

    @property
    @abstractmethod
    def checkpoint_key(self) -> str:
        """Name of the state in checkpoints; no other callback of a Trainer may have it."""

    @property
    @abstractmethod
    def parameter_state(self) -> ParameterState:
        """Gives and takes this rank's rows."""


class PreparesOptimizers(ABC):
    """A callback that changes which parameters optimizers hold, and must have done so before their states are read."""

    @abstractmethod
    def prepare_optimizers(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Bring optimizers into the shape they had when `state`, the callback's own, was saved."""


class SeesTrainingSteps(ABC):
    """A callback that is called right before each `training_step`, after all hooks that may change what the step will find."""

    @abstractmethod
    def before_training_step(self, arguments: tuple[Any, ...]) -> None:
        """`arguments` are what `LightningModule.training_step` is about to get."""
