"""Training under Ray Train, which starts the workers, and starts them again after a failure.

    def train():
        trainer = Trainer(strategy=RayMFSDPStrategy(), callbacks=[RayReport()], max_epochs=10)
        trainer.fit(model, ckpt_path=reported_checkpoint())

    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=16, use_gpu=True), run_config=RunConfig(...)).fit()

Ray is imported where it is used, which is in its workers.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import torch

from lightning_mfsdp._lightning_api import CheckpointCallback, LightningModule, Trainer
from lightning_mfsdp.checkpoint.io.locate import locate
from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import STEP_OUTPUT

__all__ = ["RayMFSDPStrategy", "RayReport", "reported_checkpoint"]

# Inside the folder that Ray calls a checkpoint; Ray's own callback for Lightning uses this name, too.
FILE = "checkpoint.ckpt"

# Ray describes storage by a file system of pyarrow and a path in it; checkpoints are read and written by paths, or URLs of fsspec.
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "abfs://"}


class RayMFSDPStrategy(MFSDPStrategy):
    """`MFSDPStrategy` in a worker of Ray Train, which chooses its device and its rank, on any number of nodes.

    Leave `num_nodes` and `devices` of the Trainer at their defaults, give it no plugin of Ray, and do not call Ray's `prepare_trainer`,
    which knows Ray's own strategies only.

    Args:
        options: As for `MFSDPStrategy`.

    Raises:
        ValueError: `timeout`, `process_group_backend` or `cluster_environment` was given: Ray connects the processes, as its
            `TorchConfig` says, and knows their ranks.
    """

    def __init__(self, **options: Any) -> None:
        for name, instead in (("timeout", "timeout_s"), ("process_group_backend", "backend")):
            if options.get(name) is not None:
                raise ValueError(
                    f"RayMFSDPStrategy({name}=...) would have no effect, because Ray connects the processes; give TorchTrainer "
                    f"torch_config=TorchConfig({instead}=...) instead"
                )
        environment = options.pop("cluster_environment", None)
        if environment is not None:
            raise ValueError(
                f"RayMFSDPStrategy(cluster_environment={type(environment).__name__}(...)): ranks of Ray's workers come from Ray. Leave it "
                "out; for processes that Ray has not started use MFSDPStrategy, which takes one"
            )
        from ray.train.lightning import RayLightningEnvironment

        super().__init__(cluster_environment=RayLightningEnvironment(), **options)

    @property
    def root_device(self) -> torch.device:
        """The device that Ray has given this worker."""
        import ray.train.torch

        device: torch.device = ray.train.torch.get_device()
        return device

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node."""
        import ray.train

        return int(ray.train.get_context().get_local_world_size())

    @property
    def configured_world_size(self) -> int:
        """Number of workers of the run; nodes may have different numbers of them."""
        return self.world_size


class RayReport(CheckpointCallback):
    """Saves a checkpoint into the storage of a Ray run and reports it, with the metrics that were logged, after every training epoch.

    Ranks write their rows to their final place, without a temporary folder on each node that would be uploaded, and Ray learns of the
    checkpoint once it is complete. Ray deletes old ones (`CheckpointConfig(num_to_keep=...)`). `RunConfig(storage_path=...)` must be a
    folder that all nodes share, or a bucket that fsspec can write; before the first step it is checked that every rank sees it.

    Args:
        every_n_train_steps: Save after every so many steps of the optimizer, and at the end of training, instead of after epochs.

    Raises:
        ValueError: `every_n_train_steps` is below 1.
    """

    def __init__(self, *, every_n_train_steps: int | None = None) -> None:
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(
                f"RayReport(every_n_train_steps={every_n_train_steps}): expected 1 or more, or None for epochs"
            )
        self._every = every_n_train_steps
        self._saved_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All ranks see the folder of the run.

        Raises:
            TypeError: The strategy is not `RayMFSDPStrategy`.
            NotSharedError: A rank does not see the folder.
        """
        import ray.train

        if not isinstance(trainer.strategy, RayMFSDPStrategy):
            raise TypeError(
                f"RayReport works with RayMFSDPStrategy, but the Trainer has {type(trainer.strategy).__name__}; pass "
                "Trainer(strategy=RayMFSDPStrategy()), or use Ray's RayTrainReportCallback with Ray's strategies"
            )
        storage = ray.train.get_context().get_storage()
        folder = _address(storage.storage_filesystem, storage.experiment_fs_path)
        locate(folder).check_shared(Ranks(sees_within=trainer.strategy.shared_folder_timeout))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What a resumed run begins with is saved already."""
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Save and report, if it is time."""
        if self._every is not None and trainer.global_step % self._every == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save and report, unless that happens every so many steps."""
        if self._every is None:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save and report the last steps."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        import ray.train

        step = trainer.global_step
        if step == self._saved_step:
            return
        self._saved_step = step
        storage = ray.train.get_context().get_storage()
        # Ray deletes what it no longer keeps, by name: a second fit, or a start that goes on from before, needs names of its own.
        name = f"checkpoint_step={step}_{trainer.strategy.broadcast(uuid.uuid4().hex[:8])}"
        path = storage.build_checkpoint_path_from_name(name)
        trainer.save_checkpoint(f"{_address(storage.storage_filesystem, path)}/{FILE}")
        assert isinstance(trainer.strategy, RayMFSDPStrategy)
        trainer.strategy.finish_saving()  # with async_save: Ray may delete earlier ones as soon as it knows of this one
        ray.train.report(
            {name: value.item() for name, value in trainer.callback_metrics.items()}
            | {"epoch": trainer.current_epoch, "step": step},
            checkpoint=ray.train.Checkpoint(path, storage.storage_filesystem),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )
        # `report` returns before Ray has read it, and what it has not read when a worker fails is lost.
        ray.train.get_all_reported_checkpoints(consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED)


def reported_checkpoint() -> str | None:
    """Path or URL of the checkpoint that this run has reported last, for `trainer.fit(ckpt_path=...)`; the same on all ranks.

    `None` in the first start of a run. Ray knows the run by its name and `storage_path`, also in another program and with another number
    of workers. Checkpoints of Ray's `RayTrainReportCallback` are found as well.
    """
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else f"{_address(checkpoint.filesystem, checkpoint.path)}/{FILE}"


def _address(filesystem: Any, path: str) -> str:
    """The path, or the URL for fsspec, of a path in a file system of pyarrow.

    Raises:
        ValueError: There is no URL known for this kind.
    """
    scheme = _SCHEMES.get(filesystem.type_name)
    if scheme is None:
        raise ValueError(
            f"the storage of this Ray run is of the kind {filesystem.type_name!r}, and checkpoints are saved to {', '.join(_SCHEMES)}; "
            "give RunConfig(storage_path=...) a folder that all nodes share"
        )
    return f"{scheme}{path}"
