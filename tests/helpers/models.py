"""Small models whose shapes are awkward on purpose: odd rows, fewer rows than ranks, biases, an embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 13


class Block(nn.Module):
    """A residual block with a norm and two linears."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, blocks, head; the head may be tied to the embedding."""

    def __init__(self, dim: int = 10, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        if tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def build(
    seed: int = 0, *, dim: int = 10, layers: int = 3, tied: bool = False, dtype: torch.dtype = torch.float32
) -> Decoder:
    """The same model for the same seed."""
    torch.manual_seed(seed)
    return Decoder(dim, layers, tied).to(dtype)


def batch(step: int, rows: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Global batch of a step: ids and targets `[rows, length]`."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in float32."""
    return F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten(), reduction=reduction)
