"""What the library needs where activations are computed again: its own checkpoint, and the recipe of the first time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.te import library

__all__ = [
    "autocast_snapshot",
    "checkpoint",
    "has_engine_modules",
    "keep_scales_in_backward",
    "quantizes_now",
    "scales_are_delayed",
]


def has_engine_modules(module: nn.Module) -> bool:
    """Whether a module is, or has inside, one of the library's. Does not load it."""
    return any(library.is_engine_module(part) for part in module.modules())


def quantizes_now() -> bool:
    """Whether modules of the library compute in 8 or 4 bits at the moment."""
    return bool(_manager().is_fp8_enabled())


def scales_are_delayed() -> bool:
    """Whether they do so with scales from earlier steps, of which the library keeps those of each call."""
    return quantizes_now() and bool(_manager().get_fp8_recipe().delayed())


def autocast_snapshot() -> Callable[[], AbstractContextManager[Any]]:
    """What makes the library compute as it does at the moment: on or off, the recipe, the ranks that share scales."""
    manager, autocast = _manager(), library.load("pytorch").autocast
    enabled, recipe, group = manager.is_fp8_enabled(), manager.get_fp8_recipe(), manager.get_fp8_group()
    return lambda: autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)


def checkpoint(function: Callable[..., Any], *values: Any) -> Any:
    """Call `function`, keep its arguments alone, and call it again in backward: quantized modules then see the scales they saw.

    PyTorch's own does not know these, and may find another number of saved tensors.
    """
    return library.load("pytorch").checkpoint(function, *values, use_reentrant=False)


def keep_scales_in_backward(outputs: Sequence[Tensor]) -> None:
    """Of what is computed again under delayed scaling: its backward sets no scales, also where it runs outside of every context.

    The library enters one around what it computes again, and would take leaving the outermost for the end of a forward.
    """
    recipe = _manager().get_fp8_recipe()

    def enter_around_the_backward(_: Tensor) -> None:
        task = compat.backward_task()
        if quantizes_now() or task in _HELD:
            return
        stack = ExitStack()
        stack.enter_context(library.load("pytorch").autocast(enabled=False, recipe=recipe))
        stack.callback(_HELD.discard, task)
        _HELD.add(task)

        def end() -> None:
            stack.close()

        weakref.finalize(end, stack.close)  # it goes without having been called where the backward raised
        compat.on_backward_end(end)

    for output in outputs:
        if output.requires_grad:
            output.register_hook(enter_around_the_backward)  # type: ignore[no-untyped-call]


_HELD = set[int]()  # backwards with such a context around them


def _manager() -> Any:
    return library.load("pytorch.quantization").FP8GlobalStateManager
