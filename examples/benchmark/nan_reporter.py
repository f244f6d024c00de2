"""What `NaNGradientReporter` costs: the same training through Trainer without and with it, in turns, in one process group.

    torchrun --standalone --nproc_per_node=2 examples/benchmark/nan_reporter.py 300m,1b

Rank 0 prints one JSON line for each size, starting with RESULT: median step times in milliseconds and the overhead.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_mfsdp  # noqa: F401  registers "mfsdp"
from examples.benchmark.command import MICROBATCH
from examples.decoder import PRESETS
from examples.lightning_decoder import LightningDecoder
from lightning_mfsdp.callbacks import NaNGradientReporter

STEPS, WARMUP = 24, 8


class RandomTokens(Dataset[Tensor]):
    """Windows of random tokens, the same for the same index."""

    def __init__(self, vocab: int, seq: int, rows: int) -> None:
        self.vocab, self.seq, self.rows = vocab, seq, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(self.vocab, (self.seq + 1,), generator=torch.Generator().manual_seed(index))


class StepTimer(Callback):
    """Device time between the starts of batches, read after the fit."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, index: int) -> None:
        """Stamp the compute stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def times_ms(self) -> list[float]:
        """Step times after the warm-up."""
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.events[WARMUP:], self.events[WARMUP + 1 :], strict=False)]


def fit(size: str, world: int, *, report: bool) -> list[float]:
    """Step times of one short training."""
    config = PRESETS[size]
    timer = StepTimer()
    trainer = Trainer(
        accelerator="gpu",
        devices=world,
        strategy="mfsdp",
        precision="bf16-mixed",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[timer, NaNGradientReporter(action="warn")] if report else [timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    rows = RandomTokens(config.vocab, config.seq, MICROBATCH[size] * STEPS * world)
    trainer.fit(LightningDecoder(size, total_steps=STEPS, meta=True), DataLoader(rows, MICROBATCH[size]))
    return timer.times_ms()


def main() -> None:
    """Alternate without and with, three times each; compare medians."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    for size in sys.argv[1].split(","):
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3):
            for report in (False, True):
                times[report].append(median(fit(size, world, report=report)))
        if rank == 0:
            without, with_reporter = median(times[False]), median(times[True])
            result = {
                "size": size,
                "world": world,
                "without_ms": [round(value, 2) for value in times[False]],
                "with_ms": [round(value, 2) for value in times[True]],
                "overhead": round(with_reporter / without - 1, 4),
            }
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
