"""Sharded training equals plain PyTorch: bit for bit on one rank, within float tolerance on the concatenated batch on several."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    unshard,
)
from tests.engine.cases import device_type
from tests.helpers.distributed import run_distributed
from tests.helpers.models import Decoder, batch, build, loss_of
from tests.helpers.pairwise import in_world, pairwise

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ROWS = 12  # divides by 1, 2, 3, 4


def shard(model: Decoder, mesh=None, own_head: bool = True, **options) -> Decoder:
    """Blocks and embedding as units; the head with its norm and scale in the root."""
    fully_shard(model.embedding, mesh, **options)
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    if own_head:
        fully_shard(model.head, mesh, **options)
    return fully_shard(model, mesh, **options)


def train(model, optimizer, *, steps, accumulation, rank, world, sync="no_sync", clip=None):
    """Train on this rank's rows of each microbatch; returns losses and norms."""
    history = []
    for step in range(steps):
        for micro in range(accumulation):
            ids, targets = batch(step * accumulation + micro, ROWS)
            ids, targets = ids.chunk(world)[rank], targets.chunk(world)[rank]
            last = micro == accumulation - 1
            waits = sync != "always" and not last and dist.is_initialized() and world > 0
            with no_sync(model, keep_sharded=sync == "keep_sharded") if waits else nullcontext():
                loss = loss_of(model, ids, targets) / accumulation
                loss.backward()
            history.append(loss.detach())
        if clip is not None:
            history.append(
                clip_grad_norm_(model, clip) if world else nn.utils.clip_grad_norm_(model.parameters(), clip)
            )
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(history)


@cache
def reference(steps, accumulation, clip=None, dtype=torch.float32):
    model = build(layers=2, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for step in range(steps):
        for micro in range(accumulation):
            loss = loss_of(model, *batch(step * accumulation + micro, ROWS)) / accumulation
            loss.backward()
            history.append(loss.detach())
        if clip is not None:
            history.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return model, torch.stack(history)


def _in_case(case, message):
    return f"{case}: {message}"


def weights(model):
    with unshard(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def world_one(rank, world, strategy, accumulation):
    expected, losses = reference(20, accumulation, clip=0.7)
    model = shard(build(layers=2), sharding=strategy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    seen = train(model, optimizer, steps=20, accumulation=accumulation, rank=0, world=1, clip=0.7, sync="always")
    assert torch.equal(seen, losses)
    trained = weights(model)
    for name, value in expected.named_parameters():
        assert torch.equal(trained[name], value), name


def all_on_one_rank(rank, world):
    for strategy, accumulation in pairwise(STRATEGIES, (1, 3), together=1):
        world_one(rank, world, strategy, accumulation)


def test_one_rank_is_bit_equal_to_plain_pytorch_in_fp32_over_20_steps():
    run_distributed(all_on_one_rank, 1)


def same_as_one_process(rank, world, cases):
    for strategy, accumulation, sync, bf16 in cases:
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16) if bf16 else None
        # Every rank starts from its own numbers; rank 0's must win.
        model = shard(build(seed=rank, layers=2), sharding=strategy, policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = train(
            model, optimizer, steps=3, accumulation=accumulation, rank=rank, world=world, sync=sync, clip=0.5
        )
        dist.all_reduce(losses)
        expected, expected_losses = reference(3, accumulation, clip=0.5)
        tolerance = {"rtol": 0.05, "atol": 0.02} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(
            losses / world, expected_losses, **tolerance, msg=partial(_in_case, (strategy, accumulation, sync, bf16))
        )
        tolerance = {"rtol": 0.1, "atol": 0.05} if bf16 else {"rtol": 1e-4, "atol": 2e-5}
        trained = weights(model)
        for name, value in expected.named_parameters():
            torch.testing.assert_close(
                trained[name],
                value.detach(),
                **tolerance,
                msg=partial(_in_case, (name, strategy, accumulation, sync)),
            )


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_strategy_equals_one_process_on_the_concatenated_batch(world):
    ways = [(*way, False) for way in ((1, "always"), (3, "no_sync"), (3, "always"), (3, "keep_sharded"))]
    ways += [(accumulation, "no_sync", True) for accumulation in (1, 3)]
    cases = [(strategy, *way) for strategy, way in in_world(world, (2, 3), STRATEGIES, ways)]
    run_distributed(same_as_one_process, world, cases)


def hybrid(rank, world):
    mesh = dist.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    ways = ((1, "always"), (3, "no_sync"), (3, "always"), (3, "keep_sharded"))
    rows = pairwise(
        STRATEGIES, ("no_shard", "optim"), ways, possible=lambda *row: row[:2] != ("no_shard", "optim"), together=1
    )
    for strategy, outer, (accumulation, sync) in rows:
        model = shard(build(seed=rank, layers=2), mesh, sharding=strategy, outer_sharding=outer)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        train(model, optimizer, steps=3, accumulation=accumulation, rank=rank, world=world, sync=sync, clip=0.5)
        expected, _ = reference(3, accumulation, clip=0.5)
        trained = weights(model)
        for name, value in expected.named_parameters():
            torch.testing.assert_close(
                trained[name],
                value.detach(),
                rtol=1e-4,
                atol=2e-5,
                msg=partial(_in_case, (name, strategy, outer, sync)),
            )


def test_hsdp_and_hfsdp_on_two_by_two_equal_one_process():
    run_distributed(hybrid, 4)
