"""Saves what modules of Transformer Engine keep besides their parameters as plain tensors, which can be read without trust.

The library saves it as a pickle inside a tensor, which it refuses to read unless an environment variable allows any code to run. So
state dicts carry none of it, and the only such state, scales and histories of delayed scaling, is saved as plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.te import library
from lightning_mfsdp.te.quantized_weights import has_quantized_weights

__all__ = ["check_savable", "forget_present_amax", "keep_apart", "load_scaling", "scaling"]

_KEY = "_extra_state"  # PyTorch's, at the end of a name
_PARTS = ("scale", "amax_history")


def keep_apart(root: nn.Module, replaced: list[nn.Module]) -> None:
    """Remove extra state from state dicts.

    Modules in `replaced` have none there, like the layers that they replaced. Others keep an empty one, so that a model built of
    them loads strictly anywhere. What a state dict holds for them is not read.
    """
    new = {id(module) for module in replaced}
    for module in _owners(root):
        module.register_state_dict_post_hook(_leave_out if id(module) in new else _empty)
        module.register_load_state_dict_pre_hook(_empty)


def check_savable(root: nn.Module) -> None:
    """Raise a ValueError for modules whose state under delayed scaling only the library itself can read."""
    for name, module in root.named_modules():
        count = getattr(module, "num_quantizers", None)
        if library.is_engine_module(module) and callable(count) and count("forward"):
            raise ValueError(
                f"{name} ({type(module).__name__}) keeps a history of its own under delayed scaling, which cannot be saved safely. Use "
                'recipe="current", or a module of transformer_engine.pytorch instead of transformer_engine.pytorch.ops'
            )


def scaling(root: nn.Module) -> dict[str, dict[str, Any]]:
    """Scales and histories under delayed scaling, on the CPU, by module name; empty if there are none. Ranks have the same ones."""
    states_by_name: dict[str, dict[str, Any]] = {}
    for name, module in _quantized(root):
        states = dict(_states(module))
        if states:
            states_by_name[name] = {
                "num_gemms": module.fp8_meta["num_gemms"],
                **{key: {part: getattr(state, part).cpu() for part in _PARTS} for key, state in states.items()},
            }
    return states_by_name


def load_scaling(root: nn.Module, saved: dict[str, dict[str, Any]], recipe_of: Callable[[str], Any]) -> list[str]:
    """Restore what `scaling` returned; a history that is longer or shorter here keeps its newest rows.

    Args:
        root: It need not have run yet.
        saved: By module name.
        recipe_of: The recipe of a module; `None` for high precision.

    Returns:
        Names of saved modules that do not compute under delayed scaling here, whose state is unused.
    """
    modules = dict(_quantized(root))
    unused = []
    for name, parts in saved.items():
        recipe = recipe_of(name)
        if name not in modules or recipe is None or not recipe.delayed():
            unused.append(name)
            continue
        module = modules[name]
        module.fp8_meta.update(num_gemms=parts["num_gemms"], recipe=recipe)
        with torch.inference_mode(False):
            module.init_fp8_meta_tensors(recipe)
        with torch.inference_mode():  # as below
            for key, state in _states(module):
                state.scale.copy_(parts[key]["scale"])
                _copy_rows(parts[key]["amax_history"], state.amax_history)
    return unused


def forget_present_amax(root: nn.Module) -> None:
    """Forget maxima that no training forward has seen.

    The first row of a history belongs to the forward under way and is empty between forwards, unless an evaluation or what was recomputed
    in a backward has written to it.
    """
    rows = [
        part
        for _, module in _quantized(root)
        for key, state in _states(module)
        if key == "scaling_fwd"
        for part in _written_by_forward(module, state.amax_history[0])
    ]
    with torch.inference_mode():  # where tensors created by an evaluation may be written as well
        if rows:
            compat.foreach_zero_(rows)


def _written_by_forward(module: Any, row: Tensor) -> list[Tensor]:
    """Parts of a row. Each matrix product has three: input, weight, output; those of FP8 weights are written when weights change."""
    return [row[0::3], row[2::3]] if has_quantized_weights(module) else [row]


def _copy_rows(saved: Tensor, history: Tensor) -> None:
    """The first row belongs to the current step; the others are older steps, the newest last."""
    history.zero_()
    history[0] = saved[0]
    count = min(len(saved), len(history)) - 1
    if count:
        history[-count:] = saved[-count:]


def _owners(root: nn.Module) -> Iterator[nn.Module]:
    for module in root.modules():
        if library.is_engine_module(module) and type(module).get_extra_state is not nn.Module.get_extra_state:
            yield module


def _quantized(root: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in root.named_modules():
        if library.is_engine_module(module) and "fp8_meta" in vars(module):
            yield name, module


def _states(module: Any) -> Iterator[tuple[str, Any]]:
    """History of delayed scaling; other recipes keep none."""
    for key in ("scaling_fwd", "scaling_bwd"):
        state = module.fp8_meta.get(key)
        if getattr(state, "amax_history", None) is not None:
            yield key, state


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict.pop(prefix + _KEY, None)


def _empty(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict[prefix + _KEY] = torch.empty(0, dtype=torch.uint8, device="cpu")
