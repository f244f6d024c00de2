"""The engine's cases of the CPU on GPUs with NCCL: the same numbers, counts and messages, with streams and events that are real."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import pytest

from tests.engine.cases import on_gpus, run_cases
from tests.helpers.distributed import needs_gpus

MODULES = (
    *("as_fsdp2", "awaited", "buffers", "conversion", "different_blocks", "direct", "epochs"),
    *("gradient_lifetime", "inside_a_step", "inspect", "lerp", "memory", "offload", "optimizers", "other_optimizers"),
    *("recompute", "refusals", "schedule", "series", "sharded_arithmetic", "state_dicts", "storage"),
    *("unused_parameters", "weights_in_backward", "collective_counts", "interruptions"),
)


def failures(module: str, world: int) -> dict[str, str]:
    """Tracebacks by case."""
    cases = import_module(f"tests.engine.test_{module}").WORLDS[world]
    found = run_cases({case.__name__: partial(on_gpus, case) for case in cases}, world, backend="nccl")
    return {name: text for name, text in found.items() if text}


def worlds(*sizes: int) -> list[tuple[str, int]]:
    return [
        (name, size) for name in MODULES for size in sizes if size in import_module(f"tests.engine.test_{name}").WORLDS
    ]


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize(("module", "world"), worlds(1))
def test_on_one_gpu(module: str, world: int) -> None:
    found = failures(module, world)
    assert not found, "\n".join(f"{name}: {text}" for name, text in found.items())


@pytest.mark.gpus2
@needs_gpus(2)
@pytest.mark.parametrize(("module", "world"), worlds(2))
def test_on_two_ranks(module: str, world: int) -> None:
    found = failures(module, world)
    assert not found, "\n".join(f"{name}: {text}" for name, text in found.items())
