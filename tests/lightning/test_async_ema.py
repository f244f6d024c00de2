"""ShardedEMA under MFSDPStrategy(async_save=True): the average that is saved is the one there was, though training went on meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.callbacks import ShardedEMA
from tests.checkpoint.internals import lightning_io
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, loader, make_trainer, seeded, strict_warnings
from tests.lightning.test_checkpoint import assert_same
from tests.lightning.test_ema import EPOCH, STEPS, Watched, averaged_rows, rows

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

KINDS = ("sharded", "full")


def state_of(ema: ShardedEMA, model: Any) -> dict[str, Any]:
    """This rank's rows."""
    return {"average": averaged_rows(ema), "weights": rows(model), "updates": ema.updates}


class SaveTwice(Callback):
    """Saves half-way, lets that be written at the last step only, and saves once more, into the same staging memory."""

    def __init__(self, folder: Path, ema: ShardedEMA) -> None:
        self.folder, self.ema = folder, ema
        self.may_write = threading.Event()
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == STEPS // 2:
            self.seen["half"] = state_of(self.ema, module)
            trainer.save_checkpoint(self.folder / "half.ckpt")
        if trainer.global_step == STEPS:
            self.seen["there while training"] = (self.folder / "half.ckpt").exists()
            trainer.strategy.barrier()
            self.may_write.set()
            self.seen["end"] = state_of(self.ema, module)
            trainer.save_checkpoint(self.folder / "end.ckpt")


def averaged_in_the_background(rank: int, world: int, folder: str) -> dict[str, Any]:
    """For each kind of checkpoint: averages as they were when they were saved, as they are read, and after a resumed run."""
    strict_warnings()
    data = loader(8 // world, EPOCH, rank, world)
    write = lightning_io.save
    found: dict[str, Any] = {}

    def run(kind: Any, steps: int, *callbacks: Callback, path: Path | None = None) -> Watched:
        strategy = MFSDPStrategy(units=["Block"], async_save=True, state_dict_type=kind)
        options: dict[str, Any] = {"max_epochs": -1, "max_steps": steps, "callbacks": list(callbacks)}
        model: Watched = seeded(Watched)
        make_trainer(folder, world, strategy=strategy, **options).fit(model, data, ckpt_path=path)
        return model

    for kind in KINDS:
        own = Path(folder, kind)
        saver = SaveTwice(own, ShardedEMA(0.75, warmup=True))

        def held_back(*args: Any, saver: SaveTwice = saver, **options: Any) -> None:
            assert threading.current_thread().name.startswith("mfsdp-save")
            assert saver.may_write.wait(60)
            write(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lightning_io, "save", held_back)
            run(kind, STEPS, saver.ema, saver)
        found[kind] = saver.seen
        for name, steps in (("half", STEPS // 2), ("end", STEPS)):
            ema = ShardedEMA(0.75, warmup=True)
            found[kind][f"{name} as read"] = state_of(ema, run(kind, steps, ema, path=own / f"{name}.ckpt"))
        ema = ShardedEMA(0.75, warmup=True)
        found[kind]["resumed"] = state_of(ema, run(kind, STEPS, ema, path=own / "half.ckpt"))
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(averaged_in_the_background, 2, str(tmp_path_factory.mktemp("ema")))


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_in_a_checkpoint_is_the_one_when_it_was_saved(ran: list[dict[str, Any]], kind: str) -> None:
    for found in (results[kind] for results in ran):
        assert not found["there while training"]
        half, end = found["half"], found["end"]
        assert (half["updates"], end["updates"]) == (STEPS // 2, STEPS)
        assert sum(value.numel() for value in half["average"].values()) > 0
        for name, value in half["average"].items():
            if value.numel():
                assert not value.equal(end["average"][name]), f"{name}: averaged on while the checkpoint waited"
                assert not value.equal(half["weights"][name]), name
        assert_same(found["half as read"], half)
        assert_same(found["end as read"], end)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_from_it_averages_what_the_straight_run_did_to_the_bit(
    ran: list[dict[str, Any]], kind: str
) -> None:
    for found in (results[kind] for results in ran):
        assert_same(found["resumed"], found["end"])
