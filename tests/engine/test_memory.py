"""Bytes: what stays, what is there at the peak of a step, and that nothing is left when a model is deleted."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mfsdp.engine import MixedPrecisionPolicy, sharded_parameters, units
from tests.engine.cases import device_type
from tests.engine.internals import unit_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, adamw, context, inputs, loss_of, sharded_chain, train
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, in_world, pairwise

BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
KEPT = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, keep_compute_shard=True)
DIM = 64  # one layer: 64 * 64 + 64 = 4160 numbers, 130 blocks of 32: few cells of padding on 1, 2 and 4 ranks
LAYER = DIM * DIM + DIM


def storages(*tensors: Tensor) -> int:
    """Bytes of the distinct storages behind tensors."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def groups_of(model: nn.Module):
    return [group for child in model.modules() if (unit := unit_of(child)) for group in unit.groups]


def about(found: int, expected: float) -> bool:
    """Equal but for padding of a few rows."""
    return expected <= found <= 1.06 * expected + 256


def persistent_buffers_have_the_size_their_strategy_says(rank, world):
    for sharding, policy in in_world(world, (2, 4), STRATEGIES, (None, BF16, KEPT)):
        model = sharded_chain(sharding=sharding, policy=policy, dim=DIM)
        optimizer = adamw(model)
        train_wide(model, optimizer, 2, rank)
        level = STRATEGIES.index(sharding)
        low = 2 if policy else 4
        main = 4 * LAYER / (world if level >= 1 else 1)
        held = low * LAYER / (world if level >= 3 else 1)
        if policy is None and level in (1, 2):
            held -= main  # which lies inside
        casts = policy is BF16 and level == 3 and world > 1
        gradient = main
        for view in units(model)[1:]:
            case = f"{sharding} bf16={policy is not None} {view}"
            assert view.num_parameters == LAYER
            assert view.padding_fraction < 0.06, case
            assert about(view.main_bytes, main) or (not policy and level in (1, 2)), case
            same = casts or (policy is None and (level in (0, 3) or world == 1))
            assert about(view.held_bytes, held) if not same else view.held_bytes == 0, case
            assert about(view.gradient_bytes, gradient), case
            assert about(view.full_bytes, low * LAYER) if level == 3 and world > 1 else view.full_bytes == 0, case
        # The same from the memory itself: whatever is reachable from the groups.
        tensors = []
        for group in groups_of(model):
            main = group.gradients.main
            held_segments = group.weights.shards[0].segments if group.weights.shards else []
            tensors += [*group.main.segments, *held_segments, *main.buffer.segments, *main.of_optimizer.segments]
        views = units(model)
        expected = sum(view.main_bytes + view.held_bytes + view.gradient_bytes for view in views)
        assert storages(*tensors) == expected, sharding


def without_other_shards_weights_are_cast_when_used(rank, world):
    """One rank on the shard axis and several in all: no copy is kept, and training is that of a kept one, to the bit."""
    mesh = init_device_mesh(device_type(), (world, 1), mesh_dim_names=("outer", "shard"))
    states = []
    for sharding, policy in (("optim_grads_params", BF16), ("optim_grads_params", KEPT), ("optim_grads", BF16)):
        model = sharded_chain(mesh=mesh, sharding=sharding, policy=policy, dim=DIM)
        optimizer = adamw(model)
        train_wide(model, optimizer, 3, rank)
        casts = sharding == "optim_grads_params" and policy is BF16
        for view in units(model)[1:]:
            assert view.held_bytes == 0 if casts else about(view.held_bytes, 2 * LAYER), view
            assert about(view.full_bytes, 2 * LAYER) if casts else view.full_bytes == 0, view
        states.append([view.main.clone() for view in sharded_parameters(model)])
    for others in states[1:]:
        assert all(torch.equal(one, other) for one, other in zip(states[0], others, strict=True))


