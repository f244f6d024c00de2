"""Fp8Compute: the contexts in which modules of Transformer Engine compute in 8 bits, and how a model is prepared for it.

prepare     once, before sharding: layers replaced, overrides hooked in, extra state removed from state dicts
forward     around a step; on exit in training, delayed scaling takes the maximum over all ranks and sets new scales
backward    around a backward: activations that are recomputed there see what the first forward saw, and set no scales
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace as replace_field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp.engine import MixedPrecisionPolicy, is_sharded
from lightning_mfsdp.te import checks, extra_state, library
from lightning_mfsdp.te.checks import Prepared
from lightning_mfsdp.te.codec import weight_codecs
from lightning_mfsdp.te.library import quantizes_now
from lightning_mfsdp.te.options import Fp8Options
from lightning_mfsdp.te.quantized_weights import quantize_again, quantized_init, quantized_modules
from lightning_mfsdp.te.recipes import Overrides, enter_around, make_recipe, outermost
from lightning_mfsdp.te.replace import replace, replaceable

__all__ = ["Fp8Compute"]

_is_in_forward: ContextVar[bool] = ContextVar("_is_in_forward", default=False)


class Fp8Compute:
    """FP8 of one run.

    Attributes:
        options: As passed.
    """

    def __init__(self, options: Fp8Options) -> None:
        self.options = options
        self._group: dist.ProcessGroup | None = None
        self._roots: list[weakref.ref[nn.Module]] = []
        self._was_interrupted = False

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
        """Context around forwards, of training and of evaluation."""
        if self._was_interrupted:
            self._was_interrupted = False
            self._forget_present_amax()
        token = _is_in_forward.set(True)
        try:
            with self._autocast(self.recipe):
                yield
        except BaseException:  # an interrupt, too: the maxima of this forward are not the next one's
            self._was_interrupted = True
            raise
        finally:
            _is_in_forward.reset(token)
        if not torch.is_grad_enabled():
            self._forget_present_amax()

    @property
    def is_in_forward(self) -> bool:
        """Whether this is inside of `forward`, of this object or of another run's, or recomputed in a backward.

        A backward on CUDA runs in threads of its own, which do not see the variable; the library's precision is visible in all.
        """
        return _is_in_forward.get() or quantizes_now()

    @contextmanager
    def backward(self) -> Generator[None, None, None]:
        """Around a backward. The outer context is off, so that leaving the inner one does not count as the end of a forward."""
        try:
            with self._autocast(None), self._autocast(self.recipe):
                yield
        except BaseException:
            self._was_interrupted = True
            raise
        if not _is_in_forward.get():  # under manual optimization it is, and the step's own maxima still have to count
            self._forget_present_amax()

    def _forget_present_amax(self) -> None:
        for root in self._present_roots() if self._is_delayed else ():
            extra_state.forget_present_amax(root)

    @contextmanager
    def _autocast(self, recipe: Any) -> Generator[None, None, None]:
        context = self._library.autocast(
            enabled=recipe is not None,
            recipe=self.recipe if recipe is None else recipe,  # without one it would query the device
            amax_reduction_group=self._group,
        )
        context.__enter__()
        try:
            yield
        except BaseException:
            # In grad mode leaving the outermost one sets scales from the maxima of all ranks, and an interrupt may be this rank's alone.
            with torch.no_grad():
                context.__exit__(None, None, None)
            raise
        context.__exit__(None, None, None)

    # -- the model -----------------------------------------------------------------------------------------------------

    def policy(self, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        """A policy with a codec for the library's quantized weights, unless it has one already.

        Raises:
            ValueError: Its codec contradicts the options, or it computes in float16.
        """
        if policy.compute_dtype is torch.float16:
            raise ValueError(
                "policy.compute_dtype=torch.float16 beside FP8: modules compute in bfloat16 what they do not in 8 bits, so weights "
                "gathered in float16 would be rounded twice; expected torch.bfloat16, torch.float32 or None"
            )
        keep = self.options.keep_transpose_cache
        ours = weight_codecs(keep_transpose_cache=keep)
        if keep and policy.weight_codecs not in ((), ours):
            raise ValueError(
                "keep_transpose_cache=True, and a policy with weight_codecs of its own, which decide that: give one of them"
            )
        return policy if policy.weight_codecs else replace_field(policy, weight_codecs=ours)

    def building(self) -> AbstractContextManager[Any]:
        """Context around code that builds modules."""
        return quantized_init(self.recipe) if self.options.fp8_weights else nullcontext()

    def prepare(self, root: nn.Module, group: dist.ProcessGroup | None) -> str:
        """Prepare a model; one that is prepared stays unchanged.

        Args:
            root: The whole model.
            group: All ranks with different data.

        Returns:
            A description of what was done; empty if nothing.

        Raises:
            ValueError: A pattern that matches nothing, a layer that cannot be replaced, no module that could compute in FP8, or a model
                of which an earlier run prepared all in another way, or a part.
        """
        self._group = group
        if all(earlier is not root for earlier in self._present_roots()):
            self._roots.append(weakref.ref(root))
        overrides = self._overrides(root)
        before = Prepared.of(root)
        if before is not None:
            before.check(root, self._wanted(replaced=before.replaced))
            candidates = [*outermost(root), *(replaceable(root) if before.replaced else ())]
            before.check_knows(root, [name for name in candidates if overrides.find(name, self.recipe) is not None])
            return ""
        replaces = self._replaces(root)
        layers = replaceable(root) if replaces else {}
        overrides.check_all_match([*layers, *outermost(root)])
        kept = [name for name in layers if overrides.find(name, self.recipe) is None]
        chosen = {name: layer for name, layer in layers.items() if name not in kept}
        options = self.options
        checks.check_something_multiplies(root, chosen, options)
        checks.check_gradients(root)
        new = replace(
            root,
            chosen,
            lambda name: overrides.find(name, self.recipe),
            quantized=options.fp8_weights,
            fused=options.fuse_weight_gradients,
        )
        inside = outermost(root)
        if self._is_delayed:
            extra_state.check_savable(root)
        for name, module in inside.items():
            recipe = overrides.find(name, self.recipe)
            if recipe is None:
                kept.append(name)
            if recipe is not self.recipe:
                enter_around(module, lambda recipe=recipe: self._autocast(recipe))  # type: ignore[misc]
                if module not in new:
                    checks.check_other_recipe(name, module)
        quantized = quantized_modules(root)
        checks.check_options_have_use(root, options, quantized)
        checks.check_devices(quantized)
        copies = self._drop_copies(inside, overrides)
        extra_state.keep_apart(root, new)
        self._wanted(replaced=replaces).note(root)
        done = (
            f"FP8 by Transformer Engine, {type(self.recipe).__name__}: {len(inside)} modules of the library, {len(new)} of them replaced "
            f"layers of torch.nn; in high precision {', '.join(kept[:6]) or 'none'}{', ...' if len(kept) > 6 else ''}"
        )
        return f"{done}; FP8 weights in {len(quantized)}{copies}"

    def _drop_copies(self, inside: Mapping[str, nn.Module], overrides: Overrides) -> str:
        """Have modules quantize 16-bit weights again in backward instead of keeping the copy; reports where that is not possible."""
        if self.options.keep_quantized:
            return ""
        stay = 0
        for name, outer in inside.items():
            recipe = overrides.find(name, self.recipe)
            if recipe is None or recipe.delayed():
                continue  # there is no copy, or the next step's scale would be in use
            stay += sum(not quantize_again(module) for module in outer.modules())
        if not stay:
            return ""
        return f"; {stay} keep 8-bit copies of weights for the backward: this version of the library cannot drop them"

    def _replaces(self, root: nn.Module) -> bool:
        wanted = not outermost(root) if self.options.replace_layers == "auto" else self.options.replace_layers
        if wanted and any(is_sharded(part) for part in root.modules()):
            raise ValueError(
                f"replace_layers={self.options.replace_layers!r}: {type(root).__name__} has modules that were given to fully_shard. Build "
                "them of transformer_engine.pytorch modules, or let the strategy shard the model"
            )
        return bool(wanted)

    def _wanted(self, *, replaced: bool) -> Prepared:
        return Prepared(options=self.options, recipe=self.recipe, overrides=self._others, replaced=replaced)

    def _overrides(self, root: nn.Module) -> Overrides:
        return Overrides(root, self.options.keep_high_precision, self._others)

    def _present_roots(self) -> list[nn.Module]:
        return [root for ref in self._roots if (root := ref()) is not None]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def scaling(self, roots: Mapping[str, nn.Module]) -> dict[str, Any]:
        """Scales and histories of models, under their names in a checkpoint; empty unless scaling is delayed and a module has run."""
        states_of = {key: extra_state.scaling(root) for key, root in roots.items()} if self._is_delayed else {}
        return {key: states for key, states in states_of.items() if states}

    def load_scaling(self, roots: Mapping[str, nn.Module], saved: Mapping[str, Any]) -> list[str]:
        """Restore what `scaling` returned; returns names of modules that do not use theirs here."""
        unused = []
        for key, states in saved.items():
            if key not in roots:
                unused += [f"{key}.{name}" for name in states]
                continue
            overrides = self._overrides(roots[key])
            unused += extra_state.load_scaling(
                roots[key],
                states,
                lambda name, o=overrides: o.find(name, self.recipe),  # type: ignore[misc]
            )
        return unused
