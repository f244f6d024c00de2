"""Sharded parameters used outside of the forward of their unit: what is computed from them, and what is written to them.

    scale * x, penalty(weight)      the whole main weight takes the parameter's place, gathered for this use unless already unsharded; its
                                    gradient joins those of the unit
    p[rows] = value                 written in the gathered whole, of which each rank keeps its rows
    p.copy_(value), p.data = value, p.data.mul_(0.9), p.norm() under no_grad
                                    nothing of the whole is needed: done on rows (sharded_arithmetic.py)

Using a parameter of a unit directly costs a gather each time and is correct under every sharding; a forward of the unit's module
costs one gather for all of them.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.base.part import is_summed
from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor, refuse_gradient
from lightning_mfsdp.engine.core.torch_functions import is_in_place, written_argument
from lightning_mfsdp.engine.core.whole_tensor import Gathered, WholeTensor, in_memory_of

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = [
    "backward_to_weights",
    "gradients_to_weights",
    "needs_whole",
    "use_whole",
    "write_in_whole",
    "writes_in_place",
]

_WORTH_SAYING_BYTES = 1 << 20


def writes_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function writes to its first argument or to `out`, a sharded tensor or a list that has some."""
    if not is_in_place(function, kwargs):
        return False
    return any(isinstance(tensor, DTensor) for tensor in tensors_in(written_argument(args, kwargs)))


def needs_whole(tensors: list[Tensor]) -> bool:
    """Whether what is computed from these, sharded tensors among them, needs more than this rank's rows.

    It does if a plain tensor such as an activation is among them, and if autograd has to lead back to a sharded parameter.
    """
    records = torch.is_grad_enabled()
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            if records and tensor.requires_grad:
                return True
        elif (tensor.dim() and not isinstance(tensor, WholeTensor)) or (records and tensor.requires_grad):
            return True
    return False


