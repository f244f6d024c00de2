"""Takes over layers that PyTorch's `parallelize_module` has divided: their parameters, which are DTensors, become plain parts.

The layers still compute with DTensors, which are made of the parts for each forward: that is what the hooks of `parallelize_module` expect,
and gradients arrive at the parts in their placements. It costs host time, about a hundred times that of plain tensors in a small layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.part import Part, mark_part
from lightning_mfsdp.tensor_parallel.division import planned_division

__all__ = ["has_dtensors", "take_dtensors"]


@dataclass(frozen=True)
class _Taken:
    """What a parameter was, and what is in its place."""

    mesh: Any
    placements: tuple[Any, ...]
    parameter: nn.Parameter
    part: Part | None


def has_dtensors(model: nn.Module) -> bool:
    """Whether `parallelize_module` has divided something in it."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def take_dtensors(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Put plain parameters in the place of DTensors, marked as parts where they are, and have their modules compute with DTensors.

    Args:
        model: Given to `parallelize_module`, with a mesh of one axis.
        group: The ranks of the tensor axis.

    Returns:
        The names of these parameters.

    Raises:
        ShardingError: A DTensor over other ranks, or that is not divided evenly along one dim; names it. Then nothing has changed.
    """
    taken: dict[int, _Taken] = {}
    names: list[str] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            names.append(name)
            if id(parameter) not in taken:
                taken[id(parameter)] = _taken(name, parameter, group)
    _warn_of_lost_ties(model, taken)
    for path, module in model.named_modules():
        taken_here = {key: taken[id(entry)] for key, entry in module._parameters.items() if id(entry) in taken}
        if not taken_here:
            continue
        for key, entry in taken_here.items():
            module._parameters[key] = entry.parameter
            if entry.part is not None:
                planned_division(path, module).parts[key] = entry.part
        module.forward = _with_dtensors(module, taken_here)
    return names


def _warn_of_lost_ties(model: nn.Module, taken: Mapping[int, _Taken]) -> None:
    """Warn where an embedding and another layer have equal numbers: `parallelize_module` makes two parameters of one that they share."""
    parameters: dict[int, tuple[str, Tensor, Part | None]] = {}
    embeddings: dict[int, None] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            entry = taken.get(id(parameter))
            plain = parameter if entry is None else entry.parameter
            parameters[id(parameter)] = (f"{path}.{key}", plain.detach(), None if entry is None else entry.part)
            if isinstance(module, nn.Embedding):
                embeddings[id(parameter)] = None
    for first in embeddings:
        for second in parameters:
            if first == second or (second in embeddings and second < first) or not {first, second} & taken.keys():
                continue
            (name, numbers, part), (other, others, part_of_other) = parameters[first], parameters[second]
            if part_of_other != part and None in (part, part_of_other):
                if (
                    part is None
                    and part_of_other is not None
                    and part_of_other.whole_shape(others.shape) == numbers.shape
                ):
                    numbers = part_of_other.own(numbers)
                elif part is not None and part.whole_shape(numbers.shape) == others.shape:
                    others = part.own(others)
            if numbers.shape != others.shape or numbers.dtype != others.dtype or numbers.is_meta or others.is_meta:
                continue
            others = others.to(numbers.device)  # a model may not be on its device yet, and what was divided is
            is_one = bool((numbers == others).all()) and bool((numbers != numbers.flatten()[0]).any())
            if is_one and dist.get_rank() == 0:
                warnings.warn(
                    f"{name} and {other} have equal numbers and are two parameters. parallelize_module makes two of one that layers share, "
                    "which are trained apart then. If they were one, have them share it again after parallelize_module: head.weight = "
                    "embedding.weight",
                    stacklevel=2,
                )


def _taken(name: str, parameter: DTensor, group: dist.ProcessGroup) -> _Taken:
    mesh, placements = parameter.device_mesh, parameter.placements
    where = f"parameter {name}, a DTensor with placements {placements}"
    if mesh.ndim != 1 or dist.get_process_group_ranks(mesh.get_group()) != dist.get_process_group_ranks(group):
        raise ShardingError(
            f"{where} on a mesh of shape {tuple(mesh.shape)}: expected one over the {dist.get_world_size(group)} ranks of the tensor axis;"
            ' pass parallelize_module that part of the mesh, such as self.device_mesh["tensor_parallel"]'
        )
    placement, local = placements[0], parameter._local_tensor.detach()
    part = None
    if type(placement) is Shard:
        dim, size = placement.dim % parameter.ndim, mesh.size()
        if parameter.shape[dim] % size:
            raise ShardingError(
                f"{where}: {parameter.shape[dim]} along dim {dim} cannot be divided evenly over {size} tensor ranks; use a smaller tensor"
                " size"
            )
        part = Part(dim=dim, sections=(parameter.shape[dim],), size=size, rank=mesh.get_local_rank())
    elif not placement.is_replicate():
        raise ShardingError(f"{where}: expected Shard or Replicate; leave its module out of parallelize_module")
    if local.is_meta and part is not None:  # whole until it has values, so that these are those of one process
        plain = nn.Parameter(torch.empty(parameter.shape, dtype=local.dtype, device="meta"), parameter.requires_grad)
    else:
        plain = nn.Parameter(local, parameter.requires_grad)
        if part is not None:
            mark_part(plain, part)
    return _Taken(mesh, placements, plain, part)


def _with_dtensors(module: nn.Module, taken: dict[str, _Taken]) -> Callable[..., Any]:
    """The forward of a module, with DTensors of its parameters in their places."""
    forward = module.forward

    def with_dtensors(*args: Any, **kwargs: Any) -> Any:
        table: dict[str, Any] = module._parameters
        plain: dict[str, Tensor] = {key: table[key] for key in taken}
        for key, entry in taken.items():
            table[key] = DTensor.from_local(plain[key], entry.mesh, entry.placements, run_check=False)
        try:
            return forward(*args, **kwargs)
        finally:
            table.update(plain)

    return with_dtensors
