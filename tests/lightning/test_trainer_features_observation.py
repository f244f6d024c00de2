"""What watches a run shows under mfsdp what it shows under DDP: loggers, monitors, metrics, profilers, summaries, LightningCLI."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateMonitor,
    ModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_mfsdp.callbacks import ShardedThroughputMonitor
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.features import Side, assert_alike, assert_ranks_alike, run_both
from tests.lightning.models import CLASSES, DIM, Classifier, TinyData, dataset, loader, seeded


class Measured(Classifier):
    """Logs losses, metric objects and numbers, in steps and in epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.flops_per_batch = 1000

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict(
            {"largest": loss, "rows": float(len(batch[0]))},
            on_step=False,
            on_epoch=True,
            reduce_fx="max",
            sync_dist=True,
        )
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.mean.update(self.loss(batch))
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("mean", self.mean)
        self.log("accuracy", self.accuracy, prog_bar=True)
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.blocks.parameters()), "name": "blocks"},
            {"params": list(self.head.parameters()), "name": "head"},
        ]
        groups.append({"params": [self.scale, *self.inputs.parameters()], "lr": 0.01, "name": "rest"})
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step", "name": "rate"}
        ]


def data(side: Side) -> DataLoader[Any]:
    return loader(4, 32, side.rank, side.world_size)


