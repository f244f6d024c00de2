"""StepProfile: shows where the time of some steps of training goes, as a table, a trace and a picture, and what to try first."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp._lightning_api import Callback, LightningModule, PyTorchProfiler, Trainer
from lightning_mfsdp.callbacks.drawing import check_drawing, new_figure, save_figure
from lightning_mfsdp.engine import record_ranges
from lightning_mfsdp.profile import Breakdown, Event, Trace, break_down, read_trace, report
from lightning_mfsdp.profile.breakdown import END, KINDS, kind_of
from lightning_mfsdp.profile.trace import NEXT_BATCH, OPTIMIZER, STEP
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["StepProfile"]


class StepProfile(Callback):
    """Profiles some steps of a fit and reports where their time went: once, on rank 0. For any strategy.

    The table has the GPU's time by kind, each moment once, so that communication is what no computation hides; beside it what is hidden.
    Below it are what the host did, the units whose communication is exposed most (with `MFSDPStrategy`), and what to try first.

    All ranks record, so that none is slower than the others. Recording takes time of the host: where the host is the bound, steps take
    longer than without, and idle time is too high. The head says how long as many steps took just before. The device is waited for
    before and after.

    Args:
        step: The first optimizer step that is recorded, from 1; with manual optimization, the first batch. The one before warms up the
            profiler. Those at the beginning of a fit compile, plan memory and choose kernels.
        steps: How many are recorded.
        trace: A file for the trace of rank 0, for Perfetto, and for `lightning-mfsdp profile`. Compressed if its name ends in `.gz`.
        picture: A PNG file for the timeline of the first recorded step. Needs matplotlib.

    Attributes:
        breakdown: Of rank 0, after the last recorded step.

    Raises:
        ValueError: Numbers below 1; or a Trainer whose profiler is PyTorch's, beside which no other one runs (when the run starts).
        ImportError: `picture` without matplotlib.
    """

    def __init__(
        self,
        step: int = 10,
        *,
        steps: int = 3,
        trace: str | Path | None = None,
        picture: str | Path | None = None,
    ) -> None:
        if step < 1 or steps < 1:
            raise ValueError(
                f"StepProfile(step={step}, steps={steps}): expected numbers from 1, since the step before warms up"
            )
        if picture is not None:
            check_drawing("StepProfile", picture)
        self.step, self.steps = step, steps
        self.trace = None if trace is None else Path(trace)
        self.picture = None if picture is None else Path(picture)
        self.breakdown: Breakdown | None = None
        self._profiler: profile | None = None
        self._ranges: dict[str, record_function] = {}
        self._hooks: list[RemovableHandle] = []
        self._first = 0
        self._began: float | None = None  # when the steps that are timed without the profiler did
        self._unprofiled_s: float | None = None  # how long a step took then

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot run beside it."""
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            raise ValueError(
                "StepProfile and Trainer(profiler=PyTorchProfiler(...)): torch.profiler runs once in a process; leave one of them out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing was seen of this fit yet, which may continue another."""
        self.breakdown, self._began, self._unprofiled_s = None, None, None
        self._first = trainer.fit_loop.epoch_loop._batches_that_stepped

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to time, or to record, with the first microbatch of a step."""
        self._end_range(NEXT_BATCH)
        at = trainer.fit_loop.epoch_loop._batches_that_stepped - self._first
        if at == self.step - 1 - self.steps and self._began is None:
            _wait(trainer)
            self._began = time.perf_counter()
        if at == self.step - 1 and self._profiler is None and self.breakdown is None:
            self._begin(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gradients are complete; clipping and the step follow."""
        self._begin_range(OPTIMIZER)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go on to the next step if this was the last microbatch of one, and report after the last one."""
        if self._profiler is None:
            return
        self._end_range(OPTIMIZER)
        at = trainer.fit_loop.epoch_loop._batches_that_stepped - self._first
        if at > self.step - 1 + self._profiler.step_num:
            is_last = self._profiler.step_num == self.steps
            if is_last:
                with record_function(END):
                    _wait(trainer)
            self._profiler.step()
            if is_last:
                self._report(trainer, self._stop(pl_module))
                return
        self._begin_range(NEXT_BATCH)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What follows is no wait for a batch."""
        self._end_range(NEXT_BATCH)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if there were no such steps."""
        if self.breakdown is None:
            rank_zero_warn(
                f"StepProfile(step={self.step}, steps={self.steps}): the fit ended before these steps had, so there is no report; choose "
                "an earlier one"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End what is being recorded: Lightning calls no `teardown` then."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End what is being recorded: the fit has ended before the last step had."""
        if self._profiler is not None:
            self._stop(pl_module)

    # -- recording -----------------------------------------------------------------------------------------------------

    def _begin(self, trainer: Trainer, module: LightningModule) -> None:
        _wait(trainer)
        if self._began is not None:
            self._unprofiled_s = (time.perf_counter() - self._began) / self.steps
        activities = [ProfilerActivity.CPU]
        if _is_on_cuda(trainer):
            activities.append(ProfilerActivity.CUDA)
        if isinstance(trainer.strategy, MFSDPStrategy):
            record_ranges(module)
        for optimizer in trainer.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._end_range(OPTIMIZER)))
        self._profiler = profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1), acc_events=True
        )
        self._profiler.start()

    def _stop(self, module: LightningModule) -> profile:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        for name in list(self._ranges):
            self._end_range(name)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        profiler.stop()
        if isinstance(module.trainer.strategy, MFSDPStrategy):
            record_ranges(module, enabled=False)
        return profiler

    def _begin_range(self, name: str) -> None:
        if self._profiler is not None and name not in self._ranges:
            self._ranges[name] = record_function(name)
            self._ranges[name].__enter__()

    def _end_range(self, name: str) -> None:
        if name in self._ranges:
            self._ranges.pop(name).__exit__(None, None, None)

    # -- after the last step -------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, profiler: profile) -> None:
        if not trainer.is_global_zero:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json.gz") if self.trace is None else self.trace
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            trace = read_trace(path)
        self.breakdown = break_down(trace)
        last = self.step + self.steps - 1
        numbers = f"step {self.step}" if self.steps == 1 else f"steps {self.step} to {last}"
        before = (
            ""
            if self._unprofiled_s is None
            else f" ({self._unprofiled_s * 1e3:.2f} ms each just before, without the profiler)"
        )
        rank_zero_info(report(self.breakdown, f"StepProfile: rank 0, {numbers}{before}"))
        if self.picture is not None:
            rank_zero_info(f"StepProfile: step {self.step} is drawn in {draw(trace, self.picture)}")


