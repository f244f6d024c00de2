"""Layers that use the seam of `moe.saving` as experts do: static buffers, a live prefix known to the device only, poison behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_mfsdp.moe import ActivationSaver, OrdinarySaver
from lightning_mfsdp.moe.stash import RowStash, StashConfig

NAN = float("nan")


class _ToyExpert(torch.autograd.Function):
    """tanh(x @ up) @ down for the live rows of x [capacity, dim]; saves x and x @ up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, live: Tensor, saver: ActivationSaver) -> Tensor:
        hidden = torch.where(is_live(x, live), x @ up, NAN)
        ctx.saver = saver
        ctx.save_for_backward(up, down, live, *saver.save(ctx, [x, hidden], live))
        return torch.where(is_live(x, live), torch.tanh(hidden) @ down, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        up, down, live, *kept = ctx.saved_tensors
        x, hidden = ctx.saver.load(ctx, kept)
        x, hidden, grad = (torch.where(is_live(x, live), tensor, 0.0) for tensor in (x, hidden, grad))
        active = torch.tanh(hidden)
        grad_hidden = (grad @ down.T) * (1 - active * active)
        return grad_hidden @ up.T, x.T @ grad_hidden, active.T @ grad, None, None


def is_live(x: Tensor, live: Tensor) -> Tensor:
    """[capacity, 1]: whether a row means something."""
    return (torch.arange(x.shape[0], device=x.device) < live)[:, None]


class ToyExperts(nn.Module):
    """An expert for tokens whose first feature is above a threshold; others pass. Buffers have room for `slack` times all tokens."""

    def __init__(self, dim: int, threshold: float = 0.0, slack: int = 1) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(2 * dim, dim) / dim**0.5)
        self.register_buffer("threshold", torch.tensor(threshold))
        self.slack = slack
        self.saver: ActivationSaver = OrdinarySaver()

    def forward(self, tokens: Tensor) -> Tensor:
        chosen = tokens[:, 0] > self.threshold
        order = torch.argsort(~chosen, stable=True)
        live = chosen.sum()
        sorted_tokens = tokens.index_select(0, order)
        if self.slack > 1:
            sorted_tokens = torch.cat([sorted_tokens] * self.slack)
        x = torch.where(is_live(sorted_tokens, live), sorted_tokens, NAN)
        saver = self.saver if torch.is_grad_enabled() else OrdinarySaver()
        out = _ToyExpert.apply(x, self.up, self.down, live, saver)[: tokens.shape[0]]
        return tokens + torch.zeros_like(tokens).index_copy(0, order, out)


class ToyModel(nn.Module):
    """Layers of experts with a dense one before each."""

    def __init__(self, layers: int = 4, dim: int = 8, slack: int = 1) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.experts = nn.ModuleList(ToyExperts(dim, slack=slack) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        for dense, experts in zip(self.dense, self.experts, strict=True):
            tokens = experts(dense(tokens))
        return tokens

    def loss(self, tokens: Tensor) -> Tensor:
        return self(tokens).square().mean()

    def stash_with(self, config: StashConfig) -> RowStash:
        stash = RowStash(config, next(self.parameters()).device)
        for index, experts in enumerate(self.experts):
            experts.saver = stash.saver(f"experts.{index}")
        return stash

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad.clone() for parameter in self.parameters()]
        self.zero_grad()
        return found


def build(layers: int = 4, dim: int = 8, slack: int = 1) -> ToyModel:
    torch.manual_seed(5)
    return ToyModel(layers, dim, slack)


def batch(index: int, tokens: int = 24, dim: int = 8) -> Tensor:
    return torch.randn(tokens, dim, generator=torch.Generator().manual_seed(100 + index))
