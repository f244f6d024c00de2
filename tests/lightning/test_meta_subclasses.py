"""A layer that inherits `reset_parameters` and adds values: the Trainer asks for them, and then trains as with a model on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_mfsdp import ShardingError
from tests.helpers.distributed import run_distributed
from tests.lightning.models import make_trainer, strict_warnings


class MaskedLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).bool())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class SetsMask(MaskedLinear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "mask"):  # not yet where the constructor of nn.Linear calls this
            self.mask.copy_(torch.tril(torch.ones(8, 8)))


class Masked(LightningModule):
    def __init__(self, layer: type[nn.Module], device: str) -> None:
        super().__init__()
        self.made, self.where = layer, device
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self, "inner"):
            with torch.device(self.where):
                self.inner, self.head = self.made(), nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.head(self.inner(batch)) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses(layer: type[nn.Module], device: str, world_size: int) -> list[float]:
    torch.manual_seed(0)
    model = Masked(layer, device)
    batches = DataLoader(torch.arange(12 * 8.0).sin().view(12, 8), batch_size=4)  # type: ignore[arg-type]
    make_trainer("", world_size, max_steps=3, max_epochs=-1).fit(model, batches)
    return model.losses


def on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    strict_warnings()
    with pytest.raises(ShardingError) as refused:
        losses(MaskedLinear, "meta", world_size)
    return {
        "refused": str(refused.value),
        "meta": losses(SetsMask, "meta", world_size),
        "cpu": losses(MaskedLinear, "cpu", world_size),
    }


def test_what_a_subclass_adds_is_asked_for_and_then_trains_as_on_the_cpu() -> None:
    for found in run_distributed(on_ranks, 2):
        assert "inner (MaskedLinear) has mask on the meta device, and reset_parameters(), inherited" in found["refused"]
        assert len(found["cpu"]) == 3
        assert found["meta"] == found["cpu"]
