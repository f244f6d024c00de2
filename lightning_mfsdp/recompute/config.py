"""Recompute: says which activations are recomputed in backward, as one frozen value of options that are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_mfsdp.recompute.operators import check_save_ops

__all__ = ["Recompute", "as_recompute"]

_METHODS = ("none", "uniform", "block", "selective")


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Which activations are recomputed in backward instead of being saved.

    A layer is an entry of a `ModuleList` or `Sequential` with others of its class; a stack is the layers of one such container. Models with
    several stacks (encoder and decoder, a multi-token-prediction head) have each stack treated by itself.

    With `tiled_modules`, modules such as the MLP are computed for pieces of the sequence, and recomputed piece by piece, alone or inside of
    layers that are recomputed.

    Args:
        method: "uniform": all layers, `num_layers` consecutive ones together, of which only the first one's input is kept. "block": the
            first `num_layers` of each stack, each by itself. "selective": chosen modules, or layers in which chosen operators are kept.
            "none": nothing but `tiled_modules`.
        num_layers: For "uniform" and "block". `None`: 1 for "uniform"; "block" needs a number. A shorter stack counts as a whole.
        modules: `fnmatch` patterns of names. They say which modules are layers; for "selective", which modules are recomputed.
        every_nth: Of what the method chooses in a stack, only the first and each n-th after it. Not for "block".
        save_ops: For "selective": operators whose results are kept, all others being recomputed: "matmul", "attention", names such as
            "aten.mm" or "mylib.myop".
        offload: Keep the inputs of what is recomputed in host memory, pinned for CUDA devices. Not those of `tiled_modules`.
        tiled_modules: Patterns of names of modules that are computed piece by piece, with any method. They take one tensor `[..., S, D]`,
            return one `[..., S, E]`, and compute each row by itself. Of modules inside one another the outermost counts.
        tiles: The number of pieces, at least 2: with S rows, pieces of ceil(S / tiles), the last one maybe shorter.

    Raises:
        ValueError: An option out of its range, or one that the method does not use.
        TypeError: An option of the wrong kind.
    """

    method: Literal["none", "uniform", "block", "selective"] = "uniform"
    num_layers: int | None = None
    modules: Sequence[str] = ()
    every_nth: int = 1
    save_ops: Sequence[str] = ()
    offload: bool = False
    tiled_modules: Sequence[str] = ()
    tiles: int | None = None

    def __post_init__(self) -> None:
        for name in ("modules", "save_ops", "tiled_modules"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        if self.method not in _METHODS:
            raise ValueError(f"Recompute: method={self.method!r}: expected one of {', '.join(map(repr, _METHODS))}")
        for name, number in (("num_layers", self.num_layers), ("every_nth", self.every_nth)):
            is_number = isinstance(number, int) and not isinstance(number, bool)
            if not (is_number and number >= 1) and not (name == "num_layers" and number is None):  # type: ignore[operator]
                raise ValueError(f"Recompute: {name}={number!r}: expected a number of at least 1")
        if self.tiles is not None and (type(self.tiles) is not int or self.tiles < 2):
            raise ValueError(f"Recompute: tiles={self.tiles!r}: expected a number of pieces of at least 2, or None")
        if bool(self.tiled_modules) != (self.tiles is not None):
            raise ValueError(
                f"Recompute: tiled_modules={list(self.tiled_modules)}, tiles={self.tiles}: expected both, patterns of names and the "
                'number of pieces, as in tiled_modules=["*.mlp"], tiles=8, or neither'
            )
        if not isinstance(self.offload, bool):
            raise TypeError(f"Recompute: offload={self.offload!r}: expected True or False")
        check_save_ops(self.save_ops)
        self._check_use()

    def _check_use(self) -> None:
        """Raise if an option would have no effect."""
        unused = {
            "none": ("num_layers", "modules", "every_nth", "save_ops", "offload"),
            "uniform": ("save_ops",),
            "block": ("save_ops", "every_nth"),
            "selective": ("num_layers",),
        }[self.method]
        without_effect = [
            option.name
            for option in fields(self)
            if option.name in unused and getattr(self, option.name) != option.default
        ]
        if without_effect:
            raise ValueError(
                f'Recompute(method="{self.method}"): {", ".join(without_effect)} would have no effect; leave it out, or choose another '
                "method"
            )
        if self.method == "block" and self.num_layers is None:
            raise ValueError('Recompute(method="block"): expected num_layers, how many first layers are recomputed')
        if self.method == "selective" and not (self.modules or self.save_ops):
            raise ValueError(
                'Recompute(method="selective"): expected modules, patterns of names of what is recomputed, or save_ops, the operators '
                'whose results are kept, such as ["matmul"]'
            )


def as_recompute(value: Recompute | Mapping[str, Any] | None) -> Recompute | None:
    """What was passed to a strategy: a `Recompute`, its options as a mapping (from a YAML file), or `None`.

    Raises:
        TypeError: Neither of them.
        ValueError: An unknown option, or one out of its range.
    """
    if value is None or isinstance(value, Recompute):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f'recompute={value!r}: expected a Recompute, a mapping of its options, or None; recompute={{"method": "uniform"}} recomputes '
            "whole layers"
        )
    options = [option.name for option in fields(Recompute)]
    unknown = [name for name in value if name not in options]
    if unknown:
        raise ValueError(f"recompute: unknown option {unknown[0]!r}; expected {', '.join(options)}")
    return Recompute(**value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(entry, str) for entry in value):
        raise TypeError(f"Recompute: {name}={value!r}: expected a list of strings")
    return tuple(value)
