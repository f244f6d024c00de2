"""MFSDPStrategy(async_save=True): training goes on while a checkpoint is written, and nothing is lost when that fails."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_mfsdp import MFSDPStrategy
from tests.checkpoint.internals import BackgroundSaver, DcpShard, Staging
from tests.engine.internals import Piece
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, loader, make_trainer, seeded, strict_warnings
from tests.lightning.test_checkpoint import Scheduled, assert_same, local_state

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

STEPS = 4


class HeldBack(FileSystemWriter):
    """Stands for a slow disk: writes nothing before it is told to, on one rank."""

    may_write = threading.Event()
    write = FileSystemWriter.write_data

    def write_data(self, *args: Any) -> Any:
        assert threading.current_thread().name.startswith("mfsdp-save")
        assert HeldBack.may_write.wait(60)
        return HeldBack.write(self, *args)


class SaveOnce(Callback):
    """Saves after the second step, trains two more while nothing can be written, and only then lets the disk go on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.seen["saved"] = local_state(trainer, module)
            trainer.save_checkpoint(self.path)
        if trainer.global_step == STEPS:
            self.seen["there while training"] = Path(self.path).exists()
            trainer.strategy.barrier()
            HeldBack.may_write.set()


def trainer_of(folder: str, world: int, **options: Any) -> Any:
    strategy = MFSDPStrategy(
        units=["Block"], async_save=True, state_dict_type=options.pop("state_dict_type", "sharded")
    )
    return make_trainer(folder, world, max_epochs=-1, strategy=strategy, **options)


def background(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    data = loader(8 // world, 8 * STEPS, rank, world)
    for kind in ("sharded", "full"):
        with pytest.MonkeyPatch.context() as patch:
            HeldBack.may_write.clear()
            if kind == "sharded":
                patch.setattr(FileSystemWriter, "write_data", HeldBack.write_data)
            saver = SaveOnce(f"{folder}/{kind}.ckpt")
            trainer = trainer_of(folder, world, max_steps=STEPS, callbacks=[saver], state_dict_type=kind)
            trainer.fit(seeded(Scheduled), data)
        saver.seen["there after fit"] = Path(saver.path).exists()
        again = seeded(Scheduled)
        loading = trainer_of(folder, world, max_steps=2)
        loading.fit(again, data, ckpt_path=saver.path)
        saver.seen["loaded"] = local_state(loading, again)
        found[kind] = saver.seen
    for save_last in (None, "link"):
        found[f"top {save_last}"] = keeps_the_last_good_one(folder, data, world, save_last)
    found["error"] = an_error_surfaces(folder, data, world, rank)
    found["staging"] = staging_fails_on_one_rank(folder, data, world, rank)
    found["shared names"] = two_callbacks_of_one_name(folder, data, world)
    return found


def keeps_the_last_good_one(folder: str, data: Any, world: int, save_last: Any) -> list[str]:
    """save_top_k=1 removes the predecessor of each checkpoint, but not before the new one is there."""
    kept = f"{folder}/top-{save_last}"
    seen: list[str] = []

    class Watch(ModelCheckpoint):
        def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._remove_checkpoint(trainer, filepath)
            seen.append(f"{Path(filepath).name} is {'still' if Path(filepath).exists() else 'no longer'} there")

    saver = Watch(dirpath=kept, filename="{step}", every_n_train_steps=2, save_top_k=1, save_last=save_last)
    trainer_of(folder, world, max_steps=STEPS, callbacks=[saver], enable_checkpointing=True).fit(
        seeded(Scheduled), data
    )
    return [*seen, *sorted(path.name for path in Path(kept).iterdir())]


def an_error_surfaces(folder: str, data: Any, world: int, rank: int) -> str:
    """At the next step after the save has failed, or at the latest when fit ends; the older checkpoint stays, and is not removed."""

    def fail_on_one(self: Any, *args: Any) -> Any:
        if rank == world - 1:
            raise OSError("disk full")
        return HeldBack.write(self, *args)

    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(f"{folder}/good.ckpt")
                trainer.strategy.finish_saving()
                patch.setattr(FileSystemWriter, "write_data", fail_on_one)
                trainer.save_checkpoint(f"{folder}/bad.ckpt")
                trainer.strategy.remove_checkpoint(f"{folder}/good.ckpt")

    trainer = trainer_of(folder, world, max_steps=STEPS, callbacks=[Failing()])
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError) as info:
            trainer.fit(seeded(Scheduled), data)
    text = [str(info.value), *(str(warning.message) for warning in caught)]
    names = [path.name for path in Path(folder).iterdir() if path.name.startswith(("good", "bad"))]
    return "\n".join([*text, *names])


def staging_fails_on_one_rank(folder: str, data: Any, world: int, rank: int) -> dict[str, Any]:
    """Training goes on, and so does saving."""
    seen: dict[str, Any] = {}

    def no_memory(self: Staging, tree: Any) -> Any:
        if rank == world - 1:
            raise MemoryError("no host memory")
        return copy(self, tree)

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Staging, "copy", no_memory)
                    with pytest.raises((MemoryError, RuntimeError)) as info:
                        trainer.save_checkpoint(f"{folder}/unstaged.ckpt")
                seen["raised"] = str(info.value)
                trainer.save_checkpoint(f"{folder}/staged.ckpt")

    copy = Staging.copy
    trainer = trainer_of(folder, world, max_steps=STEPS, callbacks=[Saving()])
    trainer.fit(seeded(Scheduled), data)
    seen["steps"] = trainer.global_step
    seen["names"] = sorted(path.name for path in Path(folder).glob("*staged.ckpt"))
    return seen


