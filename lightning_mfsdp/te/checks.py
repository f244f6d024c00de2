"""Refuses models that FP8 would compute wrongly, or not at all, and stores in a model the options that it was prepared with.

Layers, contexts and weights depend on how a run prepared a model, and another run may require something else: `Prepared`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from lightning_mfsdp.te import library
from lightning_mfsdp.te.options import Fp8Options
from lightning_mfsdp.te.quantized_weights import is_quantized, quantized_modules

__all__ = [
    "Prepared",
    "check_devices",
    "check_gradients",
    "check_options_have_use",
    "check_other_recipe",
    "check_something_multiplies",
    "refuse_prepared",
]


def check_something_multiplies(root: nn.Module, replaced: Mapping[str, nn.Module], options: Fp8Options) -> None:
    """Raise a ValueError for a model in which nothing would compute in 8 bits: norms alone do not.

    Args:
        root: Nothing was replaced in it yet.
        replaced: The layers that will be.
        options: The user's options.
    """
    linear = any(isinstance(layer, nn.Linear) for layer in replaced.values())
    if linear or any(_multiplies(module) for module in root.modules()):
        return
    if options.replace_layers:
        advice = (
            "No nn.Linear is there that could be replaced: those with a forward of their own and those in keep_high_precision="
            f'{list(options.keep_high_precision)} stay as they are. Without FP8, use precision="bf16-mixed"'
        )
    else:
        advice = (
            "Build it of transformer_engine.pytorch modules, or let plain layers be replaced: plugins=[MFSDPPrecision("
            '"transformer-engine", replace_layers=True)]'
        )
    raise ValueError(
        f'precision="transformer-engine": {type(root).__name__} has no module of Transformer Engine that multiplies matrices, so nothing '
        f"would compute in FP8. {advice}"
    )


def _multiplies(module: nn.Module) -> bool:
    count = getattr(module, "num_quantizers", None)  # of transformer_engine.pytorch.ops
    is_operation = library.is_engine_module(module) and callable(count) and count("forward")
    return bool(is_operation) or library.is_a(module, "TransformerEngineBaseModule")


def check_options_have_use(root: nn.Module, options: Fp8Options, quantized: Mapping[str, nn.Module]) -> None:
    """Raise a ValueError for options without effect on a model; `quantized` are its modules with FP8 weights."""
    if (options.fp8_weights or options.keep_transpose_cache) and not quantized:
        raise ValueError(
            f"fp8_weights={options.fp8_weights}, keep_transpose_cache={options.keep_transpose_cache}: {type(root).__name__} has no "
            "module with FP8 weights. Build modules of transformer_engine.pytorch in configure_model or under init_module, or let "
            "plain layers be replaced: replace_layers=True"
        )
    fused = any(getattr(module, "fuse_wgrad_accumulation", False) for module in root.modules())
    if options.fuse_weight_gradients and not fused:
        raise ValueError(
            f"fuse_weight_gradients=True: {type(root).__name__} has no layer that was replaced or built with "
            "fuse_wgrad_accumulation=True. Build them so, or let plain layers be replaced: replace_layers=True"
        )


def check_other_recipe(name: str, module: nn.Module) -> None:
    """Raise a ValueError for FP8 weights that were built for the run's recipe, inside what computes with another one."""
    if quantized_modules(module):
        raise ValueError(
            f"{name} is to compute with another recipe or in high precision (overrides, keep_high_precision), and has FP8 weights that "
            "were built for the run's recipe. Build it under transformer_engine.pytorch.quantized_model_init(enabled=False)"
        )


