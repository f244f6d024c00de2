"""Trainer features are tried under DDP and under mfsdp in the same processes, and must come to the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy
from tests.lightning.models import full_state, make_trainer, strict_warnings

# Advice of DDP and of Lightning's sampler, and what PyTorch and jsonargparse say of the way in which Lightning calls them.
OTHER_WARNINGS = (
    ".*find_unused_parameters=True was specified in DDP constructor.*",
    ".*it is recommended to use `Trainer.devices=1, num_nodes=1.*",
    "torch.distributed.nn.functional.all_gather is deprecated.*",
    "(?s).*JSONARGPARSE_DEPRECATION_WARNINGS.*",
    "(?s).*in v5.0.0.*",
    "Checkpoint directory .* exists and is not empty.",
    "You're resuming from a checkpoint that ended before the epoch ended .*",
    "training goes on inside an epoch, and the training loader .*",
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two strategies that a scenario runs under, on one rank.

    Attributes:
        name: "ddp" or "mfsdp".
        rank: This process.
        world_size: Number of processes.
        folder: For this scenario under this strategy; the ranks share it.
    """

    name: str
    rank: int
    world_size: int
    folder: Path

    def trainer(self, *, unused_parameters: bool = False, **options: Any) -> Trainer:
        """A quiet trainer. `unused_parameters`: some get no gradient in some backwards, which DDP wants to know."""
        strategy: Any = MFSDPStrategy(units=["Block"])
        if self.name == "ddp":
            strategy = "ddp_find_unused_parameters_true" if unused_parameters else "ddp"
        return make_trainer(self.folder, self.world_size, **{"strategy": strategy, **options})

    def weights(self, model: LightningModule) -> dict[str, Tensor]:
        """Whole main weights by name."""
        if self.name == "mfsdp":
            return full_state(model)
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


Scenario = Callable[[Side], Any]


def run_both(rank: int, world_size: int, folder: str, scenarios: Sequence[Scenario]) -> dict[str, dict[str, Any]]:
    """What each scenario returns under each strategy."""
    strict_warnings()
    for message in OTHER_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    found: dict[str, dict[str, Any]] = {}
    for scenario in scenarios:
        for name in ("ddp", "mfsdp"):
            own = Path(folder, scenario.__name__, name)
            own.mkdir(parents=True, exist_ok=True)
            found.setdefault(scenario.__name__, {})[name] = scenario(
                Side(name=name, rank=rank, world_size=world_size, folder=own)
            )
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


def assert_ranks_alike(results: Sequence[dict[str, dict[str, Any]]], scenario: Scenario) -> None:
    """On every rank the scenario came to the same under mfsdp as under DDP."""
    for rank, found in enumerate(results):
        sides = found[scenario.__name__]
        assert_alike(sides["mfsdp"], sides["ddp"], f"rank {rank}: {scenario.__name__}")
