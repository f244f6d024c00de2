"""Runs of clients under DDP and under mfsdp in the same connected processes, and what must be alike."""

from __future__ import annotations

import re
import shutil
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy, Recompute
from tests.clients.base import EPOCHS, State, batches, part
from tests.clients.refused import REFUSED
from tests.clients.table import CLIENTS, Row
from tests.lightning.features import OTHER_WARNINGS
from tests.lightning.models import full_state, make_trainer, strict_warnings

# Largest difference relative to the largest element of a tensor.
TOLERANCE = {"32-true": 1e-6, "64-true": 1e-10}
# Under bf16-mixed weights are rounded in other places (norms, biases). Of a target or teacher also its way is compared.
FOLLOWERS_BF16, WAY_BF16, OTHERS_BF16 = 1e-3, 0.1, 5e-2


@dataclass
class Outcome:
    """What a run came to on this rank: weights are whole."""

    before: State
    after: State
    losses: list[Tensor]
    notes: dict[str, Any]


class SaveInTheMiddle(Checkpoint):
    """Lightning calls it after all other callbacks."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.path is not None and trainer.current_epoch == EPOCHS // 2 - 1:
            trainer.save_checkpoint(self.path)


def run(row: Row, rank: int, strategy: Any, *, save: str | None = None, resume: str | None = None) -> Outcome:
    """One fit of `row`'s client; it raises an AssertionError where what the client is about did not happen."""
    kind = CLIENTS[row.client]
    torch.manual_seed(7 if resume is None else 8)  # what is resumed does not live on what was drawn
    client = kind(row.accumulate)
    before = {name: parameter.detach().clone() for name, parameter in client.named_parameters()}
    data = batches(kind, rank, row.accumulate)
    trainer = make_trainer(
        "",
        row.ranks,
        strategy=strategy,
        precision=row.precision,
        max_epochs=EPOCHS,
        accumulate_grad_batches=row.accumulate if client.automatic_optimization else 1,
        gradient_clip_val=kind.clip,
        limit_val_batches=1,
        callbacks=[SaveInTheMiddle(save)],
        enable_checkpointing=True,
    )
    trainer.fit(client, data, data if kind.validates else None, ckpt_path=resume)
    client.after_fit()
    if isinstance(strategy, MFSDPStrategy):
        after = full_state(client)
    else:
        after = {name: parameter.detach().clone() for name, parameter in client.named_parameters()}
    if resume is None:
        before = {name: value.to(after[name].dtype) for name, value in before.items()}
        client.check(before, after)
    return Outcome(before, after, client.losses, client.notes)


def mfsdp(row: Row) -> MFSDPStrategy:
    recompute = Recompute() if row.recompute else None
    return MFSDPStrategy(sharding=row.sharding, units=CLIENTS[row.client].units, recompute=recompute)


def ddp(row: Row) -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=CLIENTS[row.client].unused)


