"""Trainer features are tried under DDP and under mfsdp in the same processes, and must come to the same."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import run_distributed
from tests.lightning.models import full_state, make_trainer, strict_warnings

DDP_WARNINGS = (
    ".*find_unused_parameters=True was specified in DDP constructor.*",
)


@dataclass(frozen=True)
class Side:
    """One of the two strategies, on one rank.

    Attributes:
        name: "ddp" or "mfsdp".
        rank: This process.
        world_size: Number of processes.
        folder: Of this scenario under this strategy, shared by the ranks.
    """

    name: str
    rank: int
    world_size: int
    folder: Path

    def trainer(self, *, unused_parameters: bool = False, **options: Any) -> Trainer:
        strategy: Any = MFSDPStrategy(units=["Block"])
        if self.name == "ddp":
            strategy = "ddp_find_unused_parameters_true" if unused_parameters else "ddp"
        return make_trainer(self.folder, self.world_size, strategy=strategy, **options)

    def weights(self, model: LightningModule) -> dict[str, Tensor]:
        if self.name == "mfsdp":
            return full_state(model)
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


Scenario = Callable[[Side], Any]


def run_both(rank: int, world_size: int, folder: str, scenarios: Sequence[Scenario]) -> dict[str, dict[str, Any]]:
    """What each scenario returns under each strategy."""
    strict_warnings()
    for message in DDP_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    found: dict[str, dict[str, Any]] = {}
    for scenario in scenarios:
        for name in ("ddp", "mfsdp"):
            own = Path(folder, scenario.__name__, name)
            own.mkdir(parents=True, exist_ok=True)
            found.setdefault(scenario.__name__, {})[name] = scenario(Side(name, rank, world_size, own))
    return found


def assert_alike(actual: Any, expected: Any, where: str = "") -> None:
    """Equal, and numbers and tensors up to the order of sums."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_alike(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where}: {actual} against {expected}"
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_alike(one, other, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6), where
    else:
        assert actual == expected, where
