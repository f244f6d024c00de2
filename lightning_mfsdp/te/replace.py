"""Replaces layers of `torch.nn` by layers of Transformer Engine, with the same parameters under the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_mfsdp.te import library
from lightning_mfsdp.te.parts import note_multiple
from lightning_mfsdp.te.quantized_weights import quantized_init, shared_weights
from lightning_mfsdp.te.recipes import alignment

__all__ = ["replace", "replaceable"]

# What a subclass may add to its class; the library's layer would not have it.
_OWN_WAYS = (
    "forward",
    "__call__",
    "_save_to_state_dict",
    "_load_from_state_dict",
    "get_extra_state",
    "set_extra_state",
)


def replaceable(root: nn.Module) -> dict[str, nn.Module]:
    """Layers inside `root` that compute as `nn.Linear`, `nn.LayerNorm` or `nn.RMSNorm` do, by name. Each once.

    Not replaced: layers with a forward, buffers or entries of a state dict of their own, norms without weight, bias or a number for
    eps, which the library does not have, and those of which attention of `torch.nn` only reads the weights.
    """
    layers: dict[str, nn.Module] = {}
    inside: set[int] = set()  # modules that use their children's parameters themselves
    for name, module in root.named_modules():
        if isinstance(module, nn.MultiheadAttention) or library.is_engine_module(module):
            inside.update(id(part) for part in module.modules())
        if name and id(module) not in inside and _maker(module) is not None:
            layers[name] = module
    return layers


def replace(
    root: nn.Module,
    layers: Mapping[str, nn.Module],
    recipe_of: Callable[[str], Any],
    *,
    quantized: bool = False,
    fused: bool = False,
) -> list[nn.Module]:
    """Replace each by a layer of the library, wherever it is registered; returns the new ones.

    A new layer holds the same `Parameter` objects, so tied weights, optimizers and `requires_grad` stay valid. On the meta device it is
    initialized later as the old one would have been.

    Args:
        root: Not sharded yet.
        layers: From `replaceable`.
        recipe_of: The recipe a layer of that name will compute with.
        quantized: Weights of linear layers become FP8 ones when they are sharded, unless several modules hold them.
        fused: Linear layers add the gradient of their weight to the engine's memory themselves.

    Raises:
        ValueError: A layer with hooks or with sizes that its recipe cannot multiply; nothing was changed.
    """
    for name, layer in layers.items():
        _check_hooks(name, layer)
        if isinstance(layer, nn.Linear):
            _check_sizes(name, layer, recipe_of(name), quantized=quantized)
    shared = shared_weights(root) if quantized else set()
    new = {}
    for name, layer in layers.items():
        to_fp8 = quantized and isinstance(layer, nn.Linear) and id(layer.weight) not in shared
        with quantized_init(recipe_of(name)) if to_fp8 else nullcontext():
            new[id(layer)] = _made(name, layer, fused=fused)
        if isinstance(layer, nn.Linear):
            note_multiple(new[id(layer)], alignment(recipe_of(name), quantized=to_fp8))
    for parent in list(root.modules()):
        for key, child in parent._modules.items():
            if id(child) in new:
                parent._modules[key] = new[id(child)]
    return list(new.values())


def _maker(layer: nn.Module) -> Callable[[str, Any, bool], nn.Module] | None:
    """The builder of the library's counterpart, on meta; `None` if there is none."""
    for kind, maker in _MAKERS.items():
        if isinstance(layer, kind) and not _has_own_ways(layer, kind):
            return maker if kind is nn.Linear or _is_full_norm(layer) else None
    return None


def _has_own_ways(layer: nn.Module, kind: type[nn.Module]) -> bool:
    overridden = (getattr(type(layer), name) is not getattr(kind, name) or name in vars(layer) for name in _OWN_WAYS)
    return bool(layer._buffers) or any(overridden)


def _linear(name: str, layer: nn.Linear, fused: bool) -> nn.Module:
    linear: nn.Module = library.load("pytorch").Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=layer.weight.dtype,
        device="meta",
        name=name,
        fuse_wgrad_accumulation=fused,
        init_method=_as_it_is,
    )
    return linear


def _as_it_is(weight: Tensor) -> None:
    """The previous layer drew the weight."""


def _layer_norm(_: str, layer: nn.LayerNorm, __: bool) -> nn.Module:
    norm: nn.Module = library.load("pytorch").LayerNorm(
        layer.normalized_shape, eps=layer.eps, dtype=layer.weight.dtype, device="meta"
    )
    return norm


def _rms_norm(_: str, layer: nn.RMSNorm, __: bool) -> nn.Module:
    norm: nn.Module = library.load("pytorch").RMSNorm(
        layer.normalized_shape, eps=layer.eps, dtype=layer.weight.dtype, device="meta"
    )
    return norm


_MAKERS: dict[type[nn.Module], Callable[[str, Any, bool], nn.Module]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
}


def _is_full_norm(layer: nn.Module) -> bool:
    names = ("weight", "bias") if isinstance(layer, nn.LayerNorm) else ("weight",)
    return isinstance(layer.eps, float) and all(layer._parameters.get(name) is not None for name in names)


def _made(name: str, layer: nn.Module, *, fused: bool) -> nn.Module:
    maker = _maker(layer)
    assert maker is not None, "replaceable() found it"
    new_layer = maker(name, layer, fused)
    # One dictionary for both: parameters that are put into the new layer are also put into the old one, which can reset them.
    new_layer._parameters = layer._parameters
    new_layer.reset_parameters = layer.reset_parameters
    return new_layer.train(layer.training)


def _check_hooks(name: str, layer: nn.Module) -> None:
    hooks = (
        layer._forward_pre_hooks,
        layer._forward_hooks,
        layer._backward_pre_hooks,
        layer._backward_hooks,
        layer._state_dict_pre_hooks,
        layer._state_dict_hooks,
        layer._load_state_dict_pre_hooks,
        layer._load_state_dict_post_hooks,
    )
    if any(hooks) or layer._modules or layer._parameters.get("weight") is None:
        raise ValueError(
            f"replace_layers: {name} ({type(layer).__name__}) has hooks, a parametrization or modules inside, which a layer of Transformer "
            f"Engine would not have. Add them after the strategy's setup, or leave it out: keep_high_precision=[{name!r}]"
        )


def _check_sizes(name: str, layer: nn.Linear, recipe: Any, *, quantized: bool) -> None:
    multiple = alignment(recipe, quantized=quantized)
    rows, columns = layer.weight.shape
    if rows % multiple or columns % multiple:
        raise ValueError(
            f"replace_layers: {name} maps {columns} to {rows} features, and {type(recipe).__name__} multiplies matrices whose sizes are "
            f"multiples of {multiple}{' (of FP8 weights)' if quantized else ''}. Pad them, or leave it out: keep_high_precision=[{name!r}]"
        )
