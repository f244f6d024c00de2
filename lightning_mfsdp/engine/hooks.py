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

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.series import Series

if TYPE_CHECKING:
    from lightning_mfsdp.engine.unit import Unit

__all__ = ["attach", "is_plain_lookup"]


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
