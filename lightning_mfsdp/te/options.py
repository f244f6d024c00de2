"""The user's options for FP8, checked where they are passed and without loading the library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_mfsdp.base.module_patterns import check_patterns
from lightning_mfsdp.te.recipes import check_recipe

__all__ = ["Fp8Options"]

_SWITCHES = ("fp8_weights", "keep_transpose_cache", "fuse_weight_gradients", "keep_quantized")


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """The user's options for FP8.

    Attributes:
        recipe: "current", "delayed", "block", "mxfp8", "nvfp4", or a recipe of `transformer_engine.common.recipe`.
        replace_layers: Replace by the library's layers `nn.Linear`, `nn.LayerNorm` and `nn.RMSNorm`. "auto": only in a model
            that has none of the library's.
        keep_high_precision: Which layers compute in bfloat16: `fnmatch` patterns of module names, or "first" and "last" for the blocks at
            the ends of the largest `ModuleList` or `Sequential`. A module's pattern covers all inside it.
        overrides: Other recipes for some layers, by pattern.
        fp8_weights: Weights are kept and gathered in 8 bits besides their float32 main weights: those of replaced linear layers, and of
            the library's modules that are built in `configure_model` or under `init_module`.
        keep_transpose_cache: FP8 weights keep their transpose until they change: a byte a parameter more on every rank, and one
            transposition a step instead of one for each backward.
        fuse_weight_gradients: Replaced linear layers add the gradient of their weight to the engine's memory themselves, in its dtype.
            Modules that are built with `fuse_wgrad_accumulation=True` always do.
        keep_quantized: 8-bit copies of weights that are kept in 16 bits stay from forward to backward: two bytes a parameter of the
            whole model, for quantizing once and not twice. Under delayed scaling they always stay.

    Raises:
        ValueError, TypeError: An argument out of its range, or of the wrong kind.
    """

    recipe: Any = "current"
    replace_layers: bool | Literal["auto"] = False
    keep_high_precision: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    fp8_weights: bool = False
    keep_transpose_cache: bool = False
    fuse_weight_gradients: bool = False
    keep_quantized: bool = False

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected True or False for FP8")
        check_recipe("recipe", self.recipe)
        overrides: Any = self.overrides
        if not (isinstance(overrides, Mapping) and all(isinstance(pattern, str) for pattern in overrides)):
            raise TypeError(
                f"overrides={overrides!r}: expected recipes by names and patterns of modules, such as "
                '{"decoder.blocks.*.feed_forward": "block"}'
            )
        for pattern, recipe in overrides.items():
            check_recipe(f"overrides[{pattern!r}]", recipe)
        if self.replace_layers not in (True, False, "auto"):
            raise ValueError(f'replace_layers={self.replace_layers!r}: expected True, False or "auto"')
        check_patterns("keep_high_precision", self.keep_high_precision)
