"""What becomes of a sharded module when it is moved, converted or made plain again.

`module.cpu()`, `.to(dtype)`, `.half()` work on shards: the module shows this rank's rows as they were moved or cast, while the engine's
memory, the optimizer and communication stay where they are. Forward says that the module was converted; the way back (`.to(...)`, another
fit) writes the rows into the main weights. `unshard_model` ends the sharding: whole plain parameters in place, one after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.direct import write_as_ever
from lightning_mfsdp.engine.errors import ShardingError
from lightning_mfsdp.engine.group import ParameterGroup
from lightning_mfsdp.engine.parameter import Entry, leave_behind, owner_of
from lightning_mfsdp.engine.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.sharded_tensor import Rows
from lightning_mfsdp.engine.unit import forget_unit, unit_of

__all__ = ["bring_home", "follow_conversions", "unshard_model"]


class MovedRows(Rows):
    """A sharded parameter whose rows are elsewhere or of another dtype than the main weight."""

    @classmethod
    def of(cls, rows: Rows, home: ShardedParameter) -> MovedRows:
        """What a module shows of `home` after a conversion."""
        made = cls(rows._local_tensor.detach(), rows._spec, requires_grad=False)
        made._owner, made._rows = home._owner, home._rows
        made._is_param = True
        return made


class _NotForDDP:
    """Whoever asks which parameters DistributedDataParallel shall ignore wants to wrap shards with it."""

    def __iter__(self) -> Iterator[str]:
        raise ShardingError(
            "DistributedDataParallel (strategy ddp) was given a module that is sharded, whose ranks hold different rows; call "
            "unshard_model(module) first, or train on with the sharded module"
        )


def follow_conversions(module: nn.Module) -> None:
    """Have the modules in `module` that show sharded parameters convert them as shards, and DistributedDataParallel refuse `module`."""
    module.__dict__.setdefault(compat.IGNORED_BY_DDP, _NotForDDP())
    for child in module.modules():
        if any(isinstance(parameter, ShardedParameter) for parameter in child._parameters.values()):
            child.__dict__["_apply"] = _apply_of(weakref.ref(child))


def _apply_of(this: weakref.ref[nn.Module]) -> Callable[..., nn.Module]:
    """`_apply` of one module; it does not keep the module alive."""

    def _apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = this()
        assert module is not None, "called through the module"
        return _converted(module, function, recurse)

    return _apply


def _converted(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
    """What `nn.Module._apply` does, which would put other tensors where shards are."""
    table: dict[str, Any] = module._parameters
    shown = {key: one for key, one in table.items() if isinstance(one, (ShardedParameter, MovedRows))}
    with torch.no_grad():
        applied = {key: function(one) for key, one in shown.items()}
    table.update(dict.fromkeys(shown))
    try:
        compat.apply_to_tensors(module, function, recurse)
    finally:
        table.update(shown)
    for key, value in applied.items():
        owner = owner_of(shown[key])
        if owner is not None and isinstance(value, Rows):
            _show_as(owner[1], value)
    return module


def _show_as(entry: Entry, value: Rows) -> None:
    home = entry.sharded
    local, rows = home._local_tensor, value._local_tensor
    if (local.dtype, local.device) == (rows.dtype, rows.device):
        if isinstance(entry.sites[0][0][entry.sites[0][1]], MovedRows):
            _write_home(entry, rows)
        return
    entry.install(MovedRows.of(value, home))


def _write_home(entry: Entry, rows: Tensor) -> None:
    with torch.no_grad():
        entry.sharded._local_tensor.copy_(rows)
    entry.sharded._note_write()
    entry.install(entry.resting)


def bring_home(module: nn.Module) -> None:
    """Write rows that were moved back into the main weights, and show these again.

    Raises:
        ShardingError: They have another dtype now.
    """
    for child in module.modules():
        shown: list[Any] = list(child._parameters.values())
        for one in shown:
            owner = owner_of(one) if isinstance(one, MovedRows) else None
            if owner is None:
                continue
            entry = owner[1]
            if one.dtype != entry.local.dtype:
                raise ShardingError(
                    f"parameter {entry.name} was sharded with main weights of {entry.local.dtype} and converted to {one.dtype} since; "
                    "convert the module back (module.to(dtype)), or call unshard_model(module) to have it sharded anew as it is"
                )
            _write_home(entry, one._local_tensor)


def unshard_model(module: nn.Module, *, device: torch.device | str | None = None) -> nn.Module:
    """Make a sharded module plain again, in place: whole parameters, no hooks, nothing of the engine. Collective.

    Parameters become whole one after the other. `device`, or where they are, holds the model once, and the engine's device all shards
    beside it until the end. Names, ties and buffers stay. Optimizers that stepped the sharded module cannot go on: build them anew.

    Args:
        module: The root that was sharded, or a module with such roots inside.
        device: Where parameters and buffers go; `None`: where they are.

    Returns:
        The same module.

    Raises:
        ShardingError: Nothing in it is sharded, or a module around it is.
    """
    found = {id(unit): unit for child in module.modules() if (unit := unit_of(child)) is not None}
    if not found:
        raise ShardingError(
            f"unshard_model: nothing in {type(module).__name__} is sharded; expected what fully_shard was called on"
        )
    for unit in found.values():
        root = unit.context.root
        if root is None or id(root) not in found:
            raise ShardingError(
                f"unshard_model: {type(module).__name__} is part of a sharded module, which holds some of its weights; expected the root "
                "that was sharded last, or a module around it"
            )
        if any(group.mesh.parts is not None for group in unit.groups):
            raise ShardingError(
                f"unshard_model: {unit.name} holds experts that are divided among ranks, and its module has a place for this rank's alone; "
                "save a checkpoint and load it into a model built without expert_parallel"
            )
    for unit in found.values():
        unit.release()
    for unit in found.values():
        for group in unit.groups:
            _make_plain(group, device)
    for child in module.modules():
        child.__dict__.pop("_apply", None)
        if isinstance(vars(child).get(compat.IGNORED_BY_DDP), _NotForDDP):
            del child.__dict__[compat.IGNORED_BY_DDP]
        write_as_ever(child)
        forget_unit(child)
    for unit in found.values():
        unit.context.end()
        for handle in unit.hooks:
            handle.remove()
    return module if device is None else module.to(device)


def _make_plain(group: ParameterGroup, device: torch.device | str | None) -> None:
    for entry in group.entries:
        table, key = entry.sites[0]
        shown = table[key]
        rows = shown if isinstance(shown, MovedRows) else entry.sharded
        whole = rows.full_tensor()
        if device is not None:
            whole = whole.to(device)
        marks = {name: value for name, value in vars(entry.full).items() if name != "_owner"}
        with torch.inference_mode(False):
            parameter = nn.Parameter(whole, requires_grad=entry.full.requires_grad)
        parameter.__dict__.update(marks)
        entry.install(parameter)
        leave_behind(entry)
