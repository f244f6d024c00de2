"""offload="optimizer" on GPUs: bits, bytes on the device, page-locked memory under CUDA tensors, and no host synchronization in a step."""

from __future__ import annotations

import gc
from itertools import product
from unittest import mock

import pytest
import torch

from lightning_mfsdp import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    sharded_parameters,
    units,
    unshard,
)
from tests.engine.internals import context_of, empty_at_rest, put_to_rest
from tests.engine.internals import streamed_step as streaming
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.helpers.models import batch, build, loss_of
from tests.helpers.optimizer_state import state_of_rows

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ROWS = 12
BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


def _model(offload, dim=384, layers=6, **options):
    """Large enough that kernels and copies outlast the host, so that a missing wait shows."""
    model = build(dim=dim, layers=layers).cuda()
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, offload=offload, **options)
    return model


def _adamw(model, **options):
    return fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, **options))


def _backward(model, step, rank, world):
    ids, targets = (part.cuda().chunk(world)[rank] for part in batch(step, ROWS))
    loss = loss_of(model, ids, targets)
    loss.backward()
    return loss.detach()


def _train(model, optimizer, rank, world, steps=4):
    losses = []
    for step in range(steps):
        losses.append(_backward(model, step, rank, world))
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def _requested_bytes(which="current"):
    """Memory as it was asked for: what the allocator rounds up to, or leaves unsplit, says nothing about the engine."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def _start_clean():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return _requested_bytes()


def trains_to_the_bit_as_without(rank, world):
    kinds = ({"fused": True}, {"foreach": True})
    for sharding, policy, kind, together in product(STRATEGIES, (None, BF16), kinds, (1, 64 << 20)):
        found = []
        for offload in (None, "optimizer"):
            model = _model(offload, sharding=sharding, policy=policy)
            optimizer = _adamw(model, **kind)
            with mock.patch.object(streaming, "_TOGETHER_BYTES", together):
                losses = _train(model, optimizer, rank, world)
            state = [state_of_rows(optimizer).get(view.local, {}) for view in sharded_parameters(model)]
            with unshard(model):
                found.append([losses, state, {name: one.clone() for name, one in model.named_parameters()}])
        case = f"{sharding} {policy} {kind} {together}"
        (losses, state, weights), (their_losses, their_state, their_weights) = found
        assert torch.equal(losses, their_losses), (case, losses, their_losses)
        for name, value in weights.items():
            assert torch.equal(value, their_weights[name]), (case, name)
        for one, other in zip(state, their_state, strict=True):
            assert one.keys() == other.keys(), case
            assert all(torch.equal(one[key], other[key]) for key in one), case


def only_the_compute_shard_stays_on_the_device(rank, world):
    """And the first step, which makes the state, never has more of it than three chunks there."""
    before = _start_clean()
    model = _model("optimizer", dim=512, layers=16, policy=BF16)
    optimizer = _adamw(model, fused=True)
    total = sum(unit.num_parameters for unit in units(model))
    chunk_bytes = max(unit.main_bytes for unit in units(model))
    with mock.patch.object(streaming, "_TOGETHER_BYTES", 1):
        for step in range(3):
            _backward(model, step, rank, world)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = _requested_bytes()
            optimizer.step()
            used = _requested_bytes("peak") - start
            # Three areas: weights, and the new state of each; later weights and state.
            assert used < 10 * chunk_bytes + 2**20, (step, used, chunk_bytes)
            assert _requested_bytes() - start < 2**20, "staging areas are gone, state is not there; step counters are"
            optimizer.zero_grad()
    with torch.no_grad():
        model(batch(0, ROWS)[0].cuda())  # gives the gradients' memory back
    expected = 2 * total / world + context_of(model).lane.pool.allocated_bytes
    used = _requested_bytes() - before
    assert used < 1.1 * expected + 2**20, (used, expected)
    state = sum(
        one.numel() * one.element_size()
        for table in state_of_rows(optimizer).values()
        for one in table.values()
        if one.dim()
    )
    assert state > 0.9 * 8 * total / world
    homes = [group.host_buffer.host for unit in context_of(model).units for group in unit.groups if group.host_buffer]
    assert all(home.is_pinned() for home in homes)
    del model, optimizer
    gc.collect()
    assert _requested_bytes() - before < 2**20
    assert not any(home.is_pinned() for home in homes), "nobody uses it: it is ordinary memory again"


def steps_without_host_sync(rank, world):
    model = _model("optimizer", policy=BF16)
    optimizer = _adamw(model, fused=True)
    _train(model, optimizer, rank, world, steps=3)
    for step in range(3):
        _backward(model, step, rank, world)
        torch.cuda.set_sync_debug_mode("error")
        try:
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def everyone_reads_and_writes_it_as_device_memory(rank, world):
    """Copies in every direction, kernels, and what restored state goes through."""
    model = _model("optimizer", policy=BF16)
    optimizer = _adamw(model, fused=True)
    _train(model, optimizer, rank, world, steps=2)
    view = max(sharded_parameters(model), key=lambda one: one.main.numel())
    tensors = [view.main, state_of_rows(optimizer)[view.local]["exp_avg"]]
    for one in tensors:
        assert one.is_cuda
        assert not one.is_pinned()
        on_cpu, on_device = one.cpu(), one.clone()
        assert torch.equal(on_cpu.cuda(), on_device)
        one.copy_(on_cpu * 2)  # from ordinary host memory
        assert torch.equal(one, on_device * 2)
        one.copy_((on_cpu * 3).pin_memory(), non_blocking=True)
        assert torch.equal(one, on_device * 3)
        one.copy_(on_device)
        torch._foreach_add_([one], [on_device])
        assert torch.equal(one.cpu(), on_cpu * 2)
        one.copy_(on_device)
        other = torch.empty_like(one)
        assert _is_device_memory(other)
        assert not _is_device_memory(one)
    for shown in sharded_parameters(model)[:4]:  # the same on all ranks
        assert torch.isfinite(shown.dtensor.full_tensor()).all()
    before = _requested_bytes()
    restored = put_to_rest(torch.ones(view.main.shape), view.local)
    empty = empty_at_rest(view.local, torch.bfloat16)
    assert restored.is_cuda
    assert empty.is_cuda
    assert empty.dtype is torch.bfloat16
    assert bool((restored == 1).all())
    assert _requested_bytes() == before
    assert put_to_rest(restored, view.local) is restored
    # State that is loaded is moved, and the next steps are those of a run without.
    optimizer.load_state_dict(optimizer.state_dict())
    for table in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            table[key] = table[key].clone()
    _train(model, optimizer, rank, world, steps=2)
    assert not any(
        _is_device_memory(one) for table in state_of_rows(optimizer).values() for one in table.values() if one.dim()
    )


def _is_device_memory(tensor):
    """Whether the caching allocator gave it."""
    start = tensor.untyped_storage().data_ptr()
    return any(
        segment["address"] <= start < segment["address"] + segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
    )


def everything(rank, world):
    everyone_reads_and_writes_it_as_device_memory(rank, world)
    trains_to_the_bit_as_without(rank, world)
    steps_without_host_sync(rank, world)
    only_the_compute_shard_stays_on_the_device(rank, world)


@pytest.mark.gpu
@needs_gpus(1)
def test_one_gpu_offloads_its_optimizer():
    run_distributed(everything, 1, backend="nccl")


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2)
def test_two_gpus_offload_their_optimizers():
    run_distributed(everything, 2, backend="nccl")
