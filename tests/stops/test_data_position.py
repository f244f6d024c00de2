"""A run that is resumed inside an epoch reads the samples that it had not read: as the run that went on, on any number of ranks."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.trainer.data_position import ResumableSampler, resumable
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, make_trainer, strict_warnings
from tests.lightning.test_exact_continuation import SaveAt

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

SIZE, BATCH, EPOCHS = 23, 4, 2  # on two ranks three batches in an epoch, the last one full


class Numbers(Dataset):  # type: ignore[type-arg]
    """Sample i is i, and a random number of the process that reads it."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(2 * SIZE, 2))


class Reader(LightningModule):
    """Writes down what it is given."""

    def __init__(self, *, counts_steps: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.counts_steps = counts_steps
        self.read: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, list) and batch[0].dim() > 1 else [batch]
        self.read.append([None if part is None else part.tolist() for part in parts])
        return sum(self.linear(part).square().mean() for part in parts if part is not None) * 1e-3

    def configure_optimizers(self) -> Any:
        if self.counts_steps:  # which sets up the loaders, before the checkpoint is read
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ReadsAhead(DataLoader):  # type: ignore[type-arg]
    """Reads as soon as somebody will: workers do so."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return itertools.chain([next(batches)], batches)


# Runs that go on, and after how many batches they are saved.
RUNS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "shuffled": ({"shuffle": True}, (1, 3, 4)),
    "in order, whole batches only": ({"drop_last": True, "batch_size": 5}, (1,)),
    "workers read ahead": ({"shuffle": True, "kind": ReadsAhead}, (4,)),
    "loaders set up early": ({"shuffle": True}, (1,)),
}
CASES = [(name, save) for name, (_, saves) in RUNS.items() for save in saves]


def fit(world: int, make: Any, path: str | None, callbacks: Sequence[Callback] = (), **options: Any) -> Any:
    """Samples that this rank was given, by step."""
    torch.manual_seed(1)
    model = Reader(counts_steps=options.pop("counts_steps", False))
    settings = {"max_epochs": EPOCHS, "use_distributed_sampler": True, "accumulate_grad_batches": 2, **options}
    trainer = make_trainer("", world, strategy=MFSDPStrategy(), callbacks=list(callbacks), **settings)
    trainer.fit(model, make(), ckpt_path=path)
    if "max_steps" in options:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/stopped.ckpt")
    return model.read


def went_on_and_resumed(rank: int, world: int, folder: str) -> dict[Any, Any]:
    strict_warnings()
    found: dict[Any, Any] = {}
    for name, (options, saves) in RUNS.items():
        options = {"batch_size": BATCH, "kind": DataLoader, **options}
        make = functools.partial(options.pop("kind"), Numbers(), **options)

        early = {"counts_steps": name == "loaders set up early"}
        whole = fit(world, make, None, [SaveAt(save, f"{folder}/{name}-{save}.ckpt") for save in saves], **early)
        for save in saves:
            found[name, save] = whole[save:], fit(world, make, f"{folder}/{name}-{save}.ckpt", **early)
        if name == "shuffled":
            fit(world, make, f"{folder}/{name}-1.ckpt", [SaveAt(1, f"{folder}/again.ckpt")])
            found["resumed twice"] = whole[2:], fit(world, make, f"{folder}/again.ckpt")
            fit(world, make, None, max_steps=1, default_root_dir=folder)
            # For Lightning the epoch that was stopped is over, and its rest belongs to the next one.
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found["stopped by max_steps"] = whole[2:3], fit(world, make, f"{folder}/stopped.ckpt")
            found["said"] = [str(each.message) for each in warned if "ended within an epoch" in str(each.message)]
            found["order"] = [[int(row[0]) for row in batch] for (batch,) in whole]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("positions")
    return run_distributed(went_on_and_resumed, 2, str(folder)), folder


@pytest.mark.parametrize("case", [*CASES, "resumed twice", "stopped by max_steps"])
def test_what_was_not_read_is_read(runs: Any, case: Any) -> None:
    for found in runs[0]:
        expected, resumed = found[case]
        if case[0] == "workers read ahead":  # and draw numbers at other moments
            expected, resumed = ([[row[0] for row in batch] for (batch,) in read] for read in (expected, resumed))
        assert expected, "something is left to be read"
        assert resumed == expected


def test_a_checkpoint_of_an_epoch_that_lightning_counts_as_complete_is_told(runs: Any) -> None:
    first, second = (found["said"] for found in runs[0])
    assert len(first) == 1
    assert "the rest of epoch 0 is trained as epoch 1" in first[0]
    assert not second


def test_the_order_is_that_of_a_distributed_sampler(runs: Any) -> None:
    for rank, found in enumerate(runs[0]):
        sampler = DistributedSampler(Numbers(), 2, rank, seed=0)
        expected = list(sampler)
        sampler.set_epoch(1)
        expected += list(sampler)
        assert [index for batch in found["order"] for index in batch] == expected


def elsewhere(rank: int, world: int, path: str) -> Any:
    strict_warnings()
    read = fit(world, lambda: DataLoader(Numbers(), BATCH, shuffle=True), path)
    return [int(row[0]) for (batch,) in read for row in batch]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("saved", "seen"), [("again", 4 * BATCH), ("shuffled-1", 0)])
def test_other_numbers_of_ranks_read_the_same_samples(runs: Any, world: int, saved: str, seen: int) -> None:
    """Two ranks had read two batches each, which is a step, or one, with which the step begins again."""
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0)).tolist()
    rest = order[seen:]
    rest += order[: -len(rest) % world]
    whole = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1)).tolist()
    whole += whole[: -SIZE % world]
    for rank, read in enumerate(run_distributed(elsewhere, world, f"{runs[1]}/{saved}.ckpt")):
        assert read == rest[rank::world] + whole[rank::world]


class Kept(BatchSampler):
    """Knows its place, and nobody asks."""


class Loader:
    """Knows its place."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < 6:
            self.place += 1
            yield torch.full((2, 2), float(self.place))
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


