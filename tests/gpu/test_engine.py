"""The engine's cases of the CPU on GPUs with NCCL: the same numbers, counts and messages, with streams and events that are real."""

from __future__ import annotations

import inspect
import re
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest

from tests.engine.cases import Case, on_gpus, run_cases
from tests.helpers.distributed import needs_gpus

MODULES = (
    *("as_fsdp2", "awaited", "buffers", "collective_counts", "conversion", "different_blocks", "direct", "epochs"),
    *("gradient_lifetime", "inside_a_step", "inspect", "interruptions", "lerp", "memory", "offload", "optimizers"),
    *(
        "other_optimizers",
        "recompute",
        "refusals",
        "schedule",
        "side_doors",
        "grouped_modules",
        "sharded_arithmetic",
        "state_dicts",
        "storage",
    ),
    *(
        "unused_parameters",
        "weights_in_backward",
        "whole_views",
        "complex",
        "parameter_hooks",
        "functional_call",
        "flat_rows",
        "overlap",
    ),
)
PARTS = 8  # starts of processes for each number of ranks; each ends before the time-out of ranks where GPUs are shared with other tests


def cases_of(module: str, world: int) -> dict[str, Case]:
    found = import_module(f"tests.engine.test_{module}").WORLDS.get(world, ())
    return {f"{module}: {case.__name__}": partial(on_gpus, case) for case in found}


def cases_of_part(part: int, world: int) -> dict[str, Case]:
    return {name: case for module in MODULES[part::PARTS] for name, case in cases_of(module, world).items()}


@cache
def outcome(part: int, world: int) -> dict[str, str]:
    return run_cases(cases_of_part(part, world), world, backend="nccl")


def check(module: str, world: int) -> None:
    errors = outcome(MODULES.index(module) % PARTS, world)
    found = [f"{name}: {errors[name]}" for name in cases_of(module, world) if errors[name]]
    assert not found, "\n".join(found)


def with_cases(world: int) -> list[Any]:
    """Modules; the name of the test says the part, which .ci/gpu chooses by."""
    found = enumerate(MODULES)
    return [pytest.param(module, id=f"{module}-part{at % PARTS}") for at, module in found if cases_of(module, world)]


@pytest.mark.parametrize("module", MODULES)
def test_cases_make_meshes_where_their_ranks_compute(module: str) -> None:
    """NCCL moves nothing of a mesh on the CPU."""
    source = inspect.getsource(import_module(f"tests.engine.test_{module}"))
    assert not re.search(r"(init_device_mesh|DeviceMesh)\(\s*\"cpu\"", source), (
        "say device_type() of tests/engine/cases.py"
    )


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("module", with_cases(1))
def test_on_one_gpu(module: str) -> None:
    check(module, 1)


@pytest.mark.gpus2
@needs_gpus(2)
@pytest.mark.parametrize("module", with_cases(2))
def test_on_two_ranks(module: str) -> None:
    check(module, 2)
