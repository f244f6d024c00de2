"""Layers with `fuse_wgrad_accumulation=True` add the gradient of their weight to `weight.main_grad`: here that is the engine's bucket.

The library requests memory from a weight when its backward runs (`get_main_grad`, if the weight is marked as one of a sharding engine),
and has decided in forward whether it will overwrite the memory (`overwrite_main_grad`). It returns no gradient to autograd then, so
there is none to discard. Both answers are set on the weights before each forward, so that they are consistent:

    overwrite    by default: the bucket of a microbatch is new, and the product is its first content
    add          once overwriting was wrong for a layer (shared modules, gradients held back by `no_sync`): new memory is zeroed first

An overwriting product that is not the first for its weight gets memory of its own, which the engine adds; so any order of calls is correct.

Source: the contract of Megatron-LM's `main_grad` as Transformer Engine 2.20 implements it (`module/linear.py`, `module/grouped_linear.py`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.internals import gradient_memory, unsharded_of

__all__ = ["fuse_weight_gradients"]


def fuse_weight_gradients(module: nn.Module) -> list[str]:
    """Have all layers in a sharded module that were built with `fuse_wgrad_accumulation=True` write into the engine's buckets.

    Call it once, after the module and all units in it were sharded. Layers with weights that no unit owns (`ignored_parameters`) give their
    gradients to autograd from now on, unless they have a `main_grad`: the engine has no memory for them.

    Returns:
        Names of the layers that write.
    """
    layers: dict[str, Any] = {}
    for name, layer in module.named_modules():
        if getattr(layer, "fuse_wgrad_accumulation", False):
            foreign = [weight for weight in _matrices(layer) if unsharded_of(weight) is None]
            if not foreign:
                layers[name] = layer
            elif not all("main_grad" in vars(weight) for weight in foreign):
                layer.fuse_wgrad_accumulation = False
    weights = {name: _weights_of(layer) for name, layer in layers.items()}
    uses = Counter(id(weight) for weights_of_layer in weights.values() for weight in weights_of_layer)
    for name, layer in layers.items():
        fused = _FusedLayer(weights[name], overwrites=all(uses[id(weight)] == 1 for weight in weights[name]))
        fused.prepare()
        layer.register_forward_pre_hook(fused.before_forward)
    return list(layers)


def _matrices(layer: nn.Module) -> list[nn.Parameter]:
    """The tensors used in products, in any representation."""
    return [parameter for parameter in layer.parameters(recurse=False) if parameter.dim() == 2]


def _weights_of(layer: nn.Module) -> list[nn.Parameter]:
    """The unsharded matrices of a layer."""
    return [unsharded for weight in _matrices(layer) if (unsharded := unsharded_of(weight)) is not None]


def _forget_memory(reference: weakref.ref[nn.Parameter]) -> None:
    """Drop the memory that the library leaves on the weight, which would keep a full gradient alive long after it was reduced."""
    weight = reference()
    if weight is not None:
        vars(weight).pop("main_grad", None)


class _FusedLayer:
    """The weights of one layer, which the library treats alike: it reads from the first whether to overwrite."""

    def __init__(self, weights: list[nn.Parameter], *, overwrites: bool) -> None:
        self._weights = [weakref.ref(weight) for weight in weights]
        self._overwrites = overwrites
        self._collided = False

    def prepare(self) -> None:
        """Set on the weights what their next forward reads."""
        for index, reference in enumerate(self._weights):
            weight: Any = reference()
            if weight is not None:
                vars(weight).pop("grad_added_to_main_grad", None)  # a weight that has it gets a meaningless gradient
                weight.__fsdp_param__ = True
                weight.overwrite_main_grad = self._overwrites
                weight.get_main_grad = partial(self._memory, index, overwrites=self._overwrites)

    def before_forward(self, *_: object) -> None:
        """A forward pre-hook: after an overwriting product that was not the first for its weight, later ones add."""
        if self._collided and self._overwrites:
            self._overwrites = False
            self.prepare()

    def _memory(self, index: int, *, overwrites: bool) -> Tensor:
        weight = self._weights[index]()
        assert weight is not None, "its own backward calls this"
        memory, is_own = gradient_memory(weight, overwrites=overwrites)
        self._collided = self._collided or is_own
        compat.on_backward_end(partial(_forget_memory, self._weights[index]))
        return memory
