"""A training as a user writes it whose nodes come and go: `torchrun --nnodes=1:2 ... elastic_script.py FOLDER`, or plain `python`.

Writes the samples of each microbatch, and what happened, into `events-PROCESS` of the folder. Before a step it waits while there is a file
`hold-STEP`, so that whoever starts and kills nodes need not guess when; SIGTERM ends that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_mfsdp import ElasticEnvironment, MFSDPStrategy, latest_checkpoint
from tests.lightning.models import Classifier, dataset, full_state, make_trainer

SIZE, GLOBAL, BATCH, EPOCHS = 64, 8, 2, 2  # eight steps in an epoch, of two microbatches on two ranks or four on one


def main(folder: Path) -> None:
    elastic = "TORCHELASTIC_RUN_ID" in os.environ

    def event(what: str, **more: Any) -> None:
        with (folder / f"events-{os.getpid()}").open("a") as file:
            file.write(json.dumps({"what": what, "time": time.time(), **more}) + "\n")

    class Model(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step = self.trainer.global_step
            event("step", step=step, rank=self.trainer.global_rank, samples=batch[0][:, 0].tolist())
            while (folder / f"hold-{step}").exists():
                time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    class Starts(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            event("start", step=trainer.global_step, world=trainer.world_size, nodes=trainer.num_nodes)

    def release(*_: Any) -> None:
        for path in folder.glob("hold-*"):
            path.unlink(missing_ok=True)

    signal.signal(signal.SIGTERM, release)  # is called beside the Trainer's own handler
    seed_everything(1, verbose=False)
    saver = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=3, save_last=True)
    trainer = make_trainer(
        folder,
        1 if elastic else 2,
        strategy=MFSDPStrategy(global_batch_size=GLOBAL),
        plugins=[ElasticEnvironment()] if elastic else [],
        use_distributed_sampler=True,
        enable_checkpointing=True,
        max_epochs=EPOCHS,
        callbacks=[saver, Starts()],
    )
    model = Model()
    path = latest_checkpoint(trainer)
    event("from", path=path, rank=trainer.global_rank)
    trainer.fit(model, DataLoader(dataset(SIZE), BATCH, shuffle=True), ckpt_path=path)
    weights = full_state(model)
    if trainer.is_global_zero:
        torch.save(weights, folder / "end.pt")
    event("done", step=trainer.global_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
