"""Small LightningModules and runs shared by the tests in this folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.helpers.gpus import nodes_and_devices

DIM = 12
CLASSES = 5


# What Lightning itself warns of on this PyTorch, or advises on big machines.
FOREIGN_WARNINGS = (
    ".*isinstance.treespec, LeafSpec.*",
    ".*does not have many workers.*",
    ".*but have no `val_dataloader`.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
    "TypedStorage is deprecated.*",  # torch 2.10's own writer of checkpoints
)


def strict_warnings() -> None:
    """Warnings are errors in this process, as pytest makes them in its own."""
    warnings.simplefilter("error")
    for message in FOREIGN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


class Block(nn.Module):
    """Norm, linear, residual: a unit for the automatic choice."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def is_block(module: nn.Module) -> bool:
    """Units chosen by a function."""
    return isinstance(module, Block)


class Classifier(LightningModule):
    """Blocks as units; input layer, scale and head in the root."""

    def __init__(self, *, lr: float = 0.05, optimizer: str = "adamw") -> None:
        super().__init__()
        self.inputs = nn.Linear(3, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(DIM))
        self.head = nn.Linear(DIM, CLASSES)
        self.register_buffer("shift", torch.full((DIM,), 0.25))
        self.lr = lr
        self.optimizer_name = optimizer
        self.losses: list[Tensor] = []

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.shift.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale + self.shift)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


def dataset(size: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 3, generator=generator)
    return TensorDataset(x, (x.sum(1) * 2).round().long() % CLASSES)


def loader(batch_size: int, size: int = 32, rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
    """In order. Batch i of all ranks together is batch i of one process with `batch_size * world_size`."""
    mine = Subset(dataset(size), range(rank, size, world_size))
    return DataLoader(mine, batch_size=batch_size, shuffle=False)


class TinyData(LightningDataModule):
    """For LightningCLI."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(8)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(8)


def make_trainer(folder: str | Path, world_size: int, **options: Any) -> Trainer:
    """A quiet trainer, on the CPU unless told. Anything can be overridden."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": "mfsdp",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder),
    }
    settings.update(options)
    if settings["accelerator"] == "cuda":
        settings.update(nodes_and_devices(world_size))
    return Trainer(**settings)


def seeded(model_class: type[LightningModule] = Classifier, **options: Any) -> Any:
    torch.manual_seed(11)
    return model_class(**options)


def train_plainly(
    model: Classifier,
    batch_size: int,
    steps: int,
    *,
    accumulate: int = 1,
    clip_norm: float = 0.0,
    clip_value: float = 0.0,
) -> Classifier:
    """The reference: one process, plain PyTorch, batches of `batch_size` in order."""
    optimizer = model.configure_optimizers()
    batches = iter(loader(batch_size, size=batch_size * accumulate * steps))
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            (model.loss(next(batches)) / accumulate).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
    return model


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Main weights of a sharded model, whole, on the CPU. Collective."""
    from lightning_mfsdp import unshard

    with unshard(model):
        return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
