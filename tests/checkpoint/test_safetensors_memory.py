"""Host memory in bytes: no rank holds the whole model while it loads or exports."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_mfsdp.checkpoint import export_checkpoint, export_model, load_safetensors
from lightning_mfsdp.engine import fully_shard, fully_shard_optimizer
from tests.checkpoint.internals import ParameterIndex, Ranks, lightning_io, locate
from tests.helpers.distributed import run_distributed
from tests.helpers.host_memory import FREED_AT_ONCE, Meter

pytestmark = pytest.mark.nightly

WORLD = 2
LAYERS, DIM = 64, 512
LAYER_BYTES = DIM * DIM * 4
MODEL_BYTES = LAYERS * LAYER_BYTES  # 64 MiB
MARGIN_BYTES = 4 * 2**20  # what Python, allocators and threads may add


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)))


def measured(rank: int, world: int, folder: str) -> dict[str, int]:
    """Growth by what was done; exports are written on rank 0."""
    path = Path(folder)
    whole = model() if rank == 0 else None
    if whole is not None:
        save_file(whole.state_dict(), path / "float32.safetensors")
        save_file(whole.bfloat16().state_dict(), path / "bfloat16.safetensors")
        torch.save(
            {"state_dict": whole.float().state_dict(), "optimizer_states": [torch.ones(LAYERS, DIM, DIM)]},
            path / "file.ckpt",
        )
    del whole
    dist.barrier()
    with torch.device("meta"):
        sharded = model()
    fully_shard(sharded)
    optimizer = fully_shard_optimizer(torch.optim.Adam(sharded.parameters()))
    found: dict[str, int] = {}

    def measure(name: str, action: Callable[[Meter], Any]) -> None:
        dist.barrier()
        with Meter() as meter:
            kept = action(meter)
        del kept
        found[name] = meter.grown

    measure(
        "naive", lambda meter: {name: value.clone() for name, value in load_file(path / "float32.safetensors").items()}
    )
    for name in ("float32", "bfloat16"):
        measure(
            name, lambda meter, name=name: load_safetensors(sharded, path / f"{name}.safetensors", progress=meter.look)
        )
    measure("export", lambda meter: export_model(sharded, path / "live", progress=meter.look))
    sharded(torch.randn(1, DIM)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    index = ParameterIndex(sharded)
    checkpoint = {
        "state_dict": sharded.state_dict(),
        "optimizer_states": [lightning_io.optimizer_state(index, optimizer)],
    }
    content = lightning_io.ShardedContent.of(index, checkpoint, Ranks())
    lightning_io.save(locate(path / "saved.ckpt"), content, ranks=Ranks())
    dist.barrier()
    found["saved"] = sum(file.stat().st_size for file in (path / "saved.ckpt").iterdir())
    for name in ("saved", "file"):
        found[f"{name} size"] = found.pop(name, 0)
        if rank == 0:
            with Meter() as meter:
                export_checkpoint(path / f"{name}.ckpt", path / f"from {name}", progress=meter.look)
            found[f"from {name}"] = meter.grown
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def grown() -> Iterator[list[dict[str, int]]]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(*FREED_AT_ONCE)
        yield run_distributed(measured, WORLD, folder, fresh=True)


def test_the_meter_sees_a_whole_model(grown: list[dict[str, int]]) -> None:
    assert all(found["naive"] > 0.9 * MODEL_BYTES for found in grown)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_needs_next_to_nothing_beside_the_shard(grown: list[dict[str, int]], dtype: str) -> None:
    most = [found[dtype] for found in grown]
    assert max(most) < LAYER_BYTES + MARGIN_BYTES < MODEL_BYTES / WORLD, most


def test_exporting_a_model_needs_much_less_than_the_model(grown: list[dict[str, int]]) -> None:
    """A gather takes from every rank as much as the largest share of one has; here a tensor lies on one rank."""
    most = [found["export"] for found in grown]
    assert max(most) < 2 * WORLD * LAYER_BYTES + MARGIN_BYTES < MODEL_BYTES / 4, most


def test_exporting_a_checkpoint_needs_a_few_tensors_and_no_optimizer_state(grown: list[dict[str, int]]) -> None:
    found = grown[0]
    assert found["saved size"] > 2.9 * MODEL_BYTES, "the optimizer's state is in it"
    assert found["from saved"] < 3 * LAYER_BYTES + MARGIN_BYTES, found
    assert found["from file"] < LAYER_BYTES + MARGIN_BYTES, found
