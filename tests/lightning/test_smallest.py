"""The smallest test through the Trainer, to be copied: what two ranks train equals what one process of plain PyTorch trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import run_distributed
from tests.lightning.models import full_state, loader, make_trainer, seeded, strict_warnings, train_plainly

BATCH, STEPS = 8, 3


def trained(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """Runs on each rank. What it returns is pickled, and the test gets a list with one for each rank."""
    strict_warnings()
    model = seeded()
    trainer = make_trainer(folder, world_size, strategy=MFSDPStrategy(units=["Block"]))
    trainer.fit(model, loader(BATCH // world_size, BATCH * STEPS, rank, world_size))
    return full_state(model)


def test_two_ranks_train_what_one_process_of_plain_pytorch_trains(tmp_path: Path) -> None:
    expected = train_plainly(seeded(), BATCH, STEPS)
    for weights in run_distributed(partial(trained, folder=tmp_path), 2):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)
