"""What a user says of an optimizer in configure_optimizers holds under the Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_mfsdp import fully_shard_optimizer, sharded_parameters
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, loader, make_trainer, seeded, strict_warnings


class OwnAdamW(torch.optim.AdamW):
    """On no list."""


class Chosen(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = OwnAdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        return fully_shard_optimizer(optimizer, elementwise=True)


def fits(rank: int, world: int) -> list[tuple[bool, dict[str, Any]]]:
    strict_warnings()
    found = []
    for model_class in (Chosen, Classifier):
        model = seeded(model_class)
        trainer = make_trainer(".", world, max_steps=4)
        trainer.fit(model, loader(4, 32, rank, world))
        parameters = [one for group in trainer.optimizers[0].param_groups for one in group["params"]]
        weights = {view.name: view.main.detach().clone() for view in sharded_parameters(model)}
        found.append((any(isinstance(one, DTensor) for one in parameters), weights))
    return found


def test_elementwise_said_in_configure_optimizers_is_not_taken_back() -> None:
    for (chosen_has_dtensors, chosen), (_, known) in run_distributed(fits, 2):
        assert not chosen_has_dtensors
        assert chosen.keys() == known.keys()
        assert all(torch.equal(chosen[name], known[name]) for name in known)
