"""What the clients share: a base class that says how to run one, a block, and batches that are the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from tests.helpers.nights import NIGHT

STEPS, EPOCHS = 20 if NIGHT else 8, 2
DIM = 12

State = dict[str, Tensor]


class Client(LightningModule):
    """A program as people write them. What it is about is asserted by `check`.

    Attributes:
        unused: Some parameters get no gradient in some backwards, which DDP wants to know.
        recomputes: It has layers that can be computed again.
        units: For `MFSDPStrategy`.
        writes: The program writes weights by itself.
        followers: Prefixes of those it makes follow others: targets and teachers.
        splits_batches: One batch is a step; with accumulation it is cut into parts.
        clip: `gradient_clip_val` of the Trainer.
        validates: It has a validation.
        losses: Of every microbatch on this rank.
        notes: What must be the same under DDP besides weights; exact except under bf16-mixed.
    """

    unused: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False
    units: ClassVar[Any] = "auto"
    writes: ClassVar[bool] = False
    followers: ClassVar[tuple[str, ...]] = ()
    splits_batches: ClassVar[bool] = False
    clip: ClassVar[float | None] = None
    validates: ClassVar[bool] = False

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__()
        self.accumulate = accumulate
        self.losses: list[Tensor] = []
        self.notes: dict[str, Any] = {}

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        """One rank's microbatch."""
        raise NotImplementedError

    def check(self, before: State, after: State) -> None:
        """Raise an AssertionError unless what this client is about has happened.

        Args:
            before: Whole weights before the fit.
            after: Whole weights after it.
        """
        raise NotImplementedError

    def saw(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.detach().clone())
        return loss

    def is_last_microbatch(self, batch_idx: int) -> bool:
        return (batch_idx + 1) % self.accumulate == 0

    def after_fit(self) -> None:
        """What people do with the model when the fit is over."""


class Block(nn.Module):
    """Norm, two linear layers, residual. Smooth, so that penalties on gradients have gradients."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Batches(Dataset[Any]):
    """Batch i of a rank, always the same one."""

    def __init__(self, client: type[Client], rank: int, count: int) -> None:
        self.client, self.rank, self.count = client, rank, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.client.batch(torch.Generator().manual_seed(1000 * index + self.rank))


class InEpochs(Sampler[int]):
    """Other batches in each epoch; Lightning tells it which epoch it is, in a resumed run after it has made the iterator."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.epoch * self.length, (self.epoch + 1) * self.length)


def batches(client: type[Client], rank: int, accumulate: int) -> DataLoader[Any]:
    """Those of an epoch; `EPOCHS` of them are `STEPS` optimizer steps."""
    length = STEPS // EPOCHS * (1 if client.splits_batches else accumulate)
    return DataLoader(Batches(client, rank, EPOCHS * length), batch_size=None, sampler=InEpochs(length))


def part(state: State, prefix: str) -> State:
    """What begins with `prefix`, under the rest of the name."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def changed(before: State, after: State, prefix: str = "") -> list[bool]:
    """Whether each of the weights with this prefix is another than before."""
    return [not torch.equal(part(before, prefix)[name], value) for name, value in part(after, prefix).items()]
