"""What modules see of their weights while a backward runs, whoever ran the forward and whatever came in between."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    around_backward,
    fully_shard,
    fully_shard_optimizer,
    gather_root,
    sharded_parameters,
    unshard,
    watch_backward,
)
from tests.engine.cases import device_type
from tests.engine.int8_codec import Int8Codec, Int8Linear
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES
from tests.helpers.hidden import Hidden
from tests.helpers.pairwise import in_world


class _ReadsInBackward(torch.autograd.Function):
    """`x * module.weight`, whose backward asks the module for its weight, as layers of other libraries do."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        weight = ctx.module.weight
        assert not isinstance(weight, DTensor), f"a backward saw a {type(weight).__name__}"
        return grad * weight, (grad * x).sum(0), None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ReadsInBackward.apply(x, self.weight, self)


class Hiding(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden(super().forward(x))


class Showing(nn.Module):
    def forward(self, hidden: Hidden) -> torch.Tensor:
        return hidden.value


class Failing(nn.Module):
    """Its backward raises as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        if self.fails:
            y.register_hook(self._fail)
        return y

    def _fail(self, _: torch.Tensor) -> None:
        raise ArithmeticError("this backward fails")


def by_method(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """As a LightningModule's `training_step` is called: no forward hook of the root runs."""
    with gather_root(model):
        y = x
        for layer in model:
            y = layer(y)
    watch_backward(model, y)
    return y


def batch(index: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(index))


def assert_gradients(model: nn.Module, reference: nn.Module, case: object) -> None:
    for view, parameter in zip(sharded_parameters(model), reference.parameters(), strict=True):
        if view.main.numel():
            expected = parameter.grad[view.rows.start : view.rows.stop]
            torch.testing.assert_close(view.grad, expected, msg=lambda text, view=view: f"{case} {view.name}: {text}")


def modules_may_read_weights_of_their_own(rank, world):
    """The root's, and those of a unit whose result nobody can look into."""
    for sharding, reshard, run in in_world(world, (1, 2), STRATEGIES, (True, False), (by_method, nn.Module.__call__)):
        torch.manual_seed(0)
        inner = nn.Sequential(Scale(), nn.Linear(4, 4)), nn.Sequential(Scale()), Hiding(Scale(), nn.Linear(4, 4))
        model = nn.Sequential(Scale(), *inner, Showing(), Scale())
        reference = copy.deepcopy(model)
        for layer in inner:
            fully_shard(layer, sharding=sharding, reshard_after_forward=reshard)
        fully_shard(model, sharding=sharding)
        for index in range(3):
            y = run(model, batch(index))
            model.zero_grad()
            y.sum().backward()
            reference.zero_grad()
            reference(batch(index)).sum().backward()
            assert_gradients(model, reference, (sharding, reshard, run.__name__))


def weights_are_there_where_the_root_hides_its_result_too(rank, world):
    """A backward that begins with what the root returned is noticed by nobody, also of a unit whose own result was used inside the root."""
    for sharding, reshard in in_world(world, (1, 2), STRATEGIES, (True, False)):
        torch.manual_seed(0)
        inner = Hiding(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = Hiding(nn.Linear(4, 4), inner[1], inner[0], Showing())
        reference = copy.deepcopy(model)
        for layer in inner:
            fully_shard(layer, sharding=sharding, reshard_after_forward=reshard)
        fully_shard(model, sharding=sharding)
        for index in range(3):
            hidden = model(batch(index))
            model.zero_grad()
            hidden.value.sum().backward()
            reference.zero_grad()
            reference(batch(index)).value.sum().backward()
            assert_gradients(model, reference, (sharding, reshard))


def evaluation_in_between(model, loss):
    y = by_method(model, batch(7))
    with torch.no_grad():
        model(batch(8))
    loss(y).backward()


def unsharded_in_between(model, loss):
    y = by_method(model, batch(7))
    with unshard(model):
        pass
    loss(y).backward()


def two_losses_of_a_step(model, loss):
    with gather_root(model):
        results = []
        for index in (7, 8):
            y = batch(index)
            for layer in model:
                y = layer(y)
            results.append(y)
    for y in results:
        watch_backward(model, y)
    for y in results:
        loss(y).backward()


def twice(model, loss):
    value = loss(by_method(model, batch(7)))
    value.backward(retain_graph=True)
    value.backward()


# What happens between a step and its backward, and the batches whose gradients are there afterwards.
IN_BETWEEN = {
    evaluation_in_between: (7,),
    unsharded_in_between: (7,),
    two_losses_of_a_step: (7, 8),
    twice: (7, 7),
}


def weights_that_went_away_are_there_again(rank, world):
    """In slots of their own or shared ones: what autograd saved of a step points there."""
    for storage, (between, batches) in in_world(world, (1, 2), ("pooled", "dynamic"), IN_BETWEEN.items()):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 4), Scale(), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
        )
        reference = copy.deepcopy(model)
        fully_shard(model[3], storage=storage)
        fully_shard(model, storage=storage)
        for index in range(3):  # pooled slots have their places
            by_method(model, batch(index)).sum().backward()
        model.zero_grad()
        between(model, lambda y: y.square().sum())
        for index in batches:
            reference(batch(index)).square().sum().backward()
        assert_gradients(model, reference, (storage, between.__name__))


