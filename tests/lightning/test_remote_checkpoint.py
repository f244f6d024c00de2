"""Checkpoints behind a URL, through fsspec: in memory, and on a file system of another protocol that several processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.checkpoint.io.local import LocalLocation
from lightning_mfsdp.checkpoint.io.remote import RemoteLocation
from tests.checkpoint.internals import Ranks, locate
from tests.helpers.distributed import run_distributed
from tests.lightning.interrupted_saves import NEW, OLD, load, save
from tests.lightning.models import FOREIGN_WARNINGS, full_state, loader, make_trainer, seeded, strict_warnings
from tests.lightning.test_checkpoint import Scheduled, assert_same, local_state

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

STEPS = 4


class SharedFileSystem(LocalFileSystem):
    """Files that every process sees, under a protocol that is not local to Lightning or to us."""

    protocol = ("shared",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("shared://"))


class Crash(BaseException):
    """The process dies here."""


class DyingFileSystem(MemoryFileSystem):
    """In memory; from the n-th change of a file on, nothing works."""

    protocol = "dying"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way
    pseudo_dirs = [""]  # noqa: RUF012
    changes_left = 10**9
    log: list[str] = []  # noqa: RUF012

    @classmethod
    def count(cls, what: str) -> None:
        cls.changes_left -= 1
        if cls.changes_left < 0:
            raise Crash(what)
        cls.log.append(what)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "r" not in mode:
            self.count(f"write {path}")
        return super()._open(path, mode, **options)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.count(f"copy {path1} to {path2}")
        super().cp_file(path1, path2, **options)

    def _rm(self, path: str) -> None:
        self.count(f"remove {path}")
        super()._rm(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        for one in self.expand_path(path, recursive=recursive)[::-1]:
            if self.isfile(one):
                self._rm(one)
        if recursive:
            super().rm(path, recursive=True) if self.exists(path) else None


@pytest.fixture(autouse=True, scope="module")
def _dying() -> None:
    fsspec.register_implementation("dying", DyingFileSystem, clobber=True)


def through_the_trainer(rank: int, world: int, url: str) -> dict[str, Any]:
    """ModelCheckpoint with top-k and last on a URL; resume and validate from it."""
    strict_warnings()
    fsspec.register_implementation("shared", SharedFileSystem, clobber=True)
    data = loader(8 // world, 8 * STEPS, rank, world)
    found: dict[str, Any] = {}
    for kind, is_async in (("sharded", False), ("full", False), ("sharded", True)):
        base = f"{url}/{kind}-{is_async}"
        model = seeded(Scheduled)
        saver = ModelCheckpoint(dirpath=base, filename="{step}", every_n_train_steps=2, save_top_k=1, save_last=True)
        strategy = MFSDPStrategy(units=["Block"], state_dict_type=kind, async_save=is_async)
        options: dict[str, Any] = {"max_epochs": -1, "enable_checkpointing": True}
        trainer = make_trainer("", world, strategy=strategy, max_steps=STEPS, callbacks=[saver], **options)
        trainer.fit(model, data)
        again = seeded(Scheduled)
        loading = make_trainer("", world, strategy=MFSDPStrategy(units=["Block"]), max_steps=STEPS, max_epochs=-1)
        loading.fit(again, data, ckpt_path=f"{base}/last.ckpt")
        fs = fsspec.filesystem(url.partition("://")[0])
        found[f"{kind} {is_async}"] = {
            "names": sorted(path.rpartition("/")[2] for path in fs.ls(base, detail=False)),
            "saved": local_state(trainer, model),
            "loaded": local_state(loading, again),
            "whole": full_state(again),
        }
    return found


@pytest.mark.parametrize(("protocol", "world"), [pytest.param("memory", 1, marks=pytest.mark.nightly), ("shared", 2)])
def test_a_training_saves_to_a_url_and_resumes_from_it(protocol: str, world: int, tmp_path: Path) -> None:
    for found in run_distributed(through_the_trainer, world, f"{protocol}://{tmp_path}/run"):
        assert list(found) == ["sharded False", "full False", "sharded True"]
        for kind, result in found.items():
            assert result["names"] == ["last.ckpt", "step=4.ckpt"], kind
            assert_same(result["loaded"], result["saved"], kind)


def dies_at_every_change(rank: int, world: int, kind: str) -> list[str]:
    fsspec.register_implementation("dying", DyingFileSystem, clobber=True)
    url = "dying://run/last.ckpt"
    seen: list[str] = []
    number, died = -1, True
    while died:
        number += 1
        DyingFileSystem.store.clear()
        DyingFileSystem.pseudo_dirs[:] = [""]
        DyingFileSystem.changes_left = 10**9
        save(url, kind, OLD)
        DyingFileSystem.log.clear()
        DyingFileSystem.changes_left = number
        try:
            save(url, kind, NEW)
            died = False
        except (Crash, Exception):
            died = True
        DyingFileSystem.changes_left = 10**9
        last = DyingFileSystem.log[-1] if DyingFileSystem.log else "nothing"
        seen.append(f"{last}: {load(url)}")
    return seen


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.filterwarnings("ignore:.*a save was interrupted")
def test_a_save_over_a_checkpoint_that_dies_at_any_change_leaves_the_old_or_the_new_one(kind: str) -> None:
    (seen,) = run_distributed(dies_at_every_change, 1, kind)
    loaded = [line.rpartition(": ")[2] for line in seen]
    assert set(loaded) == {str(OLD), str(NEW)}, "\n".join(seen)
    assert loaded == sorted(loaded), "\n".join(seen)
    assert len(seen) > (12 if kind == "sharded" else 4), "died in the middle of the exchange too"


def broken_ones(rank: int, world: int) -> dict[str, str]:
    """What a save that died at a new place leaves is known as broken, and the next save takes its place."""
    fsspec.register_implementation("dying", DyingFileSystem, clobber=True)
    url = "dying://run/new.ckpt"
    DyingFileSystem.changes_left = 2
    try:
        save(url, "sharded", OLD)
    except (Crash, Exception):
        DyingFileSystem.changes_left = 10**9
    found = {"broken": load(url), "files": " ".join(map(str, DyingFileSystem.store))}
    save(url, "sharded", NEW)
    found["saved over it"] = load(url)
    fsspec.filesystem("dying").pipe("dying://run/foreign/notes.txt", b"mine")
    try:
        save("dying://run/foreign", "sharded", NEW)
    except RuntimeError as error:
        found["foreign"] = str(error)
    fsspec.filesystem("dying").rm(f"dying://run/new.ckpt/__{dist.get_rank()}_0.distcp")
    found["missing file"] = load(url)
    return found


def test_broken_and_foreign_directories_behind_a_url_are_told_apart() -> None:
    (found,) = run_distributed(broken_ones, 1)
    assert "distcp" in found["files"]
    assert "expected a directory with meta.pt in it" in found["broken"]
    assert found["saved over it"] == str(NEW)
    assert "is a directory with other content" in found["foreign"]
    assert "__0_0.distcp is missing" in found["missing file"]


def test_a_path_is_local_and_a_url_is_not() -> None:
    for text in ("/tmp/a.ckpt", "a.ckpt", "file:///tmp/a.ckpt"):
        assert isinstance(locate(text), LocalLocation), text
    assert str(locate("file:///tmp/a.ckpt")) == "/tmp/a.ckpt"
    found = locate("memory://run/a.ckpt")
    assert isinstance(found, RemoteLocation)
    assert str(found) == "memory://run/a.ckpt"
    assert Ranks().first("nothing", lambda: found.is_sharded()) is False
