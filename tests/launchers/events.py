"""What ranks of a run note while they train, however they were started; and whether a run of several starts read each sample once.

    python -m tests.launchers.events FOLDER 2 killed 2 stopped 1

checks what was noted in the folder by two ranks, by two after one had been killed, and by one after SIGTERM had stopped those, and prints a
line about it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.lightning.models import CLASSES, Classifier

SEED, BATCH_SIZE = 1, 4


class Rows(Dataset[tuple[int, Tensor, int]]):
    """Each with its number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        return index, torch.randn(3, generator=torch.Generator().manual_seed(index)), index % CLASSES


def rows(size: int) -> DataLoader[Any]:
    """For programs that call `seed_everything(SEED)`: Lightning's samplers take it."""
    return DataLoader(Rows(size), batch_size=BATCH_SIZE, shuffle=True)


class Noted(Classifier):
    """Notes its start, each step and its end. Steps last `pause_s` seconds longer, for whoever wants to stop a run in the middle."""

    def __init__(self, folder: Path, pause_s: float = 0.0) -> None:
        super().__init__()
        self._folder, self._pause_s = folder, pause_s
        self._start = 0.0

    def note(self, what: str, **more: Any) -> None:
        rank, step = self.trainer.global_rank, self.trainer.global_step
        with (self._folder / f"events-{rank}").open("a") as file:
            file.write(json.dumps({"what": what, "start": self._start, "rank": rank, "step": step, **more}) + "\n")

    def on_train_start(self) -> None:
        self._start = self.trainer.strategy.broadcast(time.time())
        size = len(self.trainer.train_dataloader.dataset)
        self.note("start", world_size=self.trainer.world_size, node=self.trainer.node_rank, rows=size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        indices, *inputs_and_class = batch
        loss = super().training_step(inputs_and_class, batch_idx)
        self.log("loss", loss)
        self.note("step", epoch=self.trainer.current_epoch, indices=indices.tolist(), loss=loss.item().hex())
        time.sleep(self._pause_s)
        return loss

    def on_train_end(self) -> None:
        self.note("end")


class FinishedByFile(Callback):
    """Ends the training once there is a file `finish`, or after so many more steps."""

    def __init__(self, folder: Path, more: int | None = None) -> None:
        self._file, self._left = folder / "finish", more

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._left = None if self._left is None else self._left - 1
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(
            self._file.exists() or self._left == 0, all=False
        )


class KilledOnce(Callback):
    """In the first start, one rank ends in one step, as if its machine were gone."""

    def __init__(self, folder: Path, rank: int, step: int) -> None:
        self._flag, self._rank, self._step = folder / "killed", rank, step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, trainer.global_step) == (self._rank, self._step) and not self._flag.exists():
            self._flag.touch()
            os._exit(9)


@dataclass(frozen=True)
class Start:
    """One start of the processes.

    Attributes:
        begun: What each rank noted when it began.
        steps: What ranks noted in each step.
        ended: How many ranks came to the end of the training.
    """

    begun: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    ended: int

    @property
    def world_size(self) -> int:
        return int(self.begun[0]["world_size"])

    @property
    def first_step(self) -> int:
        return int(self.begun[0]["step"])

    @property
    def end(self) -> int:
        """Number of steps, from the run's beginning, after the last one here."""
        return max(step["step"] for step in self.steps) + 1

    @property
    def nodes(self) -> list[int]:
        """Number of ranks of each node."""
        numbers = [entry["node"] for entry in self.begun]
        return [numbers.count(node) for node in sorted(set(numbers))]


def starts_in(folder: Path) -> list[Start]:
    """What was noted in a folder, in the order of time."""
    of_start: defaultdict[float, list[dict[str, Any]]] = defaultdict(list)
    for file in folder.glob("events-*"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            of_start[entry["start"]].append(entry)

    def noted(entries: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
        return [entry for entry in entries if entry["what"] == what]

    return [
        Start(noted(entries, "start"), noted(entries, "step"), len(noted(entries, "end")))
        for _, entries in sorted(of_start.items())
    ]


def check(folder: Path, *history: int | str) -> str:
    """Raise unless the run had these starts, and read the samples of each epoch once, in their order.

    Args:
        folder: Where ranks noted what they did.
        history: Numbers of ranks by start. Between two: "stopped", and nothing was trained twice; or "killed", and what was done since
            the last checkpoint may have been trained again.

    Returns:
        A line about it.
    """
    starts = starts_in(folder)
    assert [start.world_size for start in starts] == [*map(int, history[::2])], [start.begun for start in starts]
    assert starts[0].first_step == 0
    assert starts[-1].ended == starts[-1].world_size, "the last start did not end"
    size = starts[0].begun[0]["rows"]
    indices: defaultdict[int, list[int]] = defaultdict(list)
    first_noted: dict[tuple[int, ...], tuple[Any, ...]] = {}
    repeated = 0
    for start, following, end in zip(starts, [*starts[1:], None], [*history[1::2], None], strict=True):
        if following is not None:
            first, last = following.first_step, start.end
            assert first == last or (end == "killed" and first < last), f"{end} after {last} steps, went on at {first}"
        for step in start.steps:
            if following is None or step["step"] < following.first_step:
                indices[step["epoch"]] += step["indices"]
            content = (step["indices"], step["loss"])
            place = (start.world_size, step["rank"], step["step"])
            assert first_noted.setdefault(place, content) == content, f"{place}: not the same sample or loss again"
            repeated += first_noted[place] is not content
    for epoch, read in indices.items():
        order = torch.randperm(size, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        assert sorted(read) == sorted(order[: len(read)]), f"epoch {epoch}: other samples than its first, or some twice"
    begins = ", ".join(f"{start.world_size} ranks from step {start.first_step}" for start in starts)
    number = sum(map(len, indices.values()))
    return f"{begins}, to step {starts[-1].end}; {number} samples, each once; {repeated} batches again, to the bit"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("history", nargs="+")
    arguments = parser.parse_args()
    print(check(arguments.folder, *arguments.history))
