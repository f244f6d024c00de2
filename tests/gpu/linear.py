"""A model whose loss is linear in its weights, so that all ranks have the gradients of one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["DIM", "LinearLoss", "made"]

DIM = 512


class LinearLoss(nn.Sequential):
    """Linear layers without bias."""

    def forward(self, number: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(number)
        factors = [torch.randn(DIM, DIM, generator=generator, device="cuda") for _ in self]
        return torch.stack([(layer.weight * factor).sum() for layer, factor in zip(self, factors, strict=True)]).sum()


def made(layers: int) -> LinearLoss:
    """On the GPU, the same each time."""
    torch.manual_seed(0)
    return LinearLoss(*(nn.Linear(DIM, DIM, bias=False) for _ in range(layers))).cuda()
