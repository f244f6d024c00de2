"""Makes recipes, which say how tensors are scaled before they are rounded to 8 bits, and finds the layers that have another one.

A recipe is checked by name where the user passes it, and created, by the library and for this device, when a run begins. Some layers
compute with another recipe, or in high precision: `Overrides`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_mfsdp.base.alignment import ALIGNMENTS
from lightning_mfsdp.base.module_patterns import matches, without_words
from lightning_mfsdp.te import library

__all__ = ["RECIPES", "Overrides", "alignment", "check_recipe", "enter_around", "make_recipe", "outermost"]


RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
# A recipe's own predicate, and the library's query of the device. All others need plain FP8.
_QUESTIONS = {
    "float8_block_scaling": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def check_recipe(argument: str, recipe: Any) -> None:
    """Raise a ValueError unless `recipe` is a known name; anything but a string is checked once the library is loaded."""
    if recipe is None or (isinstance(recipe, str) and recipe not in RECIPES):
        raise ValueError(
            f"{argument}={recipe!r} is no recipe; expected one of {', '.join(map(repr, RECIPES))}, or one of "
            "transformer_engine.common.recipe"
        )


def make_recipe(recipe: Any) -> Any:
    """The library's recipe for a name; an object unchanged.

    Raises:
        TypeError: An object that is not a recipe.
        RuntimeError: This device cannot compute with it, with the library's reason.
        ValueError: It has state that no checkpoint could hold.
    """
    recipes = library.load("common.recipe")
    made_recipe = getattr(recipes, RECIPES[recipe])() if isinstance(recipe, str) else recipe
    if not isinstance(made_recipe, recipes.Recipe):
        raise TypeError(
            f"recipe={recipe!r}: expected a name or a recipe of transformer_engine.common.recipe, got {type(recipe).__name__}"
        )
    reason = _why_not(made_recipe)
    if reason:
        others = [repr(name) for name, kind in RECIPES.items() if not _why_not(getattr(recipes, kind)())]
        raise RuntimeError(
            f"recipe {type(made_recipe).__name__} cannot run on {torch.cuda.get_device_name()}: {reason} Recipes that can: "
            f"{', '.join(others) or 'none'}. Without FP8, use precision='bf16-mixed'"
        )
    if made_recipe.delayed() and (made_recipe.fp8_dpa or made_recipe.fp8_mha):
        raise ValueError(
            f"{type(made_recipe).__name__}(fp8_dpa=..., fp8_mha=...): attention in FP8 under delayed scaling keeps a history that cannot "
            'be saved safely. Use recipe="current", or leave attention in high precision'
        )
    return made_recipe


def alignment(recipe: Any, *, quantized: bool = False) -> int:
    """The number that both sizes of a weight, or of a `quantized` one kept in 8 bits, must be multiples of."""
    kinds = {"block": recipe.float8_block_scaling, "mxfp8": recipe.mxfp8, "nvfp4": recipe.nvfp4}
    alignments = ALIGNMENTS[
        next((name for name, is_it in kinds.items() if is_it()), "current")
    ]  # "delayed" has the same
    return alignments.quantized_weights or alignments.weights if quantized else alignments.weights


def _why_not(recipe: Any) -> str:
    questions = [question for kind, question in _QUESTIONS.items() if getattr(recipe, kind)()] or ["is_fp8_available"]
    can, reason = getattr(library.load("pytorch"), questions[0])(return_reason=True)
    return "" if can else str(reason)


def outermost(root: nn.Module) -> dict[str, nn.Module]:
    """Modules of the library that are inside no other of them, by name."""
    modules: dict[str, nn.Module] = {}
    last: str | None = None
    for name, module in root.named_modules():  # inner modules follow right after the one around them
        is_inside = last is not None and (not last or name.startswith(f"{last}."))
        if not is_inside and library.is_engine_module(module):
            modules[name] = module
            last = name
    return modules


class Overrides:
    """Patterns of module names and the recipe for the layers they match, and all inside.

    Args:
        root: The model in which "first" and "last" are found.
        kept: Patterns of modules that compute in high precision.
        others: Recipes by pattern. The first pattern that matches decides, those of `kept` before these.

    Raises:
        ValueError: "first" or "last" in a model without blocks.
    """

    def __init__(self, root: nn.Module, kept: Iterable[str], others: Mapping[str, Any]) -> None:
        rules = [*((pattern, None) for pattern in kept), *others.items()]
        self._rules = [(pattern, without_words(root, pattern), recipe) for pattern, recipe in rules]

    def find(self, name: str, default: Any) -> Any:
        """The recipe of a layer, `None` for high precision."""
        fitting = (recipe for _, pattern, recipe in self._rules if matches(name, pattern))
        return next(fitting, default)

    def check_all_match(self, names: Iterable[str]) -> None:
        """Raise a ValueError for a pattern that none of the names matches."""
        layers = list(names)
        for rule, pattern, _ in self._rules:
            if not any(matches(name, pattern) for name in layers):
                raise ValueError(
                    f"keep_high_precision, overrides: {rule!r} matches no layer that could compute in FP8; those are {layers[:6]}"
                )


def enter_around(module: nn.Module, make: Callable[[], AbstractContextManager[Any]]) -> None:
    """Every call of `module`, recomputed ones too, runs inside a context of its own."""
    entered: list[AbstractContextManager[Any]] = []

    def before(*_: Any) -> None:
        context = make()
        context.__enter__()
        entered.append(context)

    def after(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)
