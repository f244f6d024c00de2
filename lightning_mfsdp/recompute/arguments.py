"""What a region was called with, as it was: containers of its own, from which tensors are taken out.

A layer may replace entries of a dict that it is given, or add to a list. The forward gets what it was given, and its caller sees that; the
forward again gets containers as they were before. Tensors inside are kept as those outside are, which notices what is written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_mfsdp.base.containers import renewed

__all__ = ["filled", "outlined"]


class _Place:
    """Of a tensor."""

    def __init__(self, index: int) -> None:
        self.index = index


def outlined(value: Any, tensors: list[Tensor]) -> Any:
    """`value` without its tensors, which are appended to `tensors`: those in tuples, lists, dicts and dataclasses, nested."""

    def outline(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Place(len(tensors) - 1)

    return renewed(outline, value)


def filled(outline: Any, tensors: Sequence[Tensor]) -> Any:
    """What was outlined, with these tensors, in containers that nobody else has."""
    return renewed(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf, outline)
