"""With NCCL the two axes really reduce at the same time: gradients are those of one stream for both, to the bit, also in CUDA graphs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from lightning_mfsdp import MixedPrecisionPolicy, capture_step, fully_shard, fully_shard_optimizer, no_sync
from tests.engine.internals import context_of
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.helpers.models import batch, build, loss_of

ROWS, DIM, STEPS = 12, 384, 4
POLICIES = (
    None,
    MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16),
    MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16, high_precision_reduce=True),
)
SHARDINGS = (
    ("optim_grads_params", "no_shard"),
    ("optim_grads_params", "optim"),
    ("optim", "optim"),
    ("no_shard", "no_shard"),
)
WAYS = ("once", "twice", "no_sync", "keep_sharded")
# Each policy with microbatches that are added, and each way of adding them with bf16 on the wire.
CASES = list(dict.fromkeys([*product(POLICIES, ["twice"]), *product(POLICIES[-1:], WAYS)]))

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
RECORDED = partial(torch.optim.AdamW, lr=1e-3, fused=True, capturable=True)


def made(rank, sharding, outer, policy, *, two_streams, optimizer=SGD):
    mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "shard"))
    model = build(dim=DIM).cuda()
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, mesh, sharding=sharding, outer_sharding=outer, policy=policy)
    streams = context_of(model).lane.streams
    if not two_streams:
        streams.outer = streams.reduce
    return model, fully_shard_optimizer(optimizer(model.parameters()))


def inputs(index, rank, world):
    return [part.cuda().chunk(world)[rank] for part in batch(index, ROWS)]


def gradients(rank, world, sharding, outer, policy, way, *, two_streams):
    """Rows of the gradients of each step."""
    model, optimizer = made(rank, sharding, outer, policy, two_streams=two_streams)
    found = []
    for step in range(STEPS):
        if way != "once":
            with nullcontext() if way == "twice" else no_sync(model, keep_sharded=way == "keep_sharded"):
                loss_of(model, *inputs(2 * step + 1, rank, world)).backward()
        if step == STEPS - 1:  # one axis is late
            stream = context_of(model).lane.streams.outer
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
        loss_of(model, *inputs(2 * step, rank, world)).backward()
        found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


def two_streams_give_the_gradients_of_one(rank, world):
    for (sharding, outer), (policy, way) in product(SHARDINGS, CASES):
        case = rank, world, sharding, outer, policy, way
        found, expected = (gradients(*case, two_streams=two_streams) for two_streams in (True, False))
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one, other), f"{sharding} {outer} {policy} {way} step {step}"


def a_recorded_step_joins_both_streams(rank, world):
    for outer in ("no_shard", "optim"):
        results = []
        for captured in (False, True):
            model, optimizer = made(rank, "optim_grads_params", outer, None, two_streams=True, optimizer=RECORDED)

            def step(ids, targets, model=model, optimizer=optimizer):
                loss = loss_of(model, ids, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return {"loss": loss.detach()}

            run = capture_step(step, model, optimizer) if captured else step
            results.append(torch.stack([run(*inputs(index, rank, world))["loss"] for index in range(10)]))
            if captured:
                assert run.is_captured, run.failure
        torch.testing.assert_close(*results)


def everything(rank, world):
    two_streams_give_the_gradients_of_one(rank, world)
    a_recorded_step_joins_both_streams(rank, world)


@pytest.mark.gpu
@pytest.mark.gpus4
@needs_gpus(2)
def test_four_ranks_reduce_over_two_axes_at_once():
    """On two GPUs as on two hosts of two."""
    run_distributed(everything, 4, backend="nccl")
