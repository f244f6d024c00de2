"""Activation checkpointing of either kind, around one unit or many, changes memory and time but no number."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_mfsdp.engine import MixedPrecisionPolicy, fully_shard, no_sync, sharded_parameters
from tests.engine.internals import unit_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import (
    STRATEGIES,
    Chain,
    adamw,
    assert_same_weights,
    context,
    inputs,
    loss_of,
    plain_chain,
    sharded_chain,
    train,
)
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn

BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


def one_by_one(reentrant: bool):
    return lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)


class Regions(Chain):
    """Checkpoints pairs of units; every second region contains a dropout, whose mask must be the same again."""

    def __init__(self, reentrant: bool | None, layers: int = 4) -> None:
        super().__init__(layers)
        self.reentrant = reentrant

    def pair(self, x: Tensor, first: int) -> Tensor:
        for layer in self.layers[first : first + 2]:
            x = nn.functional.dropout(x + torch.tanh(layer(x)), 0.3, training=first > 0)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.layers), 2):
            keep = self.reentrant is None
            x = self.pair(x, first) if keep else checkpoint(self.pair, x, first, use_reentrant=self.reentrant)
        return self.out(x)


def regions(reentrant: bool | None, **options) -> Regions:
    torch.manual_seed(0)
    model = Regions(reentrant)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def run(model, rank, steps=4, microbatches=1) -> Tensor:
    """Train with inputs that need gradients: reentrant checkpoints need them."""
    optimizer, losses = adamw(model), []
    torch.manual_seed(5)
    for step in range(steps):
        for micro in range(microbatches):
            model_sync = no_sync(model) if micro < microbatches - 1 else torch.enable_grad()
            with model_sync:
                loss = loss_of(model, inputs(10 * step + micro, rank).requires_grad_())
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        assert all(not unit_of(layer).uses_weights for layer in model.layers), "given back after backward"
    return torch.stack(losses)


def every_unit_checkpointed_is_bit_equal(rank, world):
    for sharding, policy in thinned(product(in_turn(0, STRATEGIES), (None, BF16)), 3):
        options = {"sharding": sharding, "policy": policy}
        model = sharded_chain(**options)
        losses = run(model, rank, steps=3, microbatches=2)
        for reentrant in (False, True):
            recomputing = sharded_chain(**options)
            recomputing.wrap = one_by_one(reentrant)
            found = run(recomputing, rank, steps=3, microbatches=2)
            assert torch.equal(found, losses), f"{options} {reentrant=}"
            assert_same_weights(recomputing, model, f"{options} {reentrant=}")


def several_units_in_one_region_are_bit_equal(rank, world):
    for sharding, storage in thinned(product(in_turn(1, STRATEGIES), ("pooled", "dynamic")), 3):
        model = regions(None, sharding=sharding, storage=storage)
        losses = run(model, rank)
        for reentrant in (False, True):
            recomputing = regions(reentrant, sharding=sharding, storage=storage)
            assert torch.equal(run(recomputing, rank), losses), f"{sharding} {storage} {reentrant=}"
            assert_same_weights(recomputing, model, f"{sharding} {storage} {reentrant=}")


def twice(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(torch.tanh(layer(x)))


def a_unit_that_runs_twice_in_one_region_is_bit_equal(rank, world):
    """Its two forwards read weights in different slots, and both are computed again in one of them."""
    model = sharded_chain()
    model.wrap = twice
    losses = run(model, rank)
    for reentrant in (False, True):
        recomputing = sharded_chain()
        recomputing.wrap = lambda layer, x, reentrant=reentrant: checkpoint(twice, layer, x, use_reentrant=reentrant)
        assert torch.equal(run(recomputing, rank), losses), f"{reentrant=}"
        assert_same_weights(recomputing, model, f"{reentrant=}")


def a_call_that_nobody_uses_does_not_mislead_recomputation(rank, world):
    """Its weights lie elsewhere, and it never ends: what is recomputed first goes there, and must stay until it was used."""
    found = []
    for reentrant in (None, False):
        model = regions(reentrant)
        run(model, rank, steps=2)
        torch.manual_seed(3)
        loss = loss_of(model, inputs(7, rank).requires_grad_())
        model.layers[0](inputs(8, rank).requires_grad_())
        loss.backward()
        found.append([view.grad.clone() for view in sharded_parameters(model) if view.grad is not None])
        assert not any(group.weights.present for unit in context(model).units for group in unit.groups)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def early_stop_makes_no_difference(rank, world):
    runs = []
    for stop in (False, True):
        with set_checkpoint_early_stop(stop):
            model = regions(False)
            runs.append((model, run(model, rank)))
    assert torch.equal(runs[0][1], runs[1][1])
    assert_same_weights(runs[0][0], runs[1][0])


def some_units_checkpointed_and_changing_between_steps(rank, world):
    model, plain = sharded_chain(), sharded_chain()
    optimizers = [adamw(model), adamw(plain)]
    for step in range(8):
        chosen = [layer for index, layer in enumerate(model.layers) if (step >> (index % 3)) & 1]
        reentrant = step % 2 == 0
        model.wrap = lambda layer, x, chosen=chosen, reentrant=reentrant: (
            checkpoint(layer, x, use_reentrant=reentrant) if layer in chosen else layer(x)
        )
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            loss_of(one, inputs(step, rank).requires_grad_()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, plain)


def whole_root_checkpointed(rank, world):
    """No module above the region tells that a backward began."""
    for reentrant in (False, True):
        model, plain = sharded_chain(), sharded_chain()
        for one in (model, plain):
            optimizer = adamw(one)
            for step in range(3):
                x = inputs(step, rank).requires_grad_()
                y = checkpoint(one, x, use_reentrant=reentrant) if one is model else one(x)
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(model, plain, f"{reentrant=}")
        assert context(model).backward.num_ended >= 3


def checkpoint_within_a_checkpoint(rank, world):
    for inner, outer in ((False, False), (True, False), (False, True), (True, True)):
        model, plain = regions(outer), regions(None)
        model.wrap = one_by_one(inner)
        for one in (model, plain):
            one.pair = nested_pair(one, inner if one is model else None)
        assert torch.equal(run(model, rank), run(plain, rank)), f"{inner=} {outer=}"
        assert_same_weights(model, plain, f"{inner=} {outer=}")


def nested_pair(model, reentrant):
    def pair(x: Tensor, first: int) -> Tensor:
        for layer in model.layers[first : first + 2]:
            x = x + (layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)).tanh()
        return x

    return pair


def recomputing_equals_plain_pytorch(rank, world):
    for reentrant in (False, True):
        plain = plain_chain()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        expected = train(plain, optimizer, range(5))
        model = sharded_chain()
        model.wrap = one_by_one(reentrant)
        assert torch.equal(run_plain_inputs(model), torch.stack(expected)), f"{reentrant=}"


def run_plain_inputs(model) -> Tensor:
    optimizer, losses = adamw(model), []
    for step in range(5):
        loss = loss_of(model, inputs(step).requires_grad_())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def recompute_after_validation_and_a_lost_forward(rank, world):
    for reentrant in (False, True):
        model, plain = sharded_chain(), sharded_chain()
        model.wrap = one_by_one(reentrant)
        for one in (model, plain):
            optimizer = adamw(one)
            for step in range(4):
                loss_of(one, inputs(30 + step, rank).requires_grad_())
                loss = loss_of(one, inputs(step, rank).requires_grad_())
                with torch.no_grad():
                    loss_of(one, inputs(40, rank))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(model, plain, f"{reentrant=}")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh()


class Outer(nn.Module):
    """Its own weight is used first, so that its gradient comes after what the other module's recomputation leaves."""

    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(0.5, 2, 4))
        self.inner = [inner]  # a module beside this one

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        first = (self.shift * 2).tanh()
        return x + first + checkpoint(self.inner[0], z, use_reentrant=True)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.outer = Outer(self.inner)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.outer(x, z)


