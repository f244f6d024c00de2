"""ShardedEMA: an exponential moving average of the weights, sharded like them, used for evaluation and saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_mfsdp._lightning_api import Callback, LightningModule, Trainer, TrainerFn
from lightning_mfsdp.checkpoint.state.full_state import full_model_state
from lightning_mfsdp.checkpoint.state.parameter_state import AVERAGE, PARAMETER_STATES
from lightning_mfsdp.engine import AveragedWeights
from lightning_mfsdp.trainer.callback_hooks import HasParameterState
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["ShardedEMA"]


class ShardedEMA(Callback, HasParameterState):
    """Keeps `average = decay * average + (1 - decay) * weight` of this rank's rows of the main weights.

    Only trainable parameters are averaged, each from the first update that finds it trainable; frozen ones and buffers are the model's.
    The average is saved in sharded and full checkpoints (not with `save_weights_only=True`) and restored on any number of ranks.

    Args:
        decay: Between 0 and 1, or a function of the number of updates so far.
        warmup: Start with a small decay: `min(decay, (1 + updates) / (10 + updates))`.
        start_step: Optimizer step after which the average begins, as a copy. Steps are those of `trainer.global_step`: with
            `accumulate_grad_batches` one for several batches, with several optimizers one for each.
        every_n_steps: Optimizer steps from one update to the next. There is at most one update a batch.
        swap_for_validation: Validation, test and prediction see the averaged weights; training gets its own back, to the bit.
        dtype: Of the average: `torch.float32` or `torch.float64`.
        device: `None`: the device of the weights. "cpu": in pinned host memory, which costs a copy to and from the device in every update.

    Raises:
        ValueError, TypeError: An argument out of its range, or another strategy.
    """

    def __init__(
        self,
        decay: float | Callable[[int], float] = 0.999,
        *,
        warmup: bool = False,
        start_step: int = 1,
        every_n_steps: int = 1,
        swap_for_validation: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Literal["cpu"] | None = None,
    ) -> None:
        if not callable(decay) and not 0.0 <= decay <= 1.0:
            raise ValueError(
                f"ShardedEMA(decay={decay!r}): expected a number from 0 to 1, or a function of the updates"
            )
        if callable(decay) and warmup:
            raise ValueError(
                "ShardedEMA(warmup=True) with a function as decay: let the function warm up, or give a number"
            )
        for argument, value in (("start_step", start_step), ("every_n_steps", every_n_steps)):
            if type(value) is not int or value < 1:
                raise ValueError(f"ShardedEMA({argument}={value!r}): expected a number of optimizer steps, 1 or more")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"ShardedEMA(dtype={dtype}): expected torch.float32 or torch.float64; in lower precision small changes are rounded away "
                "and the average stops changing"
            )
        if device not in (None, "cpu"):
            raise ValueError(f'ShardedEMA(device={device!r}): expected None (beside the weights) or "cpu"')
        self.decay = decay
        self.warmup = warmup
        self.start_step = start_step
        self.every_n_steps = every_n_steps
        self.swap_for_validation = swap_for_validation
        self.dtype = dtype
        self.device: Literal["cpu"] | None = device
        self.updates = 0
        self._last_step = 0
        self._weights: AveragedWeights | None = None

    # -- access to the average -----------------------------------------------------------------------------------------

    @property
    def checkpoint_key(self) -> str:
        """Name of the average in checkpoints."""
        return AVERAGE

    @property
    def parameter_state(self) -> AveragedWeights:
        """The average.

        Raises:
            RuntimeError: No Trainer has begun with this callback.
        """
        if self._weights is None:
            raise RuntimeError(
                "ShardedEMA: there is no average before trainer.fit, validate, test or predict has begun; ask for it in a hook, or later"
            )
        return self._weights

    def averaged_state_dict(self, *, keep: bool) -> dict[str, Any]:
        """`state_dict()` of the module with averaged weights, whole, on the CPU, under the same names. All ranks call it.

        Args:
            keep: Whether this rank needs the result (such as `trainer.is_global_zero`); otherwise it is empty.

        Raises:
            RuntimeError: There is no average yet.
        """
        weights = self.parameter_state
        if not weights:
            raise RuntimeError(
                f"ShardedEMA.averaged_state_dict: there is no average before optimizer step {self.start_step}; train longer, or load a "
                "checkpoint that has one"
            )
        return full_model_state(weights.in_place_of(weights.module.state_dict()), keep=keep)

    # -- training ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the model; a different one than before begins without an average."""
        if not isinstance(trainer.strategy, MFSDPStrategy):
            raise TypeError(
                f"ShardedEMA averages sharded weights and needs MFSDPStrategy, got {type(trainer.strategy).__name__}; use "
                "lightning.pytorch.callbacks.EMAWeightAveraging there"
            )
        if self._weights is None or not self._weights.belongs_to(pl_module):
            self._weights = AveragedWeights(pl_module, dtype=self.dtype, device=self.device)
            self.updates = self._last_step = 0
        self._weights.release()  # what it read since the last run may be sharded again for this one

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the current step of training."""
        if trainer.global_step >= self.start_step and not self.parameter_state:
            rank_zero_warn(
                f"ShardedEMA: training continues at step {trainer.global_step} without an average, which starts again; the checkpoint was "
                "saved without this callback, or with weights only. To continue an average, resume from a checkpoint that has one"
            )
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Update if an optimizer step was taken that is due."""
        last, self._last_step = self._last_step, trainer.global_step
        if self._due_until(trainer.global_step) > self._due_until(last):
            self.parameter_state.update(self._decay())
            self.updates += 1

    def _due_until(self, step: int) -> int:
        """Updates due in the first `step` optimizer steps."""
        return 0 if step < self.start_step else (step - self.start_step) // self.every_n_steps + 1

    def _decay(self) -> float:
        if callable(self.decay):
            return float(self.decay(self.updates))
        return min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the average into the model for the validation, if `swap_for_validation`."""
        self._show(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the model its weights in training again, to the bit."""
        self.parameter_state.hide()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the average into the model for the test, if `swap_for_validation`."""
        self._show(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the model its weights in training again, to the bit."""
        self.parameter_state.hide()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the average into the model for the prediction, if `swap_for_validation`."""
        self._show(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the model its weights in training again, to the bit."""
        self.parameter_state.hide()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the weights in training; setup itself may have failed."""
        if self._weights is not None:
            self._weights.hide()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the average, and release the model's memory."""
        self.parameter_state.release()

    def _show(self, trainer: Trainer) -> None:
        if not self.swap_for_validation:
            return
        if not self.parameter_state and trainer.state.fn != TrainerFn.FITTING:
            rank_zero_warn(
                "ShardedEMA: there is no average of this model, so its own weights are evaluated. Pass ckpt_path of a checkpoint that was "
                "saved with this callback, or the model that was trained with it"
            )
        self.parameter_state.show()

    # -- saving --------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the average, as rows or whole.

        Raises:
            RuntimeError: The model shows the average at the moment, so its own weights would not be saved.
        """
        weights = self.parameter_state
        if weights.is_shown:
            raise RuntimeError(
                "ShardedEMA: a checkpoint was requested while averaged weights stand in for the model's; save in on_validation_end or "
                "later, or set swap_for_validation=False"
            )
        assert isinstance(trainer.strategy, MFSDPStrategy), "checked in setup"
        checkpoint.setdefault(PARAMETER_STATES, {})[self.checkpoint_key] = trainer.strategy.parameter_state(weights)

    def state_dict(self) -> dict[str, Any]:
        """The state that a schedule of the decay depends on."""
        return {"updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the count of updates, on which a decay that warms up depends."""
        self.updates = state_dict["updates"]
