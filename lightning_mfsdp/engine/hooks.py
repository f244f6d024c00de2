"""How a unit hangs on its module, and what it remembers of one forward.

No hook keeps the unit alive: the module's reference to its unit is the only strong one, so deleting the module frees everything.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_mfsdp.engine.storage import Slot

if TYPE_CHECKING:
    from lightning_mfsdp.engine.unit import Unit

__all__ = ["Call", "attach"]


class Call:
    """One forward in grad mode, until its backward.

    Attributes:
        slots: Where its saved tensors expect the weights, by group.
        has_end: Some input needs a gradient, so its backward has a visible end.
        running: Its backward has begun and not ended.
    """

    __slots__ = ("has_end", "running", "slots")

    def __init__(self) -> None:
        self.slots: list[Slot | None] = []
        self.has_end = False
        self.running = False


def attach(unit: Unit, module: nn.Module) -> None:
    """Register the unit's hooks on its module."""
    this = weakref.ref(unit)

    def pre_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = this()
        return None if unit is None else unit.pre_forward(module, args, kwargs)

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
