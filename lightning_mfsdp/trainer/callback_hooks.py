"""What the strategy requires of callbacks beyond Lightning's own hooks, and which callbacks it refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_mfsdp._lightning_api import (
    BaseFinetuning,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning_mfsdp.checkpoint.state.parameter_state import ParameterState
from lightning_mfsdp.recompute import Recompute, as_recompute
from lightning_mfsdp.trainer.continuation import GRADIENTS

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = [
    "ChoosesRecompute",
    "HasParameterState",
    "PreparesOptimizers",
    "SeesTrainingSteps",
    "check_background_saves",
    "check_callbacks",
    "copies_model",
    "prepare_optimizers",
    "recompute_option",
]


class ChoosesRecompute(ABC):
    """A callback that specifies which activations are recomputed; the strategy applies this before it shards the model."""

    @property
    @abstractmethod
    def recompute(self) -> Recompute:
        """What is recomputed in backward, instead of the strategy's own `recompute`."""


class HasParameterState(ABC):
    """A callback that keeps a tensor for each parameter, sharded like it.

    It saves by itself: `checkpoint["parameter_states"][key] = trainer.strategy.parameter_state(state)` in `on_save_checkpoint`.
    The strategy reads: rows are checked with everything else before anything changes, and then passed to the state.
    """

    @property
    @abstractmethod
    def checkpoint_key(self) -> str:
        """Name of the state in checkpoints; no other callback of a Trainer may have it."""

    @property
    @abstractmethod
    def parameter_state(self) -> ParameterState:
        """Returns and loads this rank's rows."""


class PreparesOptimizers(ABC):
    """A callback that changes which parameters optimizers hold, and must have done so before their states are read."""

    @abstractmethod
    def prepare_optimizers(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Restore the structure that optimizers had when `state`, the callback's own, was saved."""


class SeesTrainingSteps(ABC):
    """A callback that is called right before each `training_step`, after all hooks that may change the inputs of the step."""

    @abstractmethod
    def before_training_step(self, arguments: tuple[Any, ...]) -> None:
        """`arguments` are what `LightningModule.training_step` is about to be called with."""


def recompute_option(option: Recompute | Mapping[str, Any] | None, callbacks: Sequence[Callback]) -> Recompute | None:
    """What a strategy or one callback specifies about activations.

    Raises:
        ValueError: Several of them specify something.
    """
    choosing = [callback for callback in callbacks if isinstance(callback, ChoosesRecompute)]
    names = [
        *(["MFSDPStrategy(recompute=...)"] if option is not None else []),
        *(type(callback).__name__ for callback in choosing),
    ]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} both specify what is recomputed in backward; leave all but one out")
    return choosing[0].recompute if choosing else as_recompute(option)


def prepare_optimizers(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Have callbacks give optimizers the parameters that they held when the states of callbacks, by key, were saved."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = states.get(callback.state_key)
        if state is None:
            continue
        if isinstance(callback, PreparesOptimizers):
            callback.prepare_optimizers(trainer, state)
        elif isinstance(callback, BaseFinetuning):
            # Lightning's own do this when fit begins, which is after optimizers are compared with the checkpoint.
            callback.load_state_dict(state)
            BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)


def check_callbacks(callbacks: Sequence[Callback], compute_dtype: torch.dtype, *, weights_are_whole: bool) -> None:
    """Refuse callbacks that cannot work with what the engine holds, and warn of those that work less well than ours.

    Args:
        callbacks: Of the Trainer.
        compute_dtype: What layers compute in.
        weights_are_whole: Every rank has all rows of every weight.

    Raises:
        ValueError: One puts other parameters in place of those that the engine holds, or two would save what they keep for parameters
            under one name.
    """
    taken = {GRADIENTS, "model", "state_dict"}
    for callback in callbacks:
        if isinstance(callback, HasParameterState):
            key = callback.checkpoint_key
            if key in taken or key.startswith("optimizer_"):
                raise ValueError(
                    f"{type(callback).__name__}: checkpoint_key={key!r} is taken, by another callback or by the checkpoint itself; "
                    "give each callback one of its own"
                )
            taken.add(key)
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} replaces parameters by others, with masks, between two epochs, and strategy mfsdp reduces and "
                "steps those that the model had when it was sharded; call torch.nn.utils.prune in configure_model, or use "
                'strategy="ddp"'
            )
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and not weights_are_whole:
            rank_zero_warn(
                f"{type(callback).__name__} keeps a whole copy of the model on every rank, and gathers every weight for each update; "
                "use lightning_mfsdp.callbacks.ShardedEMA, which averages each rank's own rows without communication"
            )
        # Lightning's own treats an unknown precision plugin as float32.
        if type(callback) is ThroughputMonitor and callback.available_flops and compute_dtype != torch.float32:
            rank_zero_warn(
                f"ThroughputMonitor compares with this device's float32 peak, but the run computes in {compute_dtype}, so the utilization "
                "(mfu) is too high. Use lightning_mfsdp.callbacks.ShardedThroughputMonitor"
            )


def copies_model(callbacks: Sequence[Callback], *, fitting: bool) -> bool:
    """Whether one deep-copies the model before the strategy's setup; one that is sharded since an earlier run has to be whole for that."""
    copying = (StochasticWeightAveraging, WeightAveraging) if fitting else StochasticWeightAveraging
    return any(isinstance(callback, copying) for callback in callbacks)


def check_background_saves(callbacks: Sequence[Callback]) -> None:
    """Raise a ValueError where two `ModelCheckpoint`s would give a checkpoint the same name.

    Lightning numbers the second (`-v1`) when it sees the first, and what is being saved in the background does not exist yet. Then one
    callback would remove what the other keeps.
    """
    savers: dict[tuple[str, str], ModelCheckpoint] = {}
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None:
            continue
        names = [callback.filename or "{epoch}-{step}"] if callback.save_top_k else []
        names += [callback.CHECKPOINT_NAME_LAST] if callback.save_last else []
        for name in names:
            other = savers.setdefault((str(callback.dirpath), name), callback)
            if other is not callback:
                raise ValueError(
                    f"async_save=True: two callbacks save {name!r} in {callback.dirpath}, and neither sees what is still being written, so "
                    "each would overwrite and remove the other's. Give every ModelCheckpoint a dirpath or a filename of its own"
                )
