"""Grouped experts inside Hugging Face's models (transformers 5), through its own registry of experts implementations.

Their weights, names and checkpoints are unchanged; only how they are computed, and what is saved for backward, changes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.transformers_models import configurations, outermost
from lightning_mfsdp.moe.activations import ACTIVATIONS
from lightning_mfsdp.moe.experts import Dispatcher, uncompiled
from lightning_mfsdp.moe.function import experts_mlp, no_choices
from lightning_mfsdp.moe.products import product_dtype
from lightning_mfsdp.moe.row_plan import plan_rows
from lightning_mfsdp.moe.saving import ActivationSaver, OrdinarySaver, has_saver, wrong_saver_because

__all__ = [
    "DIVIDED",
    "DividedExperts",
    "ExpertLayer",
    "ExpertsReport",
    "ModelWithExperts",
    "enable_grouped_experts",
    "is_grouped_layer",
    "models_with_experts",
]

# The name under which the implementation is registered with transformers.
IMPLEMENTATION = "mfsdp_grouped"

# Where a layer stores that its experts are divided among ranks.
DIVIDED = "_divided_experts"

# What transformers' decorator of experts sets on every instance.
_DESCRIPTION = ("has_gate", "has_bias", "is_transposed", "is_concatenated")

# Names of SiLU as a function and as modules in transformers.
_SILU = ("silu", "SiLU", "SiLUActivation")

# Of weights. Formats with fewer bits have scales, which are not supported here.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class ExpertLayer:
    """The result for one layer of experts.

    Attributes:
        name: Of the module.
        kind: Its class.
        refused_because: Empty if it is computed by this package now.
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

    Their layers have an attribute `saver` from then on. Your own modules that have one (`SavesActivations`; `GroupedExperts` does)
    get the saver too. A model is switched as a whole: if one of its layers cannot be, none is. Call it before or after
    `fully_shard`.

    Args:
        module: Any, with such models inside.
        saver: Of activations. `None`: autograd keeps them.

    Returns:
        What was done, layer by layer, with a reason for each layer that is refused.
    """
    saver = saver or OrdinarySaver()
    layers: list[ExpertLayer] = []
    models = models_with_experts(module)
    theirs = {id(layer) for model in models for layer in model.layers.values()}
    for name, part in module.named_modules():
        if id(part) in theirs:
            continue
        if has_saver(part):
            cast(Any, part).saver = saver
            layers.append(ExpertLayer(name=name, kind=type(part).__name__))
        elif reason := wrong_saver_because(part):
            layers.append(ExpertLayer(name=name, kind=type(part).__name__, refused_because=reason))
    for model in models:
        if not model.refused:
            model.switch(saver)
        for name, part in model.layers.items():
            layers.append(ExpertLayer(name=name, kind=type(part).__name__, refused_because=model.refused.get(name, "")))
    return ExpertsReport(layers=tuple(layers))


class ModelWithExperts:
    """A Hugging Face model, whose experts are computed by this package between `switch` and `restore`.

    Attributes:
        layers: Of experts, by name.
        refused: Why they cannot be computed here, by name; empty if they can.
    """

    def __init__(self, prefix: str, model: Any) -> None:
        self._model = model
        self._before: list[tuple[Any, str | None]] = []
        self._given: list[Any] = []
        names = {name: f"{prefix}.{name}" if prefix else name for name, _ in model.named_modules()}
        self.layers: dict[str, nn.Module] = {
            names[name]: part for name, part in model.named_modules() if _is_layer(part)
        }
        reasons = {name: _refused_because(part) for name, part in self.layers.items()}
        first = next((name for name, reason in reasons.items() if reason), None)
        others = f"because the model has {first}, which cannot be grouped"
        self.refused = {name: reason or others for name, reason in reasons.items()} if first else {}

    @property
    def is_switched(self) -> bool:
        """Whether its experts are computed by this package."""
        # Not the model's own: if a text model is inside a vision model, the outer one has no experts of its own.
        return all(cast(Any, layer).config._experts_implementation == IMPLEMENTATION for layer in self.layers.values())

    def switch(self, saver: ActivationSaver) -> None:
        """Compute them here; each layer gets an attribute `saver`."""
        if not self.is_switched:
            self._before = [(config, config._experts_implementation) for config in configurations(self._model.config)]
            experts_of_transformers = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
            experts_of_transformers.register(IMPLEMENTATION, _grouped)
            self._model.set_experts_implementation(IMPLEMENTATION)
        self._given += [layer for layer in self.layers.values() if not has_saver(layer)]
        for layer in self.layers.values():
            cast(Any, layer).saver = saver

    def restore(self) -> None:
        """Undo `switch`."""
        for config, implementation in self._before:  # the outer ones first: they propagate what they are set to
            config._experts_implementation = implementation
        for layer in self._given:
            del layer.saver
        self._before, self._given = [], []


def models_with_experts(module: nn.Module) -> list[ModelWithExperts]:
    """The outermost models inside that let transformers choose how experts are computed, and have some."""
    models = outermost(module, lambda part: callable(getattr(part, "set_experts_implementation", None)))
    return [model for name, part in models if (model := ModelWithExperts(name, part)).layers]


def is_grouped_layer(module: nn.Module) -> bool:
    """Whether it is a layer of experts of a Hugging Face model, computed by this package."""
    return _is_layer(module) and cast(Any, module).config._experts_implementation == IMPLEMENTATION


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
    activation = getattr(layer.act_fn, "__name__", type(layer.act_fn).__name__)
    if activation not in _SILU:
        return f"because its activation is {activation} and not SiLU"
    if getattr(layer, "_is_expert_parallel", False):
        return "because transformers divides its experts among ranks already"
    weights = (getattr(layer, "gate_up_proj", None), getattr(layer, "down_proj", None))
    if not all(isinstance(weight, Tensor) and weight.dim() == 3 and weight.dtype in _DTYPES for weight in weights):
        return "because its weights are not stacked as floating-point numbers of 16 bits or more"
    return ""


def _grouped(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls in place of a layer's own forward."""
    divided: DividedExperts | None = vars(layer).get(DIVIDED)
    if divided is None:
        return _computed(layer, hidden_states, top_k_index, top_k_weights)
    output = uncompiled(divided.dispatcher, divided, hidden_states, top_k_index, top_k_weights)
    return output.to(hidden_states.dtype)


