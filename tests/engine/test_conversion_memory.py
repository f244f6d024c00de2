"""Host memory in bytes that making a sharded model whole takes: the whole once, and what is being made."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp import full_state_dict
from lightning_mfsdp.engine import fully_shard, fully_shard_optimizer, unshard_model
from tests.helpers.distributed import run_distributed
from tests.helpers.host_memory import FREED_AT_ONCE, Meter

pytestmark = pytest.mark.nightly  # it meters
WORLD = 2
LAYERS, DIM = 16, 1024
LAYER_BYTES = DIM * DIM * 4
MODEL_BYTES = LAYERS * LAYER_BYTES  # 64 MiB
OF_ONE_LAYER = LAYER_BYTES // WORLD + 2 * LAYER_BYTES  # its rows here, those of all ranks, and the whole
MARGIN_BYTES = 3 * 2**20  # what Python, allocators and threads may add


def trained(sharding: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of equal layers, each a unit of one weight, after a step; SGD has no state."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, sharding=sharding)
    fully_shard(model, sharding=sharding)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, DIM)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.ones(1, DIM))  # gradients give their memory back
    return model, optimizer


def measured(rank: int, world: int) -> dict[str, int]:
    found: dict[str, int] = {}

    def measure(name: str, action: Callable[[], Any]) -> None:
        gc.collect()
        dist.barrier()
        with Meter() as meter:
            kept = action()
        del kept
        found[name] = meter.grown

    for sharding in ("optim_grads_params", "no_shard"):
        model, optimizer = trained(sharding)
        measure(f"{sharding} state", lambda model=model: full_state_dict(model))
        measure(f"{sharding} state everywhere", lambda model=model: full_state_dict(model, rank0_only=False))
        measure(f"{sharding} model", lambda model=model: unshard_model(model))
        optimizer.zero_grad()  # it was alive meanwhile
        assert sum(one.numel() * 4 for one in model.parameters()) == MODEL_BYTES
        del model, optimizer
    return found


@pytest.fixture(scope="module")
def grown() -> Iterator[list[dict[str, int]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*FREED_AT_ONCE)
        yield run_distributed(measured, WORLD, fresh=True)


@pytest.mark.parametrize("sharding", ["optim_grads_params", "no_shard"])
def test_a_full_state_dict_is_one_copy_where_it_is_wanted(grown: list[dict[str, int]], sharding: str) -> None:
    first, second = (found[f"{sharding} state"] for found in grown)
    assert 0.9 * MODEL_BYTES < first < MODEL_BYTES + OF_ONE_LAYER + MARGIN_BYTES, first
    assert second < OF_ONE_LAYER + MARGIN_BYTES, second
    everywhere = [found[f"{sharding} state everywhere"] for found in grown]
    assert max(everywhere) < MODEL_BYTES + OF_ONE_LAYER + MARGIN_BYTES, everywhere


def test_a_model_becomes_whole_without_a_second_whole_copy(grown: list[dict[str, int]]) -> None:
    """What was there goes layer by layer, with an optimizer alive that held it."""
    before = {"optim_grads_params": MODEL_BYTES // WORLD, "no_shard": MODEL_BYTES}
    for sharding, there in before.items():
        most = [found[f"{sharding} model"] for found in grown]
        assert max(most) < MODEL_BYTES - there + OF_ONE_LAYER + MARGIN_BYTES, (sharding, most)
