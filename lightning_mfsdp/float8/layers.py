"""Float8Linear, and how it takes the place of the linear layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.base.module_patterns import check_patterns, matches, without_words
from lightning_mfsdp.float8.product import MULTIPLE, float8_linear

__all__ = ["LEAST_SIZE", "Float8Linear", "replace_linear_layers"]

LEAST_SIZE = 1024  # casts of smaller matrices take more time than 8-bit products save; see docs/design/float8.md

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Float8Linear(nn.Linear):
    """A linear layer whose products, forward and backward, are of 8-bit matrices with one scale each.

    Parameters, state dicts and initialization are those of `nn.Linear`. The output has the dtype of the input, or autocast's.

    Args:
        in_features, out_features, bias, device, dtype: As of `nn.Linear`. Both sizes are multiples of 16.

    Raises:
        ValueError: Sizes that 8-bit products cannot have.
    """

    replaces: ClassVar[Any] = nn.Linear  # the class of a layer before it computed in 8 bits

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        if in_features % MULTIPLE or out_features % MULTIPLE:
            raise ValueError(
                f"Float8Linear({in_features}, {out_features}): expected multiples of {MULTIPLE}; use nn.Linear for other sizes"
            )
        super().__init__(in_features, out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        if not x.numel():
            return F.linear(x, self.weight, self.bias)
        return float8_linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """As `nn.Linear`."""
        return f"{super().extra_repr()}, float8"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles: the class of a layer of another kind is made again where it is loaded."""
        made = type(self) is _in_8_bits(self.replaces)
        return (_empty, (self.replaces,), vars(self)) if made else super().__reduce_ex__(protocol)


def replace_linear_layers(
    module: nn.Module, *, keep_high_precision: Sequence[str] = (), least_size: int = LEAST_SIZE
) -> list[str]:
    """Choose the linear layers that compute in 8 bits: these become `Float8Linear`, and others of that class `nn.Linear` again.

    Call it before the model is compiled, in `configure_model` for example; it works under any strategy. A layer stays the same object
    with the same parameters, names, hooks and attributes, and only its class changes. Layers of a class with a forward of its own are left
    as they are, and those inside `nn.MultiheadAttention`, which reads their weights alone.

    Args:
        module: The model, or a part.
        keep_high_precision: Layers that compute in their own dtype: `fnmatch` patterns of module names, each with everything inside, or
            "first" and "last" for the blocks at the ends of the largest `ModuleList` or `Sequential`. Heads usually train better so.
        least_size: Layers with fewer input or output features are left, unless they are of the class already: casts take more time there
            than products save.

    Returns:
        The names of the layers that compute in 8 bits.

    Raises:
        TypeError: Patterns that are no list of strings.
        ValueError: A pattern that no linear layer matches, or nothing is left to compute in 8 bits. Nothing was changed then.
    """
    check_patterns("keep_high_precision", keep_high_precision)
    layers = _linear_layers(module)
    patterns = {given: without_words(module, given) for given in keep_high_precision}
    for given, pattern in patterns.items():
        if not any(matches(name, pattern) for name in layers):
            raise ValueError(
                f"keep_high_precision: {given!r} matches no linear layer; those are {', '.join(list(layers)[:6]) or 'none'}"
            )
    chosen = [
        name
        for name, layer in layers.items()
        if not any(matches(name, pattern) for pattern in patterns.values()) and _fits(layer, least_size)
    ]
    if not chosen:
        raise ValueError(
            f"{type(module).__name__} has {len(layers)} linear layers, and none to compute in 8 bits: expected sizes that are multiples of "
            f"{MULTIPLE} and at least {least_size} (least_size), outside of keep_high_precision={list(keep_high_precision)}"
        )
    for name, layer in layers.items():
        layer.__class__ = _in_8_bits(type(layer)) if name in chosen else _in_own_dtype(type(layer))
    return chosen


def _linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Layers that compute as `nn.Linear` does, by name, each once."""
    found: dict[str, nn.Linear] = {}
    inside: set[int] = set()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            inside.update(id(part) for part in layer.modules())
        own_forward = "forward" in vars(layer) or type(layer).forward not in (nn.Linear.forward, Float8Linear.forward)
        if isinstance(layer, nn.Linear) and not own_forward and id(layer) not in inside:
            found[name] = layer
    return found


def _fits(layer: nn.Linear, least_size: int) -> bool:
    """Whether a layer can compute in 8 bits, and is large enough for it. One that does may have been divided since."""
    if isinstance(layer, Float8Linear):
        return True
    sizes = (layer.in_features, layer.out_features)
    return all(size % MULTIPLE == 0 and size >= least_size for size in sizes) and layer.weight.dtype in _DTYPES


def _in_8_bits(kind: Any) -> Any:
    """The class of layers of a kind that compute in 8 bits."""
    return kind if issubclass(kind, Float8Linear) else _made_for(kind)


@cache
def _made_for(kind: Any) -> Any:
    if kind is nn.Linear:
        return Float8Linear
    return type(f"Float8{kind.__name__}", (Float8Linear, kind), {"replaces": kind})


def _in_own_dtype(kind: Any) -> Any:
    return kind.replaces if issubclass(kind, Float8Linear) else kind


def _empty(kind: Any) -> Any:
    made = _in_8_bits(kind)
    return made.__new__(made)
