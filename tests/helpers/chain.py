"""A chain of equal units under a small root, and the plain loop that trains it: what engine tests watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, unshard
from tests.engine.internals import Context, context_of

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
DIM = 8
DOUBLE = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None)


class Chain(nn.Module):
    """Equal linear units with a nonlinearity between them; a scale and an output layer belong to the root.

    Attributes:
        wrap: Around the call of each unit: `wrap(layer, x)`. The place for checkpointing, failures and skipped layers.
    """

    def __init__(self, layers: int = 4, dim: int = DIM) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.out = nn.Linear(dim, 3)
        self.wrap: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(self.wrap(layer, x))
        return self.out(x)


def plain_chain(seed: int = 0, **sizes: int) -> Chain:
    """The same chain for the same seed, not sharded."""
    torch.manual_seed(seed)
    return Chain(**sizes)


def sharded_chain(seed: int = 0, mesh: Any = None, layers: int = 4, dim: int = DIM, **options: Any) -> Chain:
    """A chain whose layers are units."""
    model = plain_chain(seed, layers=layers, dim=dim)
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def double_chain(make: Callable[..., Chain], **options: Any) -> Chain:
    """A chain of either kind in float64; `DOUBLE` is the policy that keeps it so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return make(**options)
    finally:
        torch.set_default_dtype(before)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def inputs(step: int, rank: int = 0, rows: int = 3, dim: int = DIM) -> Tensor:
    """`[rows, dim]`, different for every step and rank."""
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A scalar that depends on every parameter."""
    return model(x).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], rank: int = 0) -> list[Tensor]:
    """One forward, backward and step for each number in `steps`; returns the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, inputs(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Full main weights by name."""
    with unshard(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(model: nn.Module, other: nn.Module, case: object = "") -> None:
    """Bit-equal main weights."""
    expected = weights(other)
    for name, value in weights(model).items():
        assert torch.equal(value, expected[name]), f"{case}: {name} differs by {(value - expected[name]).abs().max()}"


def context(model: nn.Module) -> Context:
    """The engine's shared state, for counters and storage."""
    return context_of(model)
