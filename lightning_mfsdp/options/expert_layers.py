"""Divides layers of experts over an expert axis. Imported only where there is one, as it loads the packages of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_mfsdp.moe.experts import GroupedExperts
from lightning_mfsdp.moe.huggingface import is_grouped_layer, models_with_experts
from lightning_mfsdp.moe.parallel import expert_parallel
from lightning_mfsdp.moe.saving import OrdinarySaver
from lightning_mfsdp.tensor_parallel import divide

__all__ = ["keep_own_parts", "layers_of_experts"]

DispatcherName = Literal["all_gather", "all_to_all"]


def layers_of_experts(module: nn.Module, mesh: DeviceMesh, dispatcher: DispatcherName) -> list[nn.Module]:
    """The layers whose experts are divided over the axis "expert" of a mesh; `GroupedExperts` are divided at once.

    Raises:
        ValueError: There are none, or a model has experts that cannot be computed by grouped products.
    """
    size = mesh["expert"].size()
    models = models_with_experts(module)
    refused = {name: reason for model in models for name, reason in model.refused.items()}
    if refused:
        name, reason = next(iter(refused.items()))
        raise ValueError(f"expert={size}: {name} cannot be divided, {reason}; use expert=1")
    for model in models:
        if not model.is_switched:
            model.switch(OrdinarySaver())
    grouped_layers = [part for part in module.modules() if isinstance(part, GroupedExperts)]
    for layer in grouped_layers:
        expert_parallel(layer, mesh, dispatcher=dispatcher)
    layers = [*grouped_layers, *(layer for model in models for layer in model.layers.values())]
    if not layers:
        raise ValueError(
            f"expert={size}, but {type(module).__name__} has no experts to divide: expected GroupedExperts, or a model of transformers "
            "with experts; use expert=1"
        )
    return layers


def keep_own_parts(experts: Mapping[nn.Module, DeviceMesh], dispatcher: DispatcherName, module: nn.Module) -> None:
    """Keep of a module, which has values and is about to be sharded, only what this rank computes with."""
    divide(module)
    if module in experts and is_grouped_layer(module):
        expert_parallel(module, experts[module], dispatcher=dispatcher)
