"""Translates a plan's rule for a layer that PEFT has put an adapter around into rules for the modules inside the adapter.

LoRA adds `B(A(x))` to the output of the layer inside, where x is its input:

    layer                         A                            B
    divided by output features    whole                        divided by output features
    divided by input features     divided by input features    whole

A rule that divides nothing is for the adapter as it is: what is done to the output of the layer is done to the sum. A layer that is saved
as a whole is a copy beside the original, divided as that one is. Adapters are known by their attributes, so PEFT is not imported
(version 0.21).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.tensor_parallel.styles import STYLES, Style, Target

__all__ = ["inside_adapters", "without_adapters"]

_WRAPPED = re.compile(r"\.(base_layer|original_module)\b")


def without_adapters(name: str) -> str:
    """The name of a module or parameter before adapters were added around it."""
    return _WRAPPED.sub("", name)


def inside_adapters(target: Target, style: Style) -> list[tuple[Target, Style]]:
    """What a rule means for the modules inside an adapter; the rule itself for anything else.

    Raises:
        ShardingError: The adapter computes with whole weights.
    """
    layer = target.module
    if target.key is not None:
        return [(target, style)]
    inside = layer._modules
    if isinstance(original := inside.get("original_module"), nn.Module):
        copies = _named(inside.get("modules_to_save"), "modules_to_save")
        return [_inside(target, name, module, style) for name, module in [("original_module", original), *copies]]
    base = inside.get("base_layer")
    if not isinstance(base, nn.Module) or not isinstance(inside.get("lora_A"), nn.ModuleDict):
        return [(target, style)]
    if style.name == "moe_tp_experts":
        raise ShardingError(
            f"{target.name} ({type(layer).__name__}): an adapter around the parameters of experts, and the style {style.name!r} divides"
            " these. Leave target_parameters out, or the rules for the experts."
        )
    if style.divides is None:
        return [(target, style)]
    if any(getattr(layer, "lora_variant", {})) or any(getattr(layer, "use_dora", {}).values()):
        raise ShardingError(
            f"{target.name} ({type(layer).__name__}): a variant of LoRA, such as DoRA, that computes with whole weights, and the style"
            f" {style.name!r} divides them. Use plain LoRA, or leave this layer out of target_modules."
        )
    rules = [_inside(target, "base_layer", base, style)]
    if style.divides == "rows":
        rules += [_inside(target, *named_module, style) for named_module in _named(inside.get("lora_B"), "lora_B")]
    elif style.divides == "columns":
        rules += [_inside(target, *named_module, style) for named_module in _named(inside.get("lora_A"), "lora_A")]
    if style.takes_parts:
        rules += [
            _inside(target, *named_module, STYLES["dropout_of_parts"])
            for named_module in _named(inside.get("lora_dropout"), "lora_dropout")
            if isinstance(named_module[1], nn.Dropout)
        ]
    return rules


def _named(modules: nn.Module | None, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of each adapter in a `ModuleDict`, with their names."""
    if modules is not None:
        yield from ((f"{name}.{key}", module) for key, module in modules.named_children())


def _inside(target: Target, name: str, module: nn.Module, style: Style) -> tuple[Target, Style]:
    """A rule for a module inside. The parent stays: layers beside the adapter have the same input, and heads are counted there."""
    return replace(target, name=f"{target.name}.{name}", module=module, in_adapter=True), style
