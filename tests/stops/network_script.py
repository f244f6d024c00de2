"""A training on two nodes that stops for a fault: `network_script.py FOLDER PHASE`, started by test_networks.py once for each rank.

In the phase each rank writes `reached-RANK` into the folder and goes on once `happened` is there, which whoever makes the fault writes.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mfsdp import MFSDPStrategy
from tests.lightning.models import Classifier, dataset, make_trainer

# Where each phase stops: a hook of a callback, and of its calls the first, or the one after a complete checkpoint.
HOOKS = {
    "set-up": "setup",
    "step": "on_train_batch_start",
    "validation": "on_validation_batch_start",
    "save": "on_save_checkpoint",
    "load": "on_load_checkpoint",
}
SAVED_EVERY, BATCHES = 3, 8


class Stop(Callback):
    """Waits for the fault in one call of one hook."""

    def __init__(self, folder: Path, phase: str) -> None:
        self._folder, self._call = folder, 0
        wanted = {"step": 5, "save": 2}.get(phase, 1)

        def stop(trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.sanity_checking:
                return
            self._call += 1
            if self._call == wanted:
                (folder / f"reached-{trainer.global_rank}").touch()
                until = time.monotonic() + 300
                while not (folder / "happened").exists() and time.monotonic() < until:
                    time.sleep(0.02)

        if phase in HOOKS:
            setattr(self, HOOKS[phase], stop)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._call}  # so that it takes part in loading


def main(folder: Path, phase: str) -> None:
    seed_everything(1, verbose=False)
    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=SAVED_EVERY, save_last=True)
    trainer = make_trainer(
        folder,
        2,
        strategy=MFSDPStrategy(timeout=timedelta(minutes=20)),
        num_nodes=2,
        use_distributed_sampler=True,
        enable_checkpointing=True,
        callbacks=[saver, Stop(folder, phase)],
        val_check_interval=4,
        limit_val_batches=2,
    )
    rows = torch.utils.data.DataLoader(dataset(BATCHES * 4 * 4), batch_size=4)
    last = folder / "saved" / "last.ckpt"
    trainer.fit(Classifier(), rows, rows, ckpt_path=last if phase == "load" else None)
    (folder / f"done-{trainer.global_rank}").write_text(str(trainer.global_step))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
