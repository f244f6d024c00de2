"""The checkpoints under tests/data/tag: what wrote them and what is in them.

Two ranks trained an epoch of five steps at commit fc573bf (bf16-mixed, AdamW in two groups, a learning rate that falls) and saved one
sharded and one full checkpoint. `expected.pt` holds the same weights and optimizer state as whole tensors, gathered in the run itself.
Checkpoints like these exist on people's disks and later versions must read them, so they are never written again. What a version writes
today: `python -m tests.lightning.tag_checkpoint FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import MFSDPStrategy, sharded_parameters
from tests.helpers.distributed import run_distributed
from tests.helpers.optimizer_state import state_of_rows
from tests.lightning.models import Block, loader, make_trainer, strict_warnings

TAG = Path(__file__).resolve().parents[1] / "data" / "tag"
KINDS = {"sharded": "sharded.ckpt", "full": "full.ckpt"}
STEPS = 5
WIDTH = 11  # rows that no number of ranks divides


class TagModel(LightningModule):
    """Tied layers, a weight without dimensions, rows that do not divide, fewer rows than ranks, a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(WIDTH)])
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.blocks[0].linear.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.narrow = nn.Linear(WIDTH, 1)
        self.frozen = nn.Parameter(torch.full((2, WIDTH), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        self.seen += 1
        x = self.narrow(torch.tanh(self.tied(x)) * self.scale + self.frozen.sum(0))
        return F.mse_loss(x.float().flatten(), y.float())

    def configure_optimizers(self) -> dict[str, Any]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Then(Callback):
    """Calls something when what was saved has been restored."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.action(trainer, pl_module)


def batches(rank: int, world: int) -> DataLoader[Any]:
    """An epoch of `STEPS`."""
    return loader(4 // world, 4 * STEPS, rank, world)


def trainer_of(world: int, epochs: int, sharding: str, callbacks: list[Callback]) -> Trainer:
    return make_trainer(
        ".",
        world,
        max_epochs=epochs,
        precision="bf16-mixed",
        strategy=MFSDPStrategy(sharding=sharding, units=["Block"]),
        callbacks=callbacks,
    )


def whole(view: Any, rows: Tensor) -> Tensor:
    """A tensor of the parameter's shape from every rank's rows."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (view.rows.start, rows.detach().clone()))
    found = torch.zeros(view.shape or (1,), dtype=rows.dtype)
    for start, part in parts:
        if part.numel():
            part = part.reshape(-1, *found.shape[1:])
            found[start : start + len(part)] = part
    return found.reshape(view.shape)


def content(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Everything there is, in plain whole tensors. Every rank calls it."""
    (optimizer,) = trainer.optimizers
    weights: dict[str, Tensor] = {}
    state: dict[str, dict[str, Tensor]] = {}
    for view in sharded_parameters(module):
        rows = view.main
        weights[view.name] = whole(view, rows)
        if not view.requires_grad:
            continue
        own = state_of_rows(optimizer).get(view.local, {})  # a rank without rows has none
        moments = {key: own.get(key, torch.zeros_like(rows)) for key in ("exp_avg", "exp_avg_sq")}
        steps = [one for one in _gathered(own.get("step")) if one is not None]
        state[view.name] = {**{key: whole(view, value) for key, value in moments.items()}, "step": steps[0]}
    assert module.lr_schedulers() is not None
    return {
        "weights": weights,
        "state": state,
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()},
        "lr": torch.tensor([group["lr"] for group in optimizer.param_groups]),
        "decay": torch.tensor([group["weight_decay"] for group in optimizer.param_groups]),
        "scheduler_steps": torch.tensor(module.lr_schedulers().last_epoch),  # type: ignore[union-attr]
        "global_step": torch.tensor(trainer.global_step),
    }


def _gathered(value: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Leaves by path."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        found.update(flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value})
    return found


def restored(world: int, rank: int, kind: str, sharding: str) -> dict[str, Any]:
    """What a Trainer finds after it read one of the checkpoints."""
    found: dict[str, Any] = {}
    torch.manual_seed(4)  # other weights than those that were saved
    trainer = trainer_of(world, 2, sharding, [Then(lambda trainer, module: found.update(content(trainer, module)))])
    trainer.fit(TagModel(), batches(rank, world), ckpt_path=str(TAG / KINDS[kind]))
    return found


def write(rank: int, world: int, folder: str) -> None:
    strict_warnings()
    torch.manual_seed(17)
    trainer = trainer_of(world, 1, "optim_grads_params", [])
    model = TagModel()
    trainer.fit(model, batches(rank, world))
    for kind, name in KINDS.items():
        trainer.strategy.state_dict_type = kind  # type: ignore[attr-defined]
        trainer.save_checkpoint(f"{folder}/{name}")
    found = content(trainer, model)
    if rank == 0:
        torch.save(found, f"{folder}/expected.pt")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    run_distributed(write, 2, str(Path(sys.argv[1]).resolve()))
