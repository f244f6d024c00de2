"""Around the optimizer: manual optimization, schedulers, clipping, accumulation and tuners do under mfsdp what they do under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.lightning.features import Side, assert_alike, assert_ranks_alike, run_both
from tests.lightning.models import Classifier, loader, seeded

BATCHES = 6


def data(side: Side, batches: int = BATCHES) -> DataLoader[Any]:
    return loader(4, 8 * batches, side.rank, side.world_size)


class Turns(Classifier):
    """Two optimizers with a schedule each take turns, with two microbatches for a step, frozen by toggling."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rates: list[list[float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            self.untoggle_optimizer(optimizer)
        self.rates.append([optimizer.param_groups[0]["lr"] for optimizer in self.optimizers()])

    def configure_optimizers(self) -> Any:
        body = torch.optim.AdamW([self.scale, *self.inputs.parameters(), *self.blocks.parameters()], lr=0.1)
        head = torch.optim.SGD(self.head.parameters(), lr=0.2, momentum=0.9)
        schedules = [
            torch.optim.lr_scheduler.StepLR(body, 2, gamma=0.5),
            torch.optim.lr_scheduler.CosineAnnealingLR(head, 6),
        ]
        return [body, head], schedules


def several_optimizers(side: Side) -> dict[str, Any]:
    """Two epochs at once, and one epoch, a checkpoint, and another epoch from there."""
    straight = seeded(Turns)
    side.trainer(unused_parameters=True, max_epochs=2).fit(straight, data(side))
    first = side.trainer(unused_parameters=True)
    first_half = seeded(Turns)
    first.fit(first_half, data(side))
    path = side.folder / "half.ckpt"
    first.save_checkpoint(path)
    resumed = seeded(Turns)
    side.trainer(unused_parameters=True, max_epochs=2).fit(resumed, data(side), ckpt_path=path)
    return {
        "rates": straight.rates,
        "straight": side.weights(straight),
        "resumed rates": first_half.rates + resumed.rates,
        "resumed": side.weights(resumed),
    }


class Grouped(Classifier):
    """Parameter groups with their own rates, a frozen layer inside a unit and one in the root; the gradients' norms are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs.weight.requires_grad_(False)
        self.blocks[0].linear.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        decay = [parameter for parameter in trained if parameter.dim() > 1]
        rest = [parameter for parameter in trained if parameter.dim() < 2]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}], lr=0.05)


def clipping(side: Side) -> dict[str, Any]:
    found = {}
    for algorithm, value in (("norm", 0.05), ("value", 0.01)):
        model = seeded(Grouped)
        side.trainer(gradient_clip_val=value, gradient_clip_algorithm=algorithm).fit(model, data(side))
        found[algorithm] = side.weights(model)
    return found


class StepCounter(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.steps.append(trainer.global_step)


def accumulation_schedule(side: Side) -> dict[str, Any]:
    """One batch for a step, then two, then four, which leaves two over at the end of the epoch."""
    counter = StepCounter()
    model = seeded()
    trainer = side.trainer(max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2, 2: 4}), counter])
    trainer.fit(model, data(side))
    return {"steps": counter.steps, "weights": side.weights(model)}


class Tuned(Classifier):
    """Has what tuners look for: lr, batch_size, and loaders of its own."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side
        self.batch_size = 2

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size, 128, self.side.rank, self.side.world_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tuned(side: Side) -> Any:
    return seeded(Tuned, side=side)


def learning_rate_finder(side: Side) -> dict[str, Any]:
    """As a tuner, and as a callback; then training goes on with the rate that was found, from the first weights."""
    model = tuned(side)
    trainer = side.trainer(max_steps=4)
    finder = Tuner(trainer).lr_find(model, num_training=20, min_lr=1e-4, max_lr=0.5)
    suggested = model.lr
    trainer.fit(model)
    called = tuned(side)
    callback = LearningRateFinder(num_training_steps=20, min_lr=1e-4, max_lr=0.5)
    other = side.trainer(max_steps=4, callbacks=[callback])
    other.fit(called)
    return {
        "rates": finder.results["lr"],
        "losses": finder.results["loss"],
        "suggested": suggested,
        "weights": side.weights(model),
        "by callback": called.lr,
        "losses of callback": callback.optimal_lr.results["loss"],
        "rates in use": [group["lr"] for group in other.optimizers[0].param_groups],
        "weights by callback": side.weights(called),
        "left over": sorted(path.name for path in side.folder.iterdir()),
    }


