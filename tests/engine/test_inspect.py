"""Views of a part of a sharded model: what it holds is found, whichever unit owns it."""

from __future__ import annotations

import pytest
import torch

from lightning_mfsdp.engine import ShardingError, fully_shard, refresh_weights, sharded_parameters
from lightning_mfsdp.engine.internals import placed_as, unsharded_of, view_of
from tests.engine.worlds import by_world, check
from tests.helpers.models import build


def parameters_of_the_unit_around_a_part_are_found(rank: int, world: int) -> None:
    model = build(tied=True)
    fully_shard(model.blocks[0])
    fully_shard(model)
    units = {view.name: view.unit for view in sharded_parameters(model.blocks)}
    assert list(units) == [name for name, _ in model.blocks.named_parameters()]
    assert {name: unit for name, unit in units.items() if name.startswith("0.")} == {
        name: "blocks.0" for name in units if name.startswith("0.")
    }
    assert [view.names for view in sharded_parameters(model.head)] == [("weight",)]
    assert [view.names for view in sharded_parameters(model) if len(view.names) > 1] == [
        ("embedding.weight", "head.weight")
    ]


def weights_written_through_such_a_part_are_taken_over(rank: int, world: int) -> None:
    model = fully_shard(build())
    ids = torch.zeros(1, 2, dtype=torch.long)
    assert model(ids).any()
    for view in sharded_parameters(model.head):
        view.main.zero_()
    refresh_weights(model.head)
    assert not model(ids).any()


def a_module_without_sharded_parameters_is_still_refused(rank: int, world: int) -> None:
    with pytest.raises(ShardingError, match="no part of it was given to fully_shard"):
        refresh_weights(build())


def a_parameter_is_found_by_each_of_its_representations_and_what_is_made_of_it(rank: int, world: int) -> None:
    model = build()
    full = model.head.weight
    fully_shard(model)
    (view,) = (view for view in sharded_parameters(model) if view.name == "head.weight")
    for tensor in (full, view.dtensor, view.local, model.state_dict()["head.weight"]):
        found = view_of(tensor)
        assert found is not None
        assert (found.name, found.shape, found.piece) == ("head.weight", view.shape, view.piece)
        assert found.local is view.local
        assert unsharded_of(tensor) is full
    plain = torch.zeros(3)
    assert view_of(plain) is None
    assert unsharded_of(plain) is None


def rows_are_placed_as_those_of_a_parameter(rank: int, world: int) -> None:
    model = build()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model)
    for view in sharded_parameters(model):
        made = placed_as(view.main * 2, view.dtensor)
        assert made.shape == view.shape
        assert torch.equal(made.full_tensor(), before[view.name] * 2)
    rows = torch.arange(6.0)
    assert torch.equal(placed_as(rows, torch.zeros(2, 3)), rows.view(2, 3)), "of what is not sharded these are all"


CASES = [
    a_parameter_is_found_by_each_of_its_representations_and_what_is_made_of_it,
    rows_are_placed_as_those_of_a_parameter,
    parameters_of_the_unit_around_a_part_are_found,
    weights_written_through_such_a_part_are_taken_over,
    a_module_without_sharded_parameters_is_still_refused,
]
WORLDS = {2: CASES}


@by_world(WORLDS)
def test_parts_of_a_model(world, case):
    check(WORLDS, world, case)
