"""A training as a user writes it, with a fault in its first start: `torchrun ... torchrun_script.py FOLDER KIND RANK`.

Writes what happened, and when, into `events-RANK` of the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_mfsdp  # noqa: F401  # registers the strategy
from tests.lightning.models import Classifier, dataset, make_trainer
from tests.stops.faults import happen

BATCHES, FAULT_AT = 12, 7


def main(folder: Path, kind: str, faulty_rank: int) -> None:
    rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def event(what: str, **more: Any) -> None:
        with (folder / f"events-{rank}").open("a") as file:
            file.write(json.dumps({"what": what, "start": start, "time": time.time(), **more}) + "\n")

    class Model(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if start == 0 and batch_idx == FAULT_AT and rank == faulty_rank:
                event("fault")
                happen(kind)
            return super().training_step(batch, batch_idx)

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            event("step", step=trainer.global_step, batch=batch_idx, rows=batch[0][:, 0].tolist())

    seed_everything(1, verbose=False)
    saver = ModelCheckpoint(folder, every_n_train_steps=5, save_last=True, save_on_exception=True)
    trainer = make_trainer(
        folder,
        2,
        use_distributed_sampler=True,
        enable_checkpointing=True,
        callbacks=[saver, Watch()],
        accelerator=os.environ.get("MFSDP_TEST_ACCELERATOR", "cpu"),
    )
    data = torch.utils.data.DataLoader(dataset(BATCHES * 2 * 4), batch_size=4, shuffle=True)
    event("ready")
    try:
        trainer.fit(Model(), data, ckpt_path="last")
    except BaseException as error:
        event("error", error=f"{type(error).__name__}: {error}")
        raise
    event("done", step=trainer.global_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
