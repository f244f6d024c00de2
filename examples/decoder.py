"""One compact decoder-only transformer in plain PyTorch, shared by the examples, the tests and the benchmarks.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, optionally a head tied to the embedding. It knows
nothing of sharding. It keeps no buffers, and every module that owns parameters can draw them again with
`reset_parameters`, so it can be built on the meta device and filled in shard by shard.

Shapes in comments and docstrings: B batch, S sequence, D model width, H query heads, K key-value heads, E head width,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STD = 0.02

Attend = Callable[..., Tensor]  # with the arguments of F.scaled_dot_product_attention

# How ranks divide the weights of a `Decoder` with `MFSDPStrategy(tensor=2, tensor_plan=TENSOR_PLAN)`: names of modules in it, and styles.
TENSOR_PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.feed_forward.gate": "colwise",
    "blocks.*.feed_forward.up": "colwise",
    "blocks.*.feed_forward.down": "rowwise",
    "head": "colwise_gather_output",
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder.

    Args:
        dim: Model width D.
        layers: Number of blocks.
        heads: Query heads H; `dim` must be a multiple of it, and the head width must be even.
        kv_heads: Key-value heads K; a divisor of `heads`.
        ffn: Inner width of the feed-forward layers.
        vocab: Rows V of the embedding and of the head.
        seq: Sequence length the preset is meant to be trained with, in tokens. The model itself has no limit.
        tie_head: Whether the head is the embedding's own parameter.
        rope_base: Base of the rotary wavelengths.
        norm_eps: Added to the mean square inside RMSNorm.

    Raises:
        ValueError: The sizes do not fit together.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    tie_head: bool = False
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of 2 * heads = {2 * self.heads}, got dim={self.dim}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={self.heads}, got kv_heads={self.kv_heads}")

    @property
    def head_dim(self) -> int:
        """Head width E."""
        return self.dim // self.heads

    @property
    def multiplied(self) -> int:
        """Numbers in weights that each token is multiplied with: all but the embedding, and norms."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.dim * self.ffn) + self.vocab * self.dim


PRESETS: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(dim=256, layers=4, heads=4, kv_heads=4, ffn=704, vocab=1024, seq=128),
    "300m": DecoderConfig(dim=1024, layers=24, heads=16, kv_heads=16, ffn=2816, vocab=32_000, seq=1024),
    "1b": DecoderConfig(dim=2048, layers=24, heads=16, kv_heads=16, ffn=5632, vocab=32_000, seq=4096),
    "8b": DecoderConfig(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14_336, vocab=128_256, seq=4096),
}


class Linear(nn.Linear):
    """A bias-free linear map whose weight is drawn from a normal distribution."""

    def __init__(self, in_features: int, out_features: int, std: float = _STD) -> None:
        self.std = std  # nn.Linear's constructor calls reset_parameters, which reads it
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight again."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A token embedding drawn from a normal distribution."""

    def reset_parameters(self) -> None:
        """Draw the weight again."""
        nn.init.normal_(self.weight, std=_STD)


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last dim, computed in the dtype of its input."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, of shape [..., D]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotary_tables(
    seq: int, head_dim: int, base: float, device: torch.device, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, both float32 of shape [S, E / 2]; `positions` are [S], 0 to S - 1 if not given.

    Low precision would blur neighboring positions of a long sequence, so the angles are always float32, whatever the
    model computes in.
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    places = torch.arange(seq, device=device) if positions is None else positions
    angle = torch.outer(places.to(torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of every head of `x`, of shape [B, heads, S, E], by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share one key-value head."""

    def __init__(self, config: DecoderConfig, attend: Attend = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.attend = attend
        self.head_dim = config.head_dim
        self.query = Linear(config.dim, config.heads * config.head_dim)
        self.key = Linear(config.dim, config.kv_heads * config.head_dim)
        self.value = Linear(config.dim, config.kv_heads * config.head_dim)
        self.out = Linear(config.heads * config.head_dim, config.dim, std=_residual_std(config))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map `x`, of shape [B, S, D], to the same shape; `cos` and `sin` are [S, E / 2].

        The numbers of heads are those that the projections have: with tensor parallelism, this rank's.
        """
        batch, seq, _ = x.shape
        query = self.query(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        mixed = self.attend(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU: a SiLU-gated linear unit between two projections."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.ffn)
        self.up = Linear(config.dim, config.ffn)
        self.down = Linear(config.ffn, config.dim, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, of shape [..., D], to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind its own norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, attend: Attend = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, attend)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map `x`, of shape [B, S, D], to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Token ids in, logits of the next token out.

    Args:
        config: Sizes.
        attend: Attention of queries, keys and values, for ranks that have parts of sequences.
        positions: Where this rank's tokens are in whole sequences, of their number and a device; 0 to S - 1 if not given.
    """

    def __init__(
        self,
        config: DecoderConfig,
        attend: Attend = F.scaled_dot_product_attention,
        positions: Callable[[int, torch.device], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.positions = config, positions
        self.embedding = Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Linear(config.dim, config.vocab)
        if config.tie_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape [B, S, V] for `tokens`, int64 of shape [B, S]; position s sees tokens 0 to s."""
        x = self.embedding(tokens)
        return self.head(self.states(x, *self.rotary(x)))

    def rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `x`, of shape [B, S, D], in its dtype."""
        places = None if self.positions is None else self.positions(x.shape[1], x.device)
        cos, sin = rotary_tables(x.shape[1], self.config.head_dim, self.config.rope_base, x.device, places)
        return cos.to(x.dtype), sin.to(x.dtype)

    def states(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What the head sees, [B, S, D], of embedded tokens of that shape."""
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, float32, 0-D; `logits` is [B, S, V] and `targets` int64 of shape [B, S]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _residual_std(config: DecoderConfig) -> float:
    """Projections into the residual stream start smaller, so that its variance does not grow with depth."""
    return _STD / math.sqrt(2 * config.layers)
