"""training_step as CUDA graphs on GPUs: the same training as without, with everything that Lightning does around it."""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_mfsdp import MFSDPStrategy, capture_loss, fully_shard, fully_shard_optimizer, grad_norm
from lightning_mfsdp.callbacks import NaNGradientReporter
from lightning_mfsdp.engine import gather_root
from tests.engine.cases import run_cases
from tests.lightning.models import Classifier, dataset, full_state, make_trainer, seeded
from tests.lightning.test_gpu import one_gpu, precision_options, two_gpus

STEPS = 12
ROWS = 8


class Observed(Classifier):
    """Logs a loss, has a schedule, and counts how often its step really runs as Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.python_runs = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.python_runs += 1
        self.seen.add_(1)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "doubled": loss.detach() * 2}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watcher(Callback):
    """What hooks around the step see."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.doubled: list[float] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.norms.append(grad_norm(module).item())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.doubled.append(outputs["doubled"].item())


def batches(rank: int, world: int, rows: int = ROWS, count: int = STEPS) -> DataLoader[Any]:
    mine = Subset(dataset(rows * world * count), range(rank, rows * world * count, world))
    return DataLoader(mine, batch_size=rows, shuffle=False)


def run(
    rank: int, world: int, *, graph: bool, precision: str = "bf16-mixed", accumulate: int = 1, **options: Any
) -> Any:
    """Everything that a training leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        watcher, logger = Watcher(), CSVLogger(folder)
        strategy = MFSDPStrategy(units=["Block"], cuda_graph=graph, **options)
        trainer = make_trainer(
            folder,
            world,
            accelerator="cuda",
            strategy=strategy,
            logger=logger,
            callbacks=[watcher, LearningRateMonitor("step"), NaNGradientReporter("warn")],
            log_every_n_steps=1,
            val_check_interval=5,
            gradient_clip_val=0.5,
            accumulate_grad_batches=accumulate,
            **precision_options(precision),
        )
        model = seeded(Observed)
        trainer.fit(model, batches(rank, world), batches(rank, world, count=2))
    return {
        "losses": watcher.losses,
        "norms": watcher.norms,
        "doubled": watcher.doubled,
        "metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "seen": model.seen.item(),
        "runs": model.python_runs,
        "state": full_state(model),
    }


def same_training(rank: int, world: int, **case: Any) -> None:
    expected, found = (run(rank, world, graph=graph, **case) for graph in (False, True))
    assert expected["runs"] == STEPS
    assert found["runs"] == 5, "4 ordinary calls and the recording"
    assert found["seen"] == expected["seen"] == STEPS, "buffers are written by replays"
    every = case.get("accumulate", 1)  # without graphs, only the last microbatch reduces gradients
    for one in (found, expected):
        one["norms"] = one["norms"][every - 1 :: every]
    for key in ("losses", "norms", "doubled"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=2e-2, atol=2e-3, msg=key)
    assert found["metrics"].keys() == expected["metrics"].keys()
    for key, value in expected["metrics"].items():
        assert found["metrics"][key] == pytest.approx(value, rel=2e-2, abs=2e-3), key
    for key, value in expected["state"].items():
        torch.testing.assert_close(found["state"][key], value, rtol=0.1, atol=0.02, msg=key)


def same_numbers_to_the_bit(rank: int, world: int) -> None:
    """Without atomics and in float32, a replay computes what the ordinary call does."""
    expected, found = (run(rank, world, graph=graph, precision="32-true") for graph in (False, True))
    assert found["losses"] == expected["losses"]
    assert found["norms"] == expected["norms"]
    for key, value in expected["state"].items():
        assert torch.equal(found["state"][key], value), key


def warned(rank: int, world: int, model: Any, count: int = 8, **options: Any) -> tuple[Any, list[str]]:
    strategy = MFSDPStrategy(units=["Block"], cuda_graph=True)
    trainer = make_trainer(tempfile.gettempdir(), world, accelerator="cuda", strategy=strategy, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, batches(rank, world, count=count))
    return trainer, [str(one.message) for one in caught if "cuda_graph" in str(one.message)]


def what_cannot_be_recorded_is_named(rank: int, world: int) -> None:
    class Reading(Observed):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            outputs["loss"].item()
            return outputs

    class WithMetric(Observed):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            self.mean(outputs["doubled"])
            return outputs

    class NewBuffer(Observed):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            self.seen = self.seen + 1
            return outputs

    for kind, expected in (
        (Reading, 'outputs["loss"].item()'),
        (WithMetric, "updates the metric mean"),
        (NewBuffer, "buffer seen of NewBuffer was replaced"),
    ):
        model = seeded(kind)
        _, messages = warned(rank, world, model)
        assert len(messages) == 1, messages
        assert expected in messages[0], messages[0]
        assert model.python_runs == 8 + (kind is not WithMetric), "it goes on training; one run was the recording"
        assert all(tensor.isfinite().all() for tensor in full_state(model).values())


def other_batches_run_as_they_are(rank: int, world: int) -> None:
    class Uneven(Observed):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [part[:3] for part in batch] if self.trainer.global_step == 6 else batch

    class Frozen(Observed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                self.head.weight.requires_grad_(False)

    model = seeded(Uneven)
    _, messages = warned(rank, world, model)
    assert len(messages) == 1
    assert "called with" in messages[0]
    assert model.python_runs == 6
    model = seeded(Frozen)
    _, messages = warned(rank, world, model)
    assert "frozen or unfrozen" in messages[0]
    assert model.python_runs == 7


def a_loss_is_replayed_in_a_plain_loop(rank: int, world: int) -> None:
    """capture_loss by itself: gradients that were not cleared are added to, and an old loss has no backward."""
    model = seeded().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    def step(batch: list[Tensor]) -> Tensor:
        with gather_root(model):
            return model.loss(batch)

    loss_of = capture_loss(step, model)
    data = [[part.cuda() for part in batch] for batch in batches(rank, world)]
    for batch in data[:5]:
        loss_of(batch).backward()
        optimizer.zero_grad()
    assert loss_of.is_captured
    assert loss_of.pool_bytes > 0

    def norms(factor: float) -> list[Tensor]:
        found = []
        for batch in data[5:8]:
            (loss_of(batch) * factor).backward()
            found.append(grad_norm(model))
        optimizer.zero_grad()
        return found

    whole, halved = norms(1.0), norms(0.5)
    for one, half in zip(whole, halved, strict=True):
        torch.testing.assert_close(half, one / 2)
    expected = []
    for batch in data[5:8]:
        step(batch).backward()
        expected.append(grad_norm(model))
    torch.testing.assert_close(whole, expected)
    old = loss_of(data[0])
    loss_of(data[1])
    with pytest.raises(RuntimeError, match="activations are gone"):
        old.backward()


CASES = {
    "to the bit": same_numbers_to_the_bit,
    "bf16": same_training,
    "whole weights": partial(same_training, precision="32-true", sharding="optim_grads"),
    "loss scaling": partial(same_training, precision="16-mixed"),
    "nothing sharded": partial(same_training, sharding="no_shard"),
    "accumulation": partial(same_training, accumulate=3, free_gradients=True),
    "ignored parameter": partial(same_training, ignored_parameters=["scale"]),
    "plain loop": a_loss_is_replayed_in_a_plain_loop,
    "other batches": other_batches_run_as_they_are,
    "refused": what_cannot_be_recorded_is_named,
}


class TestOneGpu:
    pytestmark = one_gpu

    def test_training_step_is_replayed_on_one_gpu(self) -> None:
        assert run_cases(CASES, 1, backend="nccl") == dict.fromkeys(CASES, "")


class TestTwoGpus:
    pytestmark = two_gpus

    def test_training_step_is_replayed_on_two_gpus(self) -> None:
        assert run_cases(CASES, 2, backend="nccl") == dict.fromkeys(CASES, "")
