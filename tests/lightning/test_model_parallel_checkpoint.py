"""Directories that ModelParallelStrategy writes with tensor parallelism are read, on any mesh."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy
from tests.checkpoint.foreign import whole
from tests.checkpoint.internals import full_optimizer_state
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import rest_at_night
from tests.lightning.models import full_state, make_trainer
from tests.lightning.test_context import Texts
from tests.lightning.test_tensor import Parallelized

STEPS = 2


class Theirs(Parallelized):
    """Divided by parallelize_module, and sharded by FSDP2 where ModelParallelStrategy trains it."""

    def configure_model(self) -> None:
        super().configure_model()
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """FSDP2 gathers for a forward, and not for a training_step."""
        return super().loss(batch)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self(batch)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """PyTorch computes no norm over two meshes."""

    def configure_optimizers(self) -> Any:
        # One step for all takes DTensors of one mesh, and norms are not on the tensor axis.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


def write(rank: int, world: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # other programs' own
    model = Theirs()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    trainer = make_trainer(folder, world, strategy=strategy, max_epochs=-1, max_steps=STEPS, limit_val_batches=0)
    trainer.fit(model, DataLoader(Texts("whole"), batch_size=2))
    trainer.save_checkpoint(f"{folder}/theirs")
    return whole(model, trainer.optimizers[0])


def read(rank: int, world: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Through `ckpt_path`, without a step."""
    warnings.simplefilter("ignore")
    model = Theirs()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    more: dict[str, Any] = {"max_steps": STEPS, "limit_train_batches": 0, "limit_val_batches": 0}
    trainer = make_trainer(folder, world, strategy=MFSDPStrategy(**options), **more)
    trainer.fit(model, DataLoader(Texts("whole"), batch_size=2), ckpt_path=f"{folder}/theirs")
    return {"weights": full_state(model), "optimizer": full_optimizer_state(trainer.optimizers[0], keep=True)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The folder, and what was saved in it."""
    folder = str(tmp_path_factory.mktemp("theirs"))
    return folder, run_distributed(write, 4, folder)[0]


MESHES: list[tuple[int, dict[str, Any]]] = [
    *((1, {}), (2, {}), (4, {"tensor_parallel_size": 2}), (2, {"tensor_parallel_size": 2})),
]


@pytest.mark.parametrize(("world", "options"), rest_at_night(MESHES, lambda world, options: world == 2))
def test_weights_and_state_are_those_that_were_saved(written: Any, world: int, options: dict[str, Any]) -> None:
    folder, saved = written
    for found in run_distributed(read, world, folder, options):
        assert found["weights"].keys() == saved["weights"].keys()
        for name, value in saved["weights"].items():
            assert torch.equal(found["weights"][name], value), name
        names = [name for name, _ in Theirs().named_parameters()]
        for number, name in enumerate(names):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                theirs = saved["optimizer"]["state"][name][key]
                assert torch.equal(found["optimizer"]["state"][number][key], theirs), (name, key)