class DividedExperts:
    """A layer whose experts are divided among ranks, as a dispatcher sees it."""

    def __init__(self, layer: Any, dispatcher: Dispatcher, first_expert: int) -> None:
        self._layer = layer
        self.dispatcher = dispatcher
        self.first_expert = first_expert
        self.num_experts: int = layer.num_experts

    @property
    def weight_in(self) -> Tensor:
        """Of this rank's experts."""
        weight: Tensor = self._layer.gate_up_proj
        return weight

    def compute_dtype(self, hidden: Tensor) -> torch.dtype:
        """Dtype of the products."""
        return product_dtype(hidden, self.weight_in)

    def compute(
        self, hidden: Tensor, expert_index: Tensor, probabilities: Tensor, *, average_rows: int | None = None
    ) -> Tensor:
        """By this rank's experts alone; see `GroupedExperts.compute`. Buffers have room for all rows."""
        return _computed(self._layer, hidden, expert_index, probabilities)


def _computed(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """By the experts that this rank has."""
    weight_in, weight_out = layer.gate_up_proj, layer.down_proj
    if layer.is_transposed:
        weight_in, weight_out = weight_in.transpose(1, 2), weight_out.transpose(1, 2)
    if not top_k_index.numel():
        return no_choices(hidden_states, top_k_weights, weight_in, weight_out)
    dtype = product_dtype(hidden_states, weight_in)
    output = experts_mlp(
        hidden_states.to(dtype),
        top_k_weights,
        weight_in.to(dtype),
        weight_out.to(dtype),
        plan=plan_rows(top_k_index, len(weight_in), top_k_index.numel()),
        activation=ACTIVATIONS["swiglu"],
        # Another model may share the configuration, and so the implementation, without having been switched.
        saver=layer.saver if has_saver(layer) else OrdinarySaver(),
    )
    return output.to(hidden_states.dtype)
