"""Muon on GPUs with NCCL: the numbers of torch.optim.Muon, no host synchronization, bounded memory."""

from __future__ import annotations

import pytest
import torch

from lightning_mfsdp import fully_shard, fully_shard_optimizer, unshard
from lightning_mfsdp.optim import Muon
from tests.gpu.linear import DIM, made
from tests.helpers.distributed import needs_gpus, run_distributed

LAYERS = 64
LIMIT = 2**20  # two matrices
MATRIX = 2 * DIM * DIM


def trained(model, optimizer, steps):
    for number in steps:
        model(number).backward()
        optimizer.step()
        optimizer.zero_grad()


def trains_like_torch(rank, world):
    plain, model = made(LAYERS), made(LAYERS)
    fully_shard(model)
    reference = torch.optim.Muon(plain.parameters(), lr=0.01)
    optimizer = fully_shard_optimizer(Muon(model.parameters(), lr=0.01, exchange_bytes=LIMIT))
    trained(plain, reference, range(3))
    trained(model, optimizer, range(2))
    model(2).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    # Everything at once would take several times what this rank owns, 16 MiB.
    assert taken <= 8 * LIMIT + 8 * MATRIX, f"{taken / 2**20:.1f} MiB"
    with unshard(model):
        for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            # Three steps of about lr / sqrt(512) each; one rounding to bfloat16 in 256.
            torch.testing.assert_close(parameter, expected, rtol=0, atol=5e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2)
def test_muon_on_two_gpus_is_that_of_torch_in_bounded_memory_without_waiting_for_the_device():
    run_distributed(trains_like_torch, 2, backend="nccl")
