"""Collectives of torch.distributed on sharded tensors do what they do on whole ones, which are equal on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine import fully_shard, fully_shard_optimizer
from tests.engine.worlds import by_world, check

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
IS_OLD = torch.__version__.startswith("2.11")  # DTensor's own dispatch refuses them there


def kinds(sharding: str, keep: list[nn.Module]) -> dict[str, Tensor]:
    """A weight, what shares its memory, its gradient, and state of its optimizer, after a step; `keep` keeps the module."""
    torch.manual_seed(0)
    module = fully_shard(nn.Linear(5, 7), sharding=sharding)
    keep.append(module)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(module.parameters()))
    module(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    weight = module.weight
    state = optimizer.state[weight]["exp_avg"]
    return {
        "weight": weight,
        "data": weight.data,
        "gradient": weight.grad,
        "gradient's data": weight.grad.data,
        "state": state,
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().clone()


def reductions_have_the_values_of_whole_tensors(rank, world):
    keep: list[nn.Module] = []
    for sharding in STRATEGIES:
        for op, factor in ((dist.ReduceOp.SUM, world), (dist.ReduceOp.MAX, 1), (dist.ReduceOp.MIN, 1)):
            for name, tensor in kinds(sharding, keep).items():
                before = whole(tensor)
                dist.all_reduce(tensor.detach() if tensor.requires_grad else tensor, op=op)
                assert torch.equal(whole(tensor), factor * before), f"{sharding} {name} {op}"
    for name, tensor in kinds("optim_grads_params", keep).items():
        with pytest.raises(EngineStateError, match="each rank has rows of its own; pass value.full_tensor"):  # noqa: RUF043
            dist.all_reduce(tensor.detach(), op=dist.ReduceOp.PRODUCT)
        with pytest.raises(EngineStateError, match="rows of its own"):
            dist.reduce(tensor.detach(), 0)
        assert name


def a_group_of_one_rank_changes_nothing(rank, world):
    keep: list[nn.Module] = []
    groups = [dist.new_group([one]) for one in range(world)]
    for name, tensor in kinds("optim_grads_params", keep).items():
        before = whole(tensor)
        dist.all_reduce(tensor.detach(), group=groups[rank])
        assert torch.equal(whole(tensor), before), name


def broadcasts_and_gathers_have_the_values_of_whole_tensors(rank, world):
    keep: list[nn.Module] = []
    for sharding in STRATEGIES:
        for name, tensor in kinds(sharding, keep).items():
            before = whole(tensor)
            dist.broadcast(tensor.detach(), 0)
            work = dist.broadcast(tensor.detach(), 0, async_op=True)
            work.wait()
            plain = [torch.empty_like(before) for _ in range(world)]
            dist.all_gather(plain, tensor.detach())
            alike = [torch.zeros_like(tensor.detach()) for _ in range(world)]
            dist.all_gather(alike, tensor.detach())
            together = torch.empty(world * before.shape[0], *before.shape[1:])
            dist.all_gather_into_tensor(together, tensor.detach())
            for one in (tensor, *plain, *alike, *together.chunk(world)):
                assert torch.equal(whole(one) if hasattr(one, "full_tensor") else one, before), f"{sharding} {name}"


def averaging_gradients_again_changes_nothing(rank, world):
    """As loops do that were written for one process: sum, and divide by the number of ranks."""
    keep: list[nn.Module] = []
    for sharding in STRATEGIES:
        gradient = kinds(sharding, keep)["gradient"]
        before = whole(gradient)
        for view in (gradient, gradient.view(-1), gradient[:3]):
            dist.all_reduce(view)
            view /= world
        torch.testing.assert_close(whole(gradient), before, msg=sharding)


CASES = () if IS_OLD else (
    reductions_have_the_values_of_whole_tensors,
    a_group_of_one_rank_changes_nothing,
    broadcasts_and_gathers_have_the_values_of_whole_tensors,
    averaging_gradients_again_changes_nothing,
)  # fmt: skip


def nothing_is_lost(rank, world):
    keep: list[nn.Module] = []
    for name, tensor in kinds("optim_grads_params", keep).items():
        before = whole(tensor)
        try:
            dist.all_reduce(tensor.detach())
        except (NotImplementedError, RuntimeError):
            continue
        assert torch.equal(whole(tensor), world * before), name


WORLDS = {1: (*CASES, nothing_is_lost), 2: (*CASES, nothing_is_lost), 3: CASES}


@by_world(WORLDS)
def test_collectives(world, case):
    check(WORLDS, world, case)
