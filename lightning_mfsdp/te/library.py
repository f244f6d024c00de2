"""The only access to Transformer Engine: nothing else imports it, and nothing imports it before a run needs it.

The second half is what the library needs for recomputation: its own checkpoint, and the recipe of the first forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base import compat

__all__ = [
    "autocast_snapshot",
    "checkpoint",
    "has_engine_modules",
    "is_a",
    "is_engine_module",
    "keep_scales_in_backward",
    "load",
    "quantizes_now",
    "scales_are_delayed",
]


_PACKAGE = "transformer_engine"
_INSTALL = 'pip install --no-build-isolation "lightning-mfsdp[te]"'


def load(name: str) -> Any:
    """A module of the library, such as "pytorch" or "common.recipe".

    Raises:
        RuntimeError: There is no CUDA device, or the library is missing or broken; the message says which, and what to do.
    """
    # First: without a driver the import itself fails, with a message about something else.
    if not torch.cuda.is_available():
        raise RuntimeError(
            'precision="transformer-engine" needs an NVIDIA GPU with compute capability 8.9 or higher, and torch.cuda.is_available() is '
            'False here. Use precision="bf16-mixed", or start the run where a GPU, its driver and a CUDA build of PyTorch are'
        )
    try:
        return import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise _broken(error) from error
        raise RuntimeError(
            f'precision="transformer-engine" needs the package transformer-engine, which is not installed: {_INSTALL}'
        ) from error
    except Exception as error:  # libraries it cannot find, another PyTorch or Python: each raises another type
        raise _broken(error) from error


def _broken(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"Transformer Engine is installed and cannot be loaded ({type(error).__name__}: {error}). It must have been built for PyTorch "
        f"{torch.__version__} with CUDA {torch.version.cuda}; install it again: {_INSTALL} --force-reinstall"
    )


def is_engine_module(module: nn.Module) -> bool:
    """Whether a module is, or derives from, one of the library's. Does not load it."""
    return any(base.__module__.split(".")[0] == _PACKAGE for base in type(module).__mro__)


def is_a(value: object, name: str) -> bool:
    """Whether a value is of a class of the library's with this name. Does not load it."""
    return any(base.__name__ == name and base.__module__.split(".")[0] == _PACKAGE for base in type(value).__mro__)


def has_engine_modules(module: nn.Module) -> bool:
    """Whether a module is, or has inside, one of the library's. Does not load it."""
    return any(is_engine_module(part) for part in module.modules())


def quantizes_now() -> bool:
    """Whether modules of the library compute in 8 or 4 bits at the moment."""
    return bool(_manager().is_fp8_enabled())


def scales_are_delayed() -> bool:
    """Whether they do so with scales from earlier steps, which the library keeps for each call."""
    return quantizes_now() and bool(_manager().get_fp8_recipe().delayed())


def autocast_snapshot() -> Callable[[], AbstractContextManager[Any]]:
    """A context that restores the library's current state: on or off, the recipe, the ranks that share scales."""
    manager, autocast = _manager(), load("pytorch").autocast
    enabled, recipe, group = manager.is_fp8_enabled(), manager.get_fp8_recipe(), manager.get_fp8_group()
    return lambda: autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)


def checkpoint(function: Callable[..., Any], *values: Any) -> Any:
    """Call `function`, save only its arguments, and call it again in backward: quantized modules then see the scales they saw.

    PyTorch's own checkpoint does not handle these, and may find another number of saved tensors.
    """
    return load("pytorch").checkpoint(function, *values, use_reentrant=False)


def keep_scales_in_backward(outputs: Sequence[Tensor]) -> None:
    """For recomputation under delayed scaling: its backward sets no scales, even if it runs outside of every context.

    The library enters one around what it recomputes, and would treat leaving the outermost as the end of a forward.
    """
    recipe = _manager().get_fp8_recipe()

    def enter_around_the_backward(_: Tensor) -> None:
        task = compat.backward_task()
        if quantizes_now() or task in _HELD:
            return
        stack = ExitStack()
        stack.enter_context(load("pytorch").autocast(enabled=False, recipe=recipe))
        stack.callback(_HELD.discard, task)
        _HELD.add(task)

        def end() -> None:
            stack.close()

        weakref.finalize(end, stack.close)  # it dies without having been called if the backward raised
        compat.on_backward_end(end)

    for output in outputs:
        if output.requires_grad:
            output.register_hook(enter_around_the_backward)


_HELD = set[int]()  # backwards with such a context around them


def _manager() -> Any:
    return load("pytorch.quantization").FP8GlobalStateManager
