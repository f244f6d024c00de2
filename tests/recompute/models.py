"""A small stack of layers with dropout, whose layers take more than one argument, and a step of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DIM = 8
OUT = 3


class Layer(nn.Module):
    """Two matrix products with a nonlinearity and a dropout in between. Every input takes part in the result."""

    def __init__(self, dim: int = DIM, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, width * dim)
        self.down = nn.Linear(width * dim, dim)

    def forward(self, x: Tensor, factor: float = 1.0, *, mask: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.3, self.training)
        return x + factor * self.down(hidden) * mask


class Stack(nn.Module):
    """Layers in a list; a first and a last projection belong to the root."""

    def __init__(self, layers: int = 4, dim: int = DIM, **sizes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(Layer(dim, **sizes) for _ in range(layers))
        self.out = nn.Linear(dim, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        mask = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x, 0.5, mask=mask)
        return self.out(x)


def build(seed: int = 0, **options: int) -> Stack:
    torch.manual_seed(seed)
    return Stack(**options)


def batch(step: int, rank: int = 0, rows: int = 4, dim: int = DIM) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def steps(model: nn.Module, count: int = 3, rank: int = 0, microbatches: int = 1) -> list[Tensor]:
    """Losses, and every parameter's gradient after the last step. Dropout draws the same numbers for the same calls."""
    torch.manual_seed(5)
    losses = []
    for step in range(count):
        model.zero_grad()
        for micro in range(microbatches):
            loss = loss_of(model, batch(10 * step + micro, rank))
            loss.backward()
            losses.append(loss.detach())
    return losses + [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(*pair) for pair in zip(first, second, strict=True))
