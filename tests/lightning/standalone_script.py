"""One script for both names of Lightning, chosen by LIGHTNING_MFSDP_NAMESPACE. Trains on two processes; writes what each rank saw."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import lightning_mfsdp.fabric
from lightning_mfsdp.callbacks import NaNGradientReporter, ShardedModelSummary

NAMESPACE = os.environ.get("LIGHTNING_MFSDP_NAMESPACE", "lightning.pytorch")
pl = importlib.import_module(NAMESPACE)
fabric_package = importlib.import_module({"lightning.pytorch": "lightning.fabric"}.get(NAMESPACE, "lightning_fabric"))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = batch
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = (x * self.scale).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(folder: Path, **options: object) -> object:
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="mfsdp",
        precision="bf16-mixed",
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        callbacks=[NaNGradientReporter(), ShardedModelSummary()],
        default_root_dir=folder,
        **options,
    )


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    for message in (".*isinstance.treespec, LeafSpec.*", ".*does not have many workers.*", ".*no `val_dataloader`.*"):
        warnings.filterwarnings("ignore", message=message)
    data = torch.utils.data.DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), batch_size=4)
    torch.manual_seed(1)
    model, first = Model(), trainer(folder, max_epochs=1)
    first.fit(model, data)
    first.save_checkpoint(folder / "half.ckpt")
    torch.manual_seed(2)
    model, second = Model(), trainer(folder, max_epochs=2)
    second.fit(model, data, ckpt_path=folder / "half.ckpt")
    with lightning_mfsdp.unshard(model):
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    fabric = fabric_package.Fabric(accelerator="cpu", devices=2, strategy="mfsdp", precision="bf16-mixed")
    fabric.launch()
    torch.manual_seed(3)
    module = nn.Linear(8, 8)
    looped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.backward(looped(torch.ones(2, 8)).square().mean())
    optimizer.step()
    with lightning_mfsdp.unshard(module):
        weights |= {f"fabric.{name}": parameter.detach().clone() for name, parameter in module.named_parameters()}
    result = {
        "weights": weights,
        "steps": second.global_step,
        "loss": float(second.callback_metrics["loss"]),
        "strategy": [kind.__module__.split(".")[0] for kind in type(second.strategy).__mro__],
        "imported": sorted({"lightning", "pytorch_lightning", "lightning_fabric"} & sys.modules.keys()),
    }
    torch.save(result, folder / f"rank-{second.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Threads that gloo still winds down can abort the interpreter's own exit, now and then, under any strategy.
    sys.stdout.flush()
    os._exit(0)
