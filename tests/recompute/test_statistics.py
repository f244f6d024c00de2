"""Norms with running statistics inside of what is computed again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_mfsdp.recompute import Recompute, apply_recompute
from tests.recompute.models import DIM, batch, equal, loss_of


def test_a_batch_counts_once_for_the_statistics_of_norms() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.down = nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.norm(x).tanh())

    def trained(config: Recompute) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, DIM), *(Normed() for _ in range(4)))
        model[2].eval()  # one that reads its statistics
        apply_recompute(model, config)
        for step in range(3):
            loss_of(model, batch(step)).backward()
        return [*model.buffers(), *(parameter.grad for parameter in model.parameters())]

    plain = trained(Recompute(method="none"))
    for config in (
        Recompute(),
        Recompute(num_layers=3),
        Recompute(offload=True),
        Recompute(method="selective", modules=["*.norm"]),
        Recompute(method="selective", save_ops=["matmul"]),
    ):
        assert equal(trained(config), plain), config
