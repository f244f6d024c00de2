"""Ranks that were given different checkpoints say so, before anything is read; what a killed save leaves is no checkpoint to anyone."""

from __future__ import annotations

import os
import re
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning as L
from lightning_mfsdp.checkpoint.io.local import part_of
from lightning_mfsdp.checkpoint.io.location import beside
from lightning_mfsdp.checkpoint.io.ranks import on_hosts
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.checkpoint.internals import locate
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, loader, make_trainer, seeded, strict_warnings

HOST = socket.gethostname()


def raised(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ways_to_read(rank: int, world: int, folder: str) -> dict[str, Any]:
    """The checkpoint is there for rank 0 alone, then under another name on each rank."""
    strict_warnings()
    data, found = loader(4, 16, rank, world), {}
    trainer = make_trainer(folder, world, max_epochs=1)
    trainer.fit(seeded(Classifier), data)
    path = f"{folder}/one.ckpt"
    trainer.save_checkpoint(path)
    for name in ("fit", "validate", "test", "predict"):
        model = seeded(Classifier)
        run = getattr(make_trainer(folder, world, max_epochs=2), name)
        found[name] = raised(lambda run=run, model=model: run(model, data, ckpt_path=path if rank == 0 else None))
        found[f"{name}, losses"] = len(model.losses)
    model = seeded(Classifier)
    other = Path(folder, f"other-{rank}.ckpt")  # Path and str are compared as text
    found["other"] = raised(lambda: make_trainer(folder, world, max_epochs=2).fit(model, data, ckpt_path=other))
    given = path if rank else Path(path)
    resumed = make_trainer(folder, world, max_epochs=2)
    resumed.fit(model, data, ckpt_path=given)
    found["epochs"] = resumed.current_epoch
    waits = seeded(Classifier)
    nothing = f"{folder}/nothing.ckpt"
    found["nothing"] = raised(lambda: make_trainer(folder, world, max_epochs=2).fit(waits, data, ckpt_path=nothing))
    found["nothing, sharded"] = [type(parameter) for parameter in waits.parameters()]
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=MFSDPFabricStrategy())
    fabric.launch()
    module = fabric.setup_module(torch.nn.Linear(4, 4))
    fabric.save(f"{folder}/fabric.ckpt", {"model": module})
    found["Fabric"] = raised(lambda: fabric.load(f"{folder}/{rank}/fabric.ckpt", {"model": module}))
    fabric.load(f"{folder}/fabric.ckpt", {"model": module})
    return found


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("paths"))
    return folder, run_distributed(ways_to_read, 2, folder)


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_a_checkpoint_that_one_rank_has_is_an_error_on_all(read: Any, name: str) -> None:
    folder, every = read
    for found in every:
        assert found[name].startswith(
            f"ValueError: ckpt_path differs between ranks, so nothing was read: '{folder}/one.ckpt' on rank 0 on {HOST}; None on rank 1 on "
            f"{HOST}. All ranks load the same checkpoint, or none does."
        )
        assert len(found[name]) < 400 + len(folder)
        assert found[f"{name}, losses"] == 0


def test_two_checkpoints_are_an_error_and_equal_ones_of_two_types_are_none(read: Any) -> None:
    folder, every = read
    for found in every:
        assert f"'{folder}/other-0.ckpt' on rank 0 on {HOST}; '{folder}/other-1.ckpt' on rank 1 on" in found["other"]
        assert found["epochs"] == 2


def test_a_checkpoint_that_is_not_there_is_an_error_on_all_ranks_before_the_model_is_sharded(read: Any) -> None:
    folder, every = read
    for found in every:
        assert found["nothing"].startswith(
            f"ValueError: ckpt_path: rank 0 sees no checkpoint: '{folder}/nothing.ckpt': expected a directory with meta.pt"
        )
        assert set(found["nothing, sharded"]) == {torch.nn.Parameter}


def test_fabric_compares_what_it_loads(read: Any) -> None:
    folder, every = read
    for found in every:
        assert found["Fabric"].startswith("ValueError: the path of fabric.load differs between ranks, so nothing was")
        assert f"'{folder}/0/fabric.ckpt' on rank 0" in found["Fabric"]


