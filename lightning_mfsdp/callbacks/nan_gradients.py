"""NaNGradientReporter: reports on which rank, and in which parameters, gradients became NaN or infinite, and skips or ends steps.

    on_before_backward           the loss is checked as well, so that a report says whether NaN arose in the forward
    on_after_backward            this rank's own gradients were checked as they arose, before the reduction (gradient_watch.py)
    on_before_optimizer_step     all ranks are queried; "raise" and "skip" wait for the result, "warn" reads that of an earlier step

"warn" never makes the host wait for the device. The others need the result before the step, so they wait once a step, like a loss scaler.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import Callback, LightningModule, Trainer
from lightning_mfsdp.engine import GradientWatch, NonFiniteGradients
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["NaNGradientReporter", "NonFiniteGradientError"]

METRIC = "nan_gradients/steps"


class NonFiniteGradientError(RuntimeError):
    """Some gradient is NaN or infinite. The message names parameters, the ranks where it arose, step and microbatch."""


class NaNGradientReporter(Callback):
    """Reports every parameter whose gradient holds NaN or Inf, and the ranks where it arose.

    Args:
        action: "raise": a `NonFiniteGradientError` on all ranks, before the optimizer step. "skip": the optimizer step is skipped on
            all ranks alike, and a warning on rank 0 reports. "warn": a warning on rank 0, a step late or when training ends, without
            waiting for the device.

    Attributes:
        steps: Number of steps with such gradients; logged as "nan_gradients/steps", saved in checkpoints.

    Raises:
        ValueError: An unknown action, or one that loss scaling contradicts (when the run starts).
        TypeError: The strategy is not `MFSDPStrategy` (when the run starts).
    """

    def __init__(self, action: Literal["raise", "skip", "warn"] = "raise") -> None:
        if action not in ("raise", "skip", "warn"):
            raise ValueError(f'NaNGradientReporter(action={action!r}): expected "raise", "skip" or "warn"')
        self.action = action
        self.steps = 0
        self._watch: GradientWatch | None = None
        self._hears_steps = False

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies without sharded gradients, and actions that loss scaling contradicts."""
        strategy = trainer.strategy
        if not isinstance(strategy, MFSDPStrategy):
            raise TypeError(
                f'NaNGradientReporter reads sharded gradients and works with strategy="mfsdp", got {type(strategy).__name__}; leave it out'
            )
        if strategy.precision_plugin.needs_scaler and self.action != "warn":
            raise ValueError(
                f"NaNGradientReporter(action={self.action!r}) with precision {strategy.precision_plugin.precision!r}: loss scaling "
                'overflows now and then on purpose and skips those steps itself. Use action="warn" to see them'
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching, and start at zero in every logger."""
        self._close()
        self._watch = GradientWatch(pl_module)
        self._hears_steps = False
        self._log(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note whether the loss is finite: on the device, without waiting."""
        self._watching.note_loss(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that what the next backward finds belongs to the next microbatch."""
        self._watching.end_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check what this optimizer is about to use."""
        self._hears_steps = True
        if not self._is_fine(trainer, list(_parameters_of(optimizer))):
            for parameter in _parameters_of(optimizer):  # an optimizer skips parameters without a gradient
                parameter.grad = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """If Lightning is not notified of steps (manual optimization with bare optimizers), check now."""
        if pl_module.automatic_optimization or self._hears_steps or self._is_fine(trainer, None):
            return
        raise NonFiniteGradientError(
            'NaNGradientReporter(action="skip"): the step with the gradients of the warning above was taken, because training_step steps '
            "its optimizers without Lightning's knowledge; step what self.optimizers() returns"
        )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Pending results must be read before the count is saved."""
        self._read(trainer, wait=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the result of the last step, and warn if it is not fine."""
        self._read(trainer, wait=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching, so that backwards outside of a fit cost nothing."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching; results that have not arrived are not waited for."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps with such gradients."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the number of steps with such gradients."""
        self.steps = state_dict["steps"]

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _watching(self) -> GradientWatch:
        assert self._watch is not None, "on_train_start is called first"
        return self._watch

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _is_fine(self, trainer: Trainer, parameters: list[Tensor] | None) -> bool:
        """Whether a step may be taken, after a check of these gradients, or of all."""
        if self.action == "warn":
            self._read(trainer)
            self._watching.submit(parameters, step=trainer.global_step)
            return True
        report = self._watching.check(parameters, step=trainer.global_step)
        if report is None:
            return True
        self._count(trainer)
        if self.action == "raise":
            raise NonFiniteGradientError(report.in_words())
        self._warn(trainer, report, "\nthis optimizer step is skipped")
        return False

    def _read(self, trainer: Trainer, *, wait: bool = False) -> None:
        """Warn of earlier steps, as far as their results have arrived."""
        for report in self._watch.arrived(wait=wait) if self._watch is not None else ():
            self._count(trainer)
            self._warn(trainer, report)

    def _count(self, trainer: Trainer) -> None:
        self.steps += 1
        self._log(trainer)

    @staticmethod
    def _warn(trainer: Trainer, report: NonFiniteGradients, consequence: str = "") -> None:
        if trainer.is_global_zero:
            warnings.warn(report.in_words() + consequence, stacklevel=2)

    def _log(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({METRIC: float(self.steps)}, step=trainer.global_step)


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
