"""With what arguments a sharded module was sharded, compared with others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mfsdp.engine import MixedPrecisionPolicy, fully_shard
from lightning_mfsdp.engine.internals import divided_over, other_arguments, policy_of
from tests.engine.worlds import by_world, check

GIVEN: dict[str, Any] = {
    "sharding": "optim_grads",
    "outer_sharding": "no_shard",
    "offload": None,
    "unused_parameters": "none",
}
HALF = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def arguments_that_differ_are_named(rank: int, world: int) -> None:
    module = layers()
    for part in (*module, module):
        fully_shard(part, **GIVEN)
    assert other_arguments(module, **GIVEN) == []
    assert other_arguments(module, **GIVEN | {"sharding": 2}) == [], "another way to say it"
    for others in (
        {"sharding": "optim"},
        {"offload": "optimizer"},
        {"unused_parameters": "zero"},
        {"sharding": "no_shard", "offload": "optimizer", "unused_parameters": "zero"},
    ):
        assert other_arguments(module, **GIVEN | others) == list(others)


def an_outer_sharding_that_differs_counts_as_sharding(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    module = fully_shard(layers(), mesh, **GIVEN)
    assert other_arguments(module, **GIVEN) == []
    assert other_arguments(module, **GIVEN | {"outer_sharding": "optim"}) == ["sharding"]


def each_unit_has_the_policy_it_was_sharded_with(rank: int, world: int) -> None:
    module = layers()
    fully_shard(module[0], policy=HALF)
    fully_shard(module)
    assert [policy_of(part) for part in (module, *module)] == [MixedPrecisionPolicy(), HALF, None]


def ranks_that_compute_with_parts_are_counted(rank: int, world: int) -> None:
    module = layers()
    assert divided_over(module) == (1, 1)
    fully_shard(module)
    assert divided_over(module) == (1, 1), "data ranks have the same parameters"
    tensor = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    assert divided_over(fully_shard(layers(), tensor)) == (2, 1)
    module = layers()
    fully_shard(module[1], init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "expert")))
    assert divided_over(module) == (1, 2)


CASES = [
    arguments_that_differ_are_named,
    an_outer_sharding_that_differs_counts_as_sharding,
    each_unit_has_the_policy_it_was_sharded_with,
    ranks_that_compute_with_parts_are_counted,
]
WORLDS = {2: CASES}


@by_world(WORLDS)
def test_arguments_of_a_sharded_module(world, case):
    check(WORLDS, world, case)
