"""Direct weight gradients: a Linear writes the gradient of its weight straight into the buffer in which it is reduced.

Autograd would leave it in `weight.grad`, rounded to the compute dtype, and the engine would copy it. Here the matrix product has the
buffer's dtype and memory: one pass over memory less, no rounding in between, and microbatches are added in that dtype.

It happens where nobody can tell the difference: a plain `nn.Linear`, in eager mode, in a backward that accumulates into `.grad`. Under
hooks on the weight, `torch.compile`, `torch.autograd.grad`, `create_graph=True` or a functorch transform the gradient goes the usual way.

Layers of other libraries that can do nothing else ask for the memory instead (`gradient_memory`).

Source: gradient accumulation fusion of Megatron-LM (`main_grad`), here without a copy of the gradient kept per weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.memory.buffer import FlatBuffer
from lightning_mfsdp.engine.params.group import ParameterGroup
from lightning_mfsdp.engine.params.parameter import UnshardedParameter, place_of

__all__ = ["DirectWrites", "gradient_memory", "write_directly"]

# Smaller products save less than the host spends on an autograd function written in Python.
_WORTHWHILE_ELEMENTS = 1 << 23


class DirectWrites:
    """What layers wrote into a full-size buffer since the last reduction.

    Attributes:
        target: The buffer; `None` if nothing was written.
        is_new: Its other cells are undefined.
        written: Which tensors of the layout are there.
    """

    def __init__(self) -> None:
        self.target: FlatBuffer | None = None
        self.is_new = False
        self.written: set[int] = set()
        self._aside: list[tuple[Tensor, Tensor]] = []

    def begin(self, target: FlatBuffer, *, is_new: bool) -> None:
        """Gradients go to `target` from now on; with `is_new` it holds nothing yet."""
        self.target, self.is_new = target, is_new

    def add(self, index: int, left: Tensor, right: Tensor) -> None:
        """Write, or add, the product `left @ right` as the gradient of a tensor of the layout."""
        assert self.target is not None, "begin() comes first"
        view = self.target.views()[index]
        if self.is_new and index not in self.written:
            _product_into(view, left, right)
        else:
            _add_product(view, left, right)
        self.written.add(index)

    def memory(self, index: int, *, overwrites: bool) -> tuple[Tensor, bool]:
        """Where a layer is to write the gradient of a tensor of the layout, and whether that is memory beside the buffer.

        What is beside it is added later, so what overwrites never meets what is there already.
        """
        assert self.target is not None, "begin() comes first"
        self._add_aside()
        view = self.target.views()[index]
        is_first = self.is_new and index not in self.written
        self.written.add(index)
        if overwrites and not is_first:
            self._aside.append((view, torch.empty_like(view)))
            return self._aside[-1][1], True
        if is_first and not overwrites:
            view.zero_()
        return view, False

    def pieces(self) -> dict[int, Tensor]:
        """What was written and is not reduced yet, by tensor of the layout."""
        if self.target is None:
            return {}
        self._add_aside()
        views = self.target.views()
        return {index: views[index] for index in sorted(self.written)}

    def _add_aside(self) -> None:
        """Add what layers wrote beside the buffer since."""
        for view, piece in self._aside:
            view.add_(piece)
        self._aside.clear()

    def joined(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Forget the buffer; returns the gradients that autograd left along with those that layers wrote, in the buffer's memory."""
        target = self.target
        for index in sorted(self.end()):
            assert target is not None, "something was written"
            late, view = grads[index], target.views()[index]
            grads[index] = view if late is None else view.add_(late)
        return grads

    def end(self) -> frozenset[int]:
        """Forget the buffer; returns which tensors' cells of a new one are defined."""
        self._add_aside()
        written = frozenset(self.written) if self.is_new else frozenset()
        self.target, self.is_new = None, False
        self.written.clear()
        return written


def _product_into(view: Tensor, left: Tensor, right: Tensor) -> None:
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


def write_directly(modules: Sequence[nn.Module], groups: Sequence[ParameterGroup]) -> None:
    """Have the Linear layers in `modules` write into the buffers of `groups`, as far as the groups' policy wants it."""
    for module in modules:
        for layer in module.modules():
            if (
                not isinstance(layer, nn.Linear)
                or type(layer).forward is not nn.Linear.forward
                or "forward" in vars(layer)
            ):
                continue
            weight = layer._parameters.get("weight")  # a parametrization has taken it away
            place = place_of(weight) if weight is not None else None
            if weight is not None and place is not None and place[0] in groups and _is_wanted(place[0], weight):
                layer.forward = _forward_of(weakref.ref(layer))  # type: ignore[assignment, method-assign]


def write_as_ever(layer: nn.Module) -> None:
    """Give a layer its own forward back."""
    forward = vars(layer).get("forward")
    if isinstance(forward, FunctionType) and forward.__module__ == __name__:
        del layer.__dict__["forward"]


def _is_wanted(group: ParameterGroup, weight: Tensor) -> bool:
    wanted = group.policy.direct_weight_gradients
    if wanted == "auto":
        return group.device.type == "cuda" and weight.shape.numel() >= _WORTHWHILE_ELEMENTS and bool(group.mesh.axes)
    return wanted


def _forward_of(this: weakref.ref[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """The forward of one layer; it does not keep the layer alive."""

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
        return _Linear.apply(input, weight, bias)  # type: ignore[no-any-return,no-untyped-call]

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
        ctx.leaf = weakref.ref(weight)  # what checkpointing hands back is a copy of it
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
    """Write `left @ right` as the gradient of a full weight, if this backward accumulates it."""
    place = place_of(weight) if weight is not None else None
    context = place[0].context if place is not None else None
    if weight is None or place is None or context is None or torch.is_grad_enabled() or not compat.accumulates(weight):
        return False
    group, index = place
    if not (context.in_backward and group.entries[index].is_trained):
        return False
    writes = context.reductions.writes(group)
    if writes is None:
        return False
    writes.add(index, left, right)
    return True


def gradient_memory(weight: Tensor, *, overwrites: bool) -> tuple[Tensor, bool]:
    """Where a layer that leaves no gradient to autograd is to write that of its weight, in the backward that runs now.

    Args:
        weight: A full parameter of a sharded module.
        overwrites: The layer replaces what is in the memory; otherwise it adds to it.

    Returns:
        Memory of the weight's shape, in the dtype that gradients are reduced or kept in; and whether it is beside the buffer, because an
        earlier gradient of this weight is there that must not be overwritten. It is valid until the next call.

    Raises:
        EngineStateError: The weight belongs to no sharded module.
    """
    place = place_of(weight)
    context = place[0].context if place is not None else None
    if place is None or context is None:
        raise EngineStateError(
            f"a layer asked where to write the gradient of a weight of shape {tuple(weight.shape)}, which no sharded module has; keep the "
            "module that fully_shard was given alive until the backward is done"
        )
    group, index = place
    if not (group.entries[index].is_trained and compat.accumulates(weight)):
        return torch.zeros(
            weight.shape, dtype=group.policy.sum_dtype(group.spec.main_dtype), device=group.device
        ), False  # nobody wants it
    context.begin_backward()
    return context.reductions.required_writes(group).memory(index, overwrites=overwrites)
