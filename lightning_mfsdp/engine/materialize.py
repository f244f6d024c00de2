"""Give parameters on the meta device memory and values, the same on every rank and the same as if they had been built for real."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lightning_mfsdp.engine.errors import ShardingError

__all__ = ["Replaced", "children_first", "materialize", "materialize_module"]

# Meta parameter and its real successor, by the id of the first, which is kept so that the id stays its own.
Replaced = dict[int, tuple[nn.Parameter, nn.Parameter]]


def materialize(module: nn.Module, device: torch.device, ignored: set[int] | None = None) -> None:
    """Initialise every meta parameter and buffer of `module`, children before their parents, in registration order.

    That is the order in which modules are built (a constructor makes its children and then resets its own parameters),
    so under one seed the numbers are those of a module built for real on `device`. Tied parameters stay tied.

    Args:
        module: Parameters on the meta device belong to modules with `reset_parameters()`.
        device: Where they go.
        ignored: Ids of parameters to leave alone.

    Raises:
        ShardingError: A module with meta parameters cannot initialise itself; names it and them.
    """
    replaced: Replaced = {}
    for name, child in children_first(module):
        materialize_module(name, child, device, replaced, ignored or set())


def children_first(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module inside `module` once, with its name, each after its children; `module` itself comes last."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for key, child in module.named_children():
        yield from children_first(child, f"{name}.{key}" if name else key, seen)
    yield name, module


def materialize_module(
    name: str, module: nn.Module, device: torch.device, replaced: Replaced, ignored: set[int]
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
            real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            replaced[id(parameter)] = (parameter, real)
        module._parameters[key] = replaced[id(parameter)][1]
    for key, buffer in buffers.items():
        module._buffers[key] = torch.empty_like(buffer, device=device)
    if not fresh and not buffers:
        return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        raise ShardingError(
            f"{name or type(module).__name__} ({type(module).__name__}) has {', '.join([*fresh, *buffers])} on the "
            "meta device and no "
            "reset_parameters() to initialise them; add that method, or build this module on a real device"
        )
    with torch.no_grad():
        reset()
