"""Host memory in bytes that the Trainer's own saves and loads take beyond the model and its optimizer."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mfsdp import MFSDPStrategy
from tests.checkpoint.internals import full_model_state
from tests.helpers.distributed import run_distributed
from tests.helpers.host_memory import FREED_AT_ONCE, Meter
from tests.lightning.models import FOREIGN_WARNINGS, make_trainer, strict_warnings

pytestmark = [pytest.mark.nightly, *(pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS)]

WORLD = 2
LAYERS, DIM = 16, 1024
LAYER_BYTES = DIM * DIM * 4
MODEL_BYTES = LAYERS * LAYER_BYTES  # 64 MiB
MARGIN_BYTES = 2 * 2**20  # what Python, allocators and threads may add


class Stack(LightningModule):
    """Equal layers, each a unit of one weight that lies on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Loading(MFSDPStrategy):
    """Meters how it loads: weights, then optimizers, which begin with what the first left."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.by_weights = self.grown = 0

    def load_model_state_dict(self, *args: Any, **options: Any) -> None:
        gc.collect()  # a model of before, freed meanwhile, would hide what the load takes
        with Meter() as meter:
            super().load_model_state_dict(*args, **options)
        self.by_weights = self.grown = meter.grown

    def load_optimizer_state_dict(self, *args: Any) -> None:
        with Meter() as meter:
            super().load_optimizer_state_dict(*args)
        self.grown = max(self.grown, meter.grown)


def measured(rank: int, world: int, folder: str) -> dict[str, int]:
    """By what was done, how much memory grew on this rank. Each save is done twice: the first starts threads and process groups."""
    strict_warnings()
    data = DataLoader(TensorDataset(torch.ones(1, DIM)))
    found: dict[str, int] = {}

    def measure(name: str, action: Callable[[], Any]) -> None:
        dist.barrier()
        with Meter() as meter:
            kept = action()
        del kept
        found[name] = meter.grown

    def trainer_with(strategy: MFSDPStrategy, steps: int) -> Any:
        return make_trainer(folder, world, strategy=strategy, max_epochs=-1, max_steps=steps)

    for kind in ("sharded", "full"):
        model, path = Stack(), Path(folder, f"{kind}.ckpt")
        trainer = trainer_with(MFSDPStrategy(units=["Linear"], state_dict_type=kind), 1)  # type: ignore[arg-type]
        trainer.fit(model, data)
        trainer.save_checkpoint(path)
        measure(f"{kind} save", lambda trainer=trainer, path=path: trainer.save_checkpoint(path))
        files = path.iterdir() if path.is_dir() else [path]
        found[f"{kind} size"] = sum(file.stat().st_size for file in files)
        if kind == "full":
            measure("everywhere", lambda model=model: full_model_state(model.state_dict(), keep=True))
        del model, trainer
        strategy = Loading(units=["Linear"])
        trainer_with(strategy, 2).fit(Stack(), data, ckpt_path=path)
        found[f"{kind} load"], found[f"{kind} weights"] = strategy.grown, strategy.by_weights
    return found


@pytest.fixture(scope="module")
def grown() -> Iterator[list[dict[str, int]]]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(*FREED_AT_ONCE)
        yield run_distributed(measured, WORLD, folder, fresh=True)


def test_the_meter_sees_a_whole_model(grown: list[dict[str, int]]) -> None:
    assert all(found["everywhere"] > 0.9 * MODEL_BYTES for found in grown)


def test_a_sharded_save_writes_from_the_memory_of_the_model(grown: list[dict[str, int]]) -> None:
    assert grown[0]["sharded size"] > 3 * MODEL_BYTES, "weights and two moments"
    most = [found["sharded save"] for found in grown]
    assert max(most) < MARGIN_BYTES, most


def test_a_full_save_takes_what_is_written_on_rank_0_and_a_few_tensors_elsewhere(grown: list[dict[str, int]]) -> None:
    """For each tensor a rank has its own piece, the pieces of all, and the whole; nothing of the tensor before."""
    of_one_tensor = LAYER_BYTES // WORLD + 2 * LAYER_BYTES
    first, *others = (found["full save"] for found in grown)
    assert grown[0]["full size"] > 3 * MODEL_BYTES
    assert first < grown[0]["full size"] + of_one_tensor + MARGIN_BYTES, "written without another copy"
    assert max(others) < of_one_tensor + MARGIN_BYTES < MODEL_BYTES / 4, others


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_load_takes_the_optimizers_state_of_this_rank_and_a_few_tensors(
    grown: list[dict[str, int]], kind: str
) -> None:
    """Weights are read into their place; four threads have a piece each, as it lies in the file and unpacked."""
    state, pieces = 2 * MODEL_BYTES // WORLD, 4 * 2 * LAYER_BYTES // WORLD
    weights = [found[f"{kind} weights"] for found in grown]
    assert max(weights) < pieces + MARGIN_BYTES < MODEL_BYTES / WORLD, "without a copy, and as no hook asked for any"
    most = [found[f"{kind} load"] for found in grown]
    assert 0.9 * state < min(most)
    assert max(most) < state + pieces + MARGIN_BYTES < 1.5 * MODEL_BYTES, most
