"""What a model was made ready with: layers, contexts and weights follow it, and another run may want something else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from lightning_mfsdp.te import library
from lightning_mfsdp.te.options import Fp8Options

__all__ = ["Prepared", "refuse_prepared"]

_KEY = "_mfsdp_fp8"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What one run made a model ready with.

    Attributes:
        options: As given.
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
        """What a model, or some module in it, was made ready with; `None` if nothing was."""
        own = (module for module in root.modules() if library.is_engine_module(module))
        return next((vars(module)[_KEY] for module in own if _KEY in vars(module)), None)

    def note(self, root: nn.Module) -> None:
        """Remember it at each module, so that parts of the model know it as well, and what comes to them later does not."""
        for module in root.modules():
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

    def check_knows(self, root: nn.Module, names: Iterable[str]) -> None:
        """Raise a ValueError if some of these modules, which are to compute in FP8, were not there at the time."""
        new = [name for name in names if _KEY not in vars(root.get_submodule(name))]
        if new:
            named = ", ".join(new[:6]) + ", ..." * (len(new) > 6)
            raise ValueError(
                f"{type(root).__name__} has parts that an earlier run made ready for FP8, and {named}, which it did not know and which "
                "would compute in high precision. Build the whole model anew and load its parts' weights from a checkpoint"
            )

    def _compared(self) -> dict[str, Any]:
        values = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        kept = tuple(self.options.keep_high_precision)
        return values | {"recipe": self.recipe, "overrides": self.overrides, "keep_high_precision": kept}


def refuse_prepared(root: nn.Module, precision: str) -> None:
    """Raise a ValueError for a model that an earlier run made ready for FP8: some of its calls would still compute so."""
    before = Prepared.of(root)
    if before is not None:
        raise ValueError(
            f"{type(root).__name__} was made ready for FP8 by an earlier run, and precision={precision!r} is not FP8. Give this run the "
            "precision of that one, or build the model anew and load its weights from a checkpoint"
        )
