"""A folder that nodes do not share: no save succeeds with a part of the files, and none replaces a complete checkpoint.

One rank has another storage at the folder's path: by a mount of its own where the kernel permits that, and by its listing alone elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus

import lightning as L
from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.checkpoint.io import local, shared_folder
from lightning_mfsdp.checkpoint.io.shared_folder import NotSharedError, View, see_on_all, see_until, warn_if_late
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.checkpoint.internals import Ranks, locate
from tests.helpers.distributed import run_distributed
from tests.helpers.mounts import cannot_hide_because, hide
from tests.lightning.models import Classifier, loader, make_trainer, seeded, strict_warnings

AT_ONCE = timedelta(0)


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds


def sees_after(clock: Clock, seconds: float) -> Callable[[], str]:
    start_s = clock.now_s
    return lambda: "" if clock.now_s - start_s >= seconds else "not there"


def test_what_is_there_is_not_waited_for() -> None:
    clock = Clock()
    assert see_until(sees_after(clock, 0), 30, clock=clock, wait=clock.wait) == ("", 0)
    assert not clock.waits_s


def test_a_late_view_is_waited_for_at_growing_intervals() -> None:
    clock = Clock()
    problem, waited_s = see_until(sees_after(clock, 12), 30, clock=clock, wait=clock.wait)
    assert not problem
    assert 12 <= waited_s <= 13
    assert clock.waits_s == sorted(clock.waits_s)
    assert clock.waits_s[0] < 0.1
    assert max(clock.waits_s) == 1


@pytest.mark.parametrize("limit_s", [0.0, 0.25, 30.0])
def test_a_last_look_is_taken_when_time_is_over(limit_s: float) -> None:
    clock = Clock()
    problem, waited_s = see_until(sees_after(clock, limit_s), limit_s, clock=clock, wait=clock.wait)
    assert not problem
    assert waited_s == pytest.approx(limit_s)
    missed = see_until(sees_after(clock, limit_s + 0.0625), limit_s, clock=clock, wait=clock.wait)
    assert missed == ("not there", pytest.approx(limit_s))


class Others(Ranks):
    """Rank 0 of three nodes, of which the others have seen what is given."""

    def __init__(self, *views: View) -> None:
        super().__init__(sees_within=AT_ONCE)
        self.views = views

    def to_first(self, item: Any) -> list[Any]:
        return [item, *self.views]


def seen(*views: View, names: tuple[str, ...] = ("token",)) -> list[View]:
    return see_on_all("/data/run", "token", lambda: names, Others(*views), what="last.ckpt was not saved")


def test_a_late_view_is_a_warning_and_a_missing_one_the_error() -> None:
    warn_if_late("/data/run", seen(View("node1", "", 0.2), View("node2", "", 0.0)), Others())
    views = seen(View("node1", "", 12.25), View("node1", "", 11.0))
    assert [view.host for view in views] == [socket.gethostname(), "node1", "node1"]
    with pytest.warns(
        UserWarning, match=r"^/data/run: ranks 1, 2 on node1 saw only after 12\.2 s what rank 0 on .*raise sh"
    ):
        warn_if_late("/data/run", views, Others())
    with pytest.raises(NotSharedError) as missing:
        seen(View("node1", "no such folder", 30.0), View("node2", "its listing has no such file", 30.0))
    assert str(missing.value).startswith(
        f"last.ckpt was not saved: rank 1 on node1, rank 2 on node2 did not see within 0 s what rank 0 on {socket.gethostname()} put into "
        "/data/run (no such folder). Every node writes its part there: mount the same storage"
    )
    with pytest.raises(NotSharedError, match=r"rank 0 on .* did not see"):
        seen(View("node1", "", 0.0), View("node1", "", 0.0), names=())


class HttpError(Exception):
    """As object stores raise: no OSError."""


def test_whatever_a_listing_raises_is_told_to_all_ranks() -> None:
    """Raised on one rank alone, the others would wait for it."""

    def names() -> list[str]:
        raise HttpError("403, forbidden")

    with pytest.raises(NotSharedError, match=r"rank 0 on .* did not see .* \(HttpError: 403, forbidden\)\."):
        see_on_all("gs://run", "token", names, Others(View("node1", "", 0.0)), what="last.ckpt was not saved")


def test_a_folder_is_seen_inside_one_that_must_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parents of home and scratch folders often permit no listing."""
    listdir = os.listdir

    def permitted(path: Path | str) -> list[str]:
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", permitted)
    location = locate(tmp_path / "mine")
    location.write(f"{location.make_folder()}/token", b"")
    assert location.names(str(tmp_path / "mine")) == ["token"]
    with pytest.raises(FileNotFoundError):
        location.names(str(tmp_path / "other"))


