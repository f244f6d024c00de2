"""Weights that were stepped or written since a forward: what is gathered again, and what a backward says to it."""

from __future__ import annotations

import pytest
import torch

from lightning_mfsdp.engine import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from tests.engine.cases import device_type
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, adamw, context, inputs, loss_of, plain_chain, sharded_chain, train
from tests.helpers.pairwise import in_turn

BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


def _two_optimizers(model):
    """One for the units, one for what the root owns."""
    kinds = [list(model.layers.parameters()), list(model.out.parameters())]
    return [fully_shard_optimizer(torch.optim.AdamW(kind, lr=1e-2)) for kind in kinds]


def a_step_of_one_optimizer_gathers_again_what_it_holds(rank, world):
    for sharding in ("optim", "optim_grads"):
        for policy in (None, BF16):
            model = sharded_chain(sharding=sharding, policy=policy)
            for_units, for_root = _two_optimizers(model)
            started = []
            for optimizer in (for_units, for_root, for_root, for_units):
                loss_of(model, inputs(0, rank)).backward()
                optimizer.step()
                before = context(model).lane.started
                with torch.no_grad():
                    model(inputs(1, rank))
                started.append(context(model).lane.started - before)
            assert started == [4, 1, 1, 4], (sharding, policy)
            context(model).weights_changed()
            before = context(model).lane.started
            with torch.no_grad():
                model(inputs(1, rank))
            assert context(model).lane.started - before == 5, "written by somebody else"


def two_optimizers_train_like_plain_pytorch(rank, world):
    for sharding in in_turn(0, STRATEGIES):
        model, plain = sharded_chain(sharding=sharding), plain_chain()
        ours = _two_optimizers(model)
        theirs = [torch.optim.AdamW(kind.parameters(), lr=1e-2) for kind in (plain.layers, plain.out)]
        for step in range(6):
            for one, optimizers in ((model, ours), (plain, theirs)):
                loss_of(one, inputs(step)).backward()
                optimizers[step % 2].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(inputs(9)), plain(inputs(9)), rtol=1e-5, atol=1e-6)


def a_backward_after_a_step_of_its_weights_raises_as_in_plain_pytorch(rank, world):
    stale = r"modified by an inplace operation"
    for sharding in in_turn(1, STRATEGIES):
        for policy in (None, BF16, MixedPrecisionPolicy(direct_weight_gradients=True)):
            model = sharded_chain(sharding=sharding, policy=policy)
            optimizer = adamw(model)
            train(model, optimizer, range(2), rank)
            old = loss_of(model, inputs(0, rank))
            train(model, optimizer, [2], rank)
            with pytest.raises(RuntimeError, match=stale):
                old.backward()
            optimizer.zero_grad()
            loss = loss_of(model, inputs(0, rank))
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match=stale):
                loss.backward()
            train(model, optimizer, [3], rank)  # usable afterwards
            old = loss_of(model, inputs(0, rank))
            with torch.no_grad():
                model.layers[1].weight.mul_(0.5)
            with pytest.raises(RuntimeError, match=stale):
                old.backward()
            train(model, optimizer, [3], rank)


def copies_that_autocast_saved_outlast_a_step(rank, world):
    """Where weights are gathered in float32; the engine's own copies in the compute dtype do not."""
    for sharding in in_turn(2, STRATEGIES):
        plain, model = plain_chain(), sharded_chain(sharding=sharding)
        for one, optimizer in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (model, adamw(model))):
            with torch.autocast(device_type(), torch.bfloat16):
                old = loss_of(one, inputs(0))
            for parameter in one.parameters():
                parameter.grad = torch.ones(parameter.shape)
            optimizer.step()
            optimizer.zero_grad()
            old.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad)


def what_was_not_stepped_may_still_be_read(rank, world):
    """A generator's graph outlasts the step of the discriminator, also where both lie in one group."""
    for together in (False, True):
        plain = plain_chain(layers=2)
        model = plain_chain(layers=2)
        if not together:
            for layer in model.layers:
                fully_shard(layer)
        fully_shard(model)
        found = []
        for one, wrap in ((plain, lambda optimizer: optimizer), (model, fully_shard_optimizer)):
            first, second = (wrap(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in one.layers)
            for step in range(3):
                one.layers[1].requires_grad_(False)
                loss = loss_of(one, inputs(step))  # its graph needs the weight of layer 1
                one.layers[1].requires_grad_(True)
                loss.backward()
                first.step()
                one.zero_grad()
                one.layers[0].requires_grad_(False)
                loss = loss_of(one, inputs(step))
                one.layers[0].requires_grad_(True)
                first.zero_grad()
                first.step()  # nothing has a gradient, so nothing is written
                loss.backward()
                second.step()
                one.zero_grad()
            with torch.no_grad():
                found.append(one(inputs(9)))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


COMMON = (
    two_optimizers_train_like_plain_pytorch,
    a_backward_after_a_step_of_its_weights_raises_as_in_plain_pytorch,
    copies_that_autocast_saved_outlast_a_step,
    what_was_not_stepped_may_still_be_read,
)
WORLDS = {1: COMMON, 2: (*COMMON, a_step_of_one_optimizer_gathers_again_what_it_holds)}


@by_world(WORLDS)
def test_epochs(world, case):
    check(WORLDS, world, case)
