"""Gives parameters on the meta device memory and values: equal on every rank, and equal to those of a model built on a real device."""

from __future__ import annotations

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

# The bits of an element that nothing has written, by its size in bytes. Of floats all are 1: a NaN that arithmetic does not make, which is
# 0xFFC00000 on CPUs, 0x7FFFFFFF on GPUs and 0x7FC00000 in Python. A bool is 0 or 1. Integers have a number that programs hardly use.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALL_ONES = {1: 255, 2: -1, 4: -1, 8: -1}
_STRANGE = {1: 0xA5, 2: -0x5A5B, 4: -0x5A5A5A5B, 8: -0x5A5A5A5A5A5A5A5B}


def materialize(module: nn.Module, device: torch.device, ignored: set[int] | None = None) -> None:
    """Initialize every meta parameter and buffer of `module`, children before their parents, in registration order.

    That is the order in which modules are built (a constructor makes its children and then resets its own parameters),
    so under one seed the numbers are those of a module built directly on `device`. Tied parameters stay tied.

    Args:
        module: Parameters on the meta device belong to modules with `reset_parameters()`, or inside a model like Hugging Face's,
            which initializes its modules by `_init_weights(module)`. These must set all parameters and buffers that the module owns.
        device: Where they go.
        ignored: Ids of parameters to skip.

    Raises:
        ShardingError: Nothing sets a parameter or buffer, or a part of it; names the module and them.
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
    unset = [key for key in (*fresh, *buffers) if _is_unset(owned.get(key))]
    if unset:
        raise ShardingError(_left_unset(name, module, unset, reset, model))


def _left_unset(name: str, module: nn.Module, keys: list[str], reset: Any, model: nn.Module | None) -> str:
    """The message for parameters and buffers that would train with whatever is in their memory."""
    kind, what = type(module).__name__, ", ".join(keys)
    where = f"{name or kind} ({kind})"
    around = f", nor does the _init_weights() of {type(model).__name__} around it" if model is not None else ""
    if not callable(reset):
        return (
            f"{where} has {what} on the meta device and no reset_parameters() to initialize what it owns{around}. Add that "
            "method, or build this module on a real device"
        )
    method = getattr(reset, "__name__", "reset_parameters")
    definer = next((parent for parent in type(module).__mro__ if method in vars(parent)), type(module))
    if definer is type(module):
        return (
            f"{where} has {what} on the meta device, and its {method}() does not set all of that{around}. Set it there, or "
            "build this module on a real device"
        )
    return (
        f"{where} has {what} on the meta device, and {method}(), inherited from {definer.__name__}, does not set all of "
        f"that{around}. Define {method}() in {kind}: call super().{method}(), then set {what}. Or build this module on a real device"
    )


@torch.no_grad()
def _initialize(module: nn.Module, reset: Any, model: nn.Module | None) -> None:
    if callable(reset):
        reset()
    if model is not None:
        model._init_weights(module)  # type: ignore[operator]


def _settled(module: nn.Module, key: str, real: nn.Parameter) -> nn.Parameter:
    """What replaces `real`. Some libraries create new parameter objects while they reset them: trainable and untied."""
    current = module._parameters[key]
    if current is None or current is real:
        return real
    if type(current) is nn.Parameter:
        real.data = current.data
        module._parameters[key] = real
        return real
    current.requires_grad_(real.requires_grad)  # of another class, such as quantized parameters
    return current


def _unset_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory of which every element has the bits that `_is_unset` recognizes."""
    unset = torch.empty_like(tensor, device=device, requires_grad=False).detach()
    bits, pattern = _bits_of(unset)
    bits.fill_(pattern)
    return unset


def _is_unset(tensor: Tensor | None) -> bool:
    """Whether an element was not written; of 8-bit floats and 8- and 16-bit integers, all values of which are used, whether none was.

    By values, since version counters neither see writes through `.data` nor show that a part was left out.
    """
    if tensor is None or tensor.is_meta or tensor.numel() == 0:
        return tensor is not None and tensor.is_meta
    if not _has_bits(tensor):
        return False  # the module's method has made it
    bits, pattern = _bits_of(tensor.detach())
    untouched = bits == pattern
    is_certain = tensor.dtype == torch.bool or tensor.itemsize >= (2 if _has_nan(tensor) else 4)
    return bool(untouched.any() if is_certain else untouched.all())


def _has_bits(tensor: Tensor) -> bool:
    """Whether its elements lie in memory one by one, unlike those of sparse and quantized tensors, or of a class with tensors inside."""
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_plain and tensor.layout is torch.strided and not tensor.is_quantized


def _bits_of(tensor: Tensor) -> tuple[Tensor, int]:
    """A view of a tensor as integers, and the one that stands for an element that nothing has written."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    ones = _has_nan(tensor) or tensor.dtype == torch.bool
    return real.view(_BITS[real.itemsize]), (_ALL_ONES if ones else _STRANGE)[real.itemsize]


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
