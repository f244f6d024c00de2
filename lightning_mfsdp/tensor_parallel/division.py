"""Division: what a plan divides in one module, and the functions that keep this rank's part of each parameter.

It happens when the parameters have values. Those on the meta device get them whole first (`materialize_divided`), so that all numbers are
those of one process: equal seeds draw equal numbers, and an initialization by fan-in sees the whole weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.base.initialize import materialize
from lightning_mfsdp.base.part import Part, is_summed, mark_part, mark_summed, part_of
from lightning_mfsdp.tensor_parallel.exchange import TensorGroup, summed

__all__ = [
    "Division",
    "check_divided",
    "divide",
    "division_of",
    "is_divided",
    "materialize_divided",
    "planned_division",
    "sum_gradient",
]

_DIVISION = "_tensor_division"  # where a module stores its `Division`
_BY_RULE = "_is_divided_by_rule"  # an attribute of parameters, see `Division.by_rule`

# Where parts of activations begin, and where they end: names of autograd's nodes (exchange.py).
_BEGIN = ("_CopiedBackward", "_OwnPartBackward")
_END = ("_SummedBackward", "_GatheredBackward")


@dataclass(eq=False, kw_only=True)
class Division:
    """What becomes of the parameters of one module.

    Attributes:
        name: Of the module.
        parts: By the names of parameters in the module.
        by_rule: Those of these names that a rule divides, so that the layer computes between collectives of exchange.py.
        summed: Whole parameters whose gradients are partial sums, by name, each with the ranks of the tensor axis.
        attributes: Sizes that the module states, as they are for a part.
        is_done: The parameters are divided.
    """

    name: str
    parts: dict[str, Part] = field(default_factory=dict)
    by_rule: set[str] = field(default_factory=set)
    summed: dict[str, TensorGroup] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False


def planned_division(name: str, module: nn.Module) -> Division:
    """The division of a module, to be added to; a new, empty one is stored if there is none."""
    division = division_of(module)
    if division is None:
        division = Division(name=name)
        setattr(module, _DIVISION, division)
    return division


def division_of(module: nn.Module) -> Division | None:
    """The division of a module; `None` if no plan divides something in it."""
    division: Division | None = module.__dict__.get(_DIVISION)
    return division


def divide(module: nn.Module) -> None:
    """Keep this rank's part of each parameter that a plan divides, and mark it. Modules with parameters on the meta device stay whole.

    The parameters stay the same objects, so tied ones stay tied. A second call divides what was on the meta device at the first, and marks
    again what is divided already: `copy.deepcopy` drops marks.
    """
    for child in module.modules():
        division = division_of(child)
        if division is None or (
            not division.is_done and any(parameter.is_meta for parameter in child.parameters(recurse=False))
        ):
            continue
        for key, part in division.parts.items():
            if not division.is_done:
                _divide(getattr(child, key), part)
            mark_part(getattr(child, key), part)
        for key in division.by_rule:
            setattr(getattr(child, key), _BY_RULE, True)
        for key, group in division.summed.items():
            sum_gradient(getattr(child, key), group)
        if not division.is_done:
            for key, value in division.attributes.items():
                setattr(child, key, value)
            division.is_done = True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def is_divided(tensor: Tensor) -> bool:
    """Whether a tensor was computed from a part of a weight and is not yet whole again, by its autograd graph.

    Where nothing before a layer requires gradients, the graph begins with the part itself. Layers that exchange activations by themselves
    (`parallelize_module`, Megatron-LM) are not known here.
    """
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node.name() in _END:
            continue
        if node.name() in _BEGIN or getattr(getattr(node, "variable", None), _BY_RULE, False):
            return True
        seen.add(node)
        nodes += [earlier for earlier, _ in node.next_functions]
    return False


def sum_gradient(parameter: nn.Parameter, group: TensorGroup) -> None:
    """Have backward add up the gradients of a whole parameter, of which each rank computes a term, and mark it. Idempotent."""
    if is_summed(parameter):
        return
    mark_summed(parameter)
    is_trained = parameter.requires_grad
    parameter.requires_grad_()  # else it takes no hook, and may be trained later
    parameter.register_hook(partial(_over_ranks, group))
    parameter.requires_grad_(is_trained)


def _over_ranks(group: TensorGroup, gradient: Tensor) -> Tensor:
    return summed(gradient, group)


@torch.no_grad()
def _divide(parameter: nn.Parameter, part: Part) -> None:
    if part_of(parameter) != part:  # else it is tied to one that was divided before
        parameter.data = part.own(parameter.detach())


def materialize_divided(module: nn.Module, device: torch.device, ignored: set[int] | None = None) -> None:
    """Initialize meta parameters as one process would, whole, and then divide them.

    Args:
        module: To which a plan was applied, or a unit of such a module, which is whole in memory for a while.
        device: Where the parameters go.
        ignored: Ids of parameters to skip.

    Raises:
        ShardingError: Nothing initializes a module with meta parameters; names it and them.
    """
    materialize(module, device, ignored)
    divide(module)


def check_divided(module: nn.Module) -> None:
    """Check that the parameters of a module are divided; hooks call it before the module computes.

    Raises:
        EngineStateError: Its parameters are whole.
    """
    division = division_of(module)
    if division is not None and not division.is_done:
        raise EngineStateError(
            f"{division.name}: its parameters were initialized, but not divided over the tensor axis. Call"
            " divide after the initialization, or materialize_divided for both."
        )