def _is_on_cuda(trainer: Trainer) -> bool:
    return bool(trainer.strategy.root_device.type == "cuda")


def _wait(trainer: Trainer) -> None:
    if _is_on_cuda(trainer):
        torch.cuda.synchronize(trainer.strategy.root_device)


def draw(trace: Trace, path: Path) -> Path:
    """The first step: a lane for each kind of the GPU's work and for ranges of the host; returns the path."""
    steps = [event for event in trace.ranges if event.name.startswith(STEP)]
    first = min(steps, key=lambda event: event.start)
    lanes: dict[str, list[Event]] = {kind: [] for kind in KINDS}
    for event in trace.device:
        lanes[kind_of(event)].append(event)
    for event in trace.ranges:
        if event.name.startswith("mfsdp ") and event.name != END:
            lanes.setdefault(f"host: {' '.join(event.name.split()[1:2])}", []).append(event)
    shown = {name: events for name, events in lanes.items() if _inside(events, first)}
    figure = new_figure(12, 1 + 0.4 * len(shown))
    axes = figure.subplots()
    for number, (name, events) in enumerate(shown.items()):
        axes.broken_barh(_inside(events, first), (number - 0.4, 0.8), color=f"C{number % 10}", label=name)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlim(0, (first.end - first.start) / 1e3)
    axes.set_xlabel("ms")
    return save_figure(figure, path)


def _inside(events: Sequence[Event], step: Event) -> list[tuple[float, float]]:
    """Start and length in milliseconds of those that begin in a step."""
    return [
        ((event.start - step.start) / 1e3, (event.end - event.start) / 1e3)
        for event in events
        if step.start <= event.start <= step.end
    ]
