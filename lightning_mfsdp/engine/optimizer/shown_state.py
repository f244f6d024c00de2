"""ShownState: what `optimizer.state` is between two steps of an optimizer that steps local rows.

State is kept once, in the plain table that the optimizer's own code reads: by local rows, of plain tensors. A `ShownState` is a view of
that table with the keys of `module.parameters()` and with DTensors of their shape, over the same memory. What is written to the view is
written to the table, and what is taken out of it is gone, so moving or clearing state frees its memory at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from lightning_mfsdp.engine.core.group import as_local, as_sharded
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.optimizer.state import as_shown, taken

__all__ = ["ShownState", "ShownValues"]


class ShownValues(MutableMapping[str, Any]):
    """The state of one parameter, by name: DTensors where it is shaped like the parameter.

    Args:
        values: A copy of them, of no parameter: Lightning rebuilds mappings of their class in that way, to move what is in them.
    """

    __slots__ = ("_parameter", "plain")

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.plain: dict[str, Any] = dict(values or {})
        self._parameter: ShardedParameter | None = None

    @classmethod
    def over(cls, plain: dict[str, Any], parameter: ShardedParameter) -> ShownValues:
        """A view of the optimizer's own values of a parameter, which are read and written."""
        view = cls()
        view.plain, view._parameter = plain, parameter
        return view

    def __getitem__(self, name: str) -> Any:
        value = self.plain[name]
        return value if self._parameter is None else as_shown(name, value, self._parameter)

    def __setitem__(self, name: str, value: Any) -> None:
        self.plain[name] = value if self._parameter is None else taken(name, value, self._parameter)

    def __delitem__(self, name: str) -> None:
        del self.plain[name]

    def __contains__(self, name: object) -> bool:
        return name in self.plain

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        """A plain dictionary of what is shown, over the same memory."""
        return dict(self)


class ShownState(MutableMapping[Any, Any]):
    """State by parameter, as the module shows parameters. A key that is not there has an empty table, as in any optimizer.

    Args:
        state: Of which a table of its own is made, with keys and values of whichever representation. Collective for DTensors whose rows are
            not placed as in the layout.
    """

    __slots__ = ("plain",)

    def __init__(self, state: Mapping[Any, Any] | None = None) -> None:
        self.plain: MutableMapping[Any, Any] = defaultdict(dict)
        self.update(state or {})

    @classmethod
    def over(cls, plain: MutableMapping[Any, Any]) -> ShownState:
        """A view of the table that the optimizer's own code uses."""
        view = cls()
        view.plain = plain
        return view

    def __getitem__(self, key: Any) -> Any:
        values, parameter = self.plain[as_local(key)], as_sharded(key)
        return values if parameter is None or not isinstance(values, dict) else ShownValues.over(values, parameter)

    def __setitem__(self, key: Any, values: Any) -> None:
        parameter = as_sharded(key)
        if parameter is not None and isinstance(values, Mapping):
            plain_values = values.plain if isinstance(values, ShownValues) else values
            values = {name: taken(name, value, parameter) for name, value in plain_values.items()}
        self.plain[as_local(key)] = values

    def __delitem__(self, key: Any) -> None:
        del self.plain[as_local(key)]

    def __contains__(self, key: object) -> bool:
        return as_local(key) in self.plain

    def __iter__(self) -> Iterator[Any]:
        for key in self.plain:
            parameter = as_sharded(key)
            yield key if parameter is None else parameter

    def __len__(self) -> int:
        return len(self.plain)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.as_table()))

    # A MutableMapping's own methods would index, which makes an empty table for a missing key.

    def get(self, key: Any, default: Any = None) -> Any:
        """The values of a parameter, or `default`: as `dict.get`, and unlike indexing it makes no empty table."""
        return self[key] if key in self else default  # noqa: SIM401 - that would call itself

    def pop(self, key: Any, *default: Any) -> Any:
        """Take a parameter's values out of the optimizer's own table, as `dict.pop` does; a missing one raises a KeyError."""
        if key not in self:
            return {}.pop(key, *default)
        values = self[key]
        del self[key]
        return values

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The values of a parameter, which are set to `default` if there are none, as `dict.setdefault` does."""
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """Remove all values from the optimizer's own table, which frees their memory at once."""
        self.plain.clear()

    def copy(self) -> defaultdict[Any, Any]:
        """A table of its own with what is shown, as `as_table` makes it."""
        return self.as_table()

    def as_table(self) -> defaultdict[Any, Any]:
        """A table of its own with what is shown: no view, over the same memory."""
        return defaultdict(
            dict, {key: dict(values) if isinstance(values, ShownValues) else values for key, values in self.items()}
        )