def train_wide(model, optimizer, steps, rank) -> None:
    for step in range(steps):
        loss_of(model, inputs(step, rank, dim=DIM)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main_weight_is_the_held_weight_where_dtypes_match(rank, world):
    native = MixedPrecisionPolicy(main_params_dtype=None)
    for sharding, (policy, aliased) in product(in_turn(0, STRATEGIES), ((None, True), (native, True), (KEPT, False))):
        model = sharded_chain(sharding=sharding, policy=policy)
        for group in groups_of(model):
            same = (
                group.main.segments[0].untyped_storage().data_ptr()
                == group.weights.shards[0].segments[0].untyped_storage().data_ptr()
            )
            assert same is aliased, f"{sharding} {policy}"
        # All representations of a parameter are one memory.
        for view in sharded_parameters(model):
            if view.local.numel():
                assert view.local.data_ptr() == view.main.data_ptr() == view.dtensor.to_local().data_ptr()


def at_rest_no_full_parameter_has_memory(rank, world):
    model = sharded_chain(dim=DIM, storage="dynamic")
    train_wide(model, adamw(model), 2, rank)
    for group in groups_of(model):
        for entry in group.entries:
            nans = len(group.entries) * entry.full.element_size()  # one for each, of the same memory
            assert entry.full.untyped_storage().nbytes() == nans, entry.name
            assert entry.full._grad is None
    assert context(model).lane.pool.allocated_bytes == 0


def bucket_bytes(model: nn.Module) -> int:
    return sum(group.gradients.bucket_bytes for group in groups_of(model))


def gradient_bytes(model: nn.Module) -> int:
    return sum(view.gradient_bytes for view in units(model))


def noting_gradient_bytes(model: nn.Module) -> list[int]:
    """What gradients occupy whenever a layer's forward begins, from now on."""
    seen: list[int] = []
    model.wrap = lambda layer, x: (seen.append(gradient_bytes(model)), layer(x))[1]
    return seen


def gradients_have_memory_from_backward_to_the_next_forward(rank, world):
    policies = (None, BF16, MixedPrecisionPolicy(main_params_dtype=torch.float64))
    for sharding, policy in thinned(product(in_turn(1, STRATEGIES), policies), 2):
        model = sharded_chain(sharding=sharding, policy=policy, dim=DIM, layers=4)
        optimizer, seen = adamw(model), noting_gradient_bytes(model)
        train_wide(model, optimizer, 3, rank)
        assert seen == [0] * 12, (sharding, seen)
        loss_of(model, inputs(0, rank, dim=DIM)).backward()
        assert gradient_bytes(model) > 0
        assert bucket_bytes(model) == 0
        # Not cleared: it stays, and the next backward adds to it.
        before = [view.grad.clone() for view in sharded_parameters(model) if view.grad is not None]
        loss_of(model, inputs(0, rank, dim=DIM)).backward()
        after = [view.grad for view in sharded_parameters(model) if view.grad is not None]
        for once, both in zip(before, after, strict=True):
            torch.testing.assert_close(both, 2 * once, rtol=1e-2, atol=1e-6)


def peak_is_three_weights_and_two_buckets_of_a_chain(rank, world):
    for layers in (3, 8):
        model = sharded_chain(dim=DIM, layers=layers, policy=BF16)
        optimizer = adamw(model)
        train_wide(model, optimizer, 3, rank)
        full = max(group.weights.client.size_bytes for group in groups_of(model))
        pool = context(model).lane.pool
        slots = {id(client.home): client.home for client in pool._clients}
        assert len([slot for slot in slots.values() if slot.size_bytes > full / 2]) <= 3, layers
        weights = sum(slot.size_bytes for slot in slots.values())
        assert weights <= 3.1 * full
        assert pool.fixed_bytes == weights == pool.allocated_bytes
        seen = []
        for layer in model.layers:
            layer.register_full_backward_hook(lambda *_, seen=seen, model=model: seen.append(bucket_bytes(model)))
        loss_of(model, inputs(0, rank, dim=DIM).requires_grad_()).backward()
        assert 0 < max(seen) <= 2.2 * 2 * full, "a bucket is float32, twice the compute weight"


def peak_without_slots_is_no_higher(rank, world):
    """Dynamic storage, watched at every layer of forward and backward, from the second step on."""
    model = sharded_chain(dim=DIM, layers=8, storage="dynamic")
    optimizer = adamw(model)
    train_wide(model, optimizer, 2, rank)
    full = max(group.weights.client.size_bytes for group in groups_of(model))
    pool, seen = context(model).lane.pool, []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(pool.allocated_bytes))
        layer.register_full_backward_hook(lambda *_: seen.append(pool.allocated_bytes + bucket_bytes(model)))
    x = inputs(0, rank, dim=DIM).requires_grad_()
    loss_of(model, x).backward()
    optimizer.step()
    assert len(seen) == 16
    # root, this layer, the next one; the last one of forward stays; two buckets in float32
    assert max(seen) <= 5.2 * full, max(seen) / full


def frozen_units_are_given_back_after_forward(rank, world):
    model = sharded_chain(layers=6)
    model.layers[:4].requires_grad_(False)
    optimizer, live = adamw(model), []
    model.wrap = lambda layer, x: (live.append(sum(unit_of(one).uses_weights for one in model.layers)), layer(x))[1]
    train(model, optimizer, range(3), rank)
    assert max(live) <= 1, live


