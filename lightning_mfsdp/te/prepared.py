"""What a model was made ready with: layers, contexts and weights follow it, and another run may want something else."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from lightning_mfsdp.te import library
from lightning_mfsdp.te.options import Fp8Options

__all__ = ["Prepared"]

_KEY = "_mfsdp_fp8"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What one run made a model ready with.

    Attributes:
        options: As given.
        recipe: The library's object.
        overrides: Its objects by pattern.
    """

    options: Fp8Options
    recipe: Any
    overrides: dict[str, Any]

    @staticmethod
    def of(root: nn.Module) -> Prepared | None:
        """What a model, or some module in it, was made ready with; `None` if nothing was."""
        return next((vars(module)[_KEY] for module in root.modules() if _KEY in vars(module)), None)

    def note(self, root: nn.Module) -> None:
        """Remember it at each of the library's modules, so that parts of the model know it as well."""
        for module in root.modules():
            if library.is_engine_module(module):
                vars(module)[_KEY] = self

    def check(self, root: nn.Module, wanted: Prepared) -> None:
        """Raise a ValueError where a later run wants what the model was not made ready for."""
        before, now = self._compared(), wanted._compared()
        if wanted.options.replace_layers is not True:
            del now["replace_layers"]  # a model whose layers were replaced has the library's
        different = [f"{name}={before[name]!r}, now {value!r}" for name, value in now.items() if before[name] != value]
        if different:
            raise ValueError(
                f"{type(root).__name__} was made ready for FP8 by an earlier run, with other options: {'; '.join(different)}. Give both "
                "runs the same, or build the model anew"
            )

    def _compared(self) -> dict[str, Any]:
        values = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        kept = tuple(self.options.keep_high_precision)
        return values | {"recipe": self.recipe, "overrides": self.overrides, "keep_high_precision": kept}
