"""The decoder of examples/decoder.py in modules of Transformer Engine: norms fused with the projections behind them, and those joined.

The same sizes, residuals, rotary positions and attention; embedding and head are those of the plain decoder and compute in bfloat16. It
runs in bfloat16 as it is, and in FP8 inside of `transformer_engine.pytorch.autocast`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.decoder import DecoderConfig, Embedding, Linear, rotary_tables, rotate

__all__ = ["TeBlock", "TeDecoder"]

_STD = 0.02


class TeBlock(nn.Module):
    """Attention and SwiGLU feed-forward, in four modules of the library.

    Args:
        te: `transformer_engine.pytorch`.
        config: Sizes.
        options: For every module of the library.
    """

    def __init__(self, te: Any, config: DecoderConfig, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        draw, draw_small = (
            partial(nn.init.normal_, mean=0.0, std=std) for std in (_STD, _STD / math.sqrt(2 * config.layers))
        )
        normed = {"normalization": "RMSNorm", "eps": config.norm_eps, "init_method": draw, "bias": False, **options}
        plain = {"init_method": draw_small, "bias": False, **options}
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query_key_value = te.LayerNormLinear(config.dim, queries + 2 * keys, **normed)
        self.out = te.Linear(queries, config.dim, **plain)
        self.gate_up = te.LayerNormLinear(config.dim, 2 * config.ffn, **normed)
        self.down = te.Linear(config.ffn, config.dim, **plain)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map `x`, of shape [B, S, D], to the same shape."""
        x = x + self._attention(x, cos, sin)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        joined = self.query_key_value(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        query, key, value = joined.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))


class TeDecoder(nn.Module):
    """Token ids in, logits of the next token out; built in bfloat16.

    Args:
        te: `transformer_engine.pytorch`.
        config: Sizes.
        device: Where it is built.
        fused: Linear modules add the gradient of their weight to memory of a sharding engine.
    """

    def __init__(
        self,
        te: Any,
        config: DecoderConfig,
        device: torch.device,
        *,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        dtype = torch.bfloat16
        options = {"params_dtype": dtype, "device": device, "fuse_wgrad_accumulation": fused}
        with torch.device(device):
            self.embedding = Embedding(config.vocab, config.dim).to(dtype)
            self.head = Linear(config.dim, config.vocab).to(dtype)
        self.blocks = nn.ModuleList(TeBlock(te, config, **options) for _ in range(config.layers))
        self.norm = te.RMSNorm(config.dim, eps=config.norm_eps, dtype=dtype, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape [B, S, V] for `tokens`, int64 of shape [B, S]; position s sees tokens 0 to s."""
        x = self.embedding(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.config.head_dim, self.config.rope_base, tokens.device)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
