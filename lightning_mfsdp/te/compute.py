"""Fp8Compute: the contexts in which modules of Transformer Engine compute in 8 bits, and what a model needs before it can.

prepare     once, before sharding: layers replaced, overrides hooked in, extra state out of state dicts
forward     around a step; on leaving it in training, delayed scaling takes the maximum over all ranks and sets new scales
backward    around a backward: activations that are computed again there see what the first forward saw, and set no scales
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp.engine import is_sharded
from lightning_mfsdp.te import extra_state, library
from lightning_mfsdp.te.overrides import Overrides, enter_around, outermost
from lightning_mfsdp.te.recipes import check_recipe, make_recipe
from lightning_mfsdp.te.replace import replace, replaceable

__all__ = ["Fp8Compute", "Fp8Options"]


@dataclass(frozen=True, kw_only=True)
class Fp8Options:
    """What a user may say about FP8.

    Attributes:
        recipe: "current", "delayed", "block", "mxfp8", "nvfp4", or a recipe of `transformer_engine.common.recipe`.
        replace_layers: Put the library's layers in the place of `nn.Linear`, `nn.LayerNorm` and `nn.RMSNorm`. "auto": only in a model
            that has none of the library's.
        keep_high_precision: Which layers compute in bfloat16: `fnmatch` patterns of module names, or "first" and "last" for the blocks at
            the ends of the largest `ModuleList` or `Sequential`. A module's pattern covers all inside it.
        overrides: Other recipes for some layers, by pattern.

    Raises:
        ValueError, TypeError: An argument out of its range, or of the wrong kind.
    """

    recipe: Any = "current"
    replace_layers: bool | Literal["auto"] = False
    keep_high_precision: Sequence[str] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_recipe("recipe", self.recipe)
        for pattern, recipe in self.overrides.items():
            check_recipe(f"overrides[{pattern!r}]", recipe)
        if self.replace_layers not in (True, False, "auto"):
            raise ValueError(f'replace_layers={self.replace_layers!r}: expected True, False or "auto"')
        if isinstance(self.keep_high_precision, str) or not all(
            isinstance(name, str) for name in self.keep_high_precision
        ):
            raise TypeError(
                f"keep_high_precision={self.keep_high_precision!r}: expected a list of names and patterns of modules, such as "
                '["first", "last", "*.head"]'
            )


class Fp8Compute:
    """FP8 of one run.

    Attributes:
        options: As given.
    """

    def __init__(self, options: Fp8Options) -> None:
        self.options = options
        self._group: dist.ProcessGroup | None = None
        self._roots: list[weakref.ref[nn.Module]] = []

    @cached_property
    def _library(self) -> Any:
        return library.load("pytorch")

    @cached_property
    def recipe(self) -> Any:
        """The library's object. Reading it loads the library, and raises what `make_recipe` raises."""
        return make_recipe(self.options.recipe)

    @cached_property
    def _others(self) -> dict[str, Any]:
        return {pattern: make_recipe(recipe) for pattern, recipe in self.options.overrides.items()}

    @property
    def _is_delayed(self) -> bool:
        return any(recipe.delayed() for recipe in (self.recipe, *self._others.values()))

    # -- contexts ------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Generator[None, None, None]:
        """Around forwards, of training and of evaluation."""
        with self._autocast(self.recipe):
            yield
        if not torch.is_grad_enabled():
            self._forget_present_amax()

    @contextmanager
    def backward(self) -> Generator[None, None, None]:
        """Around a backward. The outer context is off, so that leaving the inner one is not taken for the end of a forward."""
        with self._autocast(None), self._autocast(self.recipe):
            yield
        self._forget_present_amax()

    def _forget_present_amax(self) -> None:
        for root in self._present_roots() if self._is_delayed else ():
            extra_state.forget_present_amax(root)

    def _autocast(self, recipe: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._library.autocast(
            enabled=recipe is not None,
            recipe=self.recipe if recipe is None else recipe,  # without one it would ask the device
            amax_reduction_group=self._group,
        )
        return context

    # -- the model -----------------------------------------------------------------------------------------------------

    def prepare(self, root: nn.Module, group: dist.ProcessGroup | None) -> str:
        """Make a model ready; one that is stays as it is.

        Args:
            root: The whole model.
            group: All ranks with different data.

        Returns:
            What was done, in words; empty if nothing.

        Raises:
            ValueError: A pattern that matches nothing, a layer that cannot be replaced, or no module that could compute in FP8.
        """
        self._group = group
        if all(known is not root for known in self._present_roots()):
            self._roots.append(weakref.ref(root))
        if extra_state.is_kept_apart(root):
            return ""
        overrides = self._overrides(root)
        layers = replaceable(root) if self._replaces(root) else {}
        overrides.check_all_match([*layers, *outermost(root)])
        kept = [name for name in layers if overrides.find(name, self.recipe) is None]
        chosen = {name: layer for name, layer in layers.items() if name not in kept}
        new = replace(root, chosen, lambda name: overrides.find(name, self.recipe))
        inside = outermost(root)
        if not inside:
            raise ValueError(
                f'precision="transformer-engine": {type(root).__name__} has no module of Transformer Engine, so nothing would compute in '
                "FP8. Build it of transformer_engine.pytorch modules, or let plain layers be replaced: plugins=[MFSDPPrecision("
                '"transformer-engine", replace_layers=True)]'
            )
        if self._is_delayed:
            extra_state.check_savable(root)
        for name, module in inside.items():
            recipe = overrides.find(name, self.recipe)
            if recipe is None:
                kept.append(name)
            if recipe is not self.recipe:
                enter_around(module, lambda recipe=recipe: self._autocast(recipe))  # type: ignore[misc]
        extra_state.keep_apart(root, new)
        return (
            f"FP8 by Transformer Engine, {type(self.recipe).__name__}: {len(inside)} modules of the library, {len(new)} of them replaced "
            f"layers of torch.nn; in high precision {', '.join(kept[:6]) or 'none'}{', ...' if len(kept) > 6 else ''}"
        )

    def _replaces(self, root: nn.Module) -> bool:
        wanted = not outermost(root) if self.options.replace_layers == "auto" else self.options.replace_layers
        if wanted and any(is_sharded(part) for part in root.modules()):
            raise ValueError(
                f"replace_layers={self.options.replace_layers!r}: {type(root).__name__} has modules that were given to fully_shard. Build "
                "them of transformer_engine.pytorch modules, or let the strategy shard the model"
            )
        return bool(wanted)

    def _overrides(self, root: nn.Module) -> Overrides:
        return Overrides(root, self.options.keep_high_precision, self._others)

    def _present_roots(self) -> list[nn.Module]:
        return [root for ref in self._roots if (root := ref()) is not None]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def scaling(self) -> list[dict[str, Any]]:
        """Scales and histories of each model that was prepared; empty unless scaling is delayed and something has run."""
        found = [extra_state.scaling(root) for root in self._present_roots()] if self._is_delayed else []
        return found if any(found) else []

    def load_scaling(self, saved: list[dict[str, Any]]) -> list[str]:
        """Take up what `scaling` returned; returns names of modules that have no use for theirs here."""
        unused = []
        for root, states in zip(self._present_roots(), saved, strict=False):
            overrides = self._overrides(root)
            unused += extra_state.load_scaling(root, states, lambda name, o=overrides: o.find(name, self.recipe))  # type: ignore[misc]
        return unused
