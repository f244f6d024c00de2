"""fully_shard_units shards a model and all its units in one call, and initializes it unit by unit; shard_added what came into it later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.initialize import Replaced, children_first, materialize_module
from lightning_mfsdp.engine.api.fully_shard import fully_shard, mesh_device
from lightning_mfsdp.engine.api.strategies import choose_strategies
from lightning_mfsdp.engine.api.validate import refuse_shared_memory
from lightning_mfsdp.engine.comm.mesh import are_alike, resolve_mesh
from lightning_mfsdp.engine.core.conversion import unshard_unit
from lightning_mfsdp.engine.core.inspect import context_of, is_copy, unsharded_parameters
from lightning_mfsdp.engine.core.parameter import UnshardedParameter
from lightning_mfsdp.engine.core.unit import Unit, unit_of

__all__ = ["fully_shard_units", "shard_added"]


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
        **options: As in `fully_shard`. Patterns of `sharding` are of names inside the root.

    Raises:
        ShardingError: As `fully_shard`, or a module is named twice or is not inside the root.
    """
    device = mesh_device(resolve_mesh(mesh))
    _settle(module, options)
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
    refuse_shared_memory(module, ignored)
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


def shard_added(
    module: nn.Module, units: Sequence[nn.Module | Sequence[nn.Module]], mesh: DeviceMesh | None = None, **options: Any
) -> int:
    """Shard what came into a sharded root since: replaced layers, new ones, single parameters. Collective, between two steps.

    The units that have it inside, and the root, are sharded again, one at a time, whole in memory meanwhile. All others stay as they are.
    Optimizers that hold parameters of the former raise an error when they step. Gradients of all parameters are cleared, those that wait
    under `no_sync` too. Hooks and attributes of parameters that are sharded again stay.

    Args:
        module: The root.
        units: New modules to be units of their own, nested ones first; a list among them becomes one unit.
        mesh: As in `fully_shard`, and that of the root.
        **options: As in `fully_shard`. Patterns of `sharding` are of names inside the root.

    Returns:
        How many units were sharded again, the root among them.

    Raises:
        ShardingError: As `fully_shard`, or ranks have different new parameters.
    """
    context, root = context_of(module), unit_of(module)
    assert root is not None, "callers ask whether it is sharded"
    added = unsharded_parameters(module)
    if not are_alike(list(added), context.mesh.replicated_axes, mesh_device(context.mesh)):
        raise ShardingError(
            f"shard_added: since {type(module).__name__} was sharded, other parameters came into it on this rank ({list(added)[:4]}) than "
            "on another; expected the same model on all ranks. Replace and add layers on all of them"
        )
    _make_whole(module)
    _settle(module, options)
    for parameter in module.parameters():
        if isinstance(parameter, UnshardedParameter):  # from before sharding, shown again by a module that has come
            parameter._grad = None
        else:
            parameter.grad = None
    ignored = {id(parameter) for parameter in options.get("ignored_parameters") or ()}
    around = [_unit_around(module, name) for name, parameter in added.items() if id(parameter) not in ignored]
    # Who owns a shared parameter was sharded before those who show it, too.
    nested = {unit for unit in _with_users(unit for unit in around if unit is not root) if unit is not root}
    again = sorted(nested, key=lambda unit: unit.number)
    count = len(again) + 1
    del around, nested, root  # a unit that is made plain must not be kept alive
    for unit in units:
        fully_shard(unit, mesh, **options)
    while again:
        members = unshard_unit(again.pop(0))
        fully_shard(members[0] if len(members) == 1 else members, mesh, **options)
    unshard_unit(_unit_around(module, ""))
    fully_shard(module, mesh, **options)
    return count


def _make_whole(root: nn.Module) -> None:
    """Put plain parameters in place of those that were made of sharded tensors: `nn.Parameter(layer.weight.detach())`. Collective."""
    whole: dict[int, nn.Parameter] = {}
    for module in root.modules():
        table: dict[str, Any] = module._parameters
        for key, parameter in table.items():
            if parameter is not None and is_copy(parameter):
                if id(parameter) not in whole:
                    value = parameter.detach().full_tensor().clone()
                    whole[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                table[key] = whole[id(parameter)]


def _settle(root: nn.Module, options: dict[str, Any]) -> None:
    """Have options mean the same for every unit: those that name what is inside the root, and those that can be read only once."""
    if options.get("ignored_parameters") is not None:
        options["ignored_parameters"] = list(options["ignored_parameters"])
    if "sharding" in options:
        options["sharding"] = choose_strategies(root, options["sharding"])


def _unit_around(root: nn.Module, name: str) -> Unit:
    """The innermost unit that has a parameter inside."""
    module, unit = root, unit_of(root)
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        unit = unit_of(module) or unit
    assert unit is not None, "the root is one"
    return unit


def _with_users(found: Iterable[Unit]) -> list[Unit]:
    """Units, and those that show parameters of them."""
    units = list(dict.fromkeys(found))
    for unit in units:
        users = [user for reference in unit.users if (user := reference()) is not None]
        units += [user for user in users if user not in units]
    return units
