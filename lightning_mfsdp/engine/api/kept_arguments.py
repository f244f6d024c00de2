"""Says with what arguments a module was sharded, for a caller that would shard it with others: they do not change."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from lightning_mfsdp.engine.api.strategies import Sharding, choose_strategies
from lightning_mfsdp.engine.core.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.core.unit import unit_of

__all__ = ["Divided", "divided_over", "other_arguments", "policy_of"]


class Divided(NamedTuple):
    """Over how many ranks parameters are divided that compute with different parts of them; 1: they are not.

    Attributes:
        tensor: Along a tensor axis.
        expert: Along an expert axis.
    """

    tensor: int
    expert: int


def policy_of(module: nn.Module) -> MixedPrecisionPolicy | None:
    """The policy of exactly this module; `None` if it was not given to `fully_shard`."""
    unit = unit_of(module)
    return None if unit is None else unit.policy


def divided_over(module: nn.Module) -> Divided:
    """How the parameters of the sharded modules inside `module` are divided.

    Several modules have one tensor axis; layers of experts may be the only ones with an expert axis.
    """
    units = [unit for part in module.modules() if (unit := unit_of(part)) is not None]
    meshes = [group.mesh for unit in units for group in unit.groups]
    tensor = next((mesh.tensor.size for mesh in meshes if mesh.tensor is not None), 1)
    return Divided(tensor, next((mesh.expert.size for mesh in meshes if mesh.expert is not None), 1))


def other_arguments(
    module: nn.Module, *, sharding: Sharding, outer_sharding: str | int, offload: str | None, unused_parameters: str
) -> list[str]:
    """Which of these arguments are not those that the units of a sharded module have, by name.

    Args:
        module: Sharded.
        sharding: Of `fully_shard`, as all others.
        outer_sharding: If it is another one, "sharding" is named.
        offload: As above.
        unused_parameters: As above.
    """
    unit = unit_of(module)
    assert unit is not None, "callers ask whether it is sharded"
    context, mesh = unit.context, unit.context.mesh
    wanted = choose_strategies(module, sharding).placements(module, outer_sharding, mesh)
    groups = [group for unit_inside in context.units for group in unit_inside.groups]
    differ = {
        "sharding": any(
            group.placement != group.placement_for(wanted[id(table)])
            for group in groups
            for entry in group.entries
            for table, _ in entry.sites
            if id(table) in wanted and not group.spec.whole
        ),
        "offload": any(group.offloads != (offload is not None) for group in groups),
        "unused_parameters": context.reductions.zeros_unused != (unused_parameters == "zero"),
    }
    return [name for name, differs in differ.items() if differs]
