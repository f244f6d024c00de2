"""Global norm, clipping and finite checks over sharded gradients. Only owned elements count; nothing here waits for the device.

Each number is on exactly the ranks whose shard has it, or on all of them where a gradient is not sharded, so sums are
taken over the axes that each parameter is divided over and no others. All ranks join every sum, whether or not they own
anything.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.core.group import ParameterGroup, place_of
from lightning_mfsdp.engine.core.inspect import gradients_at_hand
from lightning_mfsdp.engine.core.rows import sharded_axes

__all__ = ["GradientPlaces", "clip_finite_", "clip_grad_norm_", "clip_grad_value_", "grad_norm"]


@dataclass(eq=False)
class _Owned:
    """Gradients that are sharded over the same axes: flat pieces of this rank."""

    axes: tuple[Axis, ...] = ()
    tensors: list[Tensor] = field(default_factory=list)
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32


class GradientPlaces:
    """Where the gradients of some parameters are, in an order that all ranks share: looked up once, and read in every step.

    Keeps no group alive.

    Attributes:
        parameters: Those that were asked about, in order, whichever representation.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        # Where every rank has the whole gradient, in the order of parameters: parameters of others, and rows of ours.
        self._whole: list[Tensor] = []
        self._foreign: list[Tensor] = []  # of these, those of others
        groups: dict[ParameterGroup, dict[tuple[Axis, ...], list[int]]] = {}
        seen: set[int] = set()
        for parameter in self.parameters:
            place = place_of(parameter)
            local = parameter if place is None else place[0].entries[place[1]].local
            if id(local) in seen:
                continue
            seen.add(id(local))
            if place is not None:
                by_axes = groups.setdefault(place[0], {})
                if axes := sharded_axes(*place):
                    by_axes.setdefault(axes, []).append(place[1])
                    continue
            else:
                self._foreign.append(local)
            self._whole.append(local)
        self._groups = [
            (
                weakref.ref(group),
                (group.axes.shard, group.axes.outer),
                [(axes, sorted(indices)) for axes, indices in by_axes.items()],
            )
            for group, by_axes in groups.items()
        ]

    @property
    def is_current(self) -> bool:
        """Whether parameters are as they were looked up.

        A group may be gone; a parameter of others may be sharded since; and the first backward gives reductions communicators of their own.
        """
        for reference, (shard, outer), _ in self._groups:
            group = reference()
            if group is None or group.axes.shard is not shard or group.axes.outer is not outer:
                return False
        return not any(place_of(parameter) is not None for parameter in self._foreign)

    def owned(self) -> list[_Owned]:
        """This rank's gradients by the axes they are sharded over. Reduces what is held back, which is collective."""
        groups = [(group, by_axes) for reference, _, by_axes in self._groups if (group := reference()) is not None]
        for group, _ in groups:
            group.reduce_held_back()
        whole = _Owned(tensors=[gradient for local in self._whole if (gradient := local.grad) is not None])
        if whole.tensors:
            whole.device = whole.tensors[-1].device
            if torch.float64 in {gradient.dtype for gradient in whole.tensors}:
                whole.dtype = torch.float64
        by_groups: dict[tuple[dist.ProcessGroup, ...], _Owned] = {(): whole}
        for group, by_axes in groups:
            for axes, indices in by_axes:
                key = tuple([axis.group for axis in axes])
                part = by_groups.get(key)
                if part is None:
                    part = by_groups[key] = _Owned(axes=axes)
                part.device = group.device
                if group.spec.main_dtype is torch.float64:
                    part.dtype = torch.float64  # from what is known to all ranks: a rank may own no gradient here
                part.tensors += gradients_at_hand(group, indices)
        return list(by_groups.values())


