"""What the Trainer and ModelCheckpoint do around checkpoints they do under mfsdp as under DDP: names, choices, resuming, interruptions."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.features import Side, assert_ranks_alike, run_both
from tests.lightning.models import Classifier, loader, seeded

BATCHES = 3
EVALUATIONS = ("validate", "test", "predict") if NIGHT else ("validate",)  # one code for all


def data(side: Side, batches: int = BATCHES) -> DataLoader[Any]:
    return loader(4, 8 * batches, side.rank, side.world_size)


def names_in(folder: Path) -> list[str]:
    """Of checkpoints, once rank 0 has removed what it removes."""
    dist.barrier()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt"))


def step_of(path: Path) -> int:
    """When a checkpoint was saved, whether it is a file or a directory."""
    rest = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)
    found: int = rest["global_step"]
    return found


class Scored(Classifier):
    """Logs a score that falls and rises from epoch to epoch, another one on each rank, and notes the epochs it was trained in."""

    SCORES = (3.0, 1.0, float("nan"), 2.0, 4.0)

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append(self.current_epoch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        score = self.SCORES[min(self.trainer.current_epoch, 4)] + self.trainer.global_rank
        self.log("score", score, sync_dist=True)


class Counting(Callback):
    """Has a state of its own in checkpoints."""

    def __init__(self) -> None:
        self.batches = 0
        self.seen_in_checkpoint: list[str] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.seen_in_checkpoint = [key for key in ("epoch", "global_step", "callbacks", "loops") if key in checkpoint]


def best_ones(side: Side) -> dict[str, Any]:
    """The two best of five epochs, and the last; then evaluation and more training from "best" and "last"."""
    folder = side.folder / "best"
    options: dict[str, Any] = {"monitor": "score", "mode": "min", "save_top_k": 2, "save_last": True}
    saver = ModelCheckpoint(folder, filename="{epoch}-{score:.1f}", **options)
    model, counting = seeded(Scored), Counting()
    trainer = side.trainer(max_epochs=5, enable_checkpointing=True, callbacks=[saver, counting])
    trainer.fit(model, data(side), data(side, 2))
    found: dict[str, Any] = {
        "names": names_in(folder),
        "best": (Path(saver.best_model_path).name, saver.best_model_score.item()),
        "kept": {Path(path).name: score.item() for path, score in saver.best_k_models.items()},
        "current": saver.current_score.item(),
    }
    for path in ("best", "last"):
        for evaluate in (trainer.validate, trainer.test):
            metrics = evaluate(dataloaders=data(side, 2), ckpt_path=path, verbose=False)
            found[f"{evaluate.__name__} {path}"] = metrics, Path(trainer.ckpt_path).name
    found["predicted"] = trainer.predict(dataloaders=data(side, 1), ckpt_path="best")
    for evaluation in EVALUATIONS:
        other = Counting()
        evaluate = getattr(side.trainer(callbacks=[other]), evaluation)
        evaluate(seeded(Scored), data(side, 1), ckpt_path=saver.best_model_path)
        found[f"callback in {evaluation}"] = other.batches, other.seen_in_checkpoint
    again, counting = seeded(Scored), Counting()
    saver = ModelCheckpoint(folder, filename="{epoch}-{score:.1f}", **options)
    resumed = side.trainer(max_epochs=7, enable_checkpointing=True, callbacks=[saver, counting])
    resumed.fit(again, data(side), data(side, 2), ckpt_path="last")
    found["resumed"] = again.epochs, counting.batches, resumed.global_step, names_in(folder), side.weights(again)
    return found


def when(side: Side) -> dict[str, Any]:
    """Which checkpoints there are, and of which step, by what decides when to save."""
    found = {}
    every: dict[str, dict[str, Any]] = {
        "steps": {"every_n_train_steps": 4, "save_top_k": -1},
        "time": {"train_time_interval": timedelta(0), "save_top_k": -1, "filename": "{step}"},
        "latest": {"save_top_k": 1},
        "epochs": {"every_n_epochs": 2, "save_top_k": -1},
        "before validation": {"save_on_train_epoch_end": True, "save_top_k": -1},
        "none but the last": {"save_top_k": 0, "save_last": True},
    }
    for name, options in every.items() if NIGHT else list(every.items())[:3]:
        folder = side.folder / name
        saver = ModelCheckpoint(folder, **options)
        trainer = side.trainer(max_epochs=3, enable_checkpointing=True, callbacks=[saver])
        trainer.fit(seeded(), data(side), data(side, 1))
        found[name] = {path: step_of(folder / path) for path in names_in(folder)}
    for counts in (True, False, True) if NIGHT else (True, True):
        saver = ModelCheckpoint(side.folder / "same", filename="same", enable_version_counter=counts)
        trainer = side.trainer(enable_checkpointing=True, callbacks=[saver])
        trainer.fit(seeded(), data(side))
        found[f"same name {len(found)}"] = names_in(side.folder / "same")
    folder = side.folder / "default"
    trainer = side.trainer(default_root_dir=str(folder), enable_checkpointing=True)
    trainer.fit(seeded(), data(side))
    found["by default"] = names_in(folder)
    return found


def weights_alone(side: Side) -> dict[str, Any]:
    folder = side.folder / "weights"
    model = seeded()
    saver = ModelCheckpoint(folder, filename="only", save_weights_only=True)
    side.trainer(enable_checkpointing=True, callbacks=[saver]).fit(model, data(side))
    again = seeded()
    metrics = side.trainer().validate(again, data(side, 1), ckpt_path=folder / "only.ckpt", verbose=False)
    return {"names": names_in(folder), "metrics": metrics, "trained": side.weights(model), "read": side.weights(again)}


def of_the_cluster(side: Side) -> dict[str, Any]:
    """A job that was put back into the queue goes on from the checkpoint with the highest number."""
    folder = str(side.folder)
    for epochs in (1, 2):
        trainer = side.trainer(max_epochs=epochs, default_root_dir=folder)
        trainer.fit(seeded(), data(side), ckpt_path="hpc" if epochs > 1 else None)
        trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(folder))
        trainer.strategy.barrier()
    model = seeded(Scored)
    last = side.trainer(max_epochs=3, default_root_dir=folder)
    last.fit(model, data(side), ckpt_path="hpc")
    return {"names": names_in(side.folder), "epochs": model.epochs, "weights": side.weights(model)}


class Interrupting(Callback):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.heard: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4 and self.kind == "SIGTERM":  # a cluster sends it to every rank
            os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.global_step == 4 and self.kind in ("KeyboardInterrupt", "ZeroDivisionError"):
            raise KeyboardInterrupt if self.kind == "KeyboardInterrupt" else ZeroDivisionError("in a callback")

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        self.heard.append(type(exception).__name__)


class Stumbling(Scored):
    """Fails in the middle of a forward, where weights of a unit are there."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == 4:
            self.blocks[1].register_forward_pre_hook(self.fail)
        return super().training_step(batch, batch_idx)

    def fail(self, *_: Any) -> None:
        raise ZeroDivisionError("in forward")


