"""Loggers that would trace the sharded module on one rank are refused before the fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_mfsdp import MFSDPStrategy
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
