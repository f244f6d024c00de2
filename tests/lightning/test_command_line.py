"""LightningCLI: the strategy by its class path alone, and hyperparameters of a checkpoint that it cannot read."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.trainer.hyperparameters import compare_hyperparameters
from tests.lightning.models import FOREIGN_WARNINGS

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}") for message in (*FOREIGN_WARNINGS, "Checkpoint directory .* exists")
]
pytestmark.append(pytest.mark.filterwarnings("ignore::DeprecationWarning"))  # jsonargparse's, of what Lightning calls


class Model(LightningModule):
    def __init__(self, lr: float = 0.1, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, width)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)  # type: ignore[attr-defined]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(4, 4), batch_size=2)  # type: ignore[arg-type]


def fit(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> LightningCLI:
    options = [
        "accelerator=cpu",
        "devices=1",
        "logger=false",
        "enable_progress_bar=false",
        "enable_model_summary=false",
    ]
    options += [f"default_root_dir={folder}", "strategy=lightning_mfsdp.MFSDPStrategy"]
    monkeypatch.setattr(sys, "argv", ["program", "fit", *(f"--trainer.{option}" for option in options), *arguments])
    for variable in (
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
    ):  # the command line sets them, and ranks of later tests would take them over
        monkeypatch.setenv(variable, "1")
    return LightningCLI(Model, save_config_callback=None, seed_everything_default=1)


def test_the_class_path_is_enough_and_saved_hyperparameters_that_it_does_not_use_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fit(monkeypatch, tmp_path, "--trainer.max_epochs=1", "--model.lr=0.01")
    assert isinstance(first.trainer.strategy, MFSDPStrategy)
    saved = first.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    assert Path(saved).is_dir()
    resume = (f"--ckpt_path={saved}", "--trainer.max_epochs=2")
    with pytest.warns(UserWarning, match=r"has other hyperparameters .*: lr=0\.01 in it and 0\.1 in this run\."):
        again = fit(monkeypatch, tmp_path, *resume)
    assert again.trainer.global_step == 4
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*hyperparameters")
        fit(monkeypatch, tmp_path, *resume, "--model.lr=0.01")
        plain = Model(lr=0.2)  # no program of LightningCLI: it chooses for itself
        again.trainer.fit(plain, ckpt_path=saved)


def test_hyperparameters_that_differ_are_named_one_by_one_and_shortened() -> None:
    made_by_cli = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}
    saved = {**made_by_cli, "config": {"lr": 0.1, "betas": {"first": 0.9, "second": 0.99}}, "words": ["w"] * 1000}
    own = {**made_by_cli, "config": {"lr": 0.1, "betas": {"first": 0.8, "second": 0.99}}, "words": ["w"] * 999}
    module: Any = SimpleNamespace(hparams=own | {f"new_{number}": number for number in range(9)})
    location: Any = "last.ckpt"
    with pytest.warns(UserWarning, match="has other hyperparameters") as warned:
        compare_hyperparameters(location, {"hyper_parameters": saved}, module)
    message = str(warned[0].message)
    assert "config.betas.first=0.9 in it and 0.8 in this run; words=['w', " in message
    assert "new_5=None in it and 5 in this run; and 3 more. LightningCLI" in message
    assert "lr" not in message
    assert len(message) < 900
