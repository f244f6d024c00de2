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
from lightning_mfsdp.base import compat
from lightning_mfsdp.callbacks.drawing import check_drawing, new_figure, save_figure
from lightning_mfsdp.engine import record_ranges
from lightning_mfsdp.profile import Breakdown, Event, Trace, break_down, read_trace, report
from lightning_mfsdp.profile.breakdown import by_kind
from lightning_mfsdp.profile.trace import END, OPTIMIZER, STEP, VALIDATION
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["StepProfile"]


class StepProfile(Callback):
    """Profiles some steps of a fit and reports where their time went: once, on rank 0. For any strategy.

    The table has the GPU's time by kind, each moment once, so that communication is what no computation hides; beside it what is hidden.
    Below it are what the host did, the units whose communication is exposed most (with `MFSDPStrategy`), and what to try first. Of a
    validation between the steps nothing counts; what callbacks and hooks do there is the host's work.

    All ranks record, so that none is slower than the others. Recording takes time of the host: where the host is the bound, steps take
    longer than without, and idle time is too high. The head says how long as many steps took just before. The device is waited for
    before and after.

    Args:
        step: How many optimizer steps of this fit come before those that are recorded, at least 1: the last of them warms up the profiler.
            With manual optimization, batches. Those at the beginning of a fit compile, plan memory and choose kernels.
        steps: How many are recorded.
        trace: A file for the trace of rank 0, for Perfetto, and for `lightning-mfsdp profile`. Compressed if its name ends in `.gz`.
        picture: A PNG file for the timeline of the first recorded step. Needs matplotlib.

    Attributes:
        breakdown: Of rank 0, after the last recorded step.

    Raises:
        ValueError: Numbers below 1; or a Trainer whose profiler is PyTorch's, beside which no other one runs (when the fit starts).
        RuntimeError: Another torch.profiler is recording (when the first step would be).
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
        self._done = 0  # steps of this fit
        self._is_inside = self._stepped = False  # a step has begun; the optimizer was called in it
        self._began = 0.0  # when the steps that are timed without the profiler did, plus the time of validations since
        self._unprofiled_s: float | None = None  # how long one of them took
        self._profiler: profile | None = None
        self._ranges: dict[str, record_function] = {}
        self._hooks: list[RemovableHandle] = []
        self._named_before = False  # the engine's ranges were recorded before

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot run beside it."""
        if stage == "fit" and isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            raise ValueError(
                "StepProfile and Trainer(profiler=PyTorchProfiler(...)): torch.profiler runs once in a process; leave one of them out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing was seen of this fit yet, which may continue another."""
        self.breakdown, self._done, self._unprofiled_s = None, 0, None
        self._is_inside = self._stepped = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to time, and to record, with the first microbatch of a step."""
        is_first, self._is_inside = not self._is_inside, True
        if not is_first:
            return
        if self._done == self.step - 1 - self.steps:
            _wait(trainer)
            self._began = time.perf_counter()
        elif self._done == self.step - 1:
            _wait(trainer)
            if self.step > self.steps:
                self._unprofiled_s = (time.perf_counter() - self._began) / self.steps
            self._begin(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Gradients are complete; clipping and the step follow."""
        self._stepped = True
        self._begin_range(OPTIMIZER)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """An optimizer that calls its closure again (LBFGS) has done so."""
        self._end_range(OPTIMIZER)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Go on to the next step if this was the last microbatch of one, and report after the last one."""
        self._end_range(OPTIMIZER)
        if pl_module.automatic_optimization and not self._stepped:
            return
        self._done += 1
        self._is_inside = self._stepped = False
        if self._profiler is None:
            return
        if self._done == self.step:  # what is warmed up with must not reach into what is recorded
            _wait(trainer)
        is_last = self._done == self.step + self.steps
        if is_last:
            with record_function(END):
                _wait(trainer)
        self._profiler.step()
        if is_last:
            self._report(trainer, self._stop(pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What follows is no part of a step."""
        self._began -= time.perf_counter()
        self._begin_range(VALIDATION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        self._began += time.perf_counter()
        self._end_range(VALIDATION)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if there were no such steps."""
        if self._done < self.step + self.steps:
            rank_zero_warn(
                f"StepProfile(step={self.step}, steps={self.steps}): the fit ended after {self._done} steps of its own, so there is no "
                "report; choose an earlier one"
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
        if compat.is_profiled():
            raise RuntimeError(
                "StepProfile: another torch.profiler is recording, and it runs once in a process; leave one of them out"
            )
        activities = [ProfilerActivity.CPU]
        if _is_on_cuda(trainer):
            activities.append(ProfilerActivity.CUDA)
        if isinstance(trainer.strategy, MFSDPStrategy):
            self._named_before = record_ranges(module)
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
            record_ranges(module, self._named_before)
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
        before = (
            ""
            if self._unprofiled_s is None
            else f"; {self._unprofiled_s * 1e3:.2f} ms each just before, without the profiler"
        )
        rank_zero_info(report(self.breakdown, f"StepProfile: rank 0, after {self.step} steps of this fit{before}"))
        if self.picture is not None:
            rank_zero_info(f"StepProfile: the first of them is drawn in {draw(trace, self.picture)}")


def _is_on_cuda(trainer: Trainer) -> bool:
    return bool(trainer.strategy.root_device.type == "cuda")


def _wait(trainer: Trainer) -> None:
    if _is_on_cuda(trainer):
        torch.cuda.synchronize(trainer.strategy.root_device)


def draw(trace: Trace, path: Path) -> Path:
    """The first step: a lane for each kind of the GPU's work and for ranges of the host; returns the path."""
    first = min(trace.named(STEP), key=lambda event: event.start)
    lanes = by_kind(trace)
    for event in trace.named("mfsdp "):
        if event.name != END:
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
