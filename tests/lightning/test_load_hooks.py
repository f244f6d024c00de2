"""What a program does when a checkpoint is loaded comes to the same as under DDP: load_state_dict, hooks of modules, on_load_checkpoint."""

from __future__ import annotations

import functools
import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.distributed import run_distributed
from tests.lightning import load_programs
from tests.lightning.load_programs import PROGRAMS

SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
EVERYTHING = tuple(f"{sharding} {kind}" for sharding in SHARDINGS for kind in ("sharded", "full"))
# On a push two ranks, and of these two sides each program has one and the next program the other; at night the product.
IN_TURN = ("optim_grads_params sharded", "optim_grads full")
WORLDS = [
    pytest.param(2, IN_TURN, id="2"),
    *(pytest.param(world, EVERYTHING, id=f"{world} all", marks=pytest.mark.nightly) for world in (2, 3)),
]


def run(rank: int, world_size: int, folder: str, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")  # Lightning's advice
    if names == EVERYTHING:
        return load_programs.run(rank, world_size, folder, {program.__name__: names for program in PROGRAMS})
    own = {program.__name__: (turn_of(program.__name__, names),) for program in PROGRAMS}
    return load_programs.run(rank, world_size, folder, own)


def turn_of(program: str, names: tuple[str, ...]) -> str:
    place = [each.__name__ for each in PROGRAMS].index(program)
    return names[place % len(names)]


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


@functools.cache
def came_to(world: int, names: tuple[str, ...]) -> list[dict[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(run, world, folder, names)


@pytest.mark.parametrize(("world", "names"), WORLDS)
@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_a_program_that_takes_part_in_loading_comes_to_the_same_as_under_ddp(
    world: int, names: tuple[str, ...], program: str
) -> None:
    ranks = came_to(world, names)
    for rank, found in enumerate(ranks):
        sides = found[program]
        for name in sides:
            assert_alike(sides[name], sides["ddp"], f"rank {rank}: {program} under {name}")
        assert sides.keys() >= (set(names) if names == EVERYTHING else {turn_of(program, names)})
