"""training_step as CUDA graphs, as far as it shows without a GPU: who is refused, and what becomes of `self.log`.

The graphs themselves: tests/lightning/test_cuda_graph_gpu.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_mfsdp import EngineStateError, MFSDPStrategy, capture_loss, fully_shard
from lightning_mfsdp.trainer.cuda_graph import recorded_logs
from tests.engine.cases import run_cases
from tests.engine.internals import described, loss_in
from tests.lightning.models import FOREIGN_WARNINGS, Classifier, loader, make_trainer, seeded

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Logging(Classifier):
    """Logs in every way that leaves a number behind."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log_dict({"twice": 2 * loss, "summed": loss}, sync_dist=True)
        return loss


class Replayed(Logging):
    """Logs into a recorder first, then again from what was recorded, as after a replay."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with recorded_logs(self.trainer) as recorder:
            loss = super().training_step(batch, batch_idx)
        for name, value, options in recorder.logged:
            self.log(name, value, **options)
        return loss


def test_what_is_logged_again_reaches_loggers_callbacks_and_the_progress_bar_alike(tmp_path: Path) -> None:
    found = []
    for kind in (Logging, Replayed):
        logger = CSVLogger(tmp_path, name=kind.__name__)
        trainer = make_trainer(tmp_path, 1, strategy="auto", logger=logger, max_epochs=2, log_every_n_steps=1)
        trainer.fit(seeded(kind), loader(8))
        rows = (tmp_path / kind.__name__ / "version_0" / "metrics.csv").read_text()
        found.append((trainer.callback_metrics, trainer.progress_bar_metrics, rows))
    assert found[0] == found[1]
    assert {"loss_epoch", "largest", "twice", "summed"} <= set(found[0][0])


def test_a_metric_object_is_not_recorded(tmp_path: Path) -> None:
    class WithMetric(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.mean(loss)
            with recorded_logs(self.trainer), pytest.raises(EngineStateError, match="a metric's update is Python"):
                self.log("mean", self.mean)
            self.log("after", loss)
            return loss

    trainer = make_trainer(tmp_path, 1, strategy="auto")
    trainer.fit(seeded(WithMetric), loader(8))
    assert "after" in trainer.callback_metrics, "Lightning's own collection is back"


def train_on_cpu(manual: bool) -> Any:
    strategy = MFSDPStrategy(units=["Block"], cuda_graph=True)
    model = seeded()
    model.automatic_optimization = not manual
    trainer = make_trainer(".", 1, strategy=strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader(8))
    return [str(one.message) for one in caught if "cuda_graph" in str(one.message)], len(model.losses)


def on_cpu_it_says_so_and_trains(rank: int, world: int) -> None:
    (message,), steps = train_on_cpu(manual=False)
    assert message.startswith("cuda_graph=True: the model is on cpu, so training runs without CUDA graphs. They need")
    assert steps == 4


def a_loss_is_not_captured_on_cpu(rank: int, world: int) -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    with pytest.raises(EngineStateError, match="capture_loss: Linear is on cpu; CUDA graphs need parameters on cuda"):
        capture_loss(lambda x: model(x).sum(), model)


CASES = {"on CPU": on_cpu_it_says_so_and_trains, "capture_loss on CPU": a_loss_is_not_captured_on_cpu}


def test_without_a_gpu_there_is_no_graph() -> None:
    assert run_cases(CASES, 1) == dict.fromkeys(CASES, "")


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="cuda_graph='yes': expected True or False"):
        MFSDPStrategy(cuda_graph="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="graphs replay addresses"):
        MFSDPStrategy(cuda_graph=True, storage="dynamic")


@pytest.mark.parametrize("outputs", [None, torch.zeros(()), {"logits": torch.zeros(2)}, {"loss": 1.0}])
def test_a_step_without_a_loss_is_refused(outputs: Any) -> None:
    with pytest.raises(EngineStateError, match="expected the step to return a loss"):
        loss_in(outputs)


def test_calls_are_told_apart_by_shapes_dtypes_and_plain_values() -> None:
    x = torch.zeros(2, 3)
    same = described(({"x": x, "n": 3, "name": "a"}, [x]))
    assert same == ["0.x: float32[2, 3]", "0.n: 3", "0.name: 'a'", "1.0: float32[2, 3]"]
    assert same == described(({"x": torch.ones(2, 3), "n": 3, "name": "a"}, [x]))
    for other in (
        ({"x": x, "n": 4, "name": "a"}, [x]),
        ({"x": x.half(), "n": 3, "name": "a"}, [x]),
        (x, x),
        ({"n": 3, "x": x, "name": "a"}, [x]),
    ):
        assert same != described(other)
    first, second = object(), object()
    assert described(first) == described(first) != described(second)