def use_whole(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function with whole plain tensors in place of sharded ones. Collective, unless every rank has the whole.

    Raises:
        EngineStateError: A gradient is required of a parameter of which ranks hold different parts (experts).
    """
    gathered: list[tuple[ShardedTensor, Tensor]] = []
    groups: dict[int, ParameterGroup] = {}

    def whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if type(tensor) is DTensor:  # a number, made of rows
            return tensor.full_tensor()
        memory, group = _whole(cast("ShardedTensor", tensor))
        if group is not None:
            groups[id(group)] = group
        gathered.append((cast("ShardedTensor", tensor), memory))
        return memory

    args, kwargs = map_tensors(whole, (args, kwargs))
    before = [None if memory.is_inference() else memory._version for _, memory in gathered]
    result = function(*args, **kwargs)
    for (source, memory), version in zip(gathered, before, strict=True):
        if version is not None and version != memory._version:  # `embedding(max_norm=...)` writes
            with torch.no_grad():
                source.copy_(memory)
    returned = [memory for _, memory in gathered if any(in_memory_of(tensor, memory) for tensor in tensors_in(result))]
    if any(memory.requires_grad for memory in returned):
        # Other weights will lie in that memory, or its function forbids writes to views.
        own = {id(memory): memory.clone() for memory in returned}
        gathered = [(source, own.get(id(memory), memory)) for source, memory in gathered]
        result = function(*map_tensors(lambda tensor: own.get(id(tensor), tensor), args), **kwargs)

    wholes = [
        Gathered(source, memory, partial(_again, source, groups, recorded=memory.requires_grad), source.known_writes)
        for source, memory in gathered
    ]

    def kept(tensor: Tensor) -> Tensor:
        # Of a view that was made without gradients autograd does not admit the question.
        if groups and tensor.grad_fn is not None:
            for group in groups.values():
                tensor.grad_fn.register_prehook(_beginning(group))
        for seen in wholes if returned else ():
            if in_memory_of(tensor, seen.memory):
                return WholeTensor.of(tensor, seen.source, seen)
        return tensor

    return map_tensors(kept, result)


def gradients_to_weights(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad` with parameters among the inputs: gradients to what forwards have computed with, whole, of this rank's loss.

    As under DDP nothing is averaged.

    Raises:
        EngineStateError: Ranks compute with different parts of a parameter.
    """
    call = inspect.signature(function).bind(*args, **kwargs)
    inputs = call.arguments["inputs"]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for tensor in inputs:
        _refuse_parts(tensor)
    call.arguments["inputs"] = [_leaf(tensor) for tensor in inputs]
    with compat.without_torch_function():
        gradients = function(*call.args, **call.kwargs)
    return tuple(
        gradient.to(tensor.dtype) if isinstance(tensor, ShardedTensor) and gradient is not None else gradient
        for tensor, gradient in zip(inputs, gradients, strict=True)
    )


def backward_to_weights(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`loss.backward(inputs=parameters)`: these alone get gradients, which are reduced as those of any other backward."""
    call = inspect.signature(function).bind(*args, **kwargs)
    inputs = call.arguments.get("inputs")
    if inputs is not None:
        call.arguments["inputs"] = [_leaf(tensor) for tensor in inputs]
    with compat.without_torch_function():
        function(*call.args, **call.kwargs)


def _leaf(tensor: Any) -> Any:
    """The leaf of graphs that stands for a sharded parameter; another tensor as it is."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    group, index = tensor.place
    entry = group.entries[index]
    return entry.full if tensor is entry.sharded else tensor


def _refuse_parts(tensor: Any) -> None:
    leaf = _leaf(tensor)
    if leaf is not tensor and (tensor.place[0].entries[tensor.place[1]].part_axes or is_summed(leaf)):
        raise EngineStateError(
            f"parameter {tensor.described}: torch.autograd.grad of it was asked for, and ranks compute with different parts of it or of "
            "its gradient. Call backward and read module.parameter.grad"
        )


def _beginning(group: ParameterGroup) -> Any:
    """A hook that notifies the engine of a backward that may not involve any forward of a unit."""
    this = weakref.ref(group)

    def begin(_: Any) -> None:
        group = this()
        if group is not None:
            group.begin_backward()

    return begin


def _whole(tensor: ShardedTensor) -> tuple[Tensor, ParameterGroup | None]:
    """The whole of a sharded tensor, with history if it is a parameter that needs a gradient; and the group that its backward notifies."""
    group, index = tensor.place
    entry = group.entries[index]
    if not (torch.is_grad_enabled() and tensor.requires_grad) or not group.unit_name:
        return tensor.full_tensor(), None
    copy_of = tensor.copy_of
    if tensor is not entry.sharded and (copy_of is None or copy_of.node is not tensor.grad_fn):
        refuse_gradient(tensor.described)
    if is_summed(entry.full):
        raise EngineStateError(
            f"parameter {tensor.described}: a loss was computed from it outside of its module's forward, and its gradients are added up "
            "over the tensor axis, so this one would count once for each of its ranks. Compute it in the forward of the module that owns "
            "it, or under torch.no_grad()"
        )
    if entry.part_axes:
        raise EngineStateError(
            f"parameter {tensor.described}: a loss was computed from it outside of its module's forward, and along the mesh's axis "
            f'"{entry.part_axes[0].name}" ranks compute with different parts of it, so gradients could not be added up. Compute it in the '
            "forward of the module that owns it, or under torch.no_grad()"
        )
    if copy_of is not None:
        return _Whole.apply(_anchor(group), [copy_of.parameter, tensor.full_tensor()]), group
    unsharded = group.unsharded_outside(index)
    if unsharded is not None:
        return unsharded, group
    _advise(tensor, group)
    return _Whole.apply(_anchor(group), [tensor, tensor.full_tensor()]), group


def _anchor(group: ParameterGroup) -> Tensor:
    """What makes autograd record the use of a parameter of a group."""
    group.gradients.is_used_outside = True
    return torch.zeros((), requires_grad=True, device="cpu")


def _again(source: ShardedTensor, groups: dict[int, ParameterGroup], *, recorded: bool) -> Tensor:
    """All of a sharded tensor, gathered again, in memory of its own; with history if it had one and a graph is recorded. Collective."""
    if not (recorded and torch.is_grad_enabled()):
        return source.full_tensor()
    whole: Tensor = _Whole.apply(_anchor(source.place[0]), [source, source.full_tensor()]).clone()
    for group in groups.values():
        whole.grad_fn.register_prehook(_beginning(group))  # type: ignore[union-attr]
    return whole


class _Whole(torch.autograd.Function):
    """The whole of a sharded parameter or of a copy of it, in memory of its own; the gradient waits for the reduction of the unit."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, source_and_whole: list[Any]) -> Tensor:
        ctx.sharded, whole = source_and_whole  # in a list: autograd shall not lead to it
        return whole  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        group, index = ctx.sharded.place
        group.add_gradient(index, gradient.to(ctx.sharded.dtype))
        return None, None


def _advise(tensor: ShardedTensor, group: ParameterGroup) -> None:
    """Warn once for each large parameter that using it directly costs a gather."""
    if group.advised or tensor.numel() * tensor.element_size() < _WORTH_SAYING_BYTES or not group.mesh.axes:
        return
    group.advised = True
    if torch.distributed.get_rank() == 0:
        warnings.warn(
            f"parameter {tensor.described} is used outside of the forward of its module, so all of it is gathered for this use, every "
            "time, and kept until the backward. Using it in the forward of the module that owns it gathers it with its unit; to inspect "
            "values, use torch.no_grad(); to decay weights, the optimizer's weight_decay",
            stacklevel=2,
        )


# -- writing -----------------------------------------------------------------------------------------------------------


def write_in_whole(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to a sharded tensor at given positions: in the gathered whole, of which each rank keeps its rows. Collective."""
    target = cast("ShardedTensor", args[0])
    if torch.is_grad_enabled() and target.requires_grad:
        raise EngineStateError(
            f"{function.__name__} on parameter {target.described}: it needs a gradient, and autograd cannot follow a write in place; write "
            "under torch.no_grad(), or to its data"
        )

    def whole(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    with torch.no_grad():
        written, *others = map_tensors(whole, list(args))
        function(written, *others, **map_tensors(whole, kwargs))
        target.copy_(written)
    return target
