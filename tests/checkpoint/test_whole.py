"""Checkpoints as wholes: read without sharding, without elements, without their last file, and indices that lead elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy, load_from_checkpoint
from lightning_mfsdp.checkpoint import load_checkpoint
from lightning_mfsdp.checkpoint.safetensors.files import tensors_in_files
from lightning_mfsdp.checkpoint.tools.verify import verify
from tests.helpers.distributed import run_distributed
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Sparse(Classifier):
    """Parameters and a buffer without elements, beside others; a tied weight, and hyperparameters."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.no_rows = nn.Parameter(torch.zeros(0, 4))
        self.no_columns = nn.Parameter(torch.zeros(3, 0))
        self.register_buffer("nothing", torch.zeros(0, width))
        self.same = self.blocks[0].linear

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.no_rows.sum() + self.no_columns.sum()


def save_and_resume(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Both kinds of checkpoint, and what a run that goes on from each comes to."""
    strict_warnings()
    data = loader(4, 16, rank, world_size)
    found: dict[str, Any] = {}
    for kind in ("sharded", "full"):

        def trainer(steps: int, kind: Any = kind, **options: Any) -> Any:
            strategy = MFSDPStrategy(units=["Block"], state_dict_type=kind)
            return make_trainer(folder, world_size, max_epochs=-1, max_steps=steps, strategy=strategy, **options)

        model = seeded(Sparse, width=5)
        saver = ModelCheckpoint(f"{folder}/{kind}", filename="one", every_n_train_steps=2)
        trainer(2, callbacks=[saver], enable_checkpointing=True).fit(model, data)
        again = seeded(Sparse, width=5)
        trainer(4).fit(again, data, ckpt_path=f"{folder}/{kind}/one.ckpt")
        straight = seeded(Sparse, width=5)
        trainer(4).fit(straight, data)
        found[kind] = {"half": full_state(model), "resumed": full_state(again), "straight": full_state(straight)}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    return run_distributed(save_and_resume, 2, str(folder))[0]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_run_with_parameters_without_elements_resumes(trained: dict[str, Any], kind: str) -> None:
    resumed, straight = trained[kind]["resumed"], trained[kind]["straight"]
    assert resumed["no_columns"].shape == (3, 0)
    assert all(torch.equal(value, straight[name]) for name, value in resumed.items())


def test_parameters_without_elements_are_in_the_directory(folder: Path, trained: dict[str, Any]) -> None:
    assert not verify(folder / "sharded/one.ckpt").problems
    state = load_checkpoint(folder / "sharded/one.ckpt")["state_dict"]
    assert {state[name].shape for name in ("no_rows", "no_columns", "nothing")} == {(0, 4), (3, 0), (0, 5)}


def test_directories_of_the_version_before_which_leave_them_out_load(
    folder: Path, trained: dict[str, Any], tmp_path: Path
) -> None:
    """It listed their names and wrote nothing for them."""
    import pickle

    path = shutil.copytree(folder / "sharded/one.ckpt", tmp_path / "old.ckpt")
    table = pickle.loads((path / ".metadata").read_bytes())
    for name in [name for name in table.state_dict_metadata if "no_rows" in name or "no_columns" in name]:
        del table.state_dict_metadata[name]
        table.storage_data = {key: value for key, value in table.storage_data.items() if key.fqn != name}
    (path / ".metadata").write_bytes(pickle.dumps(table))
    assert run_distributed(load_only, 1, str(path)) == [True]


def load_only(rank: int, world_size: int, path: str) -> bool:
    strict_warnings()
    model = seeded(Sparse, width=5)
    trainer = make_trainer(Path(path).parent, world_size, max_epochs=-1, max_steps=3)
    trainer.fit(model, loader(8, 16), ckpt_path=path)
    return trainer.global_step == 3


def test_a_directory_gives_what_torch_load_gives_of_a_file(folder: Path, trained: dict[str, Any]) -> None:
    directory, file = load_checkpoint(folder / "sharded/one.ckpt"), load_checkpoint(folder / "full/one.ckpt")
    assert directory.keys() - {"rank_states"} == file.keys() - {"rank_states"}
    for name, value in torch.load(folder / "full/one.ckpt", weights_only=True)["state_dict"].items():
        assert torch.equal(directory["state_dict"][name], value)
        assert torch.equal(file["state_dict"][name], value)
    states = [checkpoint["optimizer_states"][0] for checkpoint in (directory, file)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    kept = [number for number, state in states[1]["state"].items() if state["exp_avg"].numel()]
    for number in kept:
        for key, value in states[1]["state"][number].items():
            assert torch.equal(states[0]["state"][number][key], value)
    assert "optimizer_states" not in load_checkpoint(folder / "sharded/one.ckpt", optimizers=False)


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_module_is_made_from_a_checkpoint_of_either_kind(folder: Path, trained: dict[str, Any], kind: str) -> None:
    with pytest.raises(TypeError, match="expected a LightningModule's class and then a path"):
        load_from_checkpoint(folder / kind / "one.ckpt", Sparse)  # type: ignore[type-var]
    model = load_from_checkpoint(Sparse, folder / kind / "one.ckpt")
    assert type(model) is Sparse
    assert model.hparams == {"width": 5}
    for name, value in model.named_parameters():
        assert type(value) is nn.Parameter
        assert torch.equal(value, trained[kind]["half"][name])


def test_a_directory_without_its_last_file_is_not_whole(folder: Path, trained: dict[str, Any], tmp_path: Path) -> None:
    path = shutil.copytree(folder / "sharded/one.ckpt", tmp_path / "cut.ckpt")
    (path / "meta.pt").unlink()
    for fast in (True, False):
        (problem,) = verify(path, fast=fast).problems
        assert problem.startswith("meta.pt is missing")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/secret.safetensors", "a/../../secret", "C:\\secret", "..\\b"]
)
def test_an_index_names_files_below_its_folder_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    index = {"metadata": {}, "weight_map": {"good": "model-1.safetensors", "bad": name}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match=r"says that bad is in '.*', which is not below the folder"):
        tensors_in_files(tmp_path / "model")


def test_an_index_may_name_files_in_folders_and_through_links(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "blobs").mkdir()
    (tmp_path / "model/part").mkdir(parents=True)
    save_file({"one": torch.ones(2)}, tmp_path / "blobs/abc")
    save_file({"two": torch.ones(3)}, tmp_path / "model/part/two.safetensors")
    (tmp_path / "model/one.safetensors").symlink_to(tmp_path / "blobs/abc")
    index = {"weight_map": {"one": "one.safetensors", "two": "part/two.safetensors"}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    assert tensors_in_files(tmp_path / "model").keys() == {"one", "two"}
