"""MemoryReport: shows where the device's memory goes in one step of training, by kind and by unit, as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import Callback, LightningModule, Trainer
from lightning_mfsdp.base.tables import table_lines
from lightning_mfsdp.callbacks.drawing import check_drawing, new_figure, save_figure
from lightning_mfsdp.engine import MemorySample, MemoryTimeline
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["MemoryReport"]

# Lines of the second table.
_UNITS_SHOWN = 12
_KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "unsharded": "unsharded weights",
    "rest": "activations and other",
}


class MemoryReport(Callback):
    """Watches one step of a fit and reports what this rank's device held: once, on rank 0.

    The first table has weights, gradients, optimizer state, unsharded weights and the rest at the moment of the peak; the rest is
    activations, buffers, the batch and temporary memory. The second has, for the units with the largest peaks, the peak in forward and in
    backward, and how much activation memory the forward left behind. Nothing waits for the device; the step takes longer on the host. The
    allocator's own peak (`torch.cuda.max_memory_allocated`) is reset. On a CPU only the first four kinds are counted.

    Args:
        step: Which optimizer step of the fit, from 0; with manual optimization, which batch. The first one allocates the optimizer's
            state, and the next may still plan memory.
        picture: A PNG file for the timeline of the step. Needs matplotlib.

    Attributes:
        samples: Of rank 0 or any other, after the step; see `MemoryTimeline`.

    Raises:
        ValueError: A negative step; or a CUDA graph, whose replays cannot be watched (when the run starts).
        TypeError: The strategy is not `MFSDPStrategy` (when the run starts).
        ImportError: `picture` without matplotlib.
    """

    def __init__(self, step: int = 2, *, picture: str | Path | None = None) -> None:
        if step < 0:
            raise ValueError(f"MemoryReport(step={step}): expected the number of a step, from 0")
        if picture is not None:
            check_drawing("MemoryReport", picture)
        self.step = step
        self.picture = None if picture is None else Path(picture)
        self.samples: list[MemorySample] = []
        self._timeline: MemoryTimeline | None = None
        self._stepped = False
        self._first = 0

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies without units, and CUDA graphs, whose replays allocate nothing that could be watched."""
        strategy = trainer.strategy
        if not isinstance(strategy, MFSDPStrategy):
            raise TypeError(
                f'MemoryReport reads the buffers of strategy="mfsdp"; got {type(strategy).__name__}. Leave it out, or choose that strategy'
            )
        if strategy.uses_cuda_graph:
            raise ValueError(
                "MemoryReport with cuda_graph=True: a replay allocates nothing that could be watched; expected cuda_graph=False for "
                "the report"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing was seen of this fit yet, which may continue another."""
        self.samples = []
        self._first = trainer.fit_loop.epoch_loop._batches_that_stepped

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin with the first microbatch of the step."""
        at = trainer.fit_loop.epoch_loop._batches_that_stepped - self._first
        if at == self.step and self._timeline is None and not self.samples:
            self._stepped = False
            self._timeline = MemoryTimeline(pl_module, trainer.optimizers)
            self._timeline.begin()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take a sample at the moment at which all gradients exist."""
        if self._timeline is not None:
            self._stepped = True
            self._timeline.sample("gradients complete")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The report, if that was the last microbatch of the step."""
        if self._timeline is None or (pl_module.automatic_optimization and not self._stepped):
            return
        self._timeline.sample("optimizer stepped" if self._stepped else "batch ended")
        self.samples = self._timeline.samples
        self._close()
        rank_zero_info(report(self.samples, self.step))
        if self.picture is not None and trainer.is_global_zero:
            rank_zero_info(f"MemoryReport: the step is drawn in {draw(self.samples, self.picture)}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if there was no such step."""
        if not self.samples:
            rank_zero_warn(
                f"MemoryReport(step={self.step}): the fit ended before that step, so there is no report; choose an earlier one"
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report what was seen of a step that broke off: it may have been out of memory."""
        if self._timeline is not None and self._timeline.samples:
            self.samples = self._timeline.samples
            self._close()
            rank_zero_info(f"{report(self.samples, self.step)}\nThe step broke off after this.")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks, and be ready for another fit."""
        self._close()

    def _close(self) -> None:
        if self._timeline is not None:
            self._timeline.close()
            self._timeline = None


def report(samples: Sequence[MemorySample], step: int) -> str:
    """The table of kinds at the peak, and the table of units, which a CPU does not have; both in MiB.

    Args:
        samples: Of one step, in order.
        step: Its number, for the head.
    """
    fullest = max(samples, key=lambda sample: sample.known if sample.peak is None else sample.peak)
    where = " ".join(filter(None, (fullest.unit, fullest.phase)))
    rows = [(name, _mebibytes(_bytes_of(fullest, kind))) for kind, name in _KINDS.items()]
    rows.append(("all", _mebibytes(fullest.peak)))
    head = f"MemoryReport: rank 0 in step {step}, in MiB at the peak ({where})"
    if fullest.peak is None:
        head = (
            f"MemoryReport: rank 0 in step {step}, in MiB where the engine's buffers take most ({where}); a CPU counts neither activations "
            "nor peaks, so there is no table of units"
        )
    return "\n".join([head, *table_lines(rows, right=(1,)), *_units_table(samples)])


def _units_table(samples: Sequence[MemorySample]) -> list[str]:
    begun: dict[str, int] = {}
    peaks: dict[str, dict[str, int]] = {}
    left: dict[str, int] = {}
    is_first_forward = True
    for sample in samples:
        if sample.peak is None or sample.rest is None:
            continue
        if sample.phase == "forward begins":
            begun[sample.unit] = sample.rest
        elif sample.phase:
            peaks_of_unit = peaks.setdefault(sample.unit, {})
            phase = "forward ended" if sample.phase == "forward ended" else "backward ended"
            peaks_of_unit[phase] = max(peaks_of_unit.get(phase, 0), sample.peak)
        is_first_forward &= sample.phase != "backward ended"
        if sample.phase == "forward ended" and is_first_forward:  # of each block of the unit
            left[sample.unit] = left.get(sample.unit, 0) + sample.rest - begun.get(sample.unit, sample.rest)
    if not peaks:
        return []
    largest = sorted(peaks, key=lambda unit: -max(peaks[unit].values()))[:_UNITS_SHOWN]
    rows = [("unit", "peak in forward", "peak in backward", "left by forward")]
    for unit in largest:
        forward, backward = (peaks[unit].get(f"{phase} ended") for phase in ("forward", "backward"))
        rows.append((unit, _mebibytes(forward), _mebibytes(backward), _mebibytes(left.get(unit))))
    few = len(peaks) - len(largest)
    return [*table_lines(rows, right=(1, 2, 3)), *([f"and {few} units with smaller peaks"] if few else [])]


def draw(samples: Sequence[MemorySample], path: Path) -> Path:
    """The kinds on top of each other, sample by sample, with the peaks between samples as a line; returns the path."""
    figure = new_figure(10, 5)
    axes = figure.subplots()
    order = range(len(samples))
    mebi = 2.0**20
    axes.stackplot(
        order,
        [[(getattr(sample, kind) or 0) / mebi for sample in samples] for kind in _KINDS],
        labels=list(_KINDS.values()),
        step="post",
    )
    if samples[0].peak is not None:
        peaks = [(sample.peak or 0) / mebi for sample in samples]
        axes.step(order, peaks, where="pre", color="black", linewidth=0.8, label="peak since the moment before")
    shown = order[:: max(1, len(samples) // 24)]
    labels = [" ".join(filter(None, (samples[index].unit, samples[index].phase))) for index in shown]
    axes.set_xticks(list(shown), labels, rotation=90, fontsize=6)
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=7)
    return save_figure(figure, path)


def _bytes_of(sample: MemorySample, kind: str) -> int | None:
    value: int | None = sample.peak_rest if kind == "rest" else getattr(sample, kind)
    return value


def _mebibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**20:,.1f}"