def test_ranks_are_named_by_host_and_not_all_of_many() -> None:
    hosts = [f"node{rank // 4}" for rank in range(24)]
    assert on_hosts([1], hosts) == "rank 1 on node0"
    assert on_hosts([2, 3, 4], hosts) == "ranks 2, 3 on node0, rank 4 on node1"
    assert on_hosts(range(24), hosts) == (
        "ranks 0, 1, 2, ... on node0, ranks 4, 5, 6, ... on node1, ranks 8, 9, 10, ... on node2 and those on 3 more nodes"
    )


def requeued(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A save of hpc_ckpt_2 was killed; the requeued job looks for the newest one, as Lightning does under SLURM."""
    strict_warnings()
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    data = loader(4, 16, rank, world)
    trainer = make_trainer(folder, world, max_epochs=1)
    trainer.fit(seeded(Classifier), data)
    for name in ("hpc_ckpt_1.ckpt", "last.ckpt"):
        trainer.save_checkpoint(f"{folder}/{name}")
    if rank == 0:
        for name in ("hpc_ckpt_2.ckpt", "last.ckpt", "last-v1.ckpt"):
            written = Path(locate(f"{folder}/{name}").begin(directory=True))
            (written / "__0_0.distcp").write_bytes(b"half")
    trainer.strategy.barrier()
    saver = ModelCheckpoint(dirpath=folder, save_last=True)
    resumed = make_trainer(folder, world, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    connector = resumed._checkpoint_connector
    found = {"hpc": connector._hpc_resume_path, "next": connector.hpc_save_path(folder)}
    found["last"] = sorted(saver._find_last_checkpoints(resumed))
    resumed.fit(seeded(Classifier), data, ckpt_path="hpc")
    return found | {"epochs": resumed.current_epoch}


def test_a_requeued_job_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    (found,) = run_distributed(requeued, 1, str(tmp_path))
    assert found["hpc"] == f"{tmp_path}/hpc_ckpt_1.ckpt"
    assert found["next"] == f"{tmp_path}/hpc_ckpt_2.ckpt"
    assert found["last"] == [f"{tmp_path}/last.ckpt"]
    assert found["epochs"] == 2


NAMES = ("last.ckpt", "last-ckpt", "hpc_ckpt_2.ckpt", "hpc_ckpt_12.ckpt", "epoch=1-step=200.ckpt", "x" * 255, "é" * 100)


@pytest.mark.parametrize("kind", ["part", "old"])
def test_no_pattern_of_a_checkpoint_matches_what_lies_beside_it(kind: str) -> None:
    found = [beside(name, kind) for name in NAMES]
    assert len(set(found)) == len(NAMES)
    for name in found:
        assert name.startswith(".mfsdp-")
        assert not re.search(r"ckpt_|\.ckpt|hpc_|\.pt", name)
        assert len(name.encode()) <= 255
    assert "hpc-ckpt-2-ckpt" in beside("hpc_ckpt_2.ckpt", kind), "a person still sees what it belongs to"


@pytest.mark.parametrize("url", ["{}", "memory://{}"])
def test_what_an_earlier_version_left_is_recovered_and_cleaned(url: str, tmp_path: Path) -> None:
    base = url.format(tmp_path)
    fs, folder = fsspec.core.url_to_fs(base)
    location = locate(f"{base}/last.ckpt")

    def fill(name: str, text: str) -> None:
        fs.makedirs(f"{folder}/{name}", exist_ok=True)
        fs.pipe(f"{folder}/{name}/meta.pt", text.encode())

    fill("last.ckpt.old", "older")
    assert os.path.basename(str(location.recover())) == "last.ckpt.old"
    assert fs.cat(f"{folder}/last.ckpt/meta.pt") == b"older"
    fs.mv(f"{folder}/last.ckpt", f"{folder}/last.ckpt.old", recursive=True)
    fill("last.ckpt.part", "newer")
    assert os.path.basename(str(location.recover())) == "last.ckpt.part"
    assert fs.cat(f"{folder}/last.ckpt/meta.pt") == b"newer"
    fs.makedirs(f"{folder}/last.ckpt.part", exist_ok=True)
    fs.pipe(f"{folder}/last.ckpt.part/__0_0.distcp", b"half")
    location.begin(directory=True)
    assert not fs.exists(f"{folder}/last.ckpt.part")


def test_a_part_lies_in_the_folder_of_its_checkpoint(tmp_path: Path) -> None:
    """So that a rename moves it."""
    assert part_of(tmp_path / "last.ckpt").parent == tmp_path
