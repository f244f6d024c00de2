"""Experts on 1, 2 or 4 ranks each give the loss, the gradients, the norm and the weights of one process with the whole batch."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mfsdp import (
    MFSDPStrategy,
    MixedPrecisionPolicy,
    ShardingError,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    grad_norm,
    no_sync,
    sharded_parameters,
    units,
    unshard,
)
from lightning_mfsdp.moe import GroupedExperts, expert_parallel, take_over_budget
from tests.engine.cases import Problems, run_cases
from tests.helpers.pairwise import pairwise
from tests.moe.models import batch, build, loss_of, meshes, sharded

STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")
WHOLE = {"policy": MixedPrecisionPolicy(direct_weight_gradients=False)}


def compare_rows(problems: Problems, model: nn.Module, expected: dict[str, torch.Tensor], what: str, *, grads: bool):
    for view in sharded_parameters(model):
        value = expected[view.name]
        problems.expect(view.shape == value.shape, f"{what}: {view.name} has shape {tuple(view.shape)}")
        rows = value[view.rows.start : view.rows.stop]
        if view.main.numel():
            problems.close(view.grad if grads else view.main, rows, f"{what}: {view.name}", rtol=1e-4, atol=1e-6)


def trains_like_one_process(ep: int, sharding: str, dispatcher: str, rank: int, world: int) -> None:
    """Two steps of two microbatches, the first of them without communication, clipped; then the next loss."""
    problems = Problems()
    reference = build()
    model = sharded(build(), world, ep, dispatcher=dispatcher, sharding=sharding, **WHOLE)
    for step in range(2):
        optimizers = [
            torch.optim.SGD(reference.parameters(), lr=0.5),
            fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5)),
        ]
        for micro in range(2):
            whole = loss_of(reference, batch(2 * step + micro))
            (whole / 2).backward()
            with no_sync(model) if micro == 0 else nullcontext():
                loss = loss_of(model, batch(2 * step + micro, rank, world))
                (loss / 2).backward()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            problems.close(total / world, whole.detach(), f"loss of step {step}")
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        compare_rows(problems, model, gradients, f"gradient of step {step}", grads=True)
        for order in (1.0, 2.0, float("inf")):
            expected = nn.utils.get_total_norm(list(gradients.values()), order)
            problems.close(grad_norm(model, order), expected, f"norm {order}")
        limit = float(expected)
        problems.close(
            clip_grad_norm_(model, limit), nn.utils.clip_grad_norm_(reference.parameters(), limit), "clipped norm"
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: parameter.detach() for name, parameter in reference.named_parameters()}
        compare_rows(problems, model, weights, f"weight after step {step}", grads=False)
    with unshard(model, writeback=True):
        for name, parameter in model.named_parameters():
            problems.close(parameter.detach(), weights[name], f"unsharded {name}", rtol=1e-4)
            with torch.no_grad():
                parameter.mul_(2)
                weights[name] = weights[name] * 2
    for name, parameter in model.named_parameters():
        problems.close(parameter.full_tensor(), weights[name], f"whole {name}", rtol=1e-4)
        problems.close(parameter.detach().sum(), weights[name].sum(), f"sum of {name}", rtol=1e-4, atol=1e-4)
    problems.finish()


def with_an_outer_axis(rank: int, world: int) -> None:
    problems = Problems()
    reference, model = build(), build()
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    expert = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("outer", "shard", "expert"))
    for block in model.blocks:
        expert_parallel(block.experts, expert)
        fully_shard(block.experts, expert, outer_sharding="optim")
        fully_shard(block, dense, outer_sharding="optim")
    fully_shard(model, dense, outer_sharding="optim")
    loss_of(reference, batch(0)).backward()
    loss_of(model, batch(0, rank, world)).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    compare_rows(problems, model, gradients, "gradient", grads=True)
    problems.close(grad_norm(model), nn.utils.get_total_norm(list(gradients.values())), "norm")
    problems.finish()


def built_on_meta(rank: int, world: int) -> None:
    """Under one seed weights do not depend on the number of ranks; buffers get values too."""
    problems = Problems()
    for ep in (1, 2, 4):
        with torch.device("meta"):
            experts = GroupedExperts(num_experts=8, hidden_size=4, intermediate_size=3)
        _, mesh = meshes(world, ep)
        expert_parallel(experts, mesh)
        torch.manual_seed(5)
        fully_shard(experts, mesh)
        torch.manual_seed(5)
        expected = GroupedExperts(num_experts=8, hidden_size=4, intermediate_size=3)
        for name, parameter in experts.named_parameters():
            problems.close(parameter.full_tensor(), getattr(expected, name).detach(), f"{name} at {ep}", rtol=0, atol=0)
        problems.expect(not experts.over_budget and experts.live_rows == 0, "buffers")
    problems.finish()


def a_full_buffer_is_flagged_on_all_ranks(rank: int, world: int) -> None:
    _, mesh = meshes(world, 4)
    torch.manual_seed(0)
    experts = expert_parallel(
        GroupedExperts(num_experts=8, hidden_size=4, intermediate_size=3, capacity_factor=1.5, over_capacity="drop"),
        mesh,
        dispatcher="all_gather",
    )
    hidden = torch.randn(6, 4, requires_grad=True)
    even = torch.arange(12).view(6, 2) % 8
    experts(hidden, even, torch.ones(6, 2)).sum().backward()
    assert experts.live_rows == (16 if rank < 2 else 8)
    assert not take_over_budget(experts)
    lopsided = torch.zeros_like(even)
    output = experts(hidden, lopsided, torch.ones(6, 2))
    output.sum().backward()
    assert bool(experts.over_budget) is (rank == 0)
    assert experts.capacity == 32
    assert experts.live_rows == (18 if rank == 0 else 0)  # 1.5 times the 12 choices of a rank
    assert torch.isfinite(output).all()
    assert torch.isfinite(hidden.grad).all()
    assert take_over_budget(experts), "all ranks know"
    assert not take_over_budget(experts), "it was taken"


def refusals(rank: int, world: int) -> None:
    dense, mesh = meshes(world, 2)
    experts = GroupedExperts(num_experts=8, hidden_size=4, intermediate_size=3)
    with pytest.raises(ShardingError, match="6 experts cannot be divided evenly among 4 ranks"):
        expert_parallel(GroupedExperts(num_experts=6, hidden_size=4, intermediate_size=3), dense)
    with pytest.raises(ShardingError, match='"all_gather" or "all_to_all", got \'ring\''):
        expert_parallel(experts, mesh, dispatcher="ring")
    with pytest.raises(ShardingError, match='an axis named "expert", or with one axis'):
        expert_parallel(experts, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    with pytest.raises(ShardingError, match=r"expected GroupedExperts, or .* enabled, got Sequential; call it"):
        expert_parallel(nn.Sequential(experts), mesh)
    expert_parallel(experts, mesh)
    with pytest.raises(ShardingError, match="divided or sharded already"):
        expert_parallel(experts, mesh)
    experts.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ShardingError, match=r'scale of GroupedExperts is a single number, .* axis "expert"'):
        fully_shard(experts, mesh)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])
    with pytest.raises(ShardingError, match="over a mesh of 2 ranks inside a module sharded over 4"):
        fully_shard(model, dense)
    with pytest.raises(ShardingError, match=r'expected a mesh with one axis .* axes named "expert"'):
        fully_shard(nn.Linear(2, 2), mesh["expert"])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], dense)
    with pytest.raises(ShardingError, match="unit 0 has the same parameters on all ranks"):
        fully_shard(model, mesh)
    with pytest.raises(ValueError, match='its axis "expert" is for modules of experts'):
        MFSDPStrategy(mesh=mesh)
    with pytest.raises(ValueError, match="Linear has no GroupedExperts inside"):
        take_over_budget(nn.Linear(2, 2))


def whole_experts_are_shared_out_without_padding(rank: int, world: int) -> None:
    dense, _ = meshes(world, 1)
    sizes = {"hidden_size": 48, "intermediate_size": 40}
    stacked = fully_shard(GroupedExperts(num_experts=8, **sizes), dense)
    assert sum(view.main.numel() for view in sharded_parameters(stacked)) == 8 * 3 * 48 * 40 / world
    assert units(stacked)[0].padding_fraction == 0
    # Fewer experts than ranks: rows of whole experts would leave ranks empty.
    few = fully_shard(GroupedExperts(num_experts=2, flat_weights=True, **sizes), dense)
    assert units(few)[0].padding_fraction < 0.01
    assert sum(view.main.numel() for view in sharded_parameters(few)) > 0.95 * 2 * 3 * 48 * 40 / world


CASES = {
    f"{sharding} of {ep} by {dispatcher}": partial(trains_like_one_process, ep, sharding, dispatcher)
    for ep, sharding, dispatcher in pairwise(
        (1, 2, 4),
        STRATEGIES,
        ("all_gather", "all_to_all"),
        possible=lambda ep, sharding, dispatcher: dispatcher == "all_gather" or (ep > 1 and sharding == STRATEGIES[0]),
        together=1,
    )
} | {
    case.__name__: case
    for case in (
        with_an_outer_axis,
        built_on_meta,
        a_full_buffer_is_flagged_on_all_ranks,
        refusals,
        whole_experts_are_shared_out_without_padding,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_cases(CASES, 4)


@pytest.mark.parametrize("case", CASES)
def test_experts_on_several_ranks(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]


def test_the_default_dispatcher_is_that_of_the_strategies() -> None:
    default = inspect.signature(expert_parallel).parameters["dispatcher"].default
    assert default == inspect.signature(MFSDPStrategy).parameters["expert_dispatcher"].default
