"""How tensors are scaled before they are rounded to 8 bits: recipes by name, and whether this device can compute with them."""

from __future__ import annotations

from typing import Any

import torch

from lightning_mfsdp.base.alignment import ALIGNMENTS
from lightning_mfsdp.te import library

__all__ = ["RECIPES", "alignment", "check_recipe", "make_recipe"]

RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
# What a recipe says it is, and the library's question to the device. All others need plain FP8.
_QUESTIONS = {
    "float8_block_scaling": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def check_recipe(argument: str, recipe: Any) -> None:
    """Raise a ValueError unless `recipe` is a known name; what is no string is looked at once the library is there."""
    if recipe is None or (isinstance(recipe, str) and recipe not in RECIPES):
        raise ValueError(
            f"{argument}={recipe!r} is no recipe; expected one of {', '.join(map(repr, RECIPES))}, or one of "
            "transformer_engine.common.recipe"
        )


def make_recipe(recipe: Any) -> Any:
    """The library's recipe for a name; an object as it is.

    Raises:
        TypeError: An object that is no recipe.
        RuntimeError: This device cannot compute with it, in the library's words.
        ValueError: State that no checkpoint could hold.
    """
    recipes = library.load("common.recipe")
    made = getattr(recipes, RECIPES[recipe])() if isinstance(recipe, str) else recipe
    if not isinstance(made, recipes.Recipe):
        raise TypeError(
            f"recipe={recipe!r}: expected a name or a recipe of transformer_engine.common.recipe, got {type(recipe).__name__}"
        )
    reason = _why_not(made)
    if reason:
        others = [repr(name) for name, kind in RECIPES.items() if not _why_not(getattr(recipes, kind)())]
        raise RuntimeError(
            f"recipe {type(made).__name__} cannot run on {torch.cuda.get_device_name()}: {reason} Recipes that can: "
            f"{', '.join(others) or 'none'}. Without FP8, use precision='bf16-mixed'"
        )
    if made.delayed() and (made.fp8_dpa or made.fp8_mha):
        raise ValueError(
            f"{type(made).__name__}(fp8_dpa=..., fp8_mha=...): attention in FP8 under delayed scaling keeps a history that cannot be saved "
            'safely. Use recipe="current", or leave attention in high precision'
        )
    return made


def alignment(recipe: Any, *, quantized: bool = False) -> int:
    """What both sizes of a weight must be a multiple of, or of a `quantized` one, which is kept in 8 bits."""
    kinds = {"block": recipe.float8_block_scaling, "mxfp8": recipe.mxfp8, "nvfp4": recipe.nvfp4}
    known = ALIGNMENTS[next((name for name, is_it in kinds.items() if is_it()), "current")]  # "delayed" has the same
    return known.quantized_weights or known.weights if quantized else known.weights


def _why_not(recipe: Any) -> str:
    questions = [question for kind, question in _QUESTIONS.items() if getattr(recipe, kind)()] or ["is_fp8_available"]
    can, reason = getattr(library.load("pytorch"), questions[0])(return_reason=True)
    return "" if can else str(reason)
