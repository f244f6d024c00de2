"""What `lightning_mfsdp.ray` asks of Ray and tells it, without Ray: in one process, whose `ray` notes the reports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_mfsdp.ray import RayMFSDPStrategy, RayReport, _address, reported_checkpoint
from tests.lightning.models import FOREIGN_WARNINGS, Classifier, loader, make_trainer

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Reports:
    """A `ray.train` of one worker.

    Attributes:
        reported: Metrics and checkpoint of each report.
        committed: After how many reports the callback waited for Ray.
    """

    def __init__(self, folder: Path) -> None:
        self.reported: list[tuple[dict[str, Any], Any]] = []
        self.committed: list[int] = []
        self._storage = SimpleNamespace(
            storage_filesystem=SimpleNamespace(type_name="local"),
            experiment_fs_path=str(folder),
            build_checkpoint_path_from_name=lambda name: str(folder / name),
        )

    def modules(self) -> Iterator[tuple[str, dict[str, Any]]]:
        context = SimpleNamespace(get_storage=lambda: self._storage, get_local_world_size=lambda: 1)
        yield (
            "train",
            {
                "get_context": lambda: context,
                "get_checkpoint": lambda: self.reported[-1][1] if self.reported else None,
                "report": self._report,
                "get_all_reported_checkpoints": lambda **_: self.committed.append(len(self.reported)),
                "Checkpoint": lambda path, filesystem: SimpleNamespace(path=path, filesystem=filesystem),
                "CheckpointUploadMode": SimpleNamespace(NO_UPLOAD="no upload"),
                "CheckpointConsistencyMode": SimpleNamespace(COMMITTED="committed"),
            },
        )
        yield "train.torch", {"get_device": lambda: torch.device("cpu")}
        yield "train.lightning", {"RayLightningEnvironment": LightningEnvironment}

    def _report(self, metrics: dict[str, Any], *, checkpoint: Any, checkpoint_upload_mode: str) -> None:
        assert checkpoint_upload_mode == "no upload"
        assert (Path(checkpoint.path) / "checkpoint.ckpt" / "meta.pt").is_file(), "Ray learns of complete ones"
        self.reported.append((metrics, checkpoint))


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reports:
    reports = Reports(tmp_path / "run")
    package = ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", package)
    for name, content in reports.modules():
        module = ModuleType(f"ray.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"ray.{name}", module)
        holder = package if "." not in name else vars(package)["train"]
        setattr(holder, name.rpartition(".")[2], module)
    return reports


class Logging(Classifier):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def fit(folder: Path, report: RayReport, epochs: int, ckpt_path: str | None = None, **options: Any) -> None:
    """Epochs of four steps."""
    trainer = make_trainer(
        folder,
        1,
        strategy=RayMFSDPStrategy(**options),
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[report],
    )
    trainer.fit(Logging(), loader(8), ckpt_path=ckpt_path)


def names(ray: Reports) -> list[str]:
    """Without what makes each one's its own."""
    return [Path(checkpoint.path).name.rpartition("_")[0] for _, checkpoint in ray.reported]


@pytest.mark.parametrize("async_save", [False, True])
def test_each_epoch_is_saved_and_then_reported(ray: Reports, tmp_path: Path, async_save: bool) -> None:
    assert reported_checkpoint() is None
    fit(tmp_path, RayReport(), 2, async_save=async_save)
    assert names(ray) == ["checkpoint_step=4", "checkpoint_step=8"]
    assert [(metrics["epoch"], metrics["step"]) for metrics, _ in ray.reported] == [(0, 4), (1, 8)]
    assert all(isinstance(metrics["loss"], float) for metrics, _ in ray.reported)
    assert ray.committed == [1, 2], "Ray has read each report before training goes on"
    assert not (tmp_path / "checkpoints").exists(), "Lightning adds no ModelCheckpoint of its own"


def test_a_resumed_run_reports_no_step_again_and_its_last_one(ray: Reports, tmp_path: Path) -> None:
    fit(tmp_path, RayReport(every_n_train_steps=3), 1)
    assert names(ray) == ["checkpoint_step=3", "checkpoint_step=4"]
    path = reported_checkpoint()
    assert path == f"{ray.reported[-1][1].path}/checkpoint.ckpt"
    assert Path(path).parent.parent == tmp_path / "run"
    fit(tmp_path, RayReport(every_n_train_steps=4), 2, ckpt_path=path)
    assert names(ray)[2:] == ["checkpoint_step=8"]


def test_a_second_fit_writes_nothing_over_what_the_first_reported(ray: Reports, tmp_path: Path) -> None:
    """Ray deletes by name what it no longer keeps."""
    for _ in range(2):
        fit(tmp_path, RayReport(), 1)
    assert names(ray) == ["checkpoint_step=4"] * 2
    first, second = (Path(checkpoint.path) for _, checkpoint in ray.reported)
    assert first != second
    assert (first / "checkpoint.ckpt").is_dir()
    assert (second / "checkpoint.ckpt").is_dir()


def test_another_strategy_is_refused(ray: Reports, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, enable_checkpointing=True, callbacks=[RayReport()])
    with pytest.raises(TypeError, match="the Trainer has MFSDPStrategy; pass"):
        trainer.fit(Classifier(), loader(8))


@pytest.mark.parametrize("options", [{"timeout": 1}, {"process_group_backend": "gloo"}])
def test_options_that_are_rays_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"would have no effect, because Ray connects .*=TorchConfig\("):
        RayMFSDPStrategy(**options)


def test_another_source_of_ranks_is_refused_and_none_is_none(ray: Reports) -> None:
    with pytest.raises(ValueError, match=r"cluster_environment=LightningEnvironment\(.*Leave it out"):
        RayMFSDPStrategy(cluster_environment=LightningEnvironment())
    RayMFSDPStrategy(cluster_environment=None)


def test_a_number_of_steps_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        RayReport(every_n_train_steps=0)


@pytest.mark.parametrize(
    ("kind", "address"), [("local", "/a/b"), ("s3", "s3:///a/b"), ("gcs", "gs:///a/b"), ("abfs", "abfs:///a/b")]
)
def test_storage_is_written_by_path_or_url(kind: str, address: str) -> None:
    assert _address(SimpleNamespace(type_name=kind), "/a/b") == address


def test_storage_without_a_known_url_is_refused() -> None:
    with pytest.raises(ValueError, match="of the kind 'hdfs'"):
        _address(SimpleNamespace(type_name="hdfs"), "/a/b")
