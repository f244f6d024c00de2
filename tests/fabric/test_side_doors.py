"""Backwards of what a block kept, under Fabric: gradients of one that reaches no result count, and a resharded weight is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import EngineStateError
from tests.engine.worlds import by_world, check
from tests.fabric.loops import launched, whole

DIM = 6
SHARDINGS = ("optim_grads_params", "optim_grads", "optim", "no_shard")


class Block(nn.Module):
    """Its penalty saves no weight, so it is differentiated whether weights are resharded or not; its feature needs the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.penalty: Tensor | None = None
        self.feature: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.a.weight.sum() + (3 * self.b.bias).sum()
        self.feature = self.b(self.a(x).tanh())
        return x + self.feature


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(DIM, 1))


def train(made: nn.Module, blocks: Any, optimizer: Any, backward: Any, clears: bool) -> None:
    rows = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        loss = made(rows * (step + 1)).square().mean()
        backward(blocks[1].penalty)
        if clears:
            optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def a_backward_of_a_penalty_counts_and_is_cleared(rank: int, world: int) -> None:
    for clears in (False, True):
        plain = model()
        train(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.05), torch.Tensor.backward, clears)
        expected = dict(plain.named_parameters())
        for sharding in SHARDINGS:
            fabric = launched(world, {"sharding": sharding})
            made = model()
            sharded, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.05))
            train(sharded, made, optimizer, fabric.backward, clears)
            for name, value in whole(sharded).items():
                torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-6)


def a_feature_alone_trains_or_names_unit_and_parameter(rank: int, world: int) -> None:
    plain = model()
    plain(torch.ones(2, DIM))
    plain[1].feature.square().mean().backward()
    for side_doors in ("find", "raise"):
        fabric = launched(world, {"side_doors": side_doors})
        made = model()
        sharded, _ = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.05))
        for _ in range(3):  # side doors are found in the first forward, and followed from the second on
            sharded(torch.ones(2, DIM))
        loss = made[1].feature.square().mean()
        if side_doors == "raise":
            with pytest.raises(EngineStateError, match=r"^1: a backward read its weight [ab]\.weight"):
                fabric.backward(loss)
        else:
            fabric.backward(loss)
            torch.testing.assert_close(made[0].a.weight.grad.full_tensor(), plain[0].a.weight.grad)


WORLDS = {2: (a_backward_of_a_penalty_counts_and_is_cleared, a_feature_alone_trains_or_names_unit_and_parameter)}


@by_world(WORLDS)
def test_side_doors(world: int, case: Any) -> None:
    check(WORLDS, world, case)
