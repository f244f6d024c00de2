"""Which backwards train. One that was asked for gradients of inputs does not; all others do, however gradients come about in them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp import around_backward, fully_shard, fully_shard_optimizer, no_sync, sharded_parameters
from tests.engine.internals import context_of
from tests.engine.worlds import by_world, check
from tests.helpers.pairwise import pairwise

DIM = 6
SHARDINGS = ("optim_grads", "optim_grads_params")
CHECKPOINTS = ("none", "reentrant", "non_reentrant", "whole, reentrant")
OUTSIDE = ("trained", "frozen", "nothing")
LOSSES = ("outputs", "penalty", "both", "inputs first")


class Net(nn.Module):
    """Two blocks, and parameters outside of them or none."""

    def __init__(self, checkpoints: str, outside: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.head = nn.Identity() if outside == "nothing" else nn.Linear(DIM, DIM)
        self.head.requires_grad_(outside == "trained")

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpoints in ("reentrant", "non_reentrant"):
                x = checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
            else:
                x = block(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def forward(model: Net, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True) if model.checkpoints.startswith("whole") else model(x)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


def penalty(model: Net) -> Tensor:
    return 0.1 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)


def backward(model: Net, loss: str, x: Tensor, share: float) -> None:
    if loss == "inputs first":
        torch.autograd.grad(forward(model, x).square().sum(), x)
    if loss != "penalty":
        (share * forward(model, x).square().sum()).backward()
    if loss in ("penalty", "both"):
        (share * penalty(model)).backward()


def every_way_to_a_gradient_trains(rank: int, world: int) -> None:
    def possible(checkpoints: str, outside: str, loss: str, sharding: str) -> bool:
        """PyTorch refuses gradients of inputs beside reentrant checkpoints."""
        return loss != "inputs first" or "reentrant" not in checkpoints.replace("non_reentrant", "")

    for checkpoints, outside, loss, sharding in pairwise(CHECKPOINTS, OUTSIDE, LOSSES, SHARDINGS, possible=possible):
        model = Net(checkpoints, outside)
        reference = copy.deepcopy(model)
        for block in model.blocks:
            fully_shard(block, sharding=sharding)
        fully_shard(model, sharding=sharding)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = fully_shard_optimizer(torch.optim.SGD(trained, lr=0.05))
        plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.05)
        for step in range(3):  # what one step leaves behind would be in the next
            backward(model, loss, batch(step, rank), 1.0)
            for other in range(world):
                backward(reference, loss, batch(step, other), 1 / world)
            expected = dict(reference.named_parameters())
            for view in sharded_parameters(model):
                grad = expected[view.name].grad
                if view.local.numel():
                    assert (view.grad is None) == (grad is None), (checkpoints, outside, loss, sharding, view.name)
                if view.local.numel() and grad is not None:
                    rows = grad[view.rows.start : view.rows.stop]
                    torch.testing.assert_close(
                        view.grad, rows, rtol=1e-5, atol=1e-6, msg=f"{checkpoints} {outside} {loss} {sharding}"
                    )
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()


class Skips(nn.Module):
    """Has weights, and uses them on some ranks."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.layer, self.uses = nn.Linear(DIM, DIM), uses

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.uses else 2 * x


def a_rank_may_have_no_parameter_in_its_graph(rank: int, world: int) -> None:
    for sharding in SHARDINGS:
        torch.manual_seed(0)
        model = fully_shard(Skips(uses=rank == 0), sharding=sharding)
        torch.manual_seed(0)
        reference = Skips(uses=True)
        for step in range(2):
            model(batch(step, rank)).square().sum().backward()
            (reference(batch(step, 0)).square().sum() / world).backward()
        for view, parameter in zip(sharded_parameters(model), reference.parameters(), strict=True):
            torch.testing.assert_close(view.grad, parameter.grad[view.rows.start : view.rows.stop])


def gradients_of_inputs_reduce_nothing(rank: int, world: int) -> None:
    for sharding, way in itertools.product(SHARDINGS, ("grad", "inputs")):
        model = Net("none", "trained")
        for block in model.blocks:
            fully_shard(block, sharding=sharding)
        fully_shard(model, sharding=sharding)
        reductions, x = context_of(model).reductions, batch(0, rank)
        loss = model(x).square().sum()
        if way == "grad":
            torch.autograd.grad(loss, x)
        else:
            loss.backward(inputs=[x])
        assert reductions.started == 0
        assert all(view.grad is None for view in sharded_parameters(model))
        model(x).square().sum().backward()
        assert reductions.started == 3 * (world > 1)


def what_is_held_back_is_reduced_for_methods_of_dtensors(rank: int, world: int) -> None:
    model = fully_shard(nn.Linear(DIM, DIM))
    with no_sync(model):
        model(batch(0, rank)).square().sum().backward()
    whole = model.weight.grad.full_tensor()
    assert whole.abs().max() > 0
    assert torch.equal(whole, model.weight.grad.full_tensor())
    with no_sync(model):
        model(batch(1, rank)).square().sum().backward()
    local = model.weight.grad.to_local()
    assert torch.equal(local, sharded_parameters(model)[0].local.grad)


def what_a_backward_raises_arrives_unchanged(rank: int, world: int) -> None:
    """Also where a module contains roots of their own."""
    model = nn.Sequential(nn.Linear(DIM, DIM))
    fully_shard(model)
    model.teacher = fully_shard(nn.Linear(DIM, DIM))
    x = batch(0, rank)
    loss = model[0](x).square().sum()
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), around_backward(model):
        loss.backward()


CASES = (
    every_way_to_a_gradient_trains,
    gradients_of_inputs_reduce_nothing,
    what_is_held_back_is_reduced_for_methods_of_dtensors,
    what_a_backward_raises_arrives_unchanged,
)
WORLDS = {1: CASES, 2: (*CASES, a_rank_may_have_no_parameter_in_its_graph)}


@by_world(WORLDS)
def test_idle_backward(world: int, case: Any) -> None:
    check(WORLDS, world, case)
