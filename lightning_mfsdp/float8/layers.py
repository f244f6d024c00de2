"""Float8Linear, and how it takes the place of the linear layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from lightning_mfsdp.base.module_patterns import check_patterns, matches, without_words
from lightning_mfsdp.float8.product import DTYPES, MULTIPLE, float8_linear

__all__ = ["LEAST_SIZE", "Float8Linear", "replace_linear_layers"]

LEAST_SIZE = 1024  # casts of smaller matrices take more time than 8-bit products save; see docs/design/float8.md


class Float8Linear(nn.Linear):
    """A linear layer whose products, forward and backward, are of 8-bit matrices with one scale each.

    Parameters, state dicts and initialization are those of `nn.Linear`. The output has the dtype of the input, or autocast's.

    Args:
        in_features: Size of the last dim of the input, a multiple of 16.
        out_features: Size of the last dim of the output, a multiple of 16.
        bias: Whether a bias is added to the output.
        device: Device of the parameters.
        dtype: Dtype of the parameters; products compute in 8 bits whatever it is.

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
        return float8_linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """As `nn.Linear`."""
        return f"{super().extra_repr()}, float8"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles: the class of a layer of another kind is made again where it is loaded."""
        if not _was_replaced(self):
            return super().__reduce_ex__(protocol)
        return _empty, (self.replaces,), self.__getstate__()


def replace_linear_layers(
    module: nn.Module, *, keep_high_precision: Sequence[str] = (), least_size: int = LEAST_SIZE
) -> list[str]:
    """Choose the linear layers that compute in 8 bits: these become `Float8Linear`, and others of that class `nn.Linear` again.

    Call it before the model is sharded, in `configure_model` for example; it works under any strategy. A layer stays the same object
    with the same parameters, names, hooks and attributes, and only its class changes. Left as they are: layers with a forward of their
    own, a parametrization or a packed weight, and those in `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, which at times read
    the weights alone.

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
        ValueError: A pattern that no linear layer matches, nothing is left to compute in 8 bits, a layer is sharded already, or one of
            those to keep cannot become what it was. Nothing was changed then.
    """
    check_patterns("keep_high_precision", keep_high_precision)
    layers = _linear_layers(module)
    patterns = {given: without_words(module, given) for given in keep_high_precision}
    for given, pattern in patterns.items():
        if not any(_matches(names, pattern) for names in layers.values()):
            known = [names[0] for names in layers.values()]
            raise ValueError(
                f"keep_high_precision: {given!r} matches no linear layer; those are {', '.join(known[:6]) or 'none'}"
            )
    kept = {layer for layer, names in layers.items() if any(_matches(names, each) for each in patterns.values())}
    chosen = {layer: names[0] for layer, names in layers.items() if layer not in kept and _fits(layer, least_size)}
    if not chosen:
        raise ValueError(
            f"{type(module).__name__} has {len(layers)} linear layers, and none to compute in 8 bits: expected sizes that are multiples of "
            f"{MULTIPLE} and at least {least_size} (least_size), outside of keep_high_precision={list(keep_high_precision)}"
        )
    back = [layer for layer in layers if layer not in chosen and isinstance(layer, Float8Linear)]
    for layer, names in layers.items():
        _check_class_may_change(names[0], layer, to_8_bits=layer in chosen, back=layer in back)
    for layer in chosen:
        layer.__class__ = _in_8_bits(type(layer))
    for layer in back:
        layer.__class__ = layer.replaces
    return list(chosen.values())


def _check_class_may_change(name: str, layer: nn.Linear, *, to_8_bits: bool, back: bool) -> None:
    if to_8_bits and not isinstance(layer, Float8Linear) and isinstance(layer.weight, DTensor):
        raise ValueError(
            f"replace_linear_layers: {name} is sharded already, and what computes with its weight is set up; call it before the model is "
            "sharded (fully_shard, parallelize_module), or make it plain again (unshard_model)"
        )
    if back and not _was_replaced(layer):
        raise ValueError(
            f"keep_high_precision: {name} was built as {type(layer).__name__}, or was given a parametrization since it was replaced; build "
            "it as nn.Linear, or leave it out"
        )


def _linear_layers(module: nn.Module) -> dict[nn.Linear, list[str]]:
    """Layers that compute as `nn.Linear` does, with all their names."""
    found: dict[nn.Linear, list[str]] = {}
    inside = {
        part
        for layer in module.modules()
        if isinstance(layer, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
        for part in layer.modules()
    }
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Linear) and layer not in inside and _computes_as_linear(layer):
            found.setdefault(layer, []).append(name.replace("_orig_mod.", ""))  # of torch.compile
    return found


def _computes_as_linear(layer: nn.Linear) -> bool:
    """Whether it does, or would if it were not sharded: the engine may have given it a forward that writes gradients."""
    is_sharded = isinstance(layer._parameters.get("weight"), DTensor)
    has_own_forward = "forward" in vars(layer) and not is_sharded
    if has_own_forward or type(layer).forward not in (nn.Linear.forward, Float8Linear.forward):
        return False
    return isinstance(layer, Float8Linear) or not is_parametrized(layer)


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(matches(name, pattern) for name in names)


def _fits(layer: nn.Linear, least_size: int) -> bool:
    """Whether a layer can compute in 8 bits, and is large enough for it. One that does may have been divided since."""
    if isinstance(layer, Float8Linear):
        return True
    sizes = (layer.in_features, layer.out_features)
    is_plain = type(layer.weight) is nn.Parameter or isinstance(layer.weight, DTensor)
    return (
        is_plain and layer.weight.dtype in DTYPES and all(size % MULTIPLE == 0 and size >= least_size for size in sizes)
    )


def _was_replaced(layer: Any) -> bool:
    """Whether its class was made for what it was before; a subclass or a parametrization makes another one."""
    return type(layer) is _in_8_bits(layer.replaces)


def _in_8_bits(kind: Any) -> Any:
    """The class of layers of a kind that compute in 8 bits."""
    return kind if issubclass(kind, Float8Linear) else _made_for(kind)


@cache
def _made_for(kind: Any) -> Any:
    if kind is nn.Linear:
        return Float8Linear
    return type(f"Float8{kind.__name__}", (Float8Linear, kind), {"replaces": kind})


def _empty(kind: Any) -> Any:
    made = _in_8_bits(kind)
    return made.__new__(made)
