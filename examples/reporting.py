"""What the training example reports with: the loss curve, kept in the checkpoint, the speed, and no spurious warnings."""

from __future__ import annotations

import csv
import logging
import math
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


def hide_spurious_warnings() -> None:
    """Hide messages of Lightning that would mislead in these examples, each by its text; everything else still shows."""
    # The text is in memory, so loader workers would only take cores from the training itself.
    warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")
    # A second phase, or a second run, saves beside the first one's checkpoints on purpose.
    warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists and is not empty")
    # Lightning 2.6 asks pytrees in a way that torch 2.11 and later call outdated.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).* is deprecated")
    # peft asks transformers for something under its old name.
    warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated")
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: "Tip: " not in record.getMessage())


class Curve(Callback):
    """Training and validation loss per optimizer step, in bits per byte.

    It is saved with the checkpoint, so a resumed run continues the curve instead of starting one.
    """

    def __init__(self) -> None:
        self.training: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self._steps: list[int] = []
        self._losses: list[Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note which optimizer step this microbatch belongs to; the first is step 1."""
        self._steps.append(trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss on its device: reading it here would make every step wait."""
        whole = outputs["loss"].detach() * trainer.accumulate_grad_batches  # Lightning has divided it
        self._losses.append(outputs.get("next_token_loss", whole))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the held-out loss."""
        self.validation.append((trainer.global_step, trainer.callback_metrics["val_bits_per_byte"].item()))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the losses since the last call over all ranks, and over the microbatches of a step."""
        losses = trainer.strategy.reduce(torch.stack(self._losses), reduce_op="mean").tolist()
        per_step: dict[int, list[float]] = {}
        for step, loss in zip(self._steps, losses, strict=True):
            per_step.setdefault(step, []).append(loss / math.log(2))
        self.training += [(step, sum(values) / len(values)) for step, values in per_step.items()]
        self._steps.clear()
        self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint keeps."""
        return {"training": self.training, "validation": self.validation}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the curve of a checkpoint."""
        self.training = [(int(step), float(loss)) for step, loss in state_dict["training"]]
        self.validation = [(int(step), float(loss)) for step, loss in state_dict["validation"]]


class Speed(Callback):
    """Tokens per second over all processes, validation and the first steps of each epoch left out, and the memory used.

    Args:
        tokens_per_batch: Tokens of one microbatch over all processes.
        skip: Microbatches at the start of each epoch that are not counted, because caches and clocks warm up in them.
    """

    def __init__(self, tokens_per_batch: int, skip: int = 5) -> None:
        self.tokens_per_batch, self.skip = tokens_per_batch, skip
        self.seconds, self.batches = 0.0, 0
        self.device = torch.device("cpu")
        self._started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the memory that setting up needed."""
        self.device = trainer.strategy.root_device
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock after the skipped microbatches and stop it at the end of the epoch."""
        if batch_idx + 1 == self.skip:
            self._started = self._now()
        elif trainer.is_last_batch and batch_idx >= self.skip:
            self.seconds += self._now() - self._started
            self.batches += batch_idx + 1 - self.skip

    def summary(self) -> str:
        """One line for a reader; memory is that of this process."""
        if not self.batches:
            return "too few steps to tell"
        line = f"{self.batches * self.tokens_per_batch / self.seconds:,.0f} tokens/s over all processes"
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30
            reserved = torch.cuda.max_memory_reserved(self.device) / 2**30
            line += f", peak memory {peak:.2f} GiB, reserved {reserved:.2f} GiB"
        return line

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def save(curve: Curve, path: Path) -> None:
    """Write the curve as a table: optimizer step, split, bits per byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("step", "split", "bits_per_byte"))
        table.writerows((step, "train", loss) for step, loss in curve.training)
        table.writerows((step, "held_out", loss) for step, loss in curve.validation)


def plot(curve: Curve, baseline: float, path: Path, resumed_at: int | None = None) -> Path:
    """Draw the curve, the unigram baseline and the step at which training was resumed into a PNG file; returns its path."""
    # Imported here so that only the process that draws needs matplotlib, and without a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="bits per byte")
    axes.plot(*zip(*curve.training, strict=True), color="tab:blue", linewidth=0.8, label="training")
    axes.plot(*zip(*curve.validation, strict=True), color="tab:orange", marker="o", label="held-out text")
    axes.axhline(baseline, color="gray", linestyle="--", label="unigram baseline")
    if resumed_at is not None:
        axes.axvline(
            resumed_at, color="tab:green", linestyle=":", label=f"resumed from a checkpoint at step {resumed_at}"
        )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
