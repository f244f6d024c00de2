"""A training script as a user writes it: started by Lightning, by torchrun, by SLURM or by hand. Writes what each rank saw."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities.model_summary import ModelSummary

import lightning_mfsdp
from tests.lightning.models import Classifier, dataset, strict_warnings


def main(folder: Path, devices: int, num_nodes: int, outer_size: int) -> None:
    strict_warnings()
    seed_everything(1, verbose=False)
    model = Classifier()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy="mfsdp" if outer_size == 1 else lightning_mfsdp.MFSDPStrategy(outer_size=outer_size),
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
    mesh = trainer.strategy.device_mesh
    result = {
        "weights": weights,
        "parameters": ModelSummary(model).total_parameters,
        "world_size": trainer.world_size,
        "node_rank": trainer.node_rank,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        "batches": trainer.num_training_batches,
        "sampler": type(trainer.train_dataloader.sampler).__name__,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
    }
    torch.save(result, folder / f"rank-{trainer.global_rank}.pt")
    trainer.strategy.barrier()  # the end of the first process is the end of all for whoever has started it


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--outer-size", type=int, default=1)
    main(**vars(parser.parse_args()))
    # Threads that gloo still winds down can abort the interpreter's own exit, now and then, under any strategy.
    sys.stdout.flush()
    os._exit(0)