class Plateau(Classifier):
    """The rate falls when the validation loss does not, looked at every second epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", "frequency": 2},
        }


def plateau(side: Side) -> dict[str, Any]:
    model = seeded(Plateau)
    trainer = side.trainer(max_epochs=6)
    trainer.fit(model, data(side), data(side, 2))
    return {"rate": trainer.optimizers[0].param_groups[0]["lr"], "weights": side.weights(model)}


def refused_batch_sizes(side: Side) -> list[str]:
    """Lightning tunes batch sizes under no distributed strategy, and says so."""
    with pytest.raises(ValueError, match="batch size") as as_tuner:
        Tuner(side.trainer()).scale_batch_size(tuned(side))
    trainer = side.trainer(callbacks=[BatchSizeFinder()])
    with pytest.raises(MisconfigurationException, match="Batch size") as as_callback:
        trainer.fit(tuned(side))
    return [str(as_tuner.value), str(as_callback.value)]


class Overriding(Classifier):
    """Leaves out every second step, clips and schedules by itself, and plans by the number of steps that the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.expected_steps = 0.0
        self.group_in_setup = False

    def setup(self, stage: str) -> None:
        self.group_in_setup = torch.distributed.get_world_size() == self.trainer.world_size

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02 * (1 + self.current_epoch))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        self.expected_steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2 * int(self.expected_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Closures(Classifier):
    """Manual optimization in which the optimizer runs the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def overridden(side: Side) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for accumulate in (1, 3):
        model = seeded(Overriding)
        trainer = side.trainer(max_epochs=2, accumulate_grad_batches=accumulate)
        trainer.fit(model, data(side))
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        found[f"{accumulate}"] = model.expected_steps, model.group_in_setup, rate, side.weights(model)
    by_closure = seeded(Closures)
    trainer = side.trainer()
    trainer.fit(by_closure, data(side))
    found["closures"] = trainer.global_step, side.weights(by_closure)
    plain = seeded()
    bare = side.trainer(
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")),
        num_sanity_val_steps=None,
        barebones=True,
        max_epochs=1,
    )
    bare.fit(plain, data(side))
    found["barebones"] = side.weights(plain)
    return found


class Root(Classifier):
    """The gradient of a square root at zero is infinite, and twice in a difference no number."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss + (loss - loss).sqrt() if self.trainer.global_step == 1 else loss


def anomalies(side: Side) -> str:
    with pytest.raises(RuntimeError) as info, pytest.warns(UserWarning, match="Error detected in NllLossBackward0"):
        side.trainer(detect_anomaly=True).fit(seeded(Root), data(side))
    return str(info.value)


SCENARIOS = (
    several_optimizers,
    clipping,
    accumulation_schedule,
    plateau,
    learning_rate_finder,
    refused_batch_sizes,
    overridden,
    anomalies,
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(run_both, 2, str(tmp_path_factory.mktemp("optimization")), SCENARIOS)


def test_several_optimizers_with_schedules_and_microbatches_by_hand_go_on_from_a_checkpoint(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, several_optimizers)
    found = two_ranks[0]["several_optimizers"]["mfsdp"]
    assert_alike(found["resumed"], found["straight"])
    assert found["resumed rates"] == found["rates"]
    assert len(set(map(tuple, found["rates"]))) == BATCHES + 1


def test_clipping_by_norm_and_value_with_parameter_groups_and_frozen_layers(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, clipping)
    found, start = two_ranks[0]["clipping"]["mfsdp"], dict(seeded(Grouped).named_parameters())
    for weights in found.values():
        assert torch.equal(weights["blocks.0.linear.weight"], start["blocks.0.linear.weight"])
        assert not torch.equal(weights["head.weight"], start["head.weight"])
    assert not torch.equal(found["norm"]["head.weight"], found["value"]["head.weight"])


def test_gradient_accumulation_scheduler_changes_the_number_of_batches_in_a_step(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, accumulation_schedule)
    assert two_ranks[0]["accumulation_schedule"]["mfsdp"]["steps"] == [6, 6 + 3, 6 + 3 + 2]


def test_a_schedule_that_watches_a_metric(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, plateau)
    assert two_ranks[0]["plateau"]["mfsdp"]["rate"] < 1.0


def test_learning_rate_finder_finds_what_it_finds_under_ddp_and_puts_everything_back(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, learning_rate_finder)
    found = two_ranks[0]["learning_rate_finder"]["mfsdp"]
    assert found["suggested"] == found["by callback"] != 0.05
    assert found["rates in use"] == [found["suggested"] / 2]  # the schedule halves it after three steps
    assert found["left over"] == []


def test_lightning_refuses_to_tune_batch_sizes_under_distributed_strategies(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, refused_batch_sizes)
    assert all(
        "not supported with distributed strategies" in said for said in two_ranks[0]["refused_batch_sizes"]["mfsdp"]
    )


def test_overridden_steps_clipping_and_schedules_closures_and_a_bare_trainer(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, overridden)
    found = two_ranks[0]["overridden"]["mfsdp"]
    assert (found["1"][0], found["3"][0]) == (2 * BATCHES, 4)
    assert found["1"][1], "the process group is there in setup"
    assert found["closures"][0] == BATCHES
    assert_alike(found["closures"][1], found["barebones"], "closures against the Trainer's own")


def test_detect_anomaly_names_the_operation_whose_gradient_is_no_number(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, anomalies)
    assert "'NllLossBackward0' returned nan values" in two_ranks[0]["anomalies"]["mfsdp"]
