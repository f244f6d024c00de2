"""A loss that is linear in the weights, so that gradients are known exactly: every sum of them is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["linear_loss"]


def linear_loss(parameters: Iterable[Tensor], step: int) -> Tensor:
    """The sum of all numbers, each times an integer of its own in each step."""
    generator = torch.Generator().manual_seed(step)
    products = [(one * torch.randint(-60, 60, one.shape, generator=generator)).sum() for one in parameters]
    return torch.stack(products).sum()