def clip_grad_norm_(
    module_or_parameters: nn.Module | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`.

    Same result as `torch.nn.utils.clip_grad_norm_` on one process with the whole model. Collective: call it on every
    rank.

    Args:
        module_or_parameters: A sharded module, or parameters (DTensors of the module or an optimizer's local rows).
        max_norm: Largest norm allowed.
        norm_type: p of the p-norm: positive, may be infinite.
        error_if_nonfinite: Raise if the norm is NaN or infinite. Waits for the device.

    Returns:
        The norm before clipping, 0-D on the gradients' device, equal on all ranks.
    """
    owned = _owned_gradients(module_or_parameters)
    norm = _norm(owned, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise EngineStateError(
            f"clip_grad_norm_: the gradient norm of order {norm_type} is {float(norm)}, so it cannot be clipped; find "
            "the parameter with "
            "NaNGradientReporter, or pass error_if_nonfinite=False"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as in torch.nn.utils.clip_grad_norm_
    _scale(owned, scale)
    return norm


def clip_finite_(places: GradientPlaces, max_norm: float) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`; where it is NaN or infinite, leave them as they are.

    Decided on the device, without waiting. Collective.
    """
    owned = places.owned()
    norm = _norm(owned, 2.0)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    _scale(owned, torch.where(torch.isfinite(norm), scale, torch.ones_like(scale)))


def _scale(parts: list[_Owned], scale: Tensor) -> None:
    with torch.no_grad():
        for part in parts:
            if part.tensors:
                compat.foreach_mul_(part.tensors, scale)


def grad_norm(module_or_parameters: nn.Module | Iterable[Tensor] | Tensor, norm_type: float = 2.0) -> Tensor:
    """Global p-norm of the gradients, 0-D, equal on all ranks. Collective."""
    return _norm(_owned_gradients(module_or_parameters), float(norm_type))


def clip_grad_value_(module_or_parameters: nn.Module | Iterable[Tensor] | Tensor, clip_value: float) -> None:
    """Clamp every gradient to `[-clip_value, clip_value]` in place."""
    with torch.no_grad():
        for part in _owned_gradients(module_or_parameters):
            for tensor in part.tensors:
                tensor.clamp_(-clip_value, clip_value)


def _owned_gradients(module_or_parameters: nn.Module | Iterable[Tensor] | Tensor) -> list[_Owned]:
    """This rank's gradients by the axes they are sharded over."""
    parameters: Iterable[Tensor]
    if isinstance(module_or_parameters, nn.Module):
        # In the order of `parameters()`, at a fraction of its host time, as it builds no names and skips no duplicates.
        tables = [module._parameters for module in module_or_parameters.modules() if module._parameters]
        parameters = [parameter for table in tables for parameter in table.values() if parameter is not None]
    else:
        parameters = [module_or_parameters] if isinstance(module_or_parameters, Tensor) else module_or_parameters
    return GradientPlaces(parameters).owned()


def _norm(parts: list[_Owned], norm_type: float) -> Tensor:
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: expected a positive number or inf")
    parts = [part for part in parts if part.device is not None]
    if not parts:
        return torch.zeros((), device="cpu")
    whole = [tensor for part in parts for tensor in part.tensors]
    if whole and not any(part.axes for part in parts):
        # Nothing is sharded: the same sum as PyTorch's, parameter by parameter, so that one rank clips to the bit like
        # plain PyTorch.
        if math.isinf(norm_type):  # which is undefined for an empty tensor
            whole = [tensor for tensor in whole if tensor.numel()]
        return torch.nn.utils.get_total_norm(whole, norm_type)
    infinite = math.isinf(norm_type)
    combine, op = (torch.maximum, dist.ReduceOp.MAX) if infinite else (torch.add, dist.ReduceOp.SUM)
    sums = {tuple(axis.group for axis in part.axes): _power_sum(part, norm_type) for part in parts}
    # The last axis first: what is summed over it joins what was never divided along it, so all share one sum over each axis.
    for length in range(max(map(len, sums)), 0, -1):
        for over in [over for over in sums if len(over) == length]:
            total = sums.pop(over)
            dist.all_reduce(total, op=op, group=over[-1])
            others = sums.get(over[:-1])
            sums[over[:-1]] = total if others is None else combine(total, others.to(total.device))
    total = sums[()].to(parts[0].device)
    return total if infinite else total ** (1.0 / norm_type)


def _power_sum(part: _Owned, norm_type: float) -> Tensor:
    """Sum of |g|^p (or the maximum) of this rank's pieces; 0-D float32 or better."""
    dtype = part.dtype
    tensors = [tensor for tensor in part.tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=dtype, device=part.device)
    with torch.no_grad():
        norms = torch.stack([norm.to(dtype) for norm in compat.foreach_norm(tensors, norm_type)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
