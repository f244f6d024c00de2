"""Loggers that would trace the sharded module on one rank are refused before the fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import RankError, run_distributed
from tests.lightning.models import DIM, FOREIGN_WARNINGS, loader, make_trainer, seeded

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class WithoutTensorBoard(TensorBoardLogger):
    """Has the attributes of one that was made where TensorBoard is installed, and writes nothing."""

    def __init__(self, folder: Path, *, log_graph: bool) -> None:
        self._root_dir, self._name, self._version, self._sub_dir = str(folder), "", 0, None
        self._log_graph = log_graph

    def log_hyperparams(self, *_: object, **__: object) -> None:
        pass

    log_metrics = log_hyperparams
    log_graph = log_hyperparams
    save = log_hyperparams
    finalize = log_hyperparams


@pytest.mark.parametrize(("log_graph", "has_example"), [(True, True), (True, False), (False, True)])
def test_a_graph_that_rank_0_would_draw_alone_is_refused(log_graph: bool, has_example: bool, tmp_path: Path) -> None:
    model = seeded()
    model.example_input_array = torch.ones(2, DIM) if has_example else None
    logger = WithoutTensorBoard(tmp_path, log_graph=log_graph)
    trainer = make_trainer(tmp_path, 1, strategy=MFSDPStrategy(), logger=logger, max_steps=1, log_every_n_steps=1)
    if log_graph and has_example:
        with pytest.raises(ValueError, match=r"WithoutTensorBoard\(log_graph=True\) traces the model on rank 0 alone"):
            trainer.fit(model, loader(4))
    else:
        trainer.fit(model, loader(4))


def watch(module: nn.Module, log: str) -> None:
    """What `wandb.watch` of wandb 0.31 does to a module for "all": its hook reads every weight."""
    module._wandb_hook_names = ["gradients/inputs.weight"]  # type: ignore[assignment]
    if log == "all":
        module._wandb_hook_names.append("parameters/")
        module.register_forward_hook(read_weights)


def read_weights(module: nn.Module, *_: Any) -> None:
    for parameter in module.parameters():
        parameter.data.cpu().detach().clone().reshape(-1).min().item()


class Watches(Callback):
    def __init__(self, log: str) -> None:
        self.logged = log

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            watch(pl_module, self.logged)


def watched(rank: int, world: int, log: str, sharding: Any) -> int:
    strategy = MFSDPStrategy(units=["Block"], sharding=sharding)
    trainer = make_trainer("", world, strategy=strategy, max_steps=1, callbacks=[Watches(log)])
    trainer.fit(seeded(), loader(4))
    return trainer.global_step


def test_weights_that_rank_0_would_read_alone_are_refused() -> None:
    with pytest.raises(RankError) as error:
        run_distributed(watched, 2, "all", "optim_grads_params", apart=True)
    assert 'ValueError: wandb.watch(log="all" or "parameters") of Classifier reads weights on rank 0 alone' in str(
        error.value
    )
    assert 'watch(model, log="gradients")' in str(error.value)


@pytest.mark.parametrize(("log", "sharding"), [("gradients", "optim_grads_params"), ("all", "no_shard")])
def test_gradients_and_whole_weights_may_be_watched(log: str, sharding: str) -> None:
    assert run_distributed(watched, 2, log, sharding) == [1, 1]
