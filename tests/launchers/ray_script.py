"""A training under Ray Train as a user writes it: `ray_script.py FOLDER --cpus 1 1 --workers 2`, on Ray nodes with so many cores."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ray
from lightning.pytorch import Trainer, seed_everything
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lightning_mfsdp.ray import RayMFSDPStrategy, RayReport, reported_checkpoint
from tests.launchers.events import SEED, KilledOnce, Noted, rows


def train(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    seed_everything(SEED, verbose=False)
    callbacks = [RayReport(every_n_train_steps=config["every"])]
    if config["kill"] is not None:
        callbacks.append(KilledOnce(folder, rank=1, step=config["kill"]))
    trainer = Trainer(
        accelerator="cpu",
        strategy=RayMFSDPStrategy(async_save=config["async_save"]),
        callbacks=callbacks,
        max_epochs=config["epochs"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    path = reported_checkpoint()
    with (folder / f"checkpoints-{ray.train.get_context().get_world_rank()}").open("a") as file:
        file.write(f"{path}\n")
    trainer.fit(Noted(folder), rows(config["rows"]), ckpt_path=path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpus", type=int, nargs="+", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--every", type=int)
    parser.add_argument("--async-save", action="store_true")
    arguments = parser.parse_args()
    cluster = Cluster()
    for node, number in enumerate(arguments.cpus, 1):  # Ray Train takes those of one address for one
        address = {} if node == 1 else {"node_ip_address": f"127.0.0.{node}"}
        cluster.add_node(num_cpus=number, object_store_memory=100 * 2**20, include_dashboard=False, **address)
    ray.init(address=cluster.address)
    result = TorchTrainer(
        train,
        train_loop_config={**vars(arguments), "folder": str(arguments.folder)},
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(arguments.folder / "storage"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    kept = [checkpoint.path for checkpoint, _ in result.best_checkpoints]
    found = {"checkpoint": result.checkpoint.path, "kept": kept, "metrics": result.metrics}
    (arguments.folder / "result.json").write_text(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()
