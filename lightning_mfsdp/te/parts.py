"""Answers what tensor parallelism has to know of linear layers of Transformer Engine, of which each rank has a part.

A layer computes with the weight it holds, of whatever shape. What a part must be known for is the bias, which is added once, and the sizes
that its recipe can multiply.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_mfsdp.te import library

__all__ = [
    "bias_apart",
    "computes_part",
    "computes_whole",
    "is_linear",
    "multiple_of",
    "note_multiple",
    "sections",
]

_MULTIPLE = "_mfsdp_multiple"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is the library's `Linear`. Does not load it."""
    return library.is_a(module, "TransformerEngineBaseModule") and library.is_a(module, "Linear")


def computes_whole(module: nn.Module) -> bool:
    """Whether a layer of the library has whole weights. It marks them as parts all the same, whether or not it was given a `tp_group`.

    Source: `reset_parameters` of `module/linear.py`, version 2.20.
    """
    is_alone = getattr(module, "tp_size", 1) == 1 or getattr(module, "parallel_mode", "both") is None
    return library.is_engine_module(module) and is_alone


def computes_part(module: nn.Module) -> bool:
    """Whether a layer of the library has parts of weights by itself, having been built with a `tp_group`."""
    return library.is_a(module, "TransformerEngineBaseModule") and not computes_whole(module)


def sections(module: nn.Module, key: str) -> int:
    """How many weights lie one after the other in a parameter, each of them divided: 2 for gate and up of a `LayerNormMLP`."""
    has_gate = library.is_a(module, "LayerNormMLP") and "glu" in str(getattr(module, "activation", ""))
    return 2 if has_gate and key.startswith("fc1_") else 1


def note_multiple(layer: nn.Module, multiple: int) -> None:
    """Store what both sizes of the weight of a replaced layer, and of its parts, must be multiples of."""
    vars(layer)[_MULTIPLE] = multiple


def multiple_of(layer: nn.Module) -> int:
    """The number that `note_multiple` stored; 1 for other layers."""
    multiple: int = vars(layer).get(_MULTIPLE, 1)
    return multiple


def bias_apart() -> dict[str, Any]:
    """Attributes with which a layer returns its bias beside the product, as if built with `return_bias=True` (version 2.20)."""
    return {"apply_bias": False, "return_bias": True}
