"""What a notebook would run: DDP and this package in forked processes of a program that goes on. Writes what was seen to a folder."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_mfsdp  # noqa: F401 - registers the strategies


class Model(BoringModel):
    """Logs its loss."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.step(batch)
        self.log("loss", loss, sync_dist=True)
        return loss


class Late(LightningModule):
    """Makes its layers in configure_model, that is in the forks."""

    def configure_model(self) -> None:
        self.inner = torch.nn.Linear(32, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.inner(batch).square().mean()

    train_dataloader = BoringModel.train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """All that this process and its children write to stdout and stderr."""
    kept = os.dup(1), os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for place, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, place)
                os.close(descriptor)


class Tied(BoringModel):
    """On the meta device, with a weight that two modules share and a buffer that no state dict has."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()
            self.first = torch.nn.Linear(32, 32, bias=False)
            self.second = torch.nn.Linear(32, 32, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("scale", torch.ones(1), persistent=False)

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.second(self.first(x)) * self.scale)


def plain_trainer(steps: int) -> Trainer:
    return Trainer(
        strategy="mfsdp_notebook",
        devices=2,
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
    )


def fit_tied() -> dict[str, object]:
    model = Tied()
    for _ in range(2):
        trainer = plain_trainer(2)
        trainer.fit(model)
    return {
        "tied": model.first.weight is model.second.weight,
        "scale": model.scale.tolist(),
        "finite": bool(torch.isfinite(model(torch.ones(1, 32))).all()),
    }


def fit_late(output: Path) -> None:
    with output_to(output):
        trainer = plain_trainer(1)
        trainer.fit(Late())


def main(folder: Path) -> None:
    found: dict[str, dict[str, object]] = {}
    with output_to(folder / "first.txt"):  # what is said once in a process
        Trainer(accelerator="cpu", default_root_dir=folder)
    # DDP forks even one process, so its warnings are not known here when ours runs in this process.
    for strategy, devices in (("ddp_notebook", 1), ("ddp_notebook", 2), ("mfsdp_notebook", 2), ("mfsdp_notebook", 1)):
        torch.manual_seed(1)
        model = Model()
        filters = list(warnings.filters)
        with output_to(folder / f"{strategy}-{devices}.txt"):
            trainer = Trainer(
                strategy=strategy,
                devices=devices,
                accelerator="cpu",
                precision="bf16-mixed",
                max_epochs=1,
                limit_train_batches=4,
                limit_val_batches=2,
                log_every_n_steps=1,
                default_root_dir=folder,
            )
            trainer.fit(model)
        is_plain = devices == 2 or strategy == "ddp_notebook"
        found[f"{strategy}-{devices}"] = {
            "weight": model.layer.weight.tolist() if is_plain else [],
            "is plain": type(model.layer.weight.data) is torch.Tensor,
            "loss": float(trainer.callback_metrics["loss"]),
            "checkpoint": Path(trainer.checkpoint_callback.best_model_path).exists(),
            "filters": filters == list(warnings.filters),
        }
        if devices == 2 and strategy == "mfsdp_notebook":
            fit_late(folder / "late.txt")
            with output_to(folder / "tied.txt"):
                found["tied"] = fit_tied()
    try:  # there is a process group of one now
        fit_late(folder / "refused.txt")
    except RuntimeError as error:
        found["refused"] = {"error": str(error)}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
