"""fully_shard_units: shards a model and all its units in one call, and initializes it unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.initialize import Replaced, children_first, materialize_module
from lightning_mfsdp.engine.api.fully_shard import fully_shard, mesh_device
from lightning_mfsdp.engine.comm.mesh import resolve_mesh

__all__ = ["fully_shard_units"]


def fully_shard_units(
    module: nn.Module,
    units: Sequence[nn.Module | Sequence[nn.Module]],
    mesh: DeviceMesh | None = None,
    *,
    before: Callable[[nn.Module], object] | None = None,
    other_meshes: Mapping[nn.Module, DeviceMesh] | None = None,
    **options: Any,
) -> nn.Module:
    """`fully_shard` every unit, then `module`, initializing meta parameters in the order in which their modules were built.

    One unit at a time is whole in memory, and under one seed the values are those of a model built on a real device.

    Args:
        module: The root.
        units: Modules inside it, in any order; a list among them becomes one unit.
        mesh: As in `fully_shard`.
        before: Called with each module that is about to be sharded, whose parameters have values, such as to divide them.
        other_meshes: Units that are sharded over another mesh, such as experts over one with an axis named "expert".
        **options: As in `fully_shard`.

    Raises:
        ShardingError: As `fully_shard`, or a module is named twice or is not inside the root.
    """
    device = mesh_device(resolve_mesh(mesh))
    if options.get("ignored_parameters") is not None:
        options["ignored_parameters"] = list(options["ignored_parameters"])
    members_of_each = [[unit] if isinstance(unit, nn.Module) else list(unit) for unit in units]
    unit_with = {id(member): members for members in members_of_each for member in members}
    inside = {id(child) for child in module.modules() if child is not module}
    if sum(map(len, members_of_each)) != len(unit_with) or not unit_with.keys() <= inside:
        strange = [
            type(member).__name__ for members in members_of_each for member in members if id(member) not in inside
        ]
        raise ShardingError(
            f"fully_shard_units: units: expected different modules inside {type(module).__name__}, got "
            f"{f'{strange} from elsewhere' if strange else 'a module twice'}"
        )
    seen, replaced = set[int](), Replaced()
    ignored = {id(parameter) for parameter in options.get("ignored_parameters") or ()}
    for name, child, model in children_first(module):
        materialize_module(name, child, model, device, replaced, ignored)
        seen.add(id(child))
        members = unit_with.get(id(child), [module])
        if module not in members and all(id(member) in seen for member in members):
            if before is not None:
                for member in members:
                    before(member)
            own_mesh = (other_meshes or {}).get(members[0], mesh)
            fully_shard(members[0] if len(members) == 1 else members, own_mesh, **options)
    if before is not None:
        before(module)
    return fully_shard(module, mesh, **options)