def backwards_inside_of_a_step_read_what_its_forward_read(rank, world):
    """Manual optimization: weights change within a step."""
    for storage in ("pooled", "dynamic"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
        reference = copy.deepcopy(model)
        fully_shard(model[2], storage=storage)
        fully_shard(model, storage=storage)
        plain = torch.optim.SGD(reference.parameters(), lr=0.01)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(3):
            with gather_root(model):
                for index in range(2):
                    y = batch(2 * step + index)
                    for layer in model:
                        y = layer(y)
                    y.square().sum().backward()
                    reference(batch(2 * step + index)).square().sum().backward()
                    assert_gradients(model, reference, (storage, step, index))
                    for one in (optimizer, plain):
                        one.step()
                        one.zero_grad()


def both_planes_of_the_root_are_there(rank, world):
    """One that forward reads, and another one that backward does."""
    for planes, run in itertools.product((1, 2), (by_method, nn.Module.__call__)):
        found = []
        for policy in (MixedPrecisionPolicy(weight_codecs=(Int8Codec(planes),)), None):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8)), Int8Linear(8, 8, planes), nn.Linear(8, 4)
            )
            if policy is not None:
                fully_shard(model[1], policy=policy)
                fully_shard(model, policy=policy)
            for index in range(2):
                model.zero_grad()
                (run(model, batch(index)) if policy is not None else model(batch(index))).square().sum().backward()
            found.append(model)
        assert_gradients(*found, (planes, run.__name__))


def after_a_backward_that_raised_gradients_can_be_cleared(rank, world):
    """On GPUs with `around_backward`, as its docstring says."""
    for sharding, run in in_world(world, (1, 2), STRATEGIES, (by_method, nn.Module.__call__)):
        model = nn.Sequential(nn.Linear(4, 4), Failing(), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
        fully_shard(model[2], sharding=sharding)
        fully_shard(model, sharding=sharding)
        run(model, batch(0)).sum().backward()
        model[1].fails = True
        y = run(model, batch(1)).sum()
        with pytest.raises(ArithmeticError), around_backward(model) if device_type() == "cuda" else nullcontext():
            y.backward()
        model.zero_grad()
        left = [view.name for view in sharded_parameters(model) if view.local.grad is not None]
        assert not left, (sharding, run.__name__, left)
        model[1].fails = False
        run(model, batch(2)).sum().backward()
        assert all(view.grad is not None for view in sharded_parameters(model) if view.main.numel())


CASES = [
    modules_may_read_weights_of_their_own,
    weights_are_there_where_the_root_hides_its_result_too,
    weights_that_went_away_are_there_again,
    backwards_inside_of_a_step_read_what_its_forward_read,
    both_planes_of_the_root_are_there,
    after_a_backward_that_raised_gradients_can_be_cleared,
]
WORLDS = {1: CASES, 2: CASES}


@by_world(WORLDS)
def test_weights_in_backward(world, case):
    check(WORLDS, world, case)
