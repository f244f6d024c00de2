"""The engine on GPUs with NCCL: parity with one process, memory, and no host synchronization in a step."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist

from lightning_mfsdp import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    units,
    unshard,
)
from tests.engine.internals import context_of
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.helpers.models import batch, build, loss_of

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ROWS = 12
DIM = 384  # large enough that kernels outlast the host, so that a missing wait shows


def _shard(model, mesh=None, **options):
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, mesh, **options)
    return model


def _sgd(model):
    """Linear in the gradients, so a wrong gradient shows as such; Adam would hide its size and magnify rounding."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def _train(model, optimizer, rank, world, *, accumulation=1, steps=4, waits=False, clip=1.0):
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            ids, targets = (part.cuda().chunk(world)[rank] for part in batch(step * accumulation + micro, ROWS))
            with no_sync(model) if waits and micro < accumulation - 1 else nullcontext():
                loss = loss_of(model, ids, targets) / accumulation
                loss.backward()
            losses.append(loss.detach())
        if world:
            clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def _reference(accumulation, steps=4):
    model = build(dim=DIM).cuda()
    optimizer = _sgd(model)
    for step in range(steps):
        for micro in range(accumulation):
            ids, targets = (part.cuda() for part in batch(step * accumulation + micro, ROWS))
            (loss_of(model, ids, targets) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def equals_one_process(rank, world):
    meshes = [(None, "no_shard")]
    if world == 4:
        hybrid = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "shard"))
        meshes += [(hybrid, "no_shard"), (hybrid, "optim")]
    references = {accumulation: _reference(accumulation) for accumulation in (1, 3)}
    for strategy, (mesh, outer), storage in product(STRATEGIES, meshes, ("pooled", "dynamic")):
        if strategy == "no_shard" and outer == "optim":
            continue
        every_way = ((1, False), (3, True), (3, False))
        for accumulation, waits in every_way if storage == "pooled" else every_way[1:2]:
            model = build(seed=rank, dim=DIM).cuda()
            _shard(model, mesh, sharding=strategy, outer_sharding=outer, storage=storage)
            optimizer = fully_shard_optimizer(_sgd(model))
            _train(model, optimizer, rank, world, accumulation=accumulation, waits=waits)
            expected = references[accumulation]
            with unshard(model):
                for name, parameter in model.named_parameters():
                    difference = (parameter - expected[name]).abs().max().item()
                    assert difference < 2e-5, (
                        f"{strategy} {outer} {storage} {accumulation} {waits} {name}: {difference}"
                    )


def step_without_host_sync(rank, world):
    policy = MixedPrecisionPolicy(
        compute_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16, high_precision_reduce=True
    )
    model = _shard(build().cuda(), policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    _train(model, optimizer, rank, world, steps=3)
    data = [tuple(part.cuda().chunk(world)[rank] for part in batch(step, ROWS)) for step in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids, targets in data:
            loss_of(model, ids, targets).backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def a_model_that_is_dropped_writes_nothing_any_more(rank, world):
    """A gather is under way, late, when its memory goes to others."""
    for sharding in STRATEGIES[1:]:
        model = _shard(build(dim=DIM).cuda(), sharding=sharding)
        _train(model, fully_shard_optimizer(_sgd(model)), rank, world, steps=2)
        context = context_of(model)
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.stream(context.lane.streams.gather):
            torch.cuda._sleep(1_000_000_000)  # cycles, about half a second
        gathers, groups = context.lane.started, [group for unit in context.units for group in unit.groups]
        memory = [segment for group in groups for plane in group.weights.shards for segment in plane.segments]
        memory += [buffer.memory for group in groups if (buffer := group.weights.buffer) is not None]
        sizes = [tensor.untyped_storage().size() for tensor in memory]
        context.weights_changed()
        context.refresh()
        if sharding == "optim_grads_params":
            groups[1].weights.unshard(ahead=True)  # and nobody will ask for it
        assert context.lane.started > gathers
        del model, context, groups, memory
        gc.collect()
        others = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in sizes for _ in range(2)]
        torch.cuda.synchronize()
        dist.barrier()
        assert all(bool(other.eq(7).all()) for other in others), sharding


def _requested_bytes():
    """Memory as it was asked for: what the allocator rounds up to, or leaves unsplit, says nothing about the engine."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def memory_is_sharded_and_freed(rank, world):
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = _requested_bytes()
    model = _shard(build(dim=512, layers=4).cuda(), policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    _train(model, optimizer, rank, world)
    total = sum(unit.num_parameters for unit in units(model))
    # fp32 main weight, gradient and two moments, and the fixed slots; a little for norms and the allocator's rounding.
    expected = total / world * (4 + 4 + 8) + context_of(model).lane.pool.allocated_bytes
    used = _requested_bytes() - before
    assert used < 1.1 * expected + 2**20, (used, expected)
    del model, optimizer
    # Autograd's thread may keep the last backward, with what it was to call at its end, until it takes up another.
    torch.ones((), device="cuda", requires_grad=True).square().backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # with which memory that another stream had to be done with is counted as free
    left = _requested_bytes() - before
    assert left < 2**20, left


def pooled_addresses_stay(rank, world):
    model = _shard(build().cuda())
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    seen = []
    for _ in range(4):
        _train(model, optimizer, rank, world, steps=1)
        with torch.no_grad():
            model(batch(0, ROWS)[0].cuda())
        seen.append(
            [
                buffer.memory.data_ptr()
                for unit in context_of(model).units
                for one in unit.weights
                if (buffer := one.buffer)
            ]
        )
    assert seen[1] == seen[2] == seen[3]


def everything(rank, world):
    equals_one_process(rank, world)
    step_without_host_sync(rank, world)
    if world > 1:
        memory_is_sharded_and_freed(rank, world)
        pooled_addresses_stay(rank, world)
        a_model_that_is_dropped_writes_nothing_any_more(rank, world)


@pytest.mark.gpu
@needs_gpus(1)
def test_one_gpu_trains_like_plain_pytorch():
    run_distributed(everything, 1, backend="nccl")


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2)
def test_two_gpus_train_like_one_process():
    run_distributed(everything, 2, backend="nccl")


@pytest.mark.gpu
@pytest.mark.gpus4
@needs_gpus(2)
def test_four_ranks_train_like_one_process():
    """On two GPUs as on two hosts of two."""
    run_distributed(everything, 4, backend="nccl")