def rows(folder: Path) -> list[dict[str, str]]:
    with next(folder.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def watched(side: Side) -> dict[str, Any]:
    """CSVLogger, LearningRateMonitor, DeviceStatsMonitor and ThroughputMonitor in one fit with validation."""
    logger = CSVLogger(side.folder, name="log")
    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    callbacks = [
        LearningRateMonitor(logging_interval="step", log_momentum=True),
        DeviceStatsMonitor(cpu_stats=True),
        throughput,
    ]
    model = seeded(Measured)
    trainer = side.trainer(logger=logger, log_every_n_steps=1, callbacks=callbacks, max_epochs=2)
    trainer.fit(model, data(side), data(side))
    found: dict[str, Any] = {"metrics": {name: value.item() for name, value in trainer.callback_metrics.items()}}
    found["logger"] = type(trainer.logger.experiment).__name__
    if side.rank == 0:
        found["files"] = sorted(str(path.relative_to(side.folder)) for path in side.folder.rglob("*.*"))
        table = rows(side.folder)
        measured_in_time = ("_per_sec", "time", "DeviceStats")
        found["columns"] = sorted(table[0])
        found["values"] = [
            {
                key: float(value)
                for key, value in sorted(row.items())
                if value and not any(part in key for part in measured_in_time)
            }
            for row in table
        ]
    return found


def summary(side: Side) -> dict[str, Any]:
    """Lightning's own table, before and after sharding."""
    model = seeded()
    side.trainer(callbacks=[ModelSummary(max_depth=2)], enable_model_summary=True).fit(model, data(side))
    table = summarize(model, max_depth=2)
    return {"table": str(table), "total": table.total_parameters, "trainable": table.trainable_parameters}


def profilers(side: Side) -> dict[str, Any]:
    """Which actions each profiler saw, and that its files come out."""

    def actions(names: Any) -> list[str]:
        return sorted({name.replace("DDPStrategy", "Strategy").replace("MFSDPStrategy", "Strategy") for name in names})

    found: dict[str, Any] = {}
    profilers: list[Any] = [
        SimpleProfiler(dirpath=side.folder, filename="simple"),
        PyTorchProfiler(dirpath=side.folder, filename="pytorch", export_to_chrome=False, emit_nvtx=False),
    ]
    if NIGHT:  # it sees what the first sees
        profilers.append(AdvancedProfiler(dirpath=side.folder, filename="advanced"))
    for profiler in profilers:
        model = seeded()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.profiler has its own about cycles
            side.trainer(profiler=profiler).fit(model, data(side), data(side))
        kind = type(profiler).__name__
        found[kind] = side.weights(model)
        if isinstance(profiler, SimpleProfiler):
            found["actions"] = actions(profiler.recorded_durations)
        if isinstance(profiler, AdvancedProfiler):
            found["advanced actions"] = actions(profiler.profiled_actions)
        if isinstance(profiler, PyTorchProfiler):
            found["blocks in profile"] = (
                sum("blocks.0" in event.key for event in profiler.function_events.key_averages()) > 0
            )
    found["files"] = sorted(path.name for path in side.folder.iterdir())
    return found


def collectives(side: Side) -> dict[str, Any]:
    """What modules and callbacks ask of a strategy."""

    class Asking(Classifier):
        def on_train_batch_end(self, *args: Any) -> None:
            strategy, value = self.trainer.strategy, torch.tensor([1.0, 2.0]) + 10 * side.rank
            weight = torch.tensor([2.0], requires_grad=True)
            with torch.enable_grad():
                (self.all_gather(weight * (1 + side.rank), sync_grads=True).sum() * (1 + side.rank)).backward()
            self.asked = {
                "all_gather": self.all_gather(value),
                "all_gather of a mapping": self.all_gather({"a": value, "b": [value[0]]}),
                "gradient of all_gather": weight.grad,
                "reduce": [strategy.reduce(value.clone(), reduce_op=op) for op in ("mean", "sum", "max")],
                "reduce of a number": strategy.reduce(3),
                "broadcast": strategy.broadcast({"rank": side.rank}, src=1),
                "any": strategy.reduce_boolean_decision(side.rank == 1, all=False),
                "all": strategy.reduce_boolean_decision(side.rank == 1),
                "ranks": (
                    strategy.global_rank,
                    strategy.local_rank,
                    strategy.node_rank,
                    strategy.world_size,
                    self.trainer.num_devices,
                ),
                "sampler": strategy.distributed_sampler_kwargs,
            }

    model = seeded(Asking)
    side.trainer(limit_train_batches=1).fit(model, data(side))
    return model.asked


class Noisy(Classifier):
    """Random numbers in every step, which sharding must not use up."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.drawn = torch.rand(2)
        return nn.functional.dropout(self(batch[0]), 0.5).square().mean() + self.drawn.sum() * self.scale.mean()


def seeds(side: Side) -> dict[str, Any]:
    seed_everything(42, workers=True, verbose=False)
    model = Noisy()
    trainer = side.trainer(use_distributed_sampler=True)
    trainer.fit(model, DataLoader(dataset(), batch_size=4, shuffle=True))
    start = trainer.train_dataloader.worker_init_fn
    return {
        "drawn": model.drawn,
        "weights": side.weights(model),
        "workers": (start.func.__name__, start.keywords),
        "sampler": trainer.train_dataloader.sampler.seed,
    }


class Normalized(Classifier):
    """With batch norm inside a unit and in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.blocks[0].norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def batch_norm(side: Side) -> dict[str, Any]:
    """Rank 0's statistics are those that DDP keeps, and `sync_batchnorm=True` puts layers in that say themselves where they run."""
    model = seeded(Normalized)
    side.trainer().fit(model, data(side))
    found: dict[str, Any] = {"names": list(model.state_dict()), "weights": side.weights(model)}
    if side.rank == 0:
        found["statistics"] = [model.norm.running_mean.clone(), model.blocks[0].norm.running_var.clone()]
    synced = seeded(Normalized)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        side.trainer(sync_batchnorm=True).fit(synced, data(side))
    if side.name == "mfsdp":
        assert [type(layer) for layer in (synced.norm, synced.blocks[0].norm)] == [nn.SyncBatchNorm] * 2
        assert [name for name, _ in synced.named_parameters()] == [name for name, _ in model.named_parameters()]
        with pytest.raises(ValueError, match="sharded already, with the BatchNorm1d"):
            side.trainer(sync_batchnorm=True).fit(model, data(side))
    return found


PRECISIONS = {"32-true": 100, "bf16-mixed": 1000} | ({"bf16-true": 1000} if NIGHT else {})
PEAKS = {torch.float32: 100, torch.bfloat16: 1000}


def throughput(side: Side) -> dict[str, Any]:
    """Utilization on a device whose peak is known: of the dtype that computes, and a warning from Lightning's own monitor."""

    def peak(device: torch.device, dtype: torch.dtype) -> int:
        return PEAKS[dtype]

    found: dict[str, Any] = {}
    with (
        mock.patch("lightning.pytorch.callbacks.throughput_monitor.get_available_flops", peak),
        mock.patch("lightning_mfsdp.callbacks.throughput.get_available_flops", peak),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        for precision in PRECISIONS:
            for kind in (ThroughputMonitor, ShardedThroughputMonitor):
                monitor = kind(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
                trainer = side.trainer(precision=precision, callbacks=[monitor], logger=CSVLogger(side.folder))
                trainer.fit(seeded(Measured), loader(4, 16, side.rank, side.world_size))
                measured = {throughput.available_flops for throughput in monitor._throughputs.values()}
                found[f"{kind.__name__} {precision}"] = monitor.available_flops, measured
    return {
        "peaks": found,
        "warned": [str(each.message) for each in warned if "ThroughputMonitor" in str(each.message)],
    }


def command_line(side: Side) -> dict[str, Any]:
    """LightningCLI with a saved configuration, which starts the same run again; under DDP at night."""
    if side.name == "ddp" and not NIGHT:
        return {}
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": side.name,
        "default_root_dir": side.folder,
        "max_epochs": 1,
    }
    trainer |= {"enable_progress_bar": "false", "enable_model_summary": "false"}
    trainer |= {"log_every_n_steps": 1, "logger": "CSVLogger", "logger.save_dir": side.folder}
    options = [f"--trainer.{option}={value}" for option, value in trainer.items()]
    with mock.patch("sys.argv", ["train.py"]):  # where the command line of the tests would get in the way
        first = LightningCLI(Classifier, TinyData, args=["fit", *options, "--model.lr=0.02", "--seed_everything=3"])
        saved = Path(first.trainer.log_dir, "config.yaml")
        again = LightningCLI(Classifier, TinyData, args=["fit", f"--config={saved}"])
    return {
        "lr": (first.model.lr, again.model.lr),
        "first": side.weights(first.model),
        "again": side.weights(again.model),
        "configs": sorted(str(path.relative_to(side.folder)) for path in side.folder.rglob("config.yaml")),
    }


SCENARIOS = (
    watched,
    summary,
    profilers,
    collectives,
    seeds,
    batch_norm,
    throughput,
    command_line,
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(run_both, 2, str(tmp_path_factory.mktemp("observation")), SCENARIOS)


def test_monitors_metrics_and_loggers_write_what_they_write_under_ddp_and_on_rank_zero_only(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, watched)
    found = two_ranks[0]["watched"]["mfsdp"]
    assert {"rate/blocks", "rate/rest-momentum", "loss_step", "largest", "accuracy", "mean"} <= set(found["columns"])
    assert any("DeviceStats" in column for column in found["columns"])
    assert any(column.endswith("flops_per_sec") for column in found["columns"])
    assert [results["watched"]["mfsdp"]["logger"] for results in two_ranks] == ["ExperimentWriter", "_DummyExperiment"]


def test_lightnings_model_summary_counts_whole_parameters(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, summary)
    found = two_ranks[1]["summary"]["mfsdp"]
    assert found["total"] == sum(parameter.numel() for parameter in seeded().parameters())
    assert "blocks.1" in found["table"]


def test_profilers_see_the_actions_they_see_under_ddp(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, profilers)
    found = two_ranks[0]["profilers"]["mfsdp"]
    assert "[Strategy]Strategy.training_step" in found["actions"]
    assert found["blocks in profile"]
    assert any("pytorch" in name for name in found["files"])


def test_all_gather_reduce_broadcast_and_decisions_give_what_ddp_gives(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, collectives)


def test_seed_everything_leaves_each_step_the_random_numbers_of_ddp(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, seeds)
    workers = [results["seeds"]["mfsdp"]["workers"] for results in two_ranks]
    assert workers == [("pl_worker_init_function", {"rank": 0}), ("pl_worker_init_function", {"rank": 1})]


def test_batch_norm_keeps_the_statistics_of_ddp_and_is_synchronized_before_sharding_only(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, batch_norm)


def test_throughput_is_compared_with_the_peak_of_the_dtype_that_computes(two_ranks: Any) -> None:
    found = two_ranks[0]["throughput"]["mfsdp"]
    for precision, peak in PRECISIONS.items():
        assert found["peaks"][f"ShardedThroughputMonitor {precision}"] == (peak, {peak})
    assert len(found["warned"]) == len(PRECISIONS) - 1
    assert all("Use lightning_mfsdp.callbacks.ShardedThroughputMonitor" in said for said in found["warned"])
    # Under DDP Lightning's own is right, and ours is the same.
    assert two_ranks[0]["throughput"]["ddp"]["peaks"]["ShardedThroughputMonitor bf16-mixed"] == (1000, {1000})
    assert two_ranks[0]["throughput"]["ddp"]["warned"] == []


def test_lightning_cli_saves_a_configuration_that_repeats_the_run(two_ranks: Any) -> None:
    if NIGHT:
        assert_ranks_alike(two_ranks, command_line)
    found = two_ranks[0]["command_line"]["mfsdp"]
    assert found["lr"] == (0.02, 0.02)
    assert len(found["configs"]) == 2
    assert_alike(found["again"], found["first"])