class Runner:
    """Runs rows on this rank; what DDP came to is kept for other rows with the same client, accumulation and precision."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.folder = rank, folder
        self.references: dict[tuple[str, int, str], Outcome] = {}

    def reference(self, row: Row) -> Outcome:
        key = row.client, row.accumulate, row.precision
        if key not in self.references:
            try:
                self.references[key] = run(row, self.rank, ddp(row))
            except Exception as error:
                raise AssertionError("under DDP already") from error
        return self.references[key]

    def __call__(self, row: Row) -> None:
        """Compare the row with DDP, and its second half with that of a run that is resumed.

        Raises:
            AssertionError: With everything that differs. Where runs raise, their own error.
        """
        expected = self.reference(row)
        refusal = REFUSED.get((row.client, row.sharding))
        if refusal is not None:
            kind, message = refusal
            with pytest.raises(kind, match=re.escape(message)):  # if it works now, take it out of REFUSED
                run(row, self.rank, mfsdp(row))
            return
        path = str(Path(self.folder, str(row))) if row.resume else None
        found = run(row, self.rank, mfsdp(row), save=path)
        problems = differences(row, found, expected)
        if row.resume:
            resumed = run(row, self.rank, mfsdp(row), resume=path)
            problems += differences_when_resumed(found, resumed)
            dist.barrier()
            if self.rank == 0:
                shutil.rmtree(str(path))
        assert not problems, "\n".join(problems[:12])


def differences(row: Row, found: Outcome, expected: Outcome) -> list[str]:
    """Where a run is not what DDP's is, within the precision's tolerance."""
    if found.after.keys() != expected.after.keys():
        return [f"other names: {found.after.keys() ^ expected.after.keys()}"]
    problems = []
    followers = CLIENTS[row.client].followers
    average = average_way(
        expected
    )  # what cancels in a gradient is mere rounding: it is measured by how far weights have moved
    for name, value in expected.after.items():
        actual = found.after[name]
        if actual.dtype != value.dtype or actual.shape != value.shape:
            problems.append(f"{name}: {actual.dtype} {tuple(actual.shape)}, DDP {value.dtype} {tuple(value.shape)}")
        elif row.precision != "bf16-mixed":
            problems += too_far(name, actual, value, TOLERANCE[row.precision], at_least=average)
        elif name.startswith(followers):
            way, its_way = actual - found.before[name], value - expected.before[name]
            problems += too_far_in_norm(f"the way of {name}", way, its_way, WAY_BF16)
        else:
            problems += too_far_in_norm(name, actual, value, OTHERS_BF16, at_least=value.numel() ** 0.5 * average)
    if row.precision == "bf16-mixed":
        for prefix in followers:  # one vector: biases begin at zero, and their own norm says nothing
            actual, value = (
                torch.cat([w.flatten() for w in part(o.after, prefix).values()]) for o in (found, expected)
            )
            problems += too_far_in_norm(prefix, actual, value, FOLLOWERS_BF16)
        return problems
    if len(found.losses) != len(expected.losses):
        problems.append(f"{len(found.losses)} losses, DDP {len(expected.losses)}")
    for index, (loss, other) in enumerate(zip(found.losses, expected.losses, strict=False)):
        problems += too_far(f"loss {index}", loss, other, TOLERANCE[row.precision], at_least=1.0)
    problems += [] if found.notes.keys() == expected.notes.keys() else ["other notes"]
    for what, note in expected.notes.items():
        if isinstance(note, Tensor):
            problems += too_far(what, found.notes[what], note, TOLERANCE[row.precision], at_least=1.0)
        elif found.notes.get(what) != note:
            problems.append(f"{what}: {found.notes.get(what)}, DDP {note}")
    return problems


def differences_when_resumed(found: Outcome, resumed: Outcome) -> list[str]:
    """Where the resumed run is not, to the bit, the second half of the other."""
    problems = [
        f"{name} differs by {(resumed.after[name] - value).abs().max():.3g} when resumed"
        for name, value in found.after.items()
        if not torch.equal(resumed.after[name], value)
    ]
    half = found.losses[len(found.losses) // 2 :]
    if len(half) != len(resumed.losses) or not all(map(torch.equal, half, resumed.losses)):
        problems.append("losses differ when resumed")
    return problems


def too_far(what: str, actual: Tensor, expected: Tensor, tolerance: float, at_least: float = 0.0) -> list[str]:
    difference = float((actual - expected).abs().max())
    allowed = tolerance * max(at_least, float(expected.abs().max()))
    return [] if difference <= allowed else [f"{what} differs by {difference:.3g}, allowed {allowed:.3g}"]


def average_way(of: Outcome) -> float:
    """How far one element of a weight has moved: the root of the mean square."""
    ways = torch.cat([(value - of.before[name]).flatten() for name, value in of.after.items()])
    return float(ways.norm()) / ways.numel() ** 0.5


def too_far_in_norm(what: str, actual: Tensor, expected: Tensor, tolerance: float, at_least: float = 0.0) -> list[str]:
    difference, norm = float((actual - expected).norm()), max(at_least, float(expected.norm()))
    if difference <= tolerance * norm:
        return []
    return [f"{what} differs by {difference / norm if norm else difference:.3g} of its norm, allowed {tolerance:.3g}"]


def run_rows(rank: int, world: int, folder: str, rows: Sequence[Row]) -> dict[str, str]:
    """Every row's error, empty where it passed."""
    strict_warnings()
    for message in OTHER_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    runner = Runner(rank, folder)
    found = {}
    for row in rows:
        try:
            runner(row)
            error = ""
        except (Exception, pytest.fail.Exception):  # each row passes or fails by itself
            error = traceback.format_exc()
        found[str(row)] = error
    return found
