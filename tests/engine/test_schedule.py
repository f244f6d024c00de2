"""What happens when: reductions start during backward, gathers ahead of use, and `full_tensor` sees real rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.engine import ShardingError, fully_shard, fully_shard_optimizer, sharded_parameters, unshard
from tests.engine.cases import Problems, device_type
from tests.engine.internals import context_of, unit_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import adamw, inputs, loss_of, plain_chain, sharded_chain, train


class Passing(nn.Module):
    """A unit without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def _reductions_before_the_first_layer_ends(model: nn.Module, x: Tensor) -> int:
    """Reductions started when the gradient of the input arrives, that is, before the end of the backward."""
    context, seen = context_of(model), []
    x = x.clone().requires_grad_()
    x.register_hook(lambda _: seen.append(context.reductions.started))
    before = context.reductions.started
    loss_of(model, x).backward()
    return seen[0] - before


def reductions_start_while_backward_runs(rank: int, world: int) -> None:
    model = sharded_chain(layers=4)
    optimizer = adamw(model)
    train(model, optimizer, range(2), rank)
    # Layers 3, 2 and 1 are under way when layer 0 ends; the root comes last.
    assert _reductions_before_the_first_layer_ends(model, inputs(5, rank)) >= 3


class InputToo(nn.Linear):
    """Returns its input beside its result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, super().forward(x)


def a_unit_that_returns_its_input_is_given_back_in_time(rank: int, world: int) -> None:
    model = nn.Sequential(InputToo(8, 8), nn.Linear(8, 8))
    unit = unit_of(fully_shard(model[0]))
    fully_shard(model)
    seen, gathers = [], []
    for step in range(2):
        before = context_of(model).lane.started
        x = inputs(step, rank).requires_grad_()
        x.register_hook(lambda _: seen.append(unit.groups[0].weights.present))
        # Not through the root: its weights would be part of the count.
        x, y = model[0](x * 1.0)
        (x + y).sum().backward()
        gathers.append(context_of(model).lane.started - before)
    # For forward and for backward; then it is known to end the forward, so that its weights stay.
    assert gathers == [2, 1]
    assert seen == [False, False]


def units_without_parameters_hold_nobody_up(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = plain_chain(layers=4)
    model.passing = Passing()
    model.wrap = lambda layer, x: model.passing(layer(x))
    for unit in (*model.layers, model.passing, model):
        fully_shard(unit)
    train(model, adamw(model), range(2), rank)
    assert _reductions_before_the_first_layer_ends(model, inputs(5, rank)) >= 3


class Gated(nn.Linear):
    """A unit with several inputs."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


def units_with_several_inputs_are_done_when_all_their_gradients_are_there(rank: int, world: int) -> None:
    model = plain_chain(layers=4)
    model.layers = nn.ModuleList(Gated(8, 8) for _ in range(4))
    for unit in (*model.layers, model):
        fully_shard(unit)
    gate = torch.ones(8, requires_grad=True)
    model.wrap = lambda layer, x: layer(x, gate)
    train(model, adamw(model), range(2), rank)
    assert _reductions_before_the_first_layer_ends(model, inputs(5, rank)) >= 3


def a_unit_whose_end_nobody_notices_holds_nobody_up(rank: int, world: int) -> None:
    """No gradient of its input is wanted, so it may end with the whole backward alone."""
    model = sharded_chain(layers=4)
    model.wrap = lambda layer, x: layer(x.detach() if layer is model.layers[2] else x)
    train(model, adamw(model), range(2), rank)
    # Layers 3 and 1 are under way when layer 0 ends; layer 2 and the root come last.
    assert _reductions_before_the_first_layer_ends(model, inputs(5, rank)) >= 2


def tied_weights_of_the_two_ends_hold_nobody_up(rank: int, world: int) -> None:
    """The head owns, the first layer borrows: the pair is complete last, and everything between is not kept waiting."""
    model = plain_chain(layers=4)
    model.out = nn.Linear(8, 8)
    model.out.weight = model.layers[0].weight
    for unit in (model.out, *model.layers, model):
        fully_shard(unit)
    train(model, adamw(model), range(2), rank)
    assert _reductions_before_the_first_layer_ends(model, inputs(5, rank)) >= 3


def the_next_gather_starts_before_its_unit_runs(rank: int, world: int) -> None:
    model = sharded_chain(layers=3)
    train(model, adamw(model), range(2), rank)
    seen: list[list[bool]] = []

    def watch(layer: nn.Module, x: Tensor) -> Tensor:
        groups = [group for unit in context_of(model).units for group in unit.groups][:3]
        seen.append([group.weights.present for group in groups])
        return layer(x)

    model.wrap = watch
    with torch.no_grad():
        model(inputs(0, rank))
    # Before layer k runs, layer k itself is on its way already.
    assert [row[index] for index, row in enumerate(seen)] == [True, True, True]


def full_tensor_gathers_the_rows_as_they_lie(rank: int, world: int) -> None:
    model, problems = sharded_chain(dim=7), Problems()
    optimizer = adamw(model)
    reference = plain_chain(dim=7)
    loss_of(model, inputs(0, rank, dim=7)).backward()
    (sum(loss_of(reference, inputs(0, peer, dim=7)) for peer in range(world)) / world).backward()
    with unshard(model):
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for view, expected in zip(sharded_parameters(model), reference.parameters(), strict=True):
        problems.close(view.dtensor.full_tensor(), whole[view.name], view.name, rtol=0, atol=0)
        grad = view.dtensor.grad
        problems.expect(grad is not None, f"{view.name} has no gradient")
        problems.close(None if grad is None else grad.full_tensor(), expected.grad, f"{view.name}.grad")
    del optimizer
    problems.finish()


def full_tensor_on_two_axes(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    for outer in ("no_shard", "optim"):
        model, expected = sharded_chain(mesh=mesh, outer_sharding=outer, dim=7), plain_chain(dim=7)
        for view, parameter in zip(sharded_parameters(model), expected.parameters(), strict=True):
            assert torch.equal(view.dtensor.full_tensor(), parameter.detach()), (outer, view.name)


def optimizers_of_whole_matrices_are_refused(rank: int, world: int) -> None:
    model = sharded_chain()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    with pytest.raises(ShardingError, match="Muon needs whole vectors or matrices"):
        fully_shard_optimizer(torch.optim.Muon(matrices))


WORLDS = {
    2: (
        reductions_start_while_backward_runs,
        a_unit_that_returns_its_input_is_given_back_in_time,
        units_without_parameters_hold_nobody_up,
        units_with_several_inputs_are_done_when_all_their_gradients_are_there,
        a_unit_whose_end_nobody_notices_holds_nobody_up,
        tied_weights_of_the_two_ends_hold_nobody_up,
        the_next_gather_starts_before_its_unit_runs,
        optimizers_of_whole_matrices_are_refused,
    ),
    3: (full_tensor_gathers_the_rows_as_they_lie,),
    4: (full_tensor_on_two_axes,),
}


@by_world(WORLDS)
def test_schedule(world, case):
    check(WORLDS, world, case)
