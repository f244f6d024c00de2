"""How a unit hangs on its module, and what it remembers of one forward.

No hook keeps the unit alive: the module's reference to its unit is the only strong one, so deleting the module frees everything.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.storage import Slot

if TYPE_CHECKING:
    from lightning_mfsdp.engine.unit import Unit

__all__ = ["Call", "attach", "is_plain_lookup"]


class Call:
    """One forward in grad mode, until its backward.

    Attributes:
        slots: Where its saved tensors expect the weights, by group.
        has_end: Some input needs a gradient, so its backward has a visible end.
        running: Its backward has begun and not ended.
        ended_in: The backward whose gradients of all its inputs came last.
        reads_weights: Its backward needs the weights.
        given: What its inputs are views of, by identity.
    """

    __slots__ = ("ended_in", "given", "has_end", "reads_weights", "running", "slots")

    def __init__(self) -> None:
        self.slots: list[Slot | None] = []
        self.has_end = False
        self.running = False
        self.ended_in = -1
        self.reads_weights = True
        self.given: set[int] = set()


def attach(unit: Unit, module: nn.Module) -> None:
    """Register the unit's hooks on its module. A compiler that looks into the module stops at them and goes on inside."""
    this = weakref.ref(unit)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = this()
        return None if unit is None else unit.pre_forward(module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        unit = this()
        if unit is not None:
            unit.post_forward(module, args, output)

    def rest(*_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.release()

    def weights_changed(*_: Any) -> None:
        unit = this()
        if unit is not None:
            unit.context.weights_changed()

    module.register_forward_pre_hook(pre_forward, with_kwargs=True)
    module.register_forward_hook(post_forward, always_call=True)
    module.register_state_dict_pre_hook(rest)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(rest)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(weights_changed)  # type: ignore[no-untyped-call]


def is_plain_lookup(module: nn.Module) -> bool:
    """Whether a module is an embedding and nothing more: its backward needs the indices alone, so no weight is gathered for it."""
    return (
        type(module) is nn.Embedding
        and len(module._parameters) == 1
        and not module._modules
        and "forward" not in vars(module)
        and len(module._forward_hooks) == len(module._forward_pre_hooks) == 1  # the unit's own
        and not compat.has_global_hooks()
    )
