"""Direct weight gradients: a Linear writes the gradient of its weight directly into the buffer in which it is reduced.

Autograd would leave it in `weight.grad`, rounded to the compute dtype, and the engine would copy it. Here the matrix product has the
buffer's dtype and memory: one pass over memory less, no rounding in between, and microbatches are added in that dtype.

It is used only where the result is indistinguishable: a plain `nn.Linear`, in eager mode, in a backward that accumulates into `.grad`.
Under hooks on the weight, `torch.compile`, `torch.autograd.grad`, `create_graph=True` or a functorch transform the gradient goes
through autograd as usual.

Layers of other libraries that always write gradients themselves request the memory instead (`gradient_memory`).

Source: gradient accumulation fusion of Megatron-LM (`main_grad`), here without a copy of the gradient kept per weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.group import ParameterGroup, place_of
from lightning_mfsdp.engine.core.parameter import UnshardedParameter

__all__ = ["gradient_memory", "write_directly"]

# Smaller products save less than the host time of an autograd function written in Python.
_WORTHWHILE_ELEMENTS = 1 << 23


def write_directly(modules: Sequence[nn.Module], groups: Sequence[ParameterGroup]) -> list[Callable[[], None]]:
    """Have the Linear layers in `modules` write into the buffers of `groups`, as far as the groups' policy enables it.

    Returns:
        What restores the own forward of each of them.
    """
    undo: list[Callable[[], None]] = []
    for module in modules:
        for layer in module.modules():
            if (
                not isinstance(layer, nn.Linear)
                or type(layer).forward is not nn.Linear.forward
                or "forward" in vars(layer)
            ):
                continue
            weight = layer._parameters.get("weight")  # a parametrization has removed it
            place = place_of(weight) if weight is not None else None
            if weight is not None and place is not None and place[0] in groups and _is_wanted(place[0], weight):
                this = weakref.ref(layer)
                layer.forward = forward = _forward_of(this)  # type: ignore[assignment, method-assign]
                undo.append(partial(_restore_forward, this, forward))
    return undo


def _restore_forward(this: weakref.ref[nn.Linear], forward: Callable[[Tensor], Tensor]) -> None:
    layer = this()
    if layer is not None and vars(layer).get("forward") is forward:
        del layer.__dict__["forward"]


def _is_wanted(group: ParameterGroup, weight: Tensor) -> bool:
    wanted = group.policy.direct_weight_gradients
    if weight.is_complex():  # its gradient is a product with conjugates
        return False
    if wanted == "auto":
        return group.device.type == "cuda" and weight.shape.numel() >= _WORTHWHILE_ELEMENTS and bool(group.mesh.axes)
    return wanted


def _forward_of(this: weakref.ref[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """The forward of one layer; it holds no strong reference to the layer."""

    def forward(input: Tensor) -> Tensor:
        layer = this()
        assert layer is not None, "called through the layer"
        weight: Tensor = layer.weight
        bias: Tensor | None = layer.bias
        if torch.compiler.is_compiling() or not _can_be_direct(weight):
            return F.linear(input, weight, bias)
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.is_floating_point() and input.dtype is not torch.float64:
            if torch.get_autocast_dtype(kind) is not weight.dtype:
                return F.linear(input, weight, bias)
            input, bias = input.to(weight.dtype), None if bias is None else bias.to(weight.dtype)
        if input.dtype is not weight.dtype:
            return F.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias)  # type: ignore[no-any-return]

    return forward


def _can_be_direct(weight: Tensor) -> bool:
    return (
        type(weight) is UnshardedParameter
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not weight._backward_hooks
        and not compat.has_accumulation_hooks(weight)
        and not compat.is_transformed()
    )


class _Linear(torch.autograd.Function):
    """`F.linear` whose backward may write the weight's gradient itself."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None)
        ctx.leaf = weakref.ref(weight)  # what checkpointing returns is a copy of it
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        to_input = grad.matmul(weight) if needs_input else None
        to_bias = rows.sum(0) if needs_bias else None
        to_weight = None
        if needs_weight:
            left, right = rows.t(), input.reshape(-1, input.shape[-1])
            if not _write(ctx.leaf(), left, right):
                to_weight = left @ right
        return to_input, to_weight, to_bias


def _write(weight: Tensor | None, left: Tensor, right: Tensor) -> bool:
    """Write `left @ right` as the gradient of an unsharded weight, if this backward accumulates it."""
    place = place_of(weight) if weight is not None else None
    context = place[0].root() if place is not None else None
    if weight is None or place is None or context is None or torch.is_grad_enabled() or not compat.accumulates(weight):
        return False
    group, index = place
    if not (context.backward.is_noticed and group.entries[index].is_trained):
        return False
    writes = context.reductions.writes(group)
    if writes is None:
        return False
    view, is_first = writes.open(index, compat.accumulator_of(weight))
    (_write_product if is_first else _add_product)(view, left, right)
    return True


def _write_product(view: Tensor, left: Tensor, right: Tensor) -> None:
    if view.dtype is left.dtype:
        torch.mm(left, right, out=view)
    elif _has_wide_product(view, left):
        torch.mm(left, right, out_dtype=view.dtype, out=view)
    else:
        view.copy_(left @ right)


def _add_product(view: Tensor, left: Tensor, right: Tensor) -> None:
    if view.dtype is left.dtype:
        view.addmm_(left, right)
    elif _has_wide_product(view, left):
        torch.addmm(view, left, right, out_dtype=view.dtype, out=view)
    else:
        view.add_(left @ right)


def _has_wide_product(view: Tensor, left: Tensor) -> bool:
    return view.is_cuda and view.dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16)


def gradient_memory(weight: Tensor, *, overwrites: bool) -> tuple[Tensor, bool]:
    """Where a layer that leaves no gradient to autograd must write that of its weight, in the current backward.

    Args:
        weight: An unsharded parameter of a sharded module.
        overwrites: The layer replaces what is in the memory; otherwise it adds to it.

    Returns:
        Memory of the weight's shape, in the dtype that gradients are reduced or kept in; and whether it is outside the buffer, because an
        earlier gradient of this weight is in it that must not be overwritten. It is valid until the next call.

    Raises:
        EngineStateError: The weight belongs to no sharded module.
    """
    place = place_of(weight)
    context = place[0].root() if place is not None else None
    if place is None or context is None:
        raise EngineStateError(
            f"a layer asked where to write the gradient of a weight of shape {tuple(weight.shape)}, which no sharded module has; keep the "
            "module that fully_shard was given alive until the backward is done"
        )
    group, index = place
    is_needed = group.entries[index].is_trained and compat.accumulates(weight)
    if is_needed:
        context.begin_backward()
    if not is_needed or context.reductions.is_idle:
        dtype = group.policy.sum_dtype(group.spec.main_dtype)
        return torch.zeros(weight.shape, dtype=dtype, device=group.device), False
    view, is_first = context.reductions.required_writes(group).open(index, compat.accumulator_of(weight))
    if is_first:
        return view if overwrites else view.zero_(), False
    if not overwrites:
        return view, False
    return group.gradients.memory_beside(index, view), True
