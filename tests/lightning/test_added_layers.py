"""Layers that come into a model after it was sharded are named, since nobody would shard or reduce them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_mfsdp import MFSDPStrategy, sharded_parameters, unshard_model
from tests.engine.worlds import by_world, check


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2)
        self.adds = False

    def on_train_start(self) -> None:
        if self.adds:
            self.head = nn.Sequential(self.head, nn.Linear(2, 2))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.head(self.body(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Model) -> None:
    strategy = MFSDPStrategy(ignored_parameters=["frozen.*"])
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, torch.ones(2, 2, 4))


def of_a_replaced_head(rank: int, world: int) -> None:
    model = Model()
    fit(model)
    fit(model)
    model.head = nn.Linear(4, 2)
    model.body.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(
        ValueError, match=r"Model: body\.extra, head\.weight, head\.bias came into the model after it was sharded"
    ):
        fit(model)
    fit(unshard_model(model))
    names = {name for name, _ in model.named_parameters() if not name.startswith("frozen")}
    assert {view.name for view in sharded_parameters(model)} == names


def of_a_layer_wrapped_when_training_starts(rank: int, world: int) -> None:
    model = Model()
    model.adds = True
    with pytest.raises(
        ValueError, match=r"Model: head\.1\.weight, head\.1\.bias came into the model after it was sharded"
    ):
        fit(model)


WORLDS = {1: (of_a_replaced_head, of_a_layer_wrapped_when_training_starts)}


@by_world(WORLDS)
def test_parameters_are_named(world, case):
    check(WORLDS, world, case)
