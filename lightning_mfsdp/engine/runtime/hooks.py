"""How a unit hangs on its modules.

No hook keeps the unit alive: the modules' references to their unit are the only strong ones, so deleting the modules frees everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.runtime.series import Series

if TYPE_CHECKING:
    from lightning_mfsdp.engine.runtime.unit import Unit

__all__ = ["UNIT", "Shown", "attach", "attach_inside", "is_plain_lookup", "is_unit"]


UNIT = "_mfsdp_unit"  # where a module keeps its unit


class Shown:
    """Whether modules show the unsharded parameters of their unit now, and which module inside it made them.

    Attributes:
        now: They do.
        by: The module inside whose forward they do so; `None` in the unit's own forward and in a backward.
        depth: How often that module is running.
    """

    __slots__ = ("by", "depth", "now")

    def __init__(self) -> None:
        self.now = False
        self.by: nn.Module | None = None
        self.depth = 0


def attach(unit: Unit, modules: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Register the unit's hooks on its modules, and return what takes them away.

    A compiler that looks into a module stops at them and goes on inside.
    """
    series = Series(unit, len(modules)) if len(modules) > 1 else None
    hooks: list[RemovableHandle] = []
    for index, module in enumerate(modules):
        hooks += _attach_one(weakref.ref(unit), module, index, series)
    return hooks


def _attach_one(
    this: weakref.ref[Unit], module: nn.Module, index: int, series: Series | None
) -> tuple[RemovableHandle, ...]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = this()
        if unit is None:
            return None
        if series is not None:
            return series.pre_forward(unit, index, module, args, kwargs)
        return unit.pre_forward(module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit = this()
        if unit is None:
            return
        if series is not None:
            series.post_forward(unit, index, module, args, output)
        else:
            unit.post_forward(module, args, output)

    def rest(*_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.release()
            unit.context.note_writes()

    def weights_changed(*_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.context.weights_changed()

    return (
        module.register_forward_pre_hook(
            pre_forward, with_kwargs=True, prepend=True
        ),  # other hooks may read the weights
        module.register_forward_hook(post_forward, always_call=True),
        module.register_state_dict_pre_hook(rest),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(rest),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(weights_changed),  # type: ignore[no-untyped-call]
    )


def attach_inside(unit: Unit, root: nn.Module) -> list[RemovableHandle]:
    """Register hooks on modules inside the outermost unit that have parameters of it: called by themselves, they show those.

    A training step calls such modules while its own unit has no forward: outside of theirs it sees sharded parameters, so what it writes
    lasts. Nested units have hooks of their own, and so does `root`.

    Returns:
        What takes the hooks away again.
    """
    this = weakref.ref(unit)
    handles: list[RemovableHandle] = []
    for module in _modules_inside(root, {id(table) for table in unit.tables}):
        handles += _attach_inside_one(this, unit.shown, module)
    return handles


def _modules_inside(module: nn.Module, tables: set[int]) -> list[nn.Module]:
    """Modules below `module` and outside of nested units that hold parameters in one of the tables, or contain such a module."""
    found: dict[nn.Module, bool] = {}
    _find_inside(module, tables, found)
    del found[module]
    return [child for child, has_some in found.items() if has_some and not isinstance(child, torch.jit.ScriptModule)]


def _find_inside(module: nn.Module, tables: set[int], found: dict[nn.Module, bool]) -> bool:
    if module not in found:
        found[module] = False  # in case it contains itself
        below = [_find_inside(child, tables, found) for child in module.children() if not is_unit(child)]
        found[module] = id(module._parameters) in tables or any(below)
    return found[module]


def _attach_inside_one(this: weakref.ref[Unit], shown: Shown, module: nn.Module) -> list[RemovableHandle]:
    # What a compiler looks into are the two quick ways out; inside the unit's own forward they are all that happens.
    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not shown.now:
            return enter(module, args, kwargs)
        if shown.by is module:
            shown.depth += 1
        return None

    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if shown.by is not module:
            return
        shown.depth -= 1
        if not shown.depth:
            leave(module, args, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = this()
        return None if unit is None else unit.enter_inside(module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit = this()
        if unit is not None:
            unit.leave_inside(module, args, output)

    return [
        module.register_forward_pre_hook(pre_forward, with_kwargs=True, prepend=True),
        module.register_forward_hook(post_forward, always_call=True),
    ]


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return UNIT in module.__dict__


def is_plain_lookup(module: nn.Module) -> bool:
    """Whether a module is an embedding and nothing more: its backward needs the indices alone, so no weight is gathered for it."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and len(module._parameters) == 1
        and not module._modules
        and "forward" not in vars(module)
        and len(module._forward_hooks) == len(module._forward_pre_hooks) == 1  # the unit's own
        and not compat.has_global_hooks()
    )