def trees(folder: Path) -> dict[str, str]:
    """Everything in a folder, hidden names too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def hidden(rank: int, folder: Path, how: str) -> None:
    """From here on, the folder of the last rank is another one."""
    private = folder.with_name("private")
    if rank == 0:
        private.mkdir(exist_ok=True)
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        if how == "mounts":
            hide(folder, private)
        else:
            local.LocalLocation.names = lambda self, path: os.listdir(private)  # type: ignore[method-assign]
    dist.barrier()


def raised(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def before_the_first_step(rank: int, world: int, folder: str, how: str) -> dict[str, Any]:
    strict_warnings()
    run = Path(folder, "run")
    hidden(rank, run, how)
    model, found = seeded(Classifier), {}
    strategy = MFSDPStrategy(shared_folder_timeout=AT_ONCE)
    saver = ModelCheckpoint(dirpath=run / "checkpoints", every_n_train_steps=1)
    trainer = make_trainer("", world, strategy=strategy, callbacks=[saver], enable_checkpointing=True)
    found["raised"] = raised(lambda: trainer.fit(model, loader(4, 16, rank, world)))
    return found | {"steps": len(model.losses), "files": trees(run)}


def saves(rank: int, world: int, folder: str, how: str) -> dict[str, Any]:
    """A checkpoint is saved while all see the folder; then one does not, and others are saved there."""
    strict_warnings()
    run, found = Path(folder, "run"), {}
    path = run / "last.ckpt"
    trainers = []
    for is_async in (False, True):
        strategy = MFSDPStrategy(shared_folder_timeout=AT_ONCE, async_save=is_async)
        trainers.append(make_trainer("", world, strategy=strategy, max_steps=1))
        trainers[-1].fit(seeded(Classifier), loader(4, 16, rank, world))
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=MFSDPFabricStrategy(shared_folder_timeout=AT_ONCE))
    fabric.launch()
    module = fabric.setup_module(torch.nn.Linear(4, 4))
    trainers[0].save_checkpoint(path)
    dist.barrier()
    found["before"] = trees(run)
    hidden(rank, run, how)
    found["Trainer"] = raised(lambda: trainers[0].save_checkpoint(path))
    trainers[1].state.status = TrainerStatus.RUNNING  # saves in the background while it trains
    found["async begins"] = raised(lambda: trainers[1].save_checkpoint(path))
    found["async ends"] = raised(trainers[1].strategy.finish_saving)  # type: ignore[attr-defined]
    found["Fabric"] = raised(lambda: fabric.save(path, {"model": module}))
    found["new"] = raised(lambda: trainers[0].save_checkpoint(run / "new.ckpt"))
    return found | {"after": trees(run)}


def lost_files(rank: int, world: int, folder: str) -> dict[str, Any]:
    """All see the token, and what one has written is not there all the same."""
    strict_warnings()
    run = Path(folder, "run")
    path = run / "last.ckpt"
    trainer = make_trainer("", world, strategy=MFSDPStrategy(shared_folder_timeout=AT_ONCE), max_steps=1)
    trainer.fit(seeded(Classifier), loader(4, 16, rank, world))
    trainer.save_checkpoint(path)
    dist.barrier()
    found: dict[str, Any] = {"before": trees(run)}
    write = local.Writer.write_data
    for name, spoil in {"missing": Path.unlink, "short": lambda file: os.truncate(file, 10)}.items():

        def write_data(self: Any, plan: Any, planner: Any, spoil: Any = spoil) -> Any:
            result = write(self, plan, planner)
            for file in Path(self.path).glob(f"__{rank}_*"):
                spoil(file)
            return result

        local.Writer.write_data = write_data if rank == 1 else write  # type: ignore[method-assign]
        found[name] = raised(lambda: trainer.save_checkpoint(path))
    local.Writer.write_data = write  # type: ignore[method-assign]
    return found | {"after": trees(run)}


@pytest.fixture(params=["mounts", "patched"])
def how(request: pytest.FixtureRequest) -> str:
    if request.param == "mounts" and cannot_hide_because():
        pytest.skip(cannot_hide_because())
    return str(request.param)


def folders(tmp_path: Path) -> str:
    (tmp_path / "run").mkdir()
    return str(tmp_path)


WORLD = 2
HOST = socket.gethostname()
BLIND = f"rank {WORLD - 1} on {HOST} did not see within 0 s what rank 0 on {HOST} put into"


def test_training_does_not_begin_where_a_node_has_another_folder(how: str, tmp_path: Path) -> None:
    for found in run_distributed(before_the_first_step, WORLD, folders(tmp_path), how, apart=True):
        assert found["raised"].startswith(f"NotSharedError: training did not begin: {BLIND} {tmp_path}/run/checkpoints")
        assert len(found["raised"]) < 400 + 2 * len(str(tmp_path))
        assert found["steps"] == 0
        assert found["files"] == {}


def test_no_save_replaces_a_complete_checkpoint_by_a_part_of_one(how: str, tmp_path: Path) -> None:
    every = run_distributed(saves, WORLD, folders(tmp_path), how, apart=True)
    for found in every:
        path = f"{tmp_path}/run/last.ckpt"
        for way in ("Trainer", "Fabric"):
            assert found[way].startswith(
                f"NotSharedError: {path} was not saved, and an earlier one is unchanged: {BLIND}"
            )
        assert found["async begins"] == "nothing"
        assert f"{path} was not saved, and an earlier one is unchanged: {BLIND}" in found["async ends"]
        assert "new.ckpt was not saved" in found["new"]
    assert "last.ckpt/meta.pt" in every[0]["before"]
    assert every[0]["after"] == every[0]["before"]
    assert how == "patched" or every[-1]["after"] == {}, "nothing is left on the other node"


def test_files_that_do_not_arrive_are_named_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    for found in run_distributed(lost_files, WORLD, folders(tmp_path)):
        written = f"what was written by rank 1 on {HOST}: __1_0.distcp"
        assert f"{written} is missing" in found["missing"]
        assert f"{written} has 10 bytes instead of" in found["short"]
        assert f"rank 0 does not see in {tmp_path}/run/" in found["missing"]
        assert found["after"] == found["before"]


def late_view(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    run, clock = Path(folder, "run"), Clock()
    trainer = make_trainer("", world, max_steps=1)
    trainer.fit(seeded(Classifier), loader(4, 16, rank, world))
    see, names = shared_folder.see_until, local.LocalLocation.names
    if rank == 1:
        late = sees_after(clock, 5)
        local.LocalLocation.names = lambda self, path: [] if late() else names(self, path)  # type: ignore[method-assign]
        shared_folder.see_until = lambda look, limit_s: see(look, limit_s, clock=clock, wait=clock.wait)  # type: ignore[misc, assignment]
    text = f"saw only after .* what rank 0 on {HOST} put there"
    with pytest.warns(UserWarning, match=text) if rank == 0 else nullcontext():
        trainer.save_checkpoint(run / "last.ckpt")
    shared_folder.see_until, local.LocalLocation.names = see, names  # type: ignore[method-assign]
    return {"files": trees(run), "is_sharded": locate(run / "last.ckpt").is_sharded()}


def test_a_folder_that_is_seen_late_is_waited_for_and_the_save_succeeds(tmp_path: Path) -> None:
    found = run_distributed(late_view, WORLD, folders(tmp_path))
    assert all(one["is_sharded"] for one in found)
    assert sorted(found[0]["files"]) == [
        f"last.ckpt/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt")
    ]


@pytest.mark.parametrize("strategy", [MFSDPStrategy, MFSDPFabricStrategy])
@pytest.mark.parametrize("option", ["shared_folder_timeout", "timeout"])
def test_the_option_is_a_duration(option: str, strategy: Any) -> None:
    assert strategy()._options.shared_folder_timeout == timedelta(seconds=30)
    with pytest.raises(TypeError, match=f"^{option}=30: expected a timedelta"):
        strategy(**{option: 30})
    with pytest.raises(ValueError, match="of at least 0 seconds"):
        strategy(**{option: timedelta(seconds=-1)})
