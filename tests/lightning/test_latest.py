"""`latest_checkpoint` finds the complete checkpoint of a run with the highest global step, and says what it passed by."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_mfsdp import latest_checkpoint
from lightning_mfsdp.checkpoint.io.location import beside
from lightning_mfsdp.trainer import latest
from lightning_mfsdp.trainer.latest import Choice, choose
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, Classifier, dataset, loader, make_trainer, seeded, strict_warnings

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}") for message in (*FOREIGN_WARNINGS, ".*torch.distributed is")
]

FIRST, SECOND = {"id": "first", "began": 100.0}, {"id": "second", "began": 200.0}


def progress(epochs: int, batches: int) -> dict[str, Any]:
    return {
        "epoch_progress": {"total": {"completed": epochs}},
        "epoch_loop.batch_progress": {"total": {"processed": batches}},
    }


def content(step: int, run: dict[str, Any] | None, *, place: bool, epochs: int, batches: int) -> dict[str, Any]:
    return {
        "global_step": step,
        "loops": {"fit_loop": progress(epochs, batches)},
        "lr_schedulers": [],
        "data_positions": [{"seen": 4} if place else None],
        **({"training_run": run} if run else {}),
    }


def save(
    path: Path,
    step: int,
    run: dict[str, Any] | None = FIRST,
    *,
    place: bool = True,
    epochs: int = 0,
    batches: int = 0,
    without: str = "",
) -> str:
    """A directory as the strategy writes it."""
    dcp.save({"model": {"weight": torch.ones(4)}}, checkpoint_id=path, no_dist=True)
    meta = content(step, run, place=place, epochs=epochs, batches=batches)
    meta.pop(without, None)
    torch.save(meta, path / "meta.pt")
    return str(path)


def chosen(folder: Path, **options: Any) -> Choice:
    return choose([str(folder)], **options)


def test_the_highest_step_counts_and_no_time_of_a_file(tmp_path: Path) -> None:
    paths = [save(tmp_path / name, step) for name, step in (("best.ckpt", 9), ("last.ckpt", 30), ("z.ckpt", 5))]
    for age, path in enumerate([paths[1], paths[0], paths[2]]):
        for root, _, files in os.walk(path):
            for name in [root, *(os.path.join(root, file) for file in files)]:
                os.utime(name, (1e9 + age, 1e9 + age))
    found = chosen(tmp_path)
    assert (found.path, found.step, found.run) == (paths[1], 30, "first")
    assert found.passed_by == {paths[0]: "step 9", paths[2]: "step 5"}
    assert found.later == []


def test_one_that_is_not_complete_is_passed_by(tmp_path: Path) -> None:
    good = save(tmp_path / "good.ckpt", 5)
    cut = save(tmp_path / "cut.ckpt", 30)
    next((tmp_path / "cut.ckpt").glob("*.distcp")).unlink()
    short = save(tmp_path / "short.ckpt", 29)
    with next((tmp_path / "short.ckpt").glob("*.distcp")).open("rb+") as file:
        file.truncate(3)
    begun = save(tmp_path / "begun.ckpt", 28)
    (tmp_path / "begun.ckpt/meta.pt").unlink()
    damaged = save(tmp_path / "damaged.ckpt", 27)
    (tmp_path / "damaged.ckpt/meta.pt").write_bytes(b"half")
    weights = save(tmp_path / "weights.ckpt", 26, without="lr_schedulers")
    shutil.copytree(good, tmp_path / beside("hpc_ckpt_2.ckpt", "part"))
    (tmp_path / "gone.ckpt").symlink_to(tmp_path / "nothing")
    (tmp_path / "metrics.csv").write_text("1")
    (tmp_path / "lightning_logs").mkdir()
    found = chosen(tmp_path)
    assert found.path == good
    assert "step 30, incomplete: __0_0.distcp is missing" in found.passed_by.pop(cut)
    assert "step 29, incomplete: __0_0.distcp has 3 bytes instead of" in found.passed_by.pop(short)
    assert found.passed_by.pop(begun) == "incomplete: no meta.pt"
    assert found.passed_by.pop(damaged).startswith("unreadable: ")
    assert found.passed_by.pop(weights) == "it has weights only"
    assert found.passed_by.pop(f"{tmp_path}/gone.ckpt") == "incomplete: no meta.pt"
    assert not found.passed_by


def test_another_run_in_the_same_folder_is_passed_by(tmp_path: Path) -> None:
    before = save(tmp_path / "before.ckpt", 1000, FIRST)
    old = save(tmp_path / "old.ckpt", 2000, None)
    own = [save(tmp_path / f"{step}.ckpt", step, SECOND) for step in (3, 7)]
    found = chosen(tmp_path)
    assert (found.path, found.run) == (own[1], "second")
    assert found.passed_by == {
        old: "step 2000 of another run, without an id",
        before: "step 1000 of another run, first",
        own[0]: "step 3",
    }
    assert set(found.later) == {before, old}, "worth a warning"
    assert chosen(tmp_path, run="first").path == before
    with pytest.raises(ValueError, match=r"run='third': no checkpoint in .* is of that run; there are those of"):
        chosen(tmp_path, run="third")


def test_of_equal_steps_one_that_knows_more_is_taken(tmp_path: Path) -> None:
    save(tmp_path / "z.ckpt", 8, place=False, epochs=5, batches=50)
    place = save(tmp_path / "place.ckpt", 8, batches=8)
    assert chosen(tmp_path).path == place, "the place inside the epoch"
    inside = save(tmp_path / "inside.ckpt", 8, batches=9)
    assert chosen(tmp_path).path == inside, "and a microbatch more"
    over = save(tmp_path / "epoch.ckpt", 8, epochs=1, batches=9)
    assert chosen(tmp_path).path == over, "the epoch is over, with its validation"
    copied = save(tmp_path / "last.ckpt", 8, epochs=1, batches=9)
    assert chosen(tmp_path).path == copied, "of equal ones always the same"


def test_files_and_folders_without_any(tmp_path: Path) -> None:
    assert choose([str(tmp_path), f"{tmp_path}/nothing"]) == Choice()
    torch.save(content(4, FIRST, place=True, epochs=0, batches=0) | {"state_dict": {}}, tmp_path / "whole.ckpt")
    torch.save(torch.ones(3), tmp_path / "tensor.ckpt")
    deeper = tmp_path / "deeper"
    save(deeper / "deep.ckpt", 50)
    found = choose([f"{tmp_path}/", str(tmp_path)])
    assert found == Choice(f"{tmp_path}/whole.ckpt", 4, "first", {f"{tmp_path}/tensor.ckpt": "it has weights only"})
    both = choose([str(tmp_path), str(deeper)])
    assert both.path == f"{deeper}/deep.ckpt"


class Own:
    """Of the user's."""