def flat_memory(model: nn.Module) -> list[weakref.ref]:
    """Weak references to the units' flat storages and everything the engine hangs on a model."""
    found = [weakref.ref(model), weakref.ref(context(model))]
    for group in groups_of(model):
        buffers = [group.main, *group.weights.shards]
        found += [weakref.ref(group), *(weakref.ref(buffer) for buffer in buffers)]
        found += [weakref.ref(segment.untyped_storage()) for buffer in buffers for segment in buffer.segments]
        if (gradients := group.gradients).was_needed:
            segments = gradients.main.buffer.segments
            found += [weakref.ref(gradients), *(weakref.ref(s.untyped_storage()) for s in segments)]
    for client in context(model).lane.pool._clients:
        found += [weakref.ref(client), weakref.ref(client.slot), weakref.ref(client.home)]
        if client.home.fixed:
            found += [weakref.ref(client.home), weakref.ref(client.home.memory.untyped_storage())]
    return found


def still_alive(watched: list[weakref.ref]) -> list[str]:
    """What outlived its model on any rank. Gloo's threads let go of the last tensors a moment after `wait` returns."""
    for _ in range(50):
        names = [type(thing).__name__ for reference in watched if (thing := reference()) is not None]
        anywhere = torch.tensor(len(names))
        dist.all_reduce(anywhere)
        if not anywhere:
            break
    return names if names or not anywhere else ["something on another rank"]


def deletion_frees_everything_without_the_cycle_collector(rank, world):
    gc.collect()
    gc.disable()
    try:
        for sharding, storage, when in pairwise(
            STRATEGIES, ("pooled", "dynamic"), ("untouched", "forward", "backward", "trained"), together=1
        ):
            model = sharded_chain(sharding=sharding, storage=storage, policy=BF16)
            optimizer, loss = adamw(model), None
            if when == "trained":
                train(model, optimizer, range(3), rank)
            elif when != "untouched":
                loss = loss_of(model, inputs(0, rank))
                if when == "backward":
                    loss.backward()
            watched = flat_memory(model)
            assert all(reference() is not None for reference in watched)
            del model, optimizer, loss
            alive = still_alive(watched)
            assert not alive, f"{sharding} {storage} {when}: {alive}"
    finally:
        gc.enable()


def an_optimizer_keeps_its_rows_and_nothing_else(rank, world):
    gc.collect()
    gc.disable()
    try:
        model = sharded_chain(policy=KEPT)
        optimizer = adamw(model)
        train(model, optimizer, range(3), rank)
        watched = [weakref.ref(model), weakref.ref(context(model))]
        watched += [weakref.ref(group) for group in groups_of(model)]
        watched += [
            weakref.ref(s.untyped_storage()) for group in groups_of(model) for s in group.weights.shards[0].segments
        ]
        watched += [weakref.ref(client.home.memory.untyped_storage()) for client in context(model).lane.pool._clients]
        assert all(reference() is not None for reference in watched)
        del model
        assert not still_alive(watched)
        optimizer.step()  # of no use to anybody, and no error
    finally:
        gc.enable()


def clearing_gradients_clears_every_representation(rank, world):
    for sharding in in_turn(2, STRATEGIES):
        model = sharded_chain(sharding=sharding)
        optimizer = adamw(model)
        loss_of(model, inputs(0, rank)).backward()
        for view in sharded_parameters(model):
            assert view.grad is not None
            assert view.grad.numel() == view.main.numel()
        optimizer.zero_grad()
        assert all(view.grad is None for view in sharded_parameters(model))
        loss_of(model, inputs(1, rank)).backward()
        model.zero_grad()
        assert all(view.grad is None and view.dtensor.grad is None for view in sharded_parameters(model))


def whole_step_is_balanced_over_ranks(rank, world):
    """Equal shard lengths: no rank keeps more than another."""
    model = sharded_chain(dim=DIM)
    train_wide(model, adamw(model), 1, rank)
    mine = torch.tensor([[view.main_bytes, view.held_bytes, view.gradient_bytes] for view in units(model)])
    lowest, highest = mine.clone(), mine.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest)


WORLDS = {
    1: (
        persistent_buffers_have_the_size_their_strategy_says,
        main_weight_is_the_held_weight_where_dtypes_match,
        gradients_have_memory_from_backward_to_the_next_forward,
        deletion_frees_everything_without_the_cycle_collector,
    ),
    2: (
        without_other_shards_weights_are_cast_when_used,
        persistent_buffers_have_the_size_their_strategy_says,
        main_weight_is_the_held_weight_where_dtypes_match,
        gradients_have_memory_from_backward_to_the_next_forward,
        at_rest_no_full_parameter_has_memory,
        peak_is_three_weights_and_two_buckets_of_a_chain,
        peak_without_slots_is_no_higher,
        frozen_units_are_given_back_after_forward,
        deletion_frees_everything_without_the_cycle_collector,
        an_optimizer_keeps_its_rows_and_nothing_else,
        clearing_gradients_clears_every_representation,
        whole_step_is_balanced_over_ranks,
    ),
    4: (persistent_buffers_have_the_size_their_strategy_says,),
}


@by_world(WORLDS)
def test_memory(world, case):
    check(WORLDS, world, case)
