"""A small language model with a predictor behind it, and batches of packed samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.mtp import MultiTokenPredictor
from lightning_mfsdp.ops import LinearLossHead

VOCAB, DIM, IGNORED = 19, 8, -100


class CausalLayer(nn.Module):
    """Attention to positions before, of the same sample if a mask says so, and dropout."""

    def __init__(self, dim: int = DIM, dropout: float = 0.0) -> None:
        super().__init__()
        self.inputs = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.inputs(x).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return x + F.dropout(self.out(mixed), self.dropout, self.training)


class Model(nn.Module):
    """Embedding, two layers, a head that may be tied, and a predictor."""

    def __init__(self, *, tied: bool = True, dim: int = DIM, dropout: float = 0.0, **predictor: Any) -> None:
        super().__init__()
        layer = partial(CausalLayer, dim, dropout)
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(layer() for _ in range(2))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = LinearLossHead(dim, VOCAB)
        self.predictor = MultiTokenPredictor(dim, layer, **predictor)
        if tied:
            self.head.weight = self.embedding.weight

    def states(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        embeddings = x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask)
        return embeddings, self.norm(x)

    def forward(
        self, ids: Tensor, labels: Tensor, documents: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The model's own loss, and those of the predictor `[D]`."""
        embeddings, hidden = self.states(ids, mask)
        states = self.predictor(hidden, embeddings, mask, documents=documents)
        return self.head(hidden, labels), self.predictor.losses(states, labels, self.head, documents)

    def loss(self, *batch: Tensor | None) -> Tensor:
        main, ahead = self(*batch)
        return main + self.predictor.weighted(ahead)


def build(**options: Any) -> Model:
    """The same weights for the same options."""
    torch.manual_seed(0)
    return Model(**options)


def batch(step: int, rows: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    """Ids and labels `[rows, length]`, some of which are not learned."""
    ids = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(step))
    labels = ids[:, 1:].clone()
    labels[0, 2] = IGNORED
    return ids[:, :-1], labels


def same_document(documents: Tensor) -> Tensor:
    """What attention may look at `[B, S, S]`."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (documents[:, :, None] == documents[:, None]) & causal


def samples_of(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]
