"""Give parameters on the meta device memory and values: equal on every rank, and equal to those of a model built on a real device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError

__all__ = ["Replaced", "children_first", "materialize", "materialize_module"]

# Meta parameter and its real successor, by the id of the first, which is kept so that the id stays its own.
Replaced = dict[int, tuple[nn.Parameter, nn.Parameter]]

# Attributes of Hugging Face's models: the first initializes one module inside the model, the second distinguishes them from other models.
_MODEL_METHODS = ("_init_weights", "post_init")

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def materialize(module: nn.Module, device: torch.device, ignored: set[int] | None = None) -> None:
    """Initialize every meta parameter and buffer of `module`, children before their parents, in registration order.

    That is the order in which modules are built (a constructor makes its children and then resets its own parameters),
    so under one seed the numbers are those of a module built directly on `device`. Tied parameters stay tied.

    Args:
        module: Parameters on the meta device belong to modules with `reset_parameters()`, or inside a model like Hugging Face's,
            which initializes its modules by `_init_weights(module)`.
        device: Where they go.
        ignored: Ids of parameters to skip.

    Raises:
        ShardingError: Nothing initializes a module with meta parameters; names it and them.
    """
    replaced: Replaced = {}
    for name, child, model in children_first(module):
        materialize_module(name, child, model, device, replaced, ignored or set())


def children_first(
    module: nn.Module, name: str = "", model: nn.Module | None = None, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Every module inside `module` once, with its name, each after its children; `module` itself comes last.

    The third value is the Hugging Face model that must initialize it: the innermost one around it, if all inside is on meta.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if all(callable(getattr(module, method, None)) for method in _MODEL_METHODS):
        model = module
    inside = [] if model is None else [*module.parameters(), *module.buffers()]
    is_new = bool(inside) and all(tensor.is_meta for tensor in inside)
    for key, child in module.named_children():
        yield from children_first(child, f"{name}.{key}" if name else key, model, seen)
    yield name, module, model if is_new else None


def materialize_module(
    name: str,
    module: nn.Module,
    model: nn.Module | None,
    device: torch.device,
    replaced: Replaced,
    ignored: set[int],
) -> None:
    """Initialize what one module itself owns. `replaced` carries tied weights from module to module."""
    meta = {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta and id(parameter) not in ignored
    }
    buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    if not meta and not buffers:
        _initialize(module, None, model)  # some models set other values in modules inside this one
        return
    fresh = [key for key, parameter in meta.items() if id(parameter) not in replaced]
    for key, parameter in meta.items():
        if id(parameter) not in replaced:
            real = nn.Parameter(_unset_like(parameter, device), requires_grad=parameter.requires_grad)
            replaced[id(parameter)] = (parameter, real)
        module._parameters[key] = replaced[id(parameter)][1]
    for key, buffer in buffers.items():
        module._buffers[key] = _unset_like(buffer, device)
    if not fresh and not buffers:
        return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    # A module that replaced another may reset itself like that one; then a model around it can initialize it, too.
    owner = getattr(reset, "__self__", None)
    _initialize(owner if isinstance(owner, nn.Module) else module, reset, model)
    for key, parameter in meta.items():
        replaced[id(parameter)] = (parameter, _settled(module, key, replaced[id(parameter)][1]))
    owned = {**module._parameters, **module._buffers}
    # A module with its own method may leave values unset on purpose; the model's method may not support this module.
    left = [key for key in (*fresh, *buffers) if not callable(reset) and (model is None or _is_unset(owned[key]))]
    if left:
        raise ShardingError(
            f"{name or type(module).__name__} ({type(module).__name__}) has {', '.join(left)} on the meta device and no "
            "reset_parameters() to initialize them, nor does the _init_weights() of a model around it; add that method, or build this "
            "module on a real device"
        )


@torch.no_grad()
def _initialize(module: nn.Module, reset: Any, model: nn.Module | None) -> None:
    if callable(reset):
        reset()
    if model is not None:
        model._init_weights(module)  # type: ignore[operator]


def _settled(module: nn.Module, key: str, real: nn.Parameter) -> nn.Parameter:
    """What replaces `real`. Some libraries create new parameter objects while they reset them: trainable and untied."""
    made = module._parameters[key]
    if made is None or made is real:
        return real
    if type(made) is nn.Parameter:
        real.data = made.data
        module._parameters[key] = real
        return real
    made.requires_grad_(real.requires_grad)  # of another class, such as quantized parameters
    return made


def _unset_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory filled with a value that `_is_unset` recognizes, if the dtype has one that is not used in practice."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if made.is_floating_point() or made.is_complex():
        return made.detach().fill_(math.nan)
    return made.fill_(torch.iinfo(made.dtype).min) if made.dtype in _SIGNED else made.zero_()


def _is_unset(tensor: Tensor | None) -> bool:
    if tensor is None:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype in _SIGNED and bool((tensor == torch.iinfo(tensor.dtype).min).any())
