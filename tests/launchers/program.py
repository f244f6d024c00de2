"""A training as a user writes it, for any launcher: `program.py FOLDER --devices 2`. It goes on from what it finds in the folder.

It ends after `--more` steps, or once there is a file `finish` in the folder.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_mfsdp  # noqa: F401 - registers the strategies
from tests.launchers.events import SEED, FinishedByFile, KilledOnce, Noted, rows


def main(
    folder: Path, *, pause_s: float = 0.0, kill: int | None = None, more: int | None = None, **options: Any
) -> None:
    """Train, with a checkpoint every five steps."""
    seed_everything(SEED, verbose=False)
    saver = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=5, save_last=True)
    callbacks = [saver, FinishedByFile(folder, more)]
    if kill is not None:
        callbacks.append(KilledOnce(folder, rank=1, step=kill))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=-1,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"strategy": "mfsdp", **options},
    )
    # A job of SLURM goes on from its own checkpoint, which its end by a signal has left.
    trainer.fit(Noted(folder, pause_s), rows(4096), ckpt_path=None if "SLURM_JOB_ID" in os.environ else "last")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, required=True)
    # torchrun tells how many of its agents there are now.
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("GROUP_WORLD_SIZE", 1)))
    parser.add_argument("--more", type=int, help="steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep in each step")
    parser.add_argument("--kill", type=int, help="step in which rank 1 ends, in the first start that comes to it")
    given = parser.parse_args()
    main(
        given.folder,
        pause_s=given.pause,
        kill=given.kill,
        more=given.more,
        devices=given.devices,
        num_nodes=given.nodes,
    )