OTHERS: dict[str, tuple[Any, str]] = {
    "RandomSampler": (lambda: DataLoader(Numbers(), BATCH, shuffle=True), "chosen by RandomSampler"),
    "a batch sampler": (
        lambda: DataLoader(Numbers(), batch_sampler=Kept(RandomSampler(Numbers()), BATCH, drop_last=False)),
        "chosen by Kept",
    ),
    "a stream": (lambda: DataLoader(Stream(), BATCH), "chosen by _InfiniteConstantSampler"),
    "two": (
        lambda: [
            DataLoader(Numbers(), BATCH, sampler=DistributedSampler(Numbers(), 1, 0)),
            DataLoader(Stream(), BATCH),
        ],
        r"DataLoader \(number 1 of 2\)",
    ),
}


def others(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    for number, (name, (make, _)) in enumerate(OTHERS.items()):
        path = f"{folder}/other-{number}.ckpt"
        fit(world, make, None, [SaveAt(3, path)], use_distributed_sampler=False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(world, make, path, use_distributed_sampler=False)
        found[name] = [str(one.message) for one in said]
    for early in (False, True):
        whole = fit(world, Loader, None, [SaveAt(3, f"{folder}/own.ckpt")], counts_steps=early)
        found[f"own {early}"] = fit(world, Loader, f"{folder}/own.ckpt", counts_steps=early) == whole[3:]
    return found


def test_loaders_that_cannot_go_on_are_named(tmp_path: Path) -> None:
    (found,) = run_distributed(others, 1, str(tmp_path))
    for name, (_, named) in OTHERS.items():
        assert any("reads that epoch from its beginning again" in said for said in found[name]), (name, found[name])
        assert any(re.search(named, said) for said in found[name]), (name, found[name])
    assert found["own False"], "a loader with a state_dict goes on"
    assert found["own True"], "also where it was set up before the checkpoint was read"


def test_the_loader_that_was_given_stays_as_it_is() -> None:
    given = DataLoader(Numbers(), BATCH, sampler=DistributedSampler(Numbers(), 2, 1, seed=4))
    copied: Any = resumable(given)
    assert type(given.sampler) is DistributedSampler
    assert type(copied.sampler) is ResumableSampler
    assert [batch[:, 0].tolist() for batch in copied] == [batch[:, 0].tolist() for batch in given]
    given.sampler.set_epoch(3)  # somebody's own call
    assert list(copied.sampler) == list(given.sampler)
    assert resumable(copied) is copied


@pytest.mark.parametrize(("size", "world", "drop_last"), [(43, 2, False), (43, 4, True), (3, 5, False), (40, 4, False)])
def test_passes_that_begin_inside_an_epoch_end_as_whole_ones(size: int, world: int, drop_last: bool) -> None:
    for rank in range(world):
        whole = DistributedSampler(Numbers(size), world, rank, seed=2, drop_last=drop_last)
        whole.set_epoch(5)
        expected = list(whole)
        for own in range(len(expected)):
            begun = ResumableSampler(whole)
            begun.resume(5, own * world)
            assert list(begun) == expected[own:]
            assert list(begun) == expected, "once"
