"""What a program does when a checkpoint is loaded comes to the same as under DDP: load_state_dict, hooks of modules, on_load_checkpoint."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.distributed import run_distributed
from tests.lightning import load_programs
from tests.lightning.load_programs import PROGRAMS

SIDES = {
    2: ("optim_grads_params sharded", "optim_grads full", "no_shard sharded"),
    3: ("optim_grads_params full", "optim sharded"),
}


def run(rank: int, world_size: int, folder: str, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")  # Lightning's advice
    return load_programs.run(rank, world_size, folder, names)


def assert_alike(actual: Any, expected: Any, where: str) -> None:
    """Equal; tensors up to the order of sums."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_alike(actual[key], expected[key], f"{where}: {key}")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-4), where
    else:
        assert actual == expected, where


@pytest.fixture(scope="module", params=[2, 3])
def came_to(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], list[Any]]:
    folder = tmp_path_factory.mktemp("loaded")
    names = SIDES[request.param]
    return names, run_distributed(run, request.param, str(folder), names)


@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_a_program_that_takes_part_in_loading_comes_to_the_same_as_under_ddp(came_to: Any, program: str) -> None:
    names, ranks = came_to
    for rank, found in enumerate(ranks):
        sides = found[program]
        for name in sides:
            assert_alike(sides[name], sides["ddp"], f"rank {rank}: {program} under {name}")
        assert set(names) <= sides.keys()
