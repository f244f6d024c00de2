"""GradientWatch on GPUs: the cases of the CPU, nothing that waits, and graphs that look as they are replayed."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch import nn

from lightning_mfsdp import GradientWatch, capture_loss, fully_shard, fully_shard_optimizer
from tests.engine.cases import Case, on_gpus, run_cases
from tests.engine.test_gradient_watch import TOGETHER
from tests.gpu.waiting import nothing_waits
from tests.helpers.distributed import needs_gpus


def nothing_waits_for_the_device(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    watch, x = GradientWatch(model), torch.randn(8, 64, device="cuda")
    for step in range(6):
        if step == 3:
            with nothing_waits():
                _step(model, optimizer, watch, x, step)
        else:
            _step(model, optimizer, watch, x, step)
    assert watch.arrived(wait=True) == []


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, watch: GradientWatch, x: torch.Tensor, step: int) -> None:
    model(x).square().mean().backward()
    watch.end_backward()
    assert watch.arrived() == []
    watch.submit(optimizer.param_groups[0]["params"], step=step)
    optimizer.step()
    optimizer.zero_grad()


def a_replayed_backward_is_watched(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    watch = GradientWatch(model)
    loss_of = capture_loss(lambda x: model(x).square().mean(), model)
    for step in range(9):
        x = torch.randn(8, 64, device="cuda")
        if step == 7 and rank == world - 1:
            x[0, 0] = float("nan")
        loss_of(x).backward()
        watch.end_backward()
        found = watch.check(step=step)
        assert (found is not None) == (step == 7), step
        if found is not None:
            assert {(one.first_rank, one.last_rank, one.microbatch) for one in found.parameters} == {
                (world - 1, world - 1, 0)
            }
            assert len(found.parameters) == 6
        model.zero_grad()
    assert loss_of.is_captured
    loss_of.close()


HERE: dict[str, Case] = {case.__name__: case for case in (nothing_waits_for_the_device, a_replayed_backward_is_watched)}
CASES = {1: HERE, 2: HERE | {case.__name__: partial(on_gpus, case) for case in TOGETHER}}


@cache
def outcome(world: int) -> dict[str, str]:
    return run_cases(CASES[world], world, backend="nccl")


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("case", CASES[1])
def test_on_one_gpu(case: str) -> None:
    errors = outcome(1)[case]
    assert not errors, errors


@pytest.mark.gpus2
@needs_gpus(2)
@pytest.mark.parametrize("case", CASES[2])
def test_on_two_gpus(case: str) -> None:
    errors = outcome(2)[case]
    assert not errors, errors
