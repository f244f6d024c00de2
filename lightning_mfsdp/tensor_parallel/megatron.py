"""Marks parts of weights in layers of Megatron-LM and Transformer Engine, which divide them by themselves, as their attributes say.

tensor_model_parallel   the parameter is a part
partition_dim           along which dim
partition_stride        of how many sections
sequence_parallel       the gradient of a whole parameter is a partial sum
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.part import Part, mark_part
from lightning_mfsdp.te import parts as te
from lightning_mfsdp.tensor_parallel.division import sum_gradient
from lightning_mfsdp.tensor_parallel.exchange import TensorGroup

__all__ = ["has_parts_by_itself", "is_part_by_itself", "mark_megatron_layers"]


def is_part_by_itself(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a parameter of a module is a part that the module computes with."""
    return bool(getattr(parameter, "tensor_model_parallel", False)) and not te.computes_whole(module)


def has_parts_by_itself(model: nn.Module) -> bool:
    """Whether some module inside has such a parameter."""
    return any(
        is_part_by_itself(module, parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    ) or any(te.computes_part(module) for module in model.modules())


def mark_megatron_layers(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Mark parameters of layers that divide their weights themselves. Sums of gradients are added up in backward from then on.

    Raises:
        ShardingError: A layer of Transformer Engine on the meta device, where it has no attributes yet.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and te.computes_part(module):
                raise ShardingError(
                    f"{name}.{key} ({type(module).__name__}) is on the meta device, where its layer does not say yet which part of a weight"
                    ' it has. Build the layer on a real device, such as device="cuda".'
                )
            if getattr(parameter, "sequence_parallel", False):
                sum_gradient(parameter, TensorGroup.of(group))
            if not is_part_by_itself(module, parameter):
                continue
            dim = parameter.partition_dim
            sections = max(getattr(parameter, "partition_stride", 1), te.sections(module, key))
            length = parameter.shape[dim] * size // sections
            mark_part(parameter, Part(dim=dim % parameter.ndim, sections=(length,) * sections, size=size, rank=rank))
