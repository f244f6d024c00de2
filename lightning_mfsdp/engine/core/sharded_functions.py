"""What torch functions do with sharded tensors: the choice between their rows and the whole.

p.shape, p.numel()              describes a tensor: answered by the class itself (sharded_tensor.py)
p * 2, a.add_(b), p.norm()      computed on rows (sharded_arithmetic.py)
scale(p) * x, a loss of p       a plain tensor takes part, or autograd has to lead to a parameter: the whole takes the parameter's
                                place (outside.py)
p[rows] = value                 written in the whole, of which each rank keeps its rows (outside.py)
p[:2], p.T, p @ q, p.sort()     rows are addressed by their position: computed from the whole, or, in place and in the step of an
                                optimizer, refused
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.base.stand_in import StandIn
from lightning_mfsdp.engine.core.held_back import HeldBackGradient
from lightning_mfsdp.engine.core.outside import (
    backward_to_weights,
    gradients_to_weights,
    needs_whole,
    use_whole,
    write_in_whole,
    writes_in_place,
)
from lightning_mfsdp.engine.core.sharded_arithmetic import assign_data, run
from lightning_mfsdp.engine.core.sharded_collectives import communicate
from lightning_mfsdp.engine.core.sharded_tensor import CopyOf, LayoutError, ShardedTensor, refuse_gradient
from lightning_mfsdp.engine.core.torch_functions import (
    computes,
    copies,
    makes_number,
    uses_values,
    writes_by_position,
    zeroes,
)
from lightning_mfsdp.engine.core.whole_tensor import WholeTensor, views_in, with_views

__all__ = ["operate"]

# They call the function again, with the tensors that they stand for.
_STAND_INS = (StandIn, HeldBackGradient)


def operate(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function of sharded tensors that does not just describe one. Collective where rows have to be fetched or reduced.

    Args:
        func: As `__torch_function__` gets it.
        types: Classes of the arguments that handle torch functions.
        args: Arguments by position.
        kwargs: Arguments by name.

    Raises:
        EngineStateError: It addresses rows by their position and writes in place, or is called in the step of an optimizer.
    """
    if func == compat.set_data:
        return assign_data(args[0], args[1])
    has_wholes = False
    for kind in types:
        if issubclass(kind, _STAND_INS):
            return NotImplemented
        has_wholes = has_wholes or issubclass(kind, WholeTensor)
    if has_wholes and views_in(tensors_in((args, kwargs))):
        with with_views(func, args, kwargs) as (_, args, kwargs):
            return _operate(func, args, kwargs)
    return _operate(func, args, kwargs)


def _operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled() and getattr(func, "__name__", "") in ("detach", "__getitem__"):
        # An inference tensor cannot share the version counter of the tensor that it views.
        with torch.inference_mode(False), torch.no_grad():
            return _operate(func, args, kwargs)
    operands = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, ShardedTensor)]
    if uses_values(func):
        zeroed = zeroes(func)
        for operand in operands:
            operand.before_use(zeroed=zeroed)
    if func is torch.autograd.grad:
        return gradients_to_weights(func, args, kwargs)
    if func is torch.autograd.backward:
        return backward_to_weights(func, args, kwargs)
    if computes(func):
        in_place = writes_in_place(func, args, kwargs)
        if in_place and writes_by_position(func):
            return write_in_whole(func, args, kwargs)
        if makes_number(func):
            with torch.no_grad():  # nothing leads back from a number
                return use_whole(func, args, kwargs)
        if not in_place and (kwargs.get("out") is not None or needs_whole(tensors_in((args, kwargs)))):
            return use_whole(func, args, kwargs)
    try:
        with compat.without_torch_function(), _OnRows():
            result = func(*args, **kwargs)
    except LayoutError:
        if writes_in_place(func, args, kwargs) or any(operand.stepping for operand in operands):
            raise  # an optimizer would gather whole weights in every step
        return use_whole(func, args, kwargs)
    if isinstance(result, ShardedTensor) and getattr(func, "__name__", "") == "detach":
        # Below autograd it was given a version counter of its own, and writes to its `to_local()` would be unnoticed.
        result._local_tensor = operands[0]._local_tensor.detach()
    if copies(func) and isinstance(result, ShardedTensor) and result is not args[0] and result.requires_grad:
        source = args[0]
        result.copy_of = CopyOf(source if source.copy_of is None else source.copy_of.parameter, result.grad_fn)
    if isinstance(result, WholeTensor) and result.requires_grad:
        described = operands[0].described
        result.register_hook(lambda _: refuse_gradient(described))
    return result


class _OnRows(compat.DispatchMode):
    """Inside, every operation on sharded tensors is ours, including those that a composite function calls.

    A mode and not `ShardedTensor.__torch_dispatch__`, which DTensor's own dispatch in torch 2.11 bypasses.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, ShardedTensor)]
        if not operands:
            return func(*args, **kwargs)
        return communicate(func, args) if func.namespace == "c10d" else run(func, args, kwargs, operands)
