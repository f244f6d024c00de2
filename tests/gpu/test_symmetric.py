"""Gathers into symmetric memory: moved by copy engines and not by kernels, with the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, unshard
from lightning_mfsdp.base import compat
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.helpers.models import batch, build, loss_of

ROWS = 12


def train(rank, world, *, symmetric):
    model = build(dim=256).cuda()
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, policy=policy, symmetric_memory=symmetric)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True))

    def step(index):
        ids, targets = (part.cuda().chunk(world)[rank] for part in batch(index, ROWS))
        loss = loss_of(model, ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step(index) for index in range(5)]
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        losses.append(step(5))
        torch.cuda.synchronize()
    with unshard(model):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    kernels = [event.key for event in profiled.key_averages() if "AllGather" in event.key]
    return torch.stack(losses), weights, kernels


def copy_engines_move_the_weights(rank, world):
    ordinary = train(rank, world, symmetric=False)
    symmetric = train(rank, world, symmetric=True)
    assert ordinary[2], "the profiler sees gather kernels where there are some"
    assert not symmetric[2], symmetric[2]
    torch.testing.assert_close(symmetric[0], ordinary[0], rtol=1e-3, atol=1e-3)
    for one, other in zip(symmetric[1], ordinary[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def symmetric_memory_is_shared_out_by_a_zero_cta_communicator(rank, world):
    device = torch.device("cuda", torch.cuda.current_device())
    assert compat.no_symmetric_memory_because(device) == ""
    group = compat.zero_cta_group(list(range(world)))
    memory = compat.symmetric_memory(4096, device, group)
    assert memory.shape == (4096,)
    own = memory.view(world, -1)[rank]
    with torch.cuda.stream(torch.cuda.Stream()):
        own.fill_(rank + 1)
        compat.all_gather_flat(memory, own, group)
        torch.cuda.current_stream().synchronize()
    assert memory.view(world, -1).float().mean(1).tolist() == [other + 1.0 for other in range(world)]


def everything(rank, world):
    symmetric_memory_is_shared_out_by_a_zero_cta_communicator(rank, world)
    copy_engines_move_the_weights(rank, world)


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2, apart=True)
def test_copy_engines_move_weights_between_two_gpus():
    run_distributed(everything, 2, backend="nccl")


@pytest.mark.gpu
@pytest.mark.gpus4
@needs_gpus(4, apart=True)
def test_copy_engines_move_weights_between_four_gpus():
    run_distributed(everything, 4, backend="nccl")
