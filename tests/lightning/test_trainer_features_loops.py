"""The Trainer's loops run the batches and call the hooks that they do under DDP, also where ranks have unlike numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.features import Side, assert_alike, assert_ranks_alike, run_both
from tests.lightning.models import DIM, Classifier, dataset, loader, seeded


class Noted(Classifier):
    """Remembers the first number of every batch that a step gets, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[str, float]] = []

    def note(self, kind: str, batch: list[Tensor]) -> None:
        self.batches.append((kind, batch[0][0, 0].item()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.note("train", batch)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.note("val", batch)
        super().validation_step(batch, batch_idx)


def noted(side: Side, **options: Any) -> dict[str, Any]:
    model = seeded(Noted)
    trainer = side.trainer(**{"max_epochs": 2, "use_distributed_sampler": True, **options})
    trainer.fit(
        model,
        DataLoader(dataset(48), batch_size=4, shuffle="overfit_batches" not in options),
        DataLoader(dataset(22), batch_size=4),
    )
    return {
        "batches": model.batches,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "steps": (trainer.global_step, trainer.current_epoch, trainer.num_training_batches, trainer.num_val_batches),
        "weights": side.weights(model),
    }


def limits(side: Side) -> dict[str, Any]:
    """Whatever chooses the batches of a fit."""
    found = {
        "fast_dev_run": noted(side, fast_dev_run=2),
        "overfit_batches": noted(side, overfit_batches=2),
        "limit batches": noted(side, limit_train_batches=3, limit_val_batches=0.5, num_sanity_val_steps=1),
        "max_steps": noted(side, max_steps=8, max_epochs=-1),
        "max_time": noted(side, max_time={"seconds": 0}, min_epochs=1),
    }
    if NIGHT:  # loops of Lightning that ask nothing of a strategy
        stopping = EarlyStopping("val_loss", patience=0, min_delta=10.0)
        found |= {
            "val_check_interval": noted(side, val_check_interval=2, num_sanity_val_steps=2),
            "check_val_every_n_epoch": noted(side, val_check_interval=5, check_val_every_n_epoch=None),
            "min_epochs": noted(side, callbacks=[stopping], min_epochs=2, max_epochs=4),
        }
    return found


class ManyLoaders(Classifier):
    """Takes part in evaluations of several loaders."""

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


class Stopped(Classifier):
    """A metric for which rank 0 alone would stop: there it grows, elsewhere it falls."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("own", float(self.current_epoch if self.global_rank == 0 else -self.current_epoch))


def early_stopping(side: Side) -> dict[str, Any]:
    found = noted(side, max_epochs=10, callbacks=[EarlyStopping("val_loss", patience=1, min_delta=0.2)])
    model = seeded(Stopped)
    trainer = side.trainer(max_epochs=6, callbacks=[EarlyStopping("own", patience=1)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # not synchronized on purpose
        trainer.fit(model, loader(4, 16, side.rank, 2), loader(4, 16, side.rank, 2))
    return {"all ranks": found, "one rank": trainer.current_epoch}


def hooks_of(kind: type[Any]) -> list[str]:
    named = [name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name))]
    return [*named, "setup", "teardown"]


def recording(kind: type[Any], owner: str, names: Sequence[str]) -> type[Any]:
    """A subclass that notes the calls of these methods in its list `calls` before it does what it did."""

    def noted(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(f"{owner}.{name}")
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    return type(f"Recorded{kind.__name__}", (kind,), {"calls": [], **{name: noted(name) for name in names}})


RecordedCallback = recording(Callback, "callback", [*hooks_of(Callback), "state_dict", "load_state_dict"])
RecordedClassifier = recording(
    Classifier,
    "module",
    [
        *hooks_of(LightningModule),
        *("training_step", "validation_step", "test_step", "predict_step", "backward"),
        *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
        *("configure_optimizers", "configure_model", "transfer_batch_to_device"),
    ],
)


def hooks(side: Side) -> dict[str, Any]:
    """Names of all hooks as they are called by the entry points, those of the module between those of a callback."""
    model, callback = seeded(RecordedClassifier), RecordedCallback()
    model.calls = callback.calls = calls = []
    data = loader(4, 16, side.rank, 2)
    trainer = side.trainer(
        callbacks=[callback], num_sanity_val_steps=1, gradient_clip_val=0.1, accumulate_grad_batches=2
    )
    found = {}
    for name, call in {
        "fit": lambda: trainer.fit(model, data, data),
        "save": lambda: trainer.save_checkpoint(side.folder / "saved.ckpt"),
        "validate": lambda: trainer.validate(model, data, verbose=False),
        "test": lambda: trainer.test(model, data, verbose=False),
        "predict": lambda: trainer.predict(model, data),
    }.items():
        calls.clear()
        call()
        found[name] = list(calls)
    return found


class Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
    ) -> None:  # type: ignore[no-untyped-def, override]
        self.written.append(("batch", prediction, list(batch_indices), batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices) -> None:  # type: ignore[no-untyped-def, override]
        self.written.append(("epoch", predictions, batch_indices))


def predictions(side: Side) -> dict[str, Any]:
    """Lightning's sampler for predictions repeats nothing: 17 samples in batches of 2 are 5 batches on rank 0 and 4 on rank 1."""
    model = seeded(ManyLoaders)
    found: dict[str, Any] = {}
    for interval in ("batch", "epoch", "batch_and_epoch") if NIGHT else ("batch", "epoch"):
        writer = Writer(interval)
        trainer = side.trainer(callbacks=[writer], use_distributed_sampler=True)
        found[interval] = trainer.predict(model, DataLoader(dataset(17), batch_size=2)), writer.written
    trainer = side.trainer(use_distributed_sampler=True)
    several = [DataLoader(dataset(5), batch_size=1), DataLoader(dataset(7), batch_size=1)]
    found["two loaders"] = trainer.predict(model, several)
    return found


class Stream(IterableDataset[Any]):
    """So many samples, and nobody knows how many."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return (dataset(32)[index] for index in range(self.size))


def uneven(side: Side) -> dict[str, Any]:
    """Rank 0 has 2 batches and rank 1 has 5; with and without a known length, with a limit, and after training."""
    model = seeded(ManyLoaders)
    trainer = side.trainer()
    mine = Subset(dataset(32), range(4) if side.rank == 0 else range(4, 14))
    found = {
        "validate": trainer.validate(model, DataLoader(mine, batch_size=2), verbose=False),
        "unknown length": trainer.validate(model, DataLoader(Stream(4 + 6 * side.rank), batch_size=2), verbose=False),
        "predict": trainer.predict(model, DataLoader(mine, batch_size=2)),
        "validate two loaders": trainer.validate(
            model, [DataLoader(mine, batch_size=2), DataLoader(mine, batch_size=3)], verbose=False
        ),
        "two loaders": trainer.predict(model, [DataLoader(mine, batch_size=2), DataLoader(mine, batch_size=3)]),
    }
    if NIGHT:  # the same in another order
        streams = [DataLoader(Stream(4 + 6 * side.rank), batch_size=2)] * 2
        found |= {
            "test": trainer.test(model, DataLoader(mine, batch_size=2), verbose=False),
            "limited": side.trainer(limit_val_batches=3).validate(model, DataLoader(mine, batch_size=2), verbose=False),
            "two streams": trainer.validate(model, streams, verbose=False),
        }
    trainer.fit(model, loader(4, 24, side.rank, 2))
    found["after fit"] = trainer.validate(model, DataLoader(mine, batch_size=2), verbose=False)
    found["weights"] = side.weights(model)
    return found


class Prepared(LightningDataModule):
    """Prepares once, and has loaders that are asked for anew every second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> DataLoader[Any]:
        self.calls.append("train_dataloader")
        return DataLoader(dataset(16), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        self.calls.append("val_dataloader")
        return DataLoader(dataset(16), batch_size=4)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(f"loaded {state_dict['calls']}")


def data_module(side: Side) -> dict[str, Any]:
    model, module = seeded(), Prepared()
    trainer = side.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2, use_distributed_sampler=True)
    trainer.fit(model, datamodule=module)
    trainer.save_checkpoint(side.folder / "saved.ckpt")
    trainer.validate(model, datamodule=module, ckpt_path=side.folder / "saved.ckpt", verbose=False)
    return {"calls": module.calls, "weights": side.weights(model)}


def entry_points(side: Side) -> dict[str, Any]:
    """Evaluation before, between and after fits that go on where the last one ended, with two models in one process."""
    model, data = seeded(), loader(4, 24, side.rank, 2)
    trainer = side.trainer(inference_mode=True)
    found: dict[str, Any] = {"before": trainer.validate(model, data, verbose=False)}
    found["predicted before"] = trainer.predict(model, data)
    trainer.fit(model, data)
    found["first"] = trainer.global_step, side.weights(model)
    found["test"] = trainer.test(model, data, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data, data)
    found["second"] = trainer.global_step, trainer.current_epoch, side.weights(model)
    found["predicted"] = trainer.predict(model, data)
    other = seeded(optimizer="sgd")
    side.trainer(inference_mode=False).fit(other, data)
    found["other"] = side.weights(other)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, data)
    found["third"] = trainer.global_step, side.weights(model)
    found["after"] = trainer.validate(model, data, verbose=False)
    return found


class FromSeveral(ManyLoaders):
    """Trains on batches of two loaders at once."""

    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Tensor:
        return super().training_step(batch["short"], batch_idx) + 2 * self.loss(batch["long"])


def several_loaders(side: Side) -> dict[str, Any]:
    """The shorter one begins anew, or ends the epoch; in evaluation one comes after the other."""
    found: dict[str, Any] = {}
    for mode in ("max_size_cycle", "min_size"):
        model = seeded(FromSeveral)
        loaders = {"short": loader(4, 16, side.rank, 2), "long": loader(4, 40, side.rank, 2)}
        trainer = side.trainer(max_epochs=2)
        evaluated = [loader(4, 16, side.rank, 2), loader(4, 24, side.rank, 2)]
        trainer.fit(model, CombinedLoader(loaders, mode), evaluated)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        found[mode] = trainer.global_step, metrics, side.weights(model)
    return found


class NoBuffers(ManyLoaders):
    """DDP sends buffers around in every forward inside a fit, so only without any may ranks have unlike numbers of batches there."""

    def __init__(self) -> None:
        super().__init__()
        del self.shift
        self.shift = torch.full((DIM,), 0.25)


def uneven_inside_fit(side: Side) -> dict[str, Any]:
    model = seeded(NoBuffers)
    mine = Subset(dataset(32), range(4) if side.rank == 0 else range(4, 14))
    trainer = side.trainer(num_sanity_val_steps=3, val_check_interval=2)
    trainer.fit(model, loader(4, 24, side.rank, 2), DataLoader(mine, batch_size=2))
    return {"val_loss": trainer.callback_metrics["val_loss"].item(), "weights": side.weights(model)}


SCENARIOS = (
    limits,
    early_stopping,
    hooks,
    data_module,
    entry_points,
    several_loaders,
    predictions,
    uneven,
    uneven_inside_fit,
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(run_both, 2, str(tmp_path_factory.mktemp("loops")), SCENARIOS)


def test_limits_and_intervals_choose_the_batches_they_choose_under_ddp(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, limits)
    found = two_ranks[0]["limits"]["mfsdp"]
    assert found["fast_dev_run"]["steps"][0] == 2
    assert found["overfit_batches"]["batches"][:2] == found["overfit_batches"]["batches"][4:6]
    assert found["limit batches"]["steps"] == (6, 2, 3, [1])
    assert found["max_time"]["steps"][:2] == (6, 1)  # no time at all, so one epoch instead of two
    # DistributedSampler repeats samples until ranks have the same number: 22 samples are 11 on each rank, in batches of 4.
    assert found["max_steps"]["steps"][2:] == (6, [3])


def test_early_stopping_stops_all_ranks_together(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, early_stopping)
    found = two_ranks[1]["early_stopping"]["mfsdp"]
    assert found["all ranks"]["steps"][1] < 10
    assert found["one rank"] == 2


def test_hooks_come_in_the_order_of_ddp(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, hooks)
    found = two_ranks[0]["hooks"]["mfsdp"]
    assert found["fit"].count("module.training_step") == 2
    assert found["fit"].count("module.optimizer_step") == 1
    assert found["predict"].count("module.predict_step") == 2


def test_data_modules_are_prepared_reloaded_and_restored(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, data_module)
    calls = two_ranks[0]["data_module"]["mfsdp"]["calls"]
    assert calls.count("train_dataloader") == 2
    assert "loaded 7" in calls
    assert "prepare_data" not in two_ranks[1]["data_module"]["mfsdp"]["calls"]


def test_evaluation_before_between_and_after_fits_that_go_on(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, entry_points)
    found = two_ranks[0]["entry_points"]["mfsdp"]
    assert [found[name][0] for name in ("first", "second", "third")] == [3, 9, 12]


def test_batches_of_several_loaders_are_combined_as_under_ddp(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, several_loaders)
    found = two_ranks[0]["several_loaders"]["mfsdp"]
    assert (found["max_size_cycle"][0], found["min_size"][0]) == (10, 4)
    assert sorted(found["min_size"][1]) == ["val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"]


def test_prediction_writers_get_every_sample_once(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, predictions)
    indices = []
    for rank, batches in enumerate((5, 4)):
        returned, written = two_ranks[rank]["predictions"]["mfsdp"]["batch"]
        assert len(returned) == len(written) == batches
        indices += [index for _, _, of_batch, _, _ in written for index in of_batch]
        ((_, of_epoch, _),) = two_ranks[rank]["predictions"]["mfsdp"]["epoch"][1]
        assert_alike(of_epoch, returned)
    assert sorted(indices) == list(range(17))


def test_ranks_with_unlike_numbers_of_batches_evaluate_as_under_ddp(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, uneven)
    (found,) = two_ranks[0]["uneven"]["mfsdp"]["validate"]
    model = seeded()
    with torch.no_grad():
        losses = [model.loss([x[None], y[None]]) for x, y in Subset(dataset(32), range(14))]
    assert found["val_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert [len(two_ranks[rank]["uneven"]["mfsdp"]["predict"]) for rank in (0, 1)] == [2, 5]


def test_validation_inside_a_fit_with_unlike_numbers_of_batches(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, uneven_inside_fit)