def check_gradients(root: nn.Module) -> None:
    """Raise a ValueError for modules whose gradients would not be ready when their unit's are reduced.

    Source: `TransformerEngineBaseModule.need_backward_dw` and `ops/_common.py`, version 2.20.
    """
    for name, module in root.named_modules():
        if not library.is_engine_module(module):
            continue
        delays = getattr(module, "need_backward_dw", None)
        if delays is not None and delays():
            option = "delay_wgrad_compute=True"
        elif getattr(module, "_accumulate_into_main_grad", False):
            option = "accumulate_into_main_grad=True"
        else:
            continue
        raise ValueError(
            f"{name} ({type(module).__name__}) was built with {option}: the gradient of its weight is not there at the end of its "
            "backward, when it is reduced. Build it without; fuse_wgrad_accumulation=True, of modules that have it, saves the copy"
        )


def check_devices(quantized: Mapping[str, nn.Module]) -> None:
    """Raise a ValueError for FP8 weights on another GPU than this rank's: their scales would stay there."""
    if not torch.cuda.is_available():
        return
    own_device = torch.device("cuda", torch.cuda.current_device())
    for name, module in quantized.items():
        for parameter in filter(is_quantized, module.parameters(recurse=False)):
            if parameter.device not in (own_device, torch.device("meta")):
                raise ValueError(
                    f"{name} has FP8 weights on {parameter.device}, and this rank computes on {own_device}: it was built before ranks had "
                    "their devices. Build it in configure_model, or call torch.cuda.set_device first"
                )


_KEY = "_mfsdp_fp8"  # attribute of a module that is prepared


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """How one run prepared a model.

    Attributes:
        options: As passed.
        recipe: The library's object.
        overrides: Its objects by pattern.
        replaced: Whether layers of `torch.nn` became the library's.
    """

    options: Fp8Options
    recipe: Any
    overrides: dict[str, Any]
    replaced: bool

    @staticmethod
    def of(root: nn.Module) -> Prepared | None:
        """How a model, or some module in it, was prepared; `None` if it was not."""
        modules = (module for module in root.modules() if library.is_engine_module(module))
        return next((vars(module)[_KEY] for module in modules if _KEY in vars(module)), None)

    def note(self, root: nn.Module) -> None:
        """Store it in each module, so that parts of the model have it as well, and modules added later do not."""
        for module in root.modules():
            vars(module)[_KEY] = self

    def check(self, root: nn.Module, wanted: Prepared) -> None:
        """Raise a ValueError if a later run requires what the model was not prepared for."""
        before, now = self._compared(), wanted._compared()
        if wanted.options.replace_layers is not True:
            del now["replace_layers"]  # a model whose layers were replaced has the library's
        different = [f"{name}={before[name]!r}, now {value!r}" for name, value in now.items() if before[name] != value]
        if different:
            raise ValueError(
                f"{type(root).__name__} was prepared for FP8 by an earlier run, with other options: {'; '.join(different)}. Give both "
                "runs the same, or build the model again"
            )

    def check_knows(self, root: nn.Module, names: Iterable[str]) -> None:
        """Raise a ValueError if some of these modules, which are to compute in FP8, did not exist at that time."""
        new = [name for name in names if _KEY not in vars(root.get_submodule(name))]
        if new:
            named = ", ".join(new[:6]) + ", ..." * (len(new) > 6)
            raise ValueError(
                f"{type(root).__name__} has modules that an earlier run prepared for FP8, and {named}, which were added later and "
                "would compute in high precision. Build the whole model again and load its parts' weights from a checkpoint"
            )

    def _compared(self) -> dict[str, Any]:
        values = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        kept = tuple(self.options.keep_high_precision)
        return values | {"recipe": self.recipe, "overrides": self.overrides, "keep_high_precision": kept}


def refuse_prepared(root: nn.Module, precision: str) -> None:
    """Raise a ValueError for a model that an earlier run prepared for FP8: some of its calls would still compute in FP8."""
    before = Prepared.of(root)
    if before is not None:
        raise ValueError(
            f"{type(root).__name__} was prepared for FP8 by an earlier run, and precision={precision!r} is not FP8. Give this run the "
            "precision of that one, or build the model again and load its weights from a checkpoint"
        )
