"""training_step and its backward as CUDA graphs under a Trainer: `MFSDPStrategy(cuda_graph=True)`.

Lightning's loop runs as usual: hooks, clipping, the optimizer, schedules and callbacks run between and after the replays, on real
gradients. Only `training_step` itself no longer runs as Python, so what it logged while it was recorded is logged again after
every replay, with the values of that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_mfsdp._lightning_api import is_param_in_hook_signature
from lightning_mfsdp.engine import CapturedLoss, EngineStateError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["GraphedTrainingStep", "LogRecorder", "graphed_training_step", "recorded_logs"]


def graphed_training_step(
    run: Callable[..., Any], module: LightningModule, trainer: Trainer
) -> GraphedTrainingStep | None:
    """`run` as CUDA graphs; `None`, with a warning, where there is nothing to record.

    Args:
        run: Takes what `training_step` takes, and runs it.
        module: Sharded.
        trainer: Whose loop calls.
    """
    if module.device.type != "cuda":
        reason = f"the model is on {module.device.type}"
    elif not module.automatic_optimization:
        reason = "training_step optimizes manually; capture_step records such a step in your own loop"
    elif trainer.precision_plugin.fp8 is not None:  # type: ignore[attr-defined]
        reason = "modules of Transformer Engine keep part of their state in Python"
    elif is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        reason = "training_step(dataloader_iter) fetches its own batches"
    else:
        return GraphedTrainingStep(run, module, trainer)
    rank_zero_warn(
        f"cuda_graph=True: {reason}, so training runs without CUDA graphs. They need a model on cuda without Transformer "
        "Engine, automatic optimization and training_step(batch, ...); otherwise leave cuda_graph out"
    )
    return None


class LogRecorder:
    """Replaces Lightning's result collection while a step is recorded.

    Attributes:
        logged: Name, value and options of every `self.log` that reached it.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.logged: list[tuple[str, Tensor, dict[str, Any]]] = []

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """What `LightningModule.log` calls.

        Raises:
            EngineStateError: A torchmetrics object, whose `update` is Python.
        """
        if isinstance(value, Tensor) and value.device.type != self._device_type:
            raise EngineStateError(
                f"self.log({name!r}, a tensor on {value.device}): it would be logged as it was recorded forever; log it from a hook, "
                "such as on_train_batch_end"
            )
        if not isinstance(value, Tensor):
            raise EngineStateError(
                f"self.log({name!r}, {type(value).__name__}): a metric's update is Python, which a graph cannot hold; return what it needs "
                "from training_step and update it in on_train_batch_end"
            )
        options.pop("sync_dist_fn", None)  # log() finds it again
        self.logged.append((name, value, options))

    def reset(self, **_: Any) -> None:
        """What `LightningModule.log` calls in the first step of an epoch; a recorder has no values of an earlier epoch."""


@contextmanager
def recorded_logs(trainer: Trainer) -> Iterator[LogRecorder]:
    """Inside, `self.log` in training_step goes to a recorder and nowhere else.

    Lightning has no hook for this: the loop's `_results` is what `LightningModule.log` writes to (Lightning 2.6).
    """
    loop = trainer.fit_loop.epoch_loop
    results, recorder = loop._results, LogRecorder(trainer.strategy.root_device.type)
    loop._results = recorder  # type: ignore[assignment]
    try:
        yield recorder
    finally:
        loop._results = results


class GraphedTrainingStep:
    """Calls `training_step`, by graphs as soon as possible."""

    def __init__(self, run: Callable[..., Any], module: LightningModule, trainer: Trainer) -> None:
        self._run = run
        self._module = module
        self._trainer = trainer
        self._captured = CapturedLoss("cuda_graph=True", self._step, module)
        self._metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._rest: tuple[Any, ...] = ()
        self._is_left = False
        self._logs = LogRecorder(module.device.type)

    @property
    def is_captured(self) -> bool:
        """Whether the graphs exist, so that steps replay them from now on."""
        return self._captured.is_captured

    @property
    def failure(self) -> str:
        """Why there are no graphs; empty while there may be."""
        return self._captured.failure

    @property
    def replayed(self) -> bool:
        """Whether the last step was a replay."""
        return self._captured.replayed

    def __call__(self, batch: Any, *rest: Any) -> Any:
        """One `training_step`. Its other arguments, such as `batch_idx`, keep the values from the recording."""
        if self._is_left:
            self._rest = rest
            return self._captured.outside(batch)
        was_captured = self.is_captured
        updates = {name: metric.update_count for name, metric in self._metrics.items()}
        self._rest = rest
        outputs = self._captured(batch)
        if self.replayed:
            for name, value, options in self._logs.logged:
                self._module.log(name, value, **options)
        elif not (self.failure or was_captured):
            self._check_metrics(updates)
        if self.is_captured and not was_captured:
            rank_zero_info(
                f"cuda_graph=True: training_step and its backward are replayed from now on; {self._captured.pool_bytes / 2**20:.0f} MiB of "
                "memory belong to the graphs"
            )
        return outputs

    @contextmanager
    def left(self) -> Iterator[None]:
        """Inside, steps run eagerly; what was recorded stays. The same on all ranks."""
        self._is_left = True
        try:
            yield
        finally:
            self._is_left = False

    def record_again(self) -> None:
        """Record again in the next step: memory that the graphs use has moved."""
        self._captured.record_again()

    def close(self) -> None:
        """Training is over: free the graphs and their memory."""
        self._captured.close()

    def _step(self, batch: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            return self._run(batch, *self._rest)
        with recorded_logs(self._trainer) as self._logs:
            return self._run(batch, *self._rest)

    def _check_metrics(self, updates: dict[str, int]) -> None:
        """Refuse metrics updated in a step: they would no longer change once it is replayed."""
        moved = [name for name, metric in self._metrics.items() if metric.update_count != updates[name]]
        if moved:
            self._captured.refuse(
                f"training_step updates the metric {moved[0]}, which is Python; return what it needs from training_step and update it in "
                "on_train_batch_end"
            )
