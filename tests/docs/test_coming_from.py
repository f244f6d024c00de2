"""docs/coming_from.md has every option of the other strategies, and the strategy answers each that it lacks."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import strategies
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.options.foreign_options import FOREIGN_OPTIONS

PAGE = (Path(__file__).resolve().parents[2] / "docs/coming_from.md").read_text()
STRATEGIES = ["DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"]
OURS = set(inspect.signature(MFSDPStrategy).parameters)


def rows(strategy: str) -> list[list[str]]:
    """Cells of the strategy's table, without its head."""
    table = PAGE.split(f"| {strategy} | MFSDPStrategy |\n")[1].split("\n\n")[0]
    return [row.split(" | ") for row in table.splitlines()[1:]]


def options_of(function: Any) -> set[str]:
    """What it takes by name, except what it passes on."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD} - {"module"}


# FSDPStrategy passes what it does not know to the wrapper.
THEIRS = {
    "FSDPStrategy": options_of(strategies.FSDPStrategy) | options_of(FullyShardedDataParallel),
    "ModelParallelStrategy": options_of(strategies.ModelParallelStrategy),
    "DeepSpeedStrategy": options_of(strategies.DeepSpeedStrategy),
}


@pytest.mark.parametrize("strategy", THEIRS)
def test_every_option_of_the_installed_lightning_is_in_the_table(strategy: str) -> None:
    shown = {name for cells in rows(strategy) for name in re.findall(r"`([a-z_]+)", cells[0])}
    assert len(THEIRS[strategy]) > 4
    assert sorted(THEIRS[strategy] - shown) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_option_in_the_table_is_answered_or_known(strategy: str) -> None:
    theirs = {name for cells in rows(strategy) for name in re.findall(r"`([a-z_]{3,})", cells[0])}
    assert len(theirs) > 4
    assert theirs <= OURS | FOREIGN_OPTIONS.keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_that_the_table_recommends_exist(strategy: str) -> None:
    assert {name for cells in rows(strategy) for name in re.findall(r"`([a-z_]{3,})=", cells[1])} <= OURS


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_option_that_is_the_same_is_one_of_ours(strategy: str) -> None:
    same = {
        name for cells in rows(strategy) for name in re.findall(r"`([a-z_]{3,})", cells[0]) if "the same" in cells[1]
    }
    assert same - {"start_method"} <= OURS
