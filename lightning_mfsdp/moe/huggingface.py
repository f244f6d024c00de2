"""Grouped experts inside Hugging Face's models (transformers 5), through its own registry of experts implementations.

Their weights, names and checkpoints stay as they are; what changes is how they are computed, and what is saved for backward.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_mfsdp.moe.activations import ACTIVATIONS
from lightning_mfsdp.moe.function import experts_mlp
from lightning_mfsdp.moe.rows import plan_rows
from lightning_mfsdp.moe.saving import ActivationSaver, OrdinarySaver, SavesActivations

__all__ = ["ExpertLayer", "ExpertsReport", "enable_grouped_experts"]

# What transformers' decorator of experts sets on every instance.
_DESCRIPTION = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """What became of one layer of experts.

    Attributes:
        name: Of the module.
        kind: Its class.
        refused_because: Empty where it is computed by this package now.
    """

    name: str
    kind: str
    refused_because: str = ""


@dataclass(frozen=True, kw_only=True)
class ExpertsReport:
    """Every layer of experts that was found, in module order."""

    layers: tuple[ExpertLayer, ...]

    @property
    def enabled(self) -> list[str]:
        """Names of layers that are computed by this package now."""
        return [layer.name for layer in self.layers if not layer.refused_because]

    @property
    def refused(self) -> dict[str, str]:
        """Why the others are not, by name."""
        return {layer.name: layer.refused_because for layer in self.layers if layer.refused_because}

    def __str__(self) -> str:
        if not self.layers:
            return "experts: no layer of a kind that is known was found"
        lines = [
            f"{layer.name} ({layer.kind}): {f'left alone, {reason}' if (reason := layer.refused_because) else 'grouped'}"
            for layer in self.layers
        ]
        return "\n".join([f"experts: {len(self.enabled)} of {len(self.layers)} layers are grouped", *lines])


def enable_grouped_experts(module: nn.Module, saver: ActivationSaver | None = None) -> ExpertsReport:
    """Compute the experts of Hugging Face's models inside `module` by grouped products, and save their activations by `saver`.

    Modules of one's own that have an attribute `saver` (`SavesActivations`; `GroupedExperts` is one) get the saver too. A model is
    switched as a whole: if one of its layers cannot be, all of them stay as they are. Before or after `fully_shard`.

    Args:
        module: Any, with such models inside.
        saver: Of activations. `None`: autograd keeps them.

    Returns:
        What was done, layer by layer. Nothing is refused without a reason in it.
    """
    implementation = _Implementation(saver or OrdinarySaver())
    layers: list[ExpertLayer] = []
    for name, part in module.named_modules():
        if isinstance(part, SavesActivations):
            part.saver = implementation.saver
            layers.append(ExpertLayer(name=name, kind=type(part).__name__))
    for prefix, model in _models(module):
        found = {
            f"{prefix}.{name}" if prefix else name: part for name, part in model.named_modules() if _is_layer(part)
        }
        reasons = {name: _refused_because(part) for name, part in found.items()}
        first = next((name for name, reason in reasons.items() if reason), None)
        if found and first is None:
            model.set_experts_implementation(_registered(implementation))
        for name, part in found.items():
            own = reasons[name] or (f"because the model has {first}, which cannot be grouped" if first else "")
            layers.append(ExpertLayer(name=name, kind=type(part).__name__, refused_because=own))
    return ExpertsReport(layers=tuple(layers))


def _models(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost models that let experts implementations be chosen, with their names."""
    inside: set[int] = set()
    for name, part in module.named_modules():
        if id(part) not in inside and callable(getattr(part, "set_experts_implementation", None)):
            inside.update(id(child) for child in part.modules())
            yield name, part


def _is_layer(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), bool) for name in _DESCRIPTION)


def _refused_because(layer: Any) -> str:
    """Why a layer cannot be computed by `experts_mlp`; empty if it can."""
    if layer.has_bias:
        return "because its experts have biases"
    if not layer.has_gate:
        return "because its experts have no gate"
    if not layer.is_concatenated:
        return "because gate and up projection are interleaved"
    if getattr(layer, "has_post_expert_norm", False):
        return "because each expert ends with a norm of its own"
    if type(layer)._apply_gate.__module__ != "transformers.integrations.moe":
        return "because it has a gate of its own kind"
    if not isinstance(layer.act_fn, nn.SiLU) and type(layer.act_fn).__name__ != "SiLUActivation":
        return f"because its activation is {type(layer.act_fn).__name__} and not SiLU"
    if getattr(layer, "_is_expert_parallel", False):
        return "because transformers divides its experts among ranks already"
    weights = (getattr(layer, "gate_up_proj", None), getattr(layer, "down_proj", None))
    if not all(isinstance(weight, Tensor) and weight.dim() == 3 and weight.is_floating_point() for weight in weights):
        return "because its weights are not stacked as floating-point numbers"
    return ""


def _registered(implementation: _Implementation) -> str:
    """A name under which transformers knows the implementation; each has its own, because each has its own saver."""
    name = f"mfsdp_{id(implementation):x}"
    importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(name, implementation)
    return name


class _Implementation:
    """What transformers calls in place of a layer's own forward."""

    def __init__(self, saver: ActivationSaver) -> None:
        self.saver = saver

    def __call__(self, layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weight_in, weight_out = layer.gate_up_proj, layer.down_proj
        if layer.is_transposed:
            weight_in, weight_out = weight_in.transpose(1, 2), weight_out.transpose(1, 2)
        if not top_k_index.numel():
            return hidden_states
        output: Tensor = experts_mlp(
            hidden_states.to(weight_in.dtype),
            top_k_weights,
            weight_in,
            weight_out,
            plan=plan_rows(top_k_index, layer.num_experts, top_k_index.numel()),
            activation=ACTIVATIONS["swiglu"],
            saver=self.saver,
        )
        return output.to(hidden_states.dtype)
