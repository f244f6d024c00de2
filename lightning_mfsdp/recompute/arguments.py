"""What a region was called with, as it was: containers of its own, from which tensors are taken out.

A layer may replace entries of a dict that it is given, or add to a list. The forward gets what it was given, and its caller sees that; the
forward again gets containers as they were before. Tensors inside are kept as those outside are, which notices what is written in place.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

__all__ = ["filled", "outlined"]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Of a tensor."""

    index: int


def outlined(value: Any, tensors: list[Tensor]) -> Any:
    """`value` without its tensors, which are appended to `tensors`: those in tuples, lists, dicts and dataclasses, nested."""

    def outline(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Place(len(tensors) - 1)

    return _rebuilt(outline, value)


def filled(outline: Any, tensors: Sequence[Tensor]) -> Any:
    """What was outlined, with these tensors, in containers that nobody else has."""
    return _rebuilt(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf, outline)


def _rebuilt(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` in new containers, with `function(leaf)` for all that is no container."""
    if isinstance(value, (tuple, list)):
        items = [_rebuilt(function, item) for item in value]
        if isinstance(value, tuple) and all(new is old for new, old in zip(items, value, strict=True)):
            return value  # nobody can write to it
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        entries = {key: _rebuilt(function, item) for key, item in value.items()}
        if type(value) is dict:
            return entries
        made = copy.copy(value)
        for key, item in entries.items():
            made[key] = item
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module, _Place)):
        renewed = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            if (new := _rebuilt(function, item)) is not item:
                object.__setattr__(renewed, field.name, new)  # frozen dataclasses too
        return renewed
    return function(value)
