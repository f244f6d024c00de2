"""What happens to a sharded module when it is moved, converted or made plain again.

`module.cpu()`, `.to(dtype)`, `.half()` work on shards: the module shows this rank's rows as they were moved or cast, while the engine's
memory, the optimizer and communication stay where they are. A forward of a converted module raises; the way back (`.to(...)`, another
fit) writes the rows into the main weights. `unshard_model` ends the sharding: whole plain parameters in place, unit by unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.context import Context
from lightning_mfsdp.engine.core.group import ParameterGroup, owner_of, place_of
from lightning_mfsdp.engine.core.parameter import Entry, leave_behind
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.core.sharded_tensor import Role, ShardedTensor
from lightning_mfsdp.engine.core.unit import Unit, unit_of

__all__ = [
    "bring_home",
    "follow_conversions",
    "refuse_moved",
    "unshard_model",
    "unshard_unit",
]


class _NotForDDP:
    """Raises when the list of parameters to ignore is read, which means that DistributedDataParallel is about to wrap shards.

    Args:
        module: The module it is set on.
    """

    def __init__(self, module: nn.Module) -> None:
        self.said = module.__dict__.get(compat.IGNORED_BY_DDP)  # what the user set on the module
        self.names = compat.ddp_ignores(module)

    def give_back(self, module: nn.Module) -> None:
        """Restore the module."""
        del module.__dict__[compat.IGNORED_BY_DDP]
        if self.said is not None:
            module.__dict__[compat.IGNORED_BY_DDP] = self.said

    def __iter__(self) -> Iterator[str]:
        raise ShardingError(
            "DistributedDataParallel (strategy ddp) was given a module that is sharded, whose ranks hold different rows; call "
            "unshard_model(module) first, or train on with the sharded module"
        )


def follow_conversions(module: nn.Module) -> None:
    """Have the modules in `module` that show sharded parameters convert them as shards, and DistributedDataParallel refuse `module`."""
    if not isinstance(module.__dict__.get(compat.IGNORED_BY_DDP), _NotForDDP):
        module.__dict__[compat.IGNORED_BY_DDP] = _NotForDDP(module)
    for child in module.modules():
        if any(isinstance(parameter, ShardedParameter) for parameter in child._parameters.values()):
            child.__dict__["_apply"] = _apply_of(weakref.ref(child))


def _apply_of(this: weakref.ref[nn.Module]) -> Callable[..., nn.Module]:
    """`_apply` of one module; it holds no strong reference to the module."""

    def _apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = this()
        assert module is not None, "called through the module"
        return _converted(module, function, recurse)

    return _apply


def _converted(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
    """Replaces `nn.Module._apply`, which would put other tensors in place of shards."""
    table: dict[str, Any] = module._parameters
    shown = {key: one for key, one in table.items() if isinstance(one, ShardedParameter)}
    with torch.no_grad():
        applied = {key: function(one) for key, one in shown.items()}
    table.update(dict.fromkeys(shown))
    try:
        compat.apply_to_tensors(module, function, recurse)
    finally:
        table.update(shown)
    for key, value in applied.items():
        owner = owner_of(shown[key])
        if owner is not None and isinstance(value, ShardedTensor) and value is not shown[key]:
            _show_as(*owner, value)
    return module


def _show_as(group: ParameterGroup, entry: Entry, value: ShardedTensor) -> None:
    local, rows = entry.local, value._local_tensor
    if (local.dtype, local.device) == (rows.dtype, rows.device):
        _write_home(group, entry, rows)
    else:
        _refuse_shown_average(group.root(), f"converting parameter {entry.name}")
        entry.show(ShardedParameter.converted(value, entry.sharded))
        group.moved.add(entry)


def _write_home(group: ParameterGroup, entry: Entry, rows: Tensor) -> None:
    with torch.no_grad():
        entry.local.copy_(rows)
    entry.sharded.note_write()
    entry.show(entry.at_rest)
    group.moved.discard(entry)


def refuse_moved(groups: Iterable[ParameterGroup | None], what: str) -> None:
    """Raise if main weights would be written whose rows a module shows converted; converting back would undo the write.

    Args:
        groups: Of the main weights; `None` for one that is gone.
        what: The function that was called.
    """
    for group in groups:
        for entry in group.entries if group is not None and group.moved else ():
            shown = next((table[key] for table, key in entry.sites if _is_of(table.get(key), entry)), None)
            if shown is not None and shown.role is Role.CONVERTED:
                raise ShardingError(
                    f"{what}: the module shows parameter {entry.name} as a conversion left it, {_looks(shown)}, and its "
                    f"main weight is {_looks(entry.local)}; only one of the two would last. Convert the module back before "
                    "(module.to(...)), or call unshard_model(module) to go on with it as it is"
                )


def _refuse_shown_average(context: Context | None, what: str) -> None:
    if context is not None and context.shown_averages:
        raise ShardingError(
            f"{what}: the model shows an average of its weights (ShardedEMA, AveragedWeights.show) now, and its own would be lost; "
            "call hide() before, or do it after the validation"
        )


def _looks(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"


def bring_home(module: nn.Module) -> None:
    """Write rows that were converted back into the main weights, and show these again.

    Raises:
        ShardingError: Their dtype differs from the main weights'.
    """
    for one in _shown_in(module):
        owner = owner_of(one) if isinstance(one, ShardedTensor) and one.role is Role.CONVERTED else None
        if owner is None:
            continue
        group, entry = owner
        if one.dtype != entry.local.dtype:
            raise ShardingError(
                f"parameter {entry.name} was sharded with main weights of {entry.local.dtype} and later converted to {one.dtype}; "
                "convert the module back (module.to(dtype)), or call unshard_model(module) and shard it again in its present dtype"
            )
        _write_home(group, entry, one._local_tensor)


def _shown_in(module: nn.Module) -> list[Any]:
    """All that modules show as parameters."""
    return [one for child in module.modules() for one in child._parameters.values()]


# -- plain again -------------------------------------------------------------------------------------------------------


def unshard_model(module: nn.Module, *, device: torch.device | str | None = None) -> nn.Module:
    """Make a sharded module plain again, in place: whole parameters, no hooks, nothing of the engine. Collective.

    Units become whole one after the other, and the engine's memory of each is freed then: `device`, or where they are, holds the model
    once and the shards of the remaining units. Parameters are the objects that they were before `fully_shard`, in the dtype of main
    weights (that of `state_dict()`). Names, ties, buffers, hooks and attributes that were set on parameters stay; gradients are
    dropped. Optimizers that stepped the sharded module cannot be used further: save their state before, if necessary, and create new
    ones.

    Args:
        module: The root that was sharded, or a module with such roots inside.
        device: Device of parameters and buffers; `None`: where they are.

    Returns:
        The same module.

    Raises:
        ShardingError: Nothing in it is sharded, or a module around it is, or it runs.
    """
    found = {id(unit): unit for child in module.modules() if (unit := unit_of(child)) is not None}
    _check_whole_roots(module, list(found.values()))
    contexts = _brought_to_rest(list(found.values()))
    while found:
        _end(found.popitem()[1], device)
    for context in contexts:
        context.end()
    for child in module.modules():
        child.__dict__.pop("_apply", None)
        for_ddp = vars(child).get(compat.IGNORED_BY_DDP)
        if isinstance(for_ddp, _NotForDDP):
            for_ddp.give_back(child)
    return module if device is None else module.to(device)


def unshard_unit(unit: Unit) -> list[nn.Module]:
    """Make the parameters of one unit plain, to be sharded again at once, before any forward. Collective.

    Nested units stay as they are. Parameters that it shares stay with the unit that owns them.

    Returns:
        Its modules.
    """
    _refuse_shown_average(unit.context, f"sharding {unit.name} again")
    _brought_to_rest([unit])
    modules = unit.modules
    tables = {id(table) for module in modules for table in _tables_outside_units(module)}
    for group in unit.shared_groups:
        owner = group.unit()
        if owner is None:
            continue
        owner.users[:] = [user for user in owner.users if user() is not unit]
        for entry in group.entries:
            for table, key in entry.sites:
                if id(table) in tables:
                    table[key] = entry.full
            entry.sites[:] = [(table, key) for table, key in entry.sites if id(table) not in tables]
    _end(unit, None)
    return modules


def _tables_outside_units(module: nn.Module) -> list[dict[str, Any]]:
    """The `_parameters` tables of a module and of those inside it that no unit inside it has."""
    tables: list[dict[str, Any]] = [module._parameters]
    for child in module.children():
        if unit_of(child) is None:
            tables += _tables_outside_units(child)
    return tables


def _check_whole_roots(module: nn.Module, found: list[Unit]) -> None:
    name = type(module).__name__
    owners = (place_of(one) for one in _shown_in(module) if isinstance(one, ShardedTensor))
    around = [owner[0].unit() if owner is not None else None for owner in owners]
    if not (found or around):
        raise ShardingError(f"unshard_model: nothing in {name} is sharded; expected what fully_shard was called on")
    if any(unit is None or unit.context.root() not in found for unit in (*found, *around)):
        raise ShardingError(
            f"unshard_model: {name} is part of a sharded module, which holds some of its weights; expected the root that was sharded "
            "last, or a module around it, and while it is alive"
        )
    entries = [entry for unit in found for group in unit.groups for entry in group.entries]
    if (
        compat.backward_task() != -1
        or any(unit.keeps_unsharded for unit in found)
        or any(map(_is_shown_whole, entries))
    ):
        raise ShardingError(
            f"unshard_model: {name} is in use, by a training step, a backward or unshard() around this call; call it between steps, or "
            "after fit"
        )
    for unit in found:
        _refuse_shown_average(unit.context, f"unshard_model of {name}")
        divided = [entry for group in unit.groups for entry in group.entries if entry.part_axes]
        if divided:
            axis = divided[0].part_axes[0].name
            raise ShardingError(
                f'unshard_model: {unit.name} has {divided[0].name}, of which ranks along the axis "{axis}" compute with different parts, '
                "and its module has a place for this rank's alone; save a checkpoint and load it into a model that is not divided: built "
                "without expert_parallel, or trained with tensor=1"
            )


def _brought_to_rest(units: list[Unit]) -> list[Context]:
    """The contexts that the units belong to, once nothing is gathered or waited for."""
    contexts = list({id(unit.context): unit.context for unit in units}.values())
    for context in contexts:
        if context.backward.is_noticed:
            context.recover()  # from one that raised
    for unit in units:
        unit.forget_graphs()
        unit.reshard()
    return contexts


def _is_shown_whole(entry: Entry) -> bool:
    return entry.at_rest is not entry.sharded


def _end(unit: Unit, device: torch.device | str | None) -> None:
    """Make what a unit owns plain; nothing else references the unit, so its memory is freed with it."""
    for group in unit.groups:
        for entry in group.entries:
            _make_plain(group, entry, device)
        group.gradients.drop()
    unit.end()


def _make_plain(group: ParameterGroup, entry: Entry, device: torch.device | str | None) -> None:
    sites = [(table, key) for table, key in entry.sites if _is_of(table.get(key), entry)]
    shown = next((table[key] for table, key in sites), entry.sharded)
    whole = shown.full_tensor()
    if device is not None:
        whole = whole.to(device)
    parameter = entry.as_plain(whole, group.spec.codec)
    vars(parameter).update(_attributes_of_users(entry.sharded))
    if hooks := group.gradients.hooks.pop(group.entries.index(entry), None):
        compat.give_accumulation_hooks(parameter, hooks)
    for table, key in sites:
        table[key] = parameter
    leave_behind(entry)


def _attributes_of_users(parameter: ShardedParameter) -> dict[str, Any]:
    """Those that the engine and PyTorch do not set."""
    own = {"_is_param", *ShardedParameter.__annotations__, *ShardedTensor.__annotations__}
    return {name: value for name, value in vars(parameter).items() if name not in own}


def _is_of(shown: Any, entry: Entry) -> bool:
    """Whether a module shows this entry, and it was not replaced."""
    owner = owner_of(shown) if isinstance(shown, ShardedTensor) else None
    return owner is not None and owner[1] is entry
