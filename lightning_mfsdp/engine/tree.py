"""Find and replace tensors in the arguments and results of a forward: tuples, lists, dicts and dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["leaves_in", "map_tensors", "tensors_in"]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in `value`, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def leaves_in(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Path and value of all tensors in `value`, and of everything else in it that is no container, in order."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        return [(path, value)]
    return [leaf for key, item in items for leaf in leaves_in(item, f"{path}.{key}" if path else str(key))]


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor replaced by `function(tensor)`. Containers in which something changed are rebuilt, never written to."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return changed
        rebuilt = copy.copy(value)
        for key, item in changed.items():
            rebuilt[key] = item  # type: ignore[index]
        return rebuilt
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        mapped = {name: map_tensors(function, item) for name, item in fields.items()}
        if all(mapped[name] is item for name, item in fields.items()):
            return value
        renewed = copy.copy(value)
        for name, item in mapped.items():
            object.__setattr__(renewed, name, item)  # frozen dataclasses too
        return renewed
    return value