def two_callbacks_of_one_name(folder: str, data: Any, world: int) -> list[str]:
    """What is said, for two that save the same names, the same last checkpoint, and neither."""
    said = []
    for first, second in (
        ({}, {"filename": "{epoch}-{step}"}),
        ({"filename": "a", "save_last": True}, {"filename": "b", "save_last": True}),
        ({"filename": "a", "save_last": True}, {"filename": "b"}),
    ):
        savers: list[Any] = [
            ModelCheckpoint(dirpath=f"{folder}/shared {len(said)}", every_n_train_steps=steps, **own)
            for steps, own in ((STEPS, first), (2, second))
        ]
        trainer = trainer_of(folder, world, max_steps=STEPS, callbacks=savers, enable_checkpointing=True)
        try:
            trainer.fit(seeded(Scheduled), data)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(background, 2, str(tmp_path_factory.mktemp("background")))


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_holds_what_was_there_when_it_was_saved_though_training_went_on(ran: Any, kind: str) -> None:
    for found in ran:
        assert_same(found[kind]["loaded"], found[kind]["saved"])
        assert found[kind]["there after fit"], "the end of fit waits for it"


def test_training_does_not_wait_for_the_disk(ran: Any) -> None:
    assert [found["sharded"]["there while training"] for found in ran] == [False, False]


def test_the_predecessor_is_removed_once_the_new_checkpoint_is_there(ran: Any) -> None:
    assert ran[0]["top None"] == ["step=2.ckpt is still there", "step=4.ckpt"]


def test_links_are_made_to_what_is_there(ran: Any) -> None:
    """So saves with links are not made in the background."""
    assert ran[0]["top link"] == ["step=2.ckpt is no longer there", "last.ckpt", "step=4.ckpt"]


def test_a_failure_is_raised_on_all_ranks_and_the_older_checkpoint_stays(ran: Any) -> None:
    for found in ran:
        assert "a checkpoint saved in the background failed" in found["error"]
        assert "rank 1: OSError: disk full" in found["error"]
        assert "good.ckpt was left out: the checkpoint saved before it failed" in found["error"]
        assert found["error"].endswith("\ngood.ckpt")


def test_all_ranks_hear_that_one_could_not_copy_and_go_on(ran: Any) -> None:
    assert ran[1]["staging"]["raised"] == "no host memory"
    assert "unstaged.ckpt to host memory: rank 1 failed, so all do: MemoryError" in ran[0]["staging"]["raised"]
    for found in ran:
        assert found["staging"]["steps"] == STEPS
        assert found["staging"]["names"] == ["staged.ckpt"]


def test_callbacks_that_would_save_under_one_name_are_refused(ran: Any) -> None:
    for found in ran:
        same, last, neither = found["shared names"]
        assert "two callbacks save '{epoch}-{step}' in" in same
        assert "two callbacks save 'last' in" in last
        assert neither == ""


# -- parts -------------------------------------------------------------------------------------------------------------


def test_staging_copies_every_tensor_and_uses_its_memory_again() -> None:
    rows = DcpShard.of(torch.arange(6.0).reshape(3, 2), Piece(shape=torch.Size([8, 2]), rows=range(4, 7)))
    tree = {"a": rows, "b": [torch.ones(2), {"c": (torch.zeros(()), 3)}], "d": {"step": 7}}
    staging = Staging()
    copied = staging.copy(tree)
    rows.local.fill_(9)
    tree["b"][0].fill_(9)  # type: ignore[index]
    assert torch.equal(copied["a"].local, torch.arange(6.0).reshape(3, 2))
    assert copied["a"].size() == torch.Size([8, 2])
    assert copied["a"].__create_chunk_list__()[0].offsets == torch.Size([4, 0])
    assert torch.equal(copied["b"][0], torch.ones(2))
    assert copied["b"][1]["c"][1] == 3
    assert copied["d"] == {"step": 7}
    addresses = copied["a"].local.data_ptr(), copied["b"][0].data_ptr()
    again = staging.copy(tree)
    assert (again["a"].local.data_ptr(), again["b"][0].data_ptr()) == addresses
    assert again["a"].local.eq(9).all()


def test_actions_wait_for_the_save_and_run_in_order() -> None:
    saver, order = BackgroundSaver(), []
    saver.after("at once", lambda: order.append("at once"))
    go = threading.Event()
    saver.start(lambda: (go.wait(60), order.append("saved"))[1])
    saver.after("first", lambda: order.append("first"))
    saver.after("second", lambda: order.append("second"))
    assert saver.is_saving
    assert order == ["at once"]
    go.set()
    saver.close()
    assert order == ["at once", "saved", "first", "second"]


def test_a_removal_that_fails_afterwards_is_reported_and_the_next_is_done() -> None:
    saver, done = BackgroundSaver(), []
    go = threading.Event()

    def save() -> None:
        assert go.wait(60)

    def refuse() -> None:
        raise PermissionError("not yours")

    saver.start(save)
    saver.after("removing old.ckpt", refuse)
    saver.after("removing older.ckpt", lambda: done.append("older"))
    go.set()
    with pytest.warns(UserWarning, match=r"removing old\.ckpt failed after the checkpoint was saved: not yours"):
        saver.close()
    assert done == ["older"]
