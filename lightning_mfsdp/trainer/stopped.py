"""Chooses where a run that a signal stopped is saved: in the place where its next start looks for a checkpoint by itself.

fit(ckpt_path="last")    in folders of ModelCheckpoints, for names that begin with their word for the last one
fit() in a SLURM job     in the Trainer's default_root_dir, for the hpc_ckpt_N.ckpt with the highest N
"""

from __future__ import annotations

import os
import re

from lightning_mfsdp._lightning_api import ModelCheckpoint, OnExceptionCheckpoint, Trainer
from lightning_mfsdp.checkpoint.io.remote import names_in

__all__ = ["Last", "next_hpc_path"]

_HPC = "hpc_ckpt_"


class Last:
    """The checkpoint that `ckpt_path="last"` will find: what a ModelCheckpoint calls the last one is replaced, as it would do.

    Collective, as are its methods.

    Args:
        saver: Its state says from now on that this is its last checkpoint, in every checkpoint that is saved.
        trainer: The Trainer of both.

    Attributes:
        path: Where to save.
    """

    def __init__(self, saver: ModelCheckpoint, trainer: Trainer) -> None:
        self._saver, self._trainer = saver, trainer
        metrics = saver._monitor_candidates(trainer)
        self.path = saver.format_checkpoint_name(metrics, saver.CHECKPOINT_NAME_LAST)
        version = saver.STARTING_VERSION
        while (
            saver._enable_version_counter
            and self.path != saver.last_model_path
            and saver.file_exists(self.path, trainer)
        ):
            self.path = saver.format_checkpoint_name(metrics, saver.CHECKPOINT_NAME_LAST, ver=version)
            version += 1
        self._previous, saver.last_model_path = saver.last_model_path, self.path

    @classmethod
    def of(cls, trainer: Trainer) -> Last | None:
        """The last checkpoint of the first ModelCheckpoint, one with `save_last` if there is one; `None` where nothing is to be saved."""
        if trainer.fast_dev_run or any(  # type: ignore[attr-defined]
            isinstance(saver, OnExceptionCheckpoint) for saver in trainer.checkpoint_callbacks
        ):
            return None  # an OnExceptionCheckpoint saves by itself, and ckpt_path="last" finds what it saved
        savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
        with_last = [saver for saver in savers if saver.save_last]
        if not savers or any(
            saver._last_global_step_saved == trainer.global_step for saver in with_last if not saver.save_weights_only
        ):
            return None
        return cls((with_last or savers)[0], trainer)

    def save(self) -> None:
        """Save the checkpoint, with optimizers, also for a ModelCheckpoint that saves weights only; then remove what it replaces."""
        self._trainer.save_checkpoint(self.path)
        previous, saver = self._previous, self._saver
        if previous and saver._should_remove_checkpoint(self._trainer, previous, self.path):
            self._trainer.strategy.remove_checkpoint(previous)


def next_hpc_path(folder: str) -> str:
    """The path that a requeued job will find in a folder or URL: its number is above those of all names that Lightning looks at."""
    numbers = [re.sub("[^0-9]", "", name.split(_HPC)[-1]) for name in names_in(folder) if _HPC in name]
    return os.path.join(folder, f"{_HPC}{max((int(number) for number in numbers if number), default=0) + 1}.ckpt")
