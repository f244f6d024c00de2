"""Give parameters on the meta device memory and values, the same on every rank and the same as if they had been built for real."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_mfsdp.engine.errors import ShardingError

__all__ = ["Replaced", "children_first", "materialize", "materialize_module"]

# Meta parameter and its real successor, by the id of the first, which is kept so that the id stays its own.
Replaced = dict[int, tuple[nn.Parameter, nn.Parameter]]

# What a model around a module brings to initialise its parts: `_init_weights(part)`, as Hugging Face models have it.
Initialiser: TypeAlias = Callable[[nn.Module], object]


def materialize(module: nn.Module, device: torch.device, ignored: set[int] | None = None) -> None:
    """Initialise every meta parameter and buffer of `module`, children before their parents, in registration order.

    That is the order in which modules are built (a constructor makes its children and then resets its own parameters),
    so under one seed the numbers are those of a module built for real on `device`. Tied parameters stay tied.

    Args:
        module: Parameters on the meta device belong to modules with `reset_parameters()`, or inside one with `_init_weights(part)`.
            Where there are both, the second follows the first.
        device: Where they go.
        ignored: Ids of parameters to leave alone.

    Raises:
        ShardingError: A module with meta parameters cannot initialise itself; names it and them.
    """
    replaced: Replaced = {}
    for name, child, initialiser in children_first(module):
        materialize_module(name, child, device, replaced, ignored or set(), initialiser)


def children_first(
    module: nn.Module, name: str = "", seen: set[int] | None = None, initialiser: Initialiser | None = None
) -> Iterator[tuple[str, nn.Module, Initialiser | None]]:
    """Every module inside `module` once, each after its children; `module` itself comes last.

    Yields:
        Its name, the module, and the `_init_weights` of the nearest model around it.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    initialiser = _initialiser(module) or initialiser
    for key, child in module.named_children():
        yield from children_first(child, f"{name}.{key}" if name else key, seen, initialiser)
    yield name, module, initialiser


def _initialiser(module: nn.Module) -> Initialiser | None:
    own = getattr(module, "_init_weights", None)
    if not callable(own):
        return None
    try:
        inspect.signature(own).bind(module)
    except TypeError:  # one that takes nothing is for the module's own constructor
        return None
    return own  # type: ignore[no-any-return]


def materialize_module(
    name: str,
    module: nn.Module,
    device: torch.device,
    replaced: Replaced,
    ignored: set[int],
    initialiser: Initialiser | None = None,
) -> None:
    """Initialise what one module itself owns. `replaced` carries tied weights from module to module."""
    meta = {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta and id(parameter) not in ignored
    }
    buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    if not meta and not buffers:
        return
    fresh = [key for key, parameter in meta.items() if id(parameter) not in replaced]
    for key, parameter in meta.items():
        if id(parameter) not in replaced:
            real = nn.Parameter(_unset(parameter, device), requires_grad=parameter.requires_grad)
            replaced[id(parameter)] = (parameter, real)
        module._parameters[key] = replaced[id(parameter)][1]
    for key, buffer in buffers.items():
        module._buffers[key] = _unset(buffer, device)
    if not fresh and not buffers:
        return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    left = [*fresh, *buffers]
    with torch.no_grad():
        if callable(reset):
            reset()
            left = []
        if initialiser is not None:
            initialiser(module)
            left = [key for key in left if _is_unset(getattr(module, key))]
    if left:
        raise ShardingError(
            f"{name or type(module).__name__} ({type(module).__name__}) has {', '.join(left)} on the meta device and no "
            "reset_parameters() to initialise them, nor does the _init_weights() of a model around it; add that method, or build this "
            "module on a real device"
        )


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a meta tensor, filled with what is no sensible value, so that what nobody set can be told."""
    real = torch.empty_like(tensor, device=device, requires_grad=False)
    if real.is_floating_point():
        real.fill_(torch.nan)
    elif real.dtype.is_signed and not real.is_complex():
        real.fill_(torch.iinfo(real.dtype).min)
    return real


def _is_unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.float().isnan().any())
    return tensor.dtype.is_signed and not tensor.is_complex() and bool((tensor == torch.iinfo(tensor.dtype).min).any())
