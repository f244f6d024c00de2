"""PagedStash: when the Trainer's hooks call the stash, and what each of its three reactions to too few pages means for a step.

    before_training_step       "rerun" stores the microbatch
    on_before_backward         all ranks are queried whether a tensor found no page, or experts more rows than their buffers; no wait
    on_before_optimizer_step   the answer has arrived. "skip": gradients are cleared. "rerun": the step is repeated, outside of graphs, with
                               ordinary saves and buffers that suffice
    on_train_batch_end         of the last microbatch: pages are counted and, where they were too few, enlarged

"keep" queries no rank: gradients are correct, and memory concerns this rank only. Experts with a capacity factor wait for the device there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import Callback, LightningModule, Trainer, is_param_in_hook_signature
from lightning_mfsdp.callbacks.drawing import check_drawing
from lightning_mfsdp.callbacks.paged_stash.budget import BudgetWatch
from lightning_mfsdp.callbacks.paged_stash.layers import StashedLayers, find_layers
from lightning_mfsdp.callbacks.paged_stash.picture import draw
from lightning_mfsdp.callbacks.paged_stash.report import metrics, report_layers, report_sizes
from lightning_mfsdp.callbacks.paged_stash.rerun import StepMemory
from lightning_mfsdp.moe import GroupedExperts
from lightning_mfsdp.moe.capacity import rounded_up
from lightning_mfsdp.moe.stash import RowStash, StashConfig, StashStatistics
from lightning_mfsdp.trainer.callback_hooks import SeesTrainingSteps
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["PagedStash"]


class PagedStash(SeesTrainingSteps, Callback):
    """Keeps the live rows of expert layers in pages from forward to backward, instead of whole buffers.

    Layers are those with a `saver` (`lightning_mfsdp.moe.saving.SavesActivations`), such as `GroupedExperts`, and the experts of Hugging
    Face's models, which compute them as `enable_grouped_experts` does until `fit` ends. Counts are logged under
    "paged_stash/", see `StashStatistics`.

    Args:
        page_rows: Rows in a page.
        sizing: Whether pages follow the "average" or the "maximum" of what the recorded steps needed, over steps and ranks.
        device_factor: Pages on the device, as a multiple of that.
        host_factor: Pages in pinned host memory, for tensors that find no place on the device; 0 for none.
        overflow: When neither has room. "keep": the tensor stays where it is. "skip": the optimizer step is skipped, on all ranks.
            "rerun": the step is repeated with ordinary saves, on all ranks. All of them enlarge the pages for the next step. The
            same goes for rows beyond the capacity factor of `GroupedExperts`; under "keep" these wait for the device and make room.
        recorded_steps: Steps with ordinary saves before pages are allocated.
        modules: `fnmatch` patterns of the layers' names.
        picture: A PNG file for the pages in use over the first step that has pages (rank 0; needs matplotlib).

    Attributes:
        stash: In use; `None` outside `fit`.
        skipped: Optimizer steps skipped.
        reruns: Steps repeated.
        statistics: Of the last step whose numbers have arrived.

    Raises:
        ValueError: An option out of its range; when the run starts, one that does not fit the Trainer, or no layer that can be stashed.
        TypeError: The strategy is not `MFSDPStrategy` (when the run starts).
        ImportError: A picture is requested and there is no matplotlib.
    """

    def __init__(
        self,
        *,
        page_rows: int = 64,
        sizing: Literal["average", "maximum"] = "average",
        device_factor: float = 1.2,
        host_factor: float = 0.0,
        overflow: Literal["keep", "skip", "rerun"] = "keep",
        recorded_steps: int = 1,
        modules: Sequence[str] = ("*",),
        picture: str | Path | None = None,
    ) -> None:
        self.config = StashConfig(
            page_rows=page_rows,
            sizing=sizing,
            device_factor=device_factor,
            host_factor=host_factor,
            overflow=overflow,
            recorded_steps=recorded_steps,
        )
        if isinstance(modules, str) or not modules or not all(isinstance(pattern, str) for pattern in modules):
            raise ValueError(f'PagedStash(modules={modules!r}): expected patterns of names, such as ["*.experts"]')
        if picture is not None:
            check_drawing("PagedStash", picture)
        self.modules = tuple(modules)
        self.picture = None if picture is None else Path(picture)
        self.stash: RowStash | None = None
        self.skipped = self.reruns = 0
        self.statistics: StashStatistics | None = None
        self._layers: StashedLayers | None = None
        self._memory: StepMemory | None = None
        self._budget: BudgetWatch | None = None
        self._stepped = self._is_rerunning = self._is_traced = self._has_warned = False

    # -- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse unsupported settings."""
        if stage == "fit":
            _check_run(trainer, pl_module, self.config.overflow)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the layers' savers."""
        if self.config.overflow == "keep" and _strategy(trainer).graphed_step is not None:
            raise ValueError(
                'PagedStash(overflow="keep") with cuda_graph=True: it decides on the host, which a graph never asks; use overflow="skip"'
            )
        stashed = find_layers(pl_module, self.modules)
        self.stash = RowStash(self.config, trainer.strategy.root_device)
        self._layers = stashed
        stashed.stash(self.stash)
        limited = {
            name: layer
            for name, layer in stashed.layers.items()
            if isinstance(layer, GroupedExperts) and layer.capacity_factor is not None
        }
        dropping = {name: layer for name, layer in limited.items() if layer.over_capacity == "drop"}
        self.stash.watch({name: layer for name, layer in limited.items() if name not in dropping})
        self._budget = BudgetWatch(dropping, trainer.strategy.root_device)
        self._memory = StepMemory(trainer, pl_module) if self.config.overflow == "rerun" else None
        self._stepped = self._is_rerunning = self._is_traced = False
        report_layers(stashed)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last step, and restore the layers' own savers."""
        if self.stash is not None:
            self._log(trainer, self.stash.statistics(wait=True))
        self._tell_of_lost_rows(trainer, wait=True)
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Abandon the step."""
        self._close()

    def _close(self) -> None:
        if self._layers is not None:
            self._layers.restore()
        if self.stash is not None:
            self.stash.unwatch()
            self.stash.abort()
        if self._budget is not None:
            self._budget.close()
        self.stash = self._memory = self._layers = self._budget = None

    # -- a step --------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forget microbatches that are not part of this step."""
        if self._memory is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._memory.forget()  # if `on_train_batch_start` ended the previous epoch early, one is left that was never completed

    def before_training_step(self, arguments: tuple[Any, ...]) -> None:
        """Store what may have to be repeated."""
        if self._memory is not None and not self._is_rerunning:
            self._memory.remember(arguments)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Query all ranks; the answer is read before the optimizer step."""
        if self._memory is not None and not self._is_rerunning:
            self._memory.computed()
        if self.stash is not None and self.config.overflow != "keep" and not self._is_rerunning:
            self.stash.submit_overflow()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Skip the step, or repeat it, if gradients are wrong on some rank."""
        self._stepped = True
        if self.stash is None or self.config.overflow == "keep" or not self.stash.overflowed():
            return
        what, cure = _shortage(self.stash)
        if self._memory is None:
            self.skipped += 1
            rank_zero_warn(
                f"PagedStash: {what} in step {trainer.global_step} on some rank, so all ranks leave this optimizer step out; {cure}"
            )
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            return
        self.reruns += 1
        rank_zero_warn(
            f"PagedStash: {what} in step {trainer.global_step} on some rank, so all ranks do this step again with what suffices; {cure}"
        )
        graphed = _strategy(trainer).graphed_step
        self._is_rerunning = True
        with self.stash.paused(), nullcontext() if graphed is None else graphed.left():
            self._memory.rerun()
        self._is_rerunning = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Count what the step did, and decide how many pages the next one has."""
        if self._memory is not None:
            self._memory.check()
        if self.stash is None or not self._stepped:
            return
        self._stepped = False
        if self._memory is not None:
            self._memory.forget()
        self._log(trainer, self.stash.statistics())
        self._tell_of_lost_rows(trainer)
        was_recording = self.stash.is_recording
        moved = self.stash.end_step()
        if moved and was_recording:
            report_sizes(self.stash, self.stash.statistics(wait=True))
        graphed = _strategy(trainer).graphed_step
        if moved and graphed is not None:
            graphed.record_again()
        self._trace(trainer, begins=moved and was_recording)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What an evaluation saves, if anything, does not belong to the step."""
        if self.stash is not None:
            self.stash.is_paused = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to training."""
        if self.stash is not None:
            self.stash.is_paused = False

    # -- reports -------------------------------------------------------------------------------------------------------

    def _log(self, trainer: Trainer, statistics: StashStatistics | None) -> None:
        if self.stash is None or statistics is None:
            return
        self.statistics = statistics
        if statistics.over_capacity and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"PagedStash: rank {trainer.global_rank}: {statistics.over_capacity} tensors had a negative number of live rows, or more "
                "than their buffer has room for; what is beyond it was not saved. Give the saver the number of rows that were computed. "
                "This is reported once",
                stacklevel=2,
            )
        if trainer.global_step % trainer.log_every_n_steps == 0 or not trainer.training:  # type: ignore[attr-defined]
            for logger in trainer.loggers:
                logger.log_metrics(metrics(statistics, self.stash.growths), step=trainer.global_step)

    def _tell_of_lost_rows(self, trainer: Trainer, *, wait: bool = False) -> None:
        """A warning, once for each `fit`, if experts dropped rows. Each rank checks its own."""
        if self._budget is None:
            return
        if needed := self._budget.seen(wait=wait):
            first, others = next(iter(needed)), f" (and {len(needed) - 1} more)" if len(needed) > 1 else ""
            warnings.warn(
                f"PagedStash: rank {trainer.global_rank}: {first}{others} had more rows than its buffer holds and left some out, as "
                f'over_capacity="drop" says. capacity_factor={rounded_up(max(needed.values()))} would have been enough so far; '
                "give at least that to lose none. This is reported once",
                stacklevel=2,
            )
            self._budget.close()
            self._budget = None
        else:
            self._budget.look()

    def _trace(self, trainer: Trainer, *, begins: bool) -> None:
        """Follow the pages of one step."""
        if self.stash is None or self.picture is None:
            return
        if begins:
            self.stash.start_trace()
            self._is_traced = True
        elif self._is_traced:
            self._is_traced = False
            trace = self.stash.stop_trace()
            if trace and trainer.is_global_zero:
                rank_zero_info(f"PagedStash: pages in use over a step are drawn in {draw(trace, self.picture)}")


def _shortage(stash: RowStash) -> tuple[str, str]:
    """What was too small, and what would have been enough."""
    what, cure = [], []
    if stash.found_no_pages:
        what.append("rows found no pages")
        cure.append("there will be more pages for the next. Raise device_factor or host_factor to avoid it")
    if stash.needed_capacity:
        what.append("experts had more rows than their buffers hold")
        cure.append(
            f"capacity_factor={stash.needed_capacity:.2f} would have been enough. Buffers do not grow by themselves: give more than the "
            "largest factor that was needed so far"
        )
    return " and ".join(what), "; ".join(cure)


def _strategy(trainer: Trainer) -> MFSDPStrategy:
    strategy = trainer.strategy
    assert isinstance(strategy, MFSDPStrategy), "checked in setup"
    return strategy


def _check_run(trainer: Trainer, module: LightningModule, overflow: str) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, MFSDPStrategy):
        raise TypeError(
            f'PagedStash works with strategy="mfsdp", got {type(strategy).__name__}; elsewhere use moe.stash.RowStash'
        )
    if overflow == "keep":
        return
    if strategy.precision_plugin.needs_scaler:
        raise ValueError(
            f"PagedStash(overflow={overflow!r}) with precision {strategy.precision_plugin.precision!r}: loss scaling has checked the "
            'gradients before; use overflow="keep" or precision="bf16-mixed"'
        )
    if overflow == "rerun":
        reasons = {
            "manual optimization": not module.automatic_optimization,
            "training_step(dataloader_iter)": is_param_in_hook_signature(
                module.training_step, "dataloader_iter", explicit=True
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(
                    f'PagedStash(overflow="rerun") with {reason}: the step cannot be done again from outside; use overflow="skip" or "keep"'
                )