def a_unit_with_a_gradient_still_to_come_is_not_reduced_by_what_it_recomputes(rank, world):
    plain, model = Both(), Both()
    fully_shard([model.inner, model.outer])
    fully_shard(model)
    for step in range(3):
        before = context(model).reductions.started
        for one in (plain, model):
            # The call of the outer module ends with the gradient of x, before that of its weight is there.
            x, z = (torch.full((4,), value + step, requires_grad=True) for value in (1.0, 0.5))
            one(x, z).square().sum().backward()
        assert context(model).reductions.started == before + 1
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


ALL = (
    every_unit_checkpointed_is_bit_equal,
    several_units_in_one_region_are_bit_equal,
    a_unit_that_runs_twice_in_one_region_is_bit_equal,
    a_call_that_nobody_uses_does_not_mislead_recomputation,
    early_stop_makes_no_difference,
    some_units_checkpointed_and_changing_between_steps,
    whole_root_checkpointed,
    checkpoint_within_a_checkpoint,
    recompute_after_validation_and_a_lost_forward,
    a_unit_with_a_gradient_still_to_come_is_not_reduced_by_what_it_recomputes,
)
WORLDS = {1: (recomputing_equals_plain_pytorch,), 2: ALL}


@by_world(WORLDS)
def test_recompute(world, case):
    check(WORLDS, world, case)