def test_one_with_classes_that_are_not_allowed_is_passed_by(tmp_path: Path) -> None:
    path = save(tmp_path / "own.ckpt", 5)
    meta = torch.load(f"{path}/meta.pt", weights_only=True)
    torch.save(meta | {"own": Own()}, f"{path}/meta.pt")
    found = chosen(tmp_path)
    assert found.path is None
    assert "weights_only=False" in found.passed_by[path]
    assert chosen(tmp_path, weights_only=False).path == path


def test_a_replacement_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    for name in ("last.ckpt", "epoch=0-step=5.ckpt"):
        save(tmp_path / beside(name, "old"), 5)
    with pytest.warns(
        UserWarning, match=r"last.ckpt: a save was interrupted while it replaced this checkpoint; taking"
    ):
        assert chosen(tmp_path).path == f"{tmp_path}/last.ckpt"


def test_folders_behind_urls(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", 5)
    save(tmp_path / "b.ckpt", 7)
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/", "/latest/", recursive=True)
    found = choose(["memory://latest"])
    assert found.path == "memory://latest/b.ckpt"
    assert list(found.passed_by) == ["memory://latest/a.ckpt"]


def test_what_the_trainer_does_not_know_is_asked_for(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, enable_checkpointing=True)
    with pytest.raises(ValueError, match="has no dirpath, so each start saves into a folder of its own"):
        latest_checkpoint(trainer)
    other = make_trainer(tmp_path, 1, strategy=DDPStrategy())
    with pytest.raises(TypeError, match=r"expected a Trainer with MFSDPStrategy, .* got DDPStrategy"):
        latest_checkpoint(other)


def goes_on(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    found: dict[str, Any] = {"told": []}
    latest.rank_zero_info = latest.rank_zero_warn = found["told"].append  # type: ignore[attr-defined]
    data = DataLoader(dataset(32), 4, shuffle=True)

    def start(epochs: int, *, resumes: bool = True, **options: Any) -> Any:
        saver = ModelCheckpoint(f"{folder}/own", every_n_train_steps=2, save_top_k=-1)
        settings = {"max_epochs": epochs, "use_distributed_sampler": True, **options}
        trainer = make_trainer(folder, world, enable_checkpointing=True, callbacks=[saver], **settings)
        path = latest_checkpoint(trainer) if resumes else None
        trainer.fit(seeded(Classifier), data, ckpt_path=path)
        return trainer, path

    def run_of(path: str) -> str:
        identity: str = torch.load(f"{path}/meta.pt", weights_only=True)["training_run"]["id"]
        return identity

    _, found["first"] = start(1)
    second, found["second"] = start(2)
    own = f"{folder}/own"
    found["runs"] = {run_of(f"{own}/{name}") for name in sorted(os.listdir(own)) if name.endswith(".ckpt")}
    found["steps"] = second.global_step
    third, _ = start(1, resumes=False, limit_train_batches=2)
    found["another"] = run_of(third.checkpoint_callback.best_model_path) in found["runs"]
    found["latest"] = latest_checkpoint(third) == third.checkpoint_callback.best_model_path
    return found


def test_fits_that_go_on_are_one_run_and_another_fit_is_another(tmp_path: Path) -> None:
    for rank, found in enumerate(run_distributed(goes_on, 2, str(tmp_path))):
        assert found["first"] is None
        assert found["second"] == f"{tmp_path}/own/epoch=0-step=4.ckpt"
        assert found["steps"] == 8
        assert len(found["runs"]) == 1
        assert not found["another"]
        assert found["latest"]
        if rank == 0:
            told = found["told"]
            assert told[0] == f"no checkpoint to go on from in {tmp_path}/own, {tmp_path}"
            assert told[1] == (
                f"going on from {tmp_path}/own/epoch=0-step=4.ckpt, step 4 of run {next(iter(found['runs']))}; passed by: "
                f"{tmp_path}/own/epoch=0-step=2.ckpt (step 2)"
            )
            assert "Other runs have more steps: give run=ID" in told[2]


def other_storage(rank: int, world: int, folder: str) -> list[str]:
    strict_warnings()
    errors = []
    data = loader(4, 32, rank, world)
    trainer = make_trainer(folder, world)
    trainer.fit(seeded(Classifier), data)
    trainer.save_checkpoint(f"{folder}/0/own/last.ckpt")
    own = Path(folder, str(rank))
    (own / "own").mkdir(parents=True, exist_ok=True)
    os.chdir(own)
    trainer.strategy.shared_folder_timeout *= 0
    trainer.strategy.cluster_environment.local_rank = lambda: 0  # as on two nodes

    def look(where: str) -> None:
        try:
            latest_checkpoint(trainer, where)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    look(f"{folder}/{rank}")
    look("own")  # rank 0 has the checkpoint
    if rank == 0:
        os.rename("own/last.ckpt", "../1/own/last.ckpt")
    trainer.strategy.barrier()
    look("own")  # rank 1 has it
    return errors


def test_ranks_that_see_other_folders_are_named(tmp_path: Path) -> None:
    for found in run_distributed(other_storage, 2, str(tmp_path)):
        paths, first, second = found
        assert paths.startswith("ValueError: the folder of latest_checkpoint differs between ranks")
        assert f"'{tmp_path}/1' on rank 1 on" in paths
        assert first.startswith("NotSharedError: nothing was read: rank 1 on ")
        assert second.startswith("NotSharedError: rank 1 on ")
        assert "can see own/last.ckpt, and rank 0 on " in second
