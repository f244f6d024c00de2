"""Finds modules of Transformer Engine that have, or will have, FP8 weights, and converts ordinary weights to these.

Modules that are built inside `quantized_init` have them from the start. A layer in place of one of `torch.nn` begins with the weight
object of that one, which is quantized once it has its value: when its unit is sharded (`quantize_late`). Until then it may be on meta,
on the host, or in an optimizer.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.te import library

__all__ = [
    "has_quantized_weights",
    "is_quantized",
    "quantize_again",
    "quantize_late",
    "quantized_init",
    "quantized_modules",
    "shared_weights",
]

_NOMINAL = torch.bfloat16  # the nominal dtype of quantized weights: that of their products


def quantized_init(recipe: Any) -> AbstractContextManager[Any]:
    """Modules of the library that are built inside have quantized weights, and keep the values from before for the main weights."""
    context: AbstractContextManager[Any] = library.load("pytorch").quantized_model_init(
        enabled=True, recipe=recipe, preserve_high_precision_init_val=True
    )
    return context


def is_quantized(parameter: Tensor | None) -> bool:
    """Whether a parameter is one of the library's, without loading it."""
    return library.is_a(parameter, "QuantizedTensor")


def quantized_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Modules inside that were built for quantized weights, by name."""
    return {
        name: module
        for name, module in root.named_modules()
        if has_quantized_weights(module) and any(parameter.dim() == 2 for parameter in module.parameters(recurse=False))
    }


def shared_weights(root: nn.Module) -> set[int]:
    """Ids of parameters that several modules hold."""
    held = Counter(id(parameter) for module in root.modules() for parameter in module._parameters.values())
    return {key for key, count in held.items() if count > 1}


def quantize_late(root: nn.Module, device: torch.device) -> None:
    """Quantize weights of replaced layers that are still ordinary ones. Those of units that are sharded are not."""
    for module in root.modules():
        weight = module._parameters.get("weight")
        if has_quantized_weights(module) and type(weight) is nn.Parameter:
            _quantize(module, weight, device)


def quantize_again(module: Any) -> bool:
    """Have a module of the library quantize its 16-bit weights a second time in backward, and keep no 8-bit copy from forward to backward.

    The library does so under torch's `fully_shard`, where a weight that is gathered again makes the copy pointless; the same holds here. It
    stores this in `_is_fsdp2`. Source: `TransformerEngineBaseModule.is_fsdp2` and `module/linear.py`, version 2.20.

    Returns:
        Whether it does, or has nothing to keep. `False`: this version of the library cannot. Its `LayerNormLinear` does not request
        the gradient's memory then (`module/layernorm_linear.py`, `main_grad_func`), so it keeps the copy if it must write there.
    """
    if not library.is_a(module, "TransformerEngineBaseModule") or has_quantized_weights(module):
        return True
    if library.is_a(module, "LayerNormLinear") and module.fuse_wgrad_accumulation:
        return False
    module._is_fsdp2 = True
    return bool(getattr(module, "is_fsdp2", False))


def has_quantized_weights(module: nn.Module) -> bool:
    """Whether a module was built for quantized weights; they may be on meta, or not quantized yet."""
    return library.is_engine_module(module) and bool(getattr(module, "primary_weights_in_fp8", False))


def _quantize(layer: Any, weight: nn.Parameter, device: torch.device) -> None:
    """Through the library's own reset, whose `init_method` leaves values unchanged (replace.py)."""
    parameters = layer._parameters
    others = {name: parameters.pop(name) for name in list(parameters) if name != "weight"}
    with torch.inference_mode(False), torch.enable_grad():
        parameters["weight"] = nn.Parameter(weight.detach().to(device, _NOMINAL))
        type(layer).reset_parameters(layer)
    parameters.update(others)
    quantized = parameters["weight"]
    for name, value in vars(weight).items():
        setattr(quantized, name, value)  # attributes that users set on parameters, for their optimizer's groups
    # The library would have kept the rounded one.
    kept = [weight.detach()]
    quantized.get_high_precision_init_val = lambda: kept[0] if kept else None
    quantized.clear_high_precision_init_val = kept.clear
    quantized.requires_grad_(weight.requires_grad)
