"""Blocks that share a unit through the Trainer: the same training, compiled or not, and checkpoints that know nothing of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.engine import units
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, dataset, make_trainer, seeded


def fit(folder: Any, blocks_per_unit: int, epochs: int, ckpt_path: Any = None, **options: Any) -> Classifier:
    model = seeded(Classifier)
    strategy = MFSDPStrategy(units=["Block"], blocks_per_unit=blocks_per_unit, **options)
    callbacks = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)] if ckpt_path is None else []
    trainer = make_trainer(
        folder, 2, strategy=strategy, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=bool(callbacks)
    )
    trainer.fit(model, DataLoader(dataset(), batch_size=4), ckpt_path=ckpt_path)
    return model


def state(model: Classifier) -> list[Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters()]


def each_way(rank: int, world: int, folder: str) -> dict[str, Any]:
    alone, together = fit(Path(folder) / "alone", 1, 2), fit(Path(folder) / "together", 2, 2)
    resumed = fit(folder, 1, 2, ckpt_path=str(Path(folder) / "together" / "epoch=0.ckpt"))
    return {
        "expected": state(alone),
        "together": state(together),
        "resumed": state(resumed),
        "units": [(view.name, view.module_class) for view in units(together)],
    }


def compiled(rank: int, world: int, folder: str) -> dict[str, Any]:
    alone = fit(Path(folder) / "alone", 1, 2)
    path = str(Path(folder) / "alone" / "epoch=0.ckpt")
    model = fit(folder, 2, 2, ckpt_path=path, compile={"backend": "eager"})
    forwards = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return {"expected": state(alone), "compiled": state(model), "compiled forwards": forwards}


def test_joined_blocks_train_bit_equal_and_exchange_checkpoints_with_single_ones() -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_distributed(each_way, 2, folder)
    for outcome in outcomes:
        for way in ("together", "resumed"):
            assert all(torch.equal(*pair) for pair in zip(outcome["expected"], outcome[way], strict=True)), way
        assert outcome["units"][1:] == [("blocks.0..blocks.1", "2 x Block")]


@pytest.mark.nightly  # compiled units on a push: test_compile.py
def test_joined_blocks_are_compiled_one_by_one_and_train_bit_equal() -> None:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_distributed(compiled, 2, folder)
    for outcome in outcomes:
        assert all(torch.equal(*pair) for pair in zip(outcome["expected"], outcome["compiled"], strict=True))
        assert outcome["compiled forwards"] == ["blocks.0", "blocks.1"]
