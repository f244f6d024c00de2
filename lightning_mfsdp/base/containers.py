"""Finds and replaces tensors in arguments and results of a forward: in tuples, lists, dicts and dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["are_same", "leaves_in", "map_tensors", "renewed", "tensors_in"]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in `value`, in order."""
    if isinstance(value, Tensor):  # most results
        return [value]
    tensors: list[Tensor] = []
    _collect(value, tensors)
    return tensors


def _collect(value: Any, tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, tensors)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, tensors)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), tensors)


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
    if type(value) is tuple:  # the arguments of most forwards
        for item in value:
            if not isinstance(item, Tensor):
                break
        else:
            items = [function(item) for item in value]
            return value if are_same(items, value) else tuple(items)
    return _mapped(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value, renews=False)


def renewed(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function(leaf)` for all in it that is no container, in new containers.

    Mappings that are not dicts are leaves, since they may not accept what `function` returns.
    """
    return _mapped(function, value, renews=True)


def _mapped(function: Callable[[Any], Any], value: Any, *, renews: bool) -> Any:
    """Containers are rebuilt where something changed; with `renews`, all mutable ones."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(function, item, renews=renews) for item in value]
        if (not renews or isinstance(value, tuple)) and are_same(items, value):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict if renews else Mapping):
        changed = {key: _mapped(function, item, renews=renews) for key, item in value.items()}
        if not renews and are_same(changed.values(), value.values()):
            return value
        if type(value) is dict:
            return changed
        rebuilt = copy.copy(value)
        for key, item in changed.items():
            rebuilt[key] = item  # type: ignore[index]
        return rebuilt
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        mapped = {name: _mapped(function, item, renews=renews) for name, item in fields.items()}
        if not renews and are_same(mapped.values(), fields.values()):
            return value
        again = copy.copy(value)
        for name, item in mapped.items():
            if item is not fields[name]:
                object.__setattr__(again, name, item)  # frozen dataclasses too
        return again
    return function(value)


def are_same(items: Collection[object], others: Collection[object]) -> bool:
    """Whether two containers hold the same objects in the same order."""
    return len(items) == len(others) and all(map(operator.is_, items, others))
