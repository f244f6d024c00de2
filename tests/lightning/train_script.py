"""A training script as a user writes it: started by Lightning, by torchrun, or through LightningCLI. Writes what each rank saw."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities.model_summary import ModelSummary

import lightning_mfsdp
from tests.lightning.models import Classifier, dataset, strict_warnings


def main(folder: Path) -> None:
    strict_warnings()
    seed_everything(1, verbose=False)
    model = Classifier()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="mfsdp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        num_sanity_val_steps=1,
    )
    train = torch.utils.data.DataLoader(dataset(), batch_size=4)
    trainer.fit(model, train, torch.utils.data.DataLoader(dataset(16), batch_size=4))
    with lightning_mfsdp.unshard(model):
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sampler = type(trainer.train_dataloader.sampler).__name__
    result = {
        "weights": weights,
        "parameters": ModelSummary(model).total_parameters,
        "world_size": trainer.world_size,
        "batches": trainer.num_training_batches,
        "sampler": sampler,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }
    torch.save(result, folder / f"rank-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