INTERRUPTIONS: dict[str, type[BaseException]] = {"KeyboardInterrupt": SystemExit, "in forward": ZeroDivisionError}
if NIGHT:  # all of tests/stops are about SIGTERM
    INTERRUPTIONS |= {"SIGTERM": SIGTERMException, "ZeroDivisionError": ZeroDivisionError}


def interruptions(side: Side) -> dict[str, Any]:
    """All ranks are interrupted after the fourth step; a checkpoint is left, and training goes on from it."""
    found: dict[str, Any] = {}
    for kind, expected in INTERRUPTIONS.items():
        folder = side.folder / kind
        saver = ModelCheckpoint(folder, filename="{epoch}-{step}", save_on_exception=True, every_n_epochs=9)
        interrupting = Interrupting(kind)
        model = seeded(Stumbling if kind == "in forward" else Scored)
        trainer = side.trainer(max_epochs=3, enable_checkpointing=True, callbacks=[saver, interrupting])
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(expected):
            trainer.fit(model, data(side))
        signal.signal(signal.SIGINT, handler)
        again = seeded(Scored)
        resumed = side.trainer(max_epochs=3)
        resumed.fit(again, data(side), ckpt_path=next(folder.iterdir()))
        # After SIGTERM ranks agree on a step under mfsdp, this one or the next; what training comes to is shown in tests/stops.
        same_step = kind != "SIGTERM"
        found[kind] = {
            "state": (trainer.state.status.value, trainer.interrupted, interrupting.heard),
            # After SIGTERM mfsdp saves what "last" finds as well, tests/stops/test_last.py.
            "names": names_in(folder) if same_step else len(set(names_in(folder)) - {"last.ckpt"}),
            "went on": (again.epochs, resumed.global_step, side.weights(again) if same_step else None),
        }
    return found


SCENARIOS = (best_ones, when, weights_alone, of_the_cluster, interruptions)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(run_both, 2, str(tmp_path_factory.mktemp("checkpoints")), SCENARIOS)


def test_the_best_and_the_last_checkpoints_are_those_of_ddp_and_serve_every_entry_point(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, best_ones)
    found = two_ranks[0]["best_ones"]["mfsdp"]
    assert found["names"] == ["epoch=1-score=1.5.ckpt", "epoch=3-score=2.5.ckpt", "last.ckpt"]
    assert found["best"] == ("epoch=1-score=1.5.ckpt", 1.5)
    assert found["test best"][1] == "epoch=1-score=1.5.ckpt"
    assert found["test best"][0] != found["test last"][0]
    epochs, batches, step, *_ = found["resumed"]
    assert (epochs[-1], batches, step) == (6, 7 * BATCHES, 7 * BATCHES), "the callback went on counting"


def test_callbacks_get_their_state_in_evaluations_from_a_checkpoint(two_ranks: Any) -> None:
    found = two_ranks[0]["best_ones"]["mfsdp"]
    for evaluation in EVALUATIONS:
        batches, seen = found[f"callback in {evaluation}"]
        assert batches in (0, 2 * BATCHES)
        assert seen == ["epoch", "global_step", "callbacks", "loops"]


def test_checkpoints_are_saved_when_ddp_saves_them_and_named_alike(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, when)
    found = two_ranks[0]["when"]["mfsdp"]
    assert found["steps"] == {"epoch=1-step=4.ckpt": 4, "epoch=2-step=8.ckpt": 8}
    assert len(found["time"]) == 3 * BATCHES
    assert found["latest"] == {f"epoch=2-step={3 * BATCHES}.ckpt": 3 * BATCHES}


def test_checkpoints_of_weights_only_hold_the_weights(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, weights_alone)
    found = two_ranks[0]["weights_alone"]["mfsdp"]
    for name, weight in found["trained"].items():
        assert torch.equal(found["read"][name], weight), name


def test_a_job_put_back_into_the_queue_goes_on_from_its_last_checkpoint(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, of_the_cluster)
    found = two_ranks[0]["of_the_cluster"]["mfsdp"]
    assert found["names"] == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"]
    assert found["epochs"] == [2]


def test_interrupted_runs_leave_a_checkpoint_and_go_on_from_it(two_ranks: Any) -> None:
    assert_ranks_alike(two_ranks, interruptions)
    found = two_ranks[0]["interruptions"]["mfsdp"]
    assert found.keys() == INTERRUPTIONS.keys()
    for kind, seen in found.items():
        assert seen["names"] == (1 if kind == "SIGTERM" else ["epoch=1-step=4.ckpt"]), kind
        assert seen["state"][:2] == ("interrupted", True), kind
        assert seen["went on"][1] == 3 * BATCHES, kind
