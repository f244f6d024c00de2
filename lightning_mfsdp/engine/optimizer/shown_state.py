"""ShownState: what `optimizer.state` is between two steps of an optimizer that steps local rows.

State is kept once, in the plain table that the optimizer's own code reads: by local rows, of plain tensors. A `ShownState` is a view of
that table with the keys of `module.parameters()` and with DTensors of their shape, over the same memory. What is written to the view is
written to the table, and what is taken out of it is gone, so moving or clearing state frees its memory at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from lightning_mfsdp.engine.core.group import owner_of
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.optimizer.state import as_shown, taken

__all__ = ["ShownState", "ShownValues"]


class ShownValues(MutableMapping[str, Any]):
    """The state of one parameter, by name: DTensors where it is shaped like the parameter.

    Args:
        values: A copy of them, of no parameter: Lightning rebuilds mappings of their class in that way, to move what is in them.
    """

    __slots__ = ("_entry", "plain")

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.plain: dict[str, Any] = dict(values or {})
        self._entry: Entry | None = None

    @classmethod
    def over(cls, plain: dict[str, Any], entry: Entry) -> ShownValues:
        """A view of the optimizer's own values of a parameter, which are read and written."""
        made = cls()
        made.plain, made._entry = plain, entry
        return made

    def __getitem__(self, name: str) -> Any:
        value = self.plain[name]
        return value if self._entry is None else as_shown(name, value, self._entry)

    def __setitem__(self, name: str, value: Any) -> None:
        self.plain[name] = value if self._entry is None else taken(name, value, self._entry.local, self._entry)

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
        """As `dict.copy`."""
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
        made = cls()
        made.plain = plain
        return made

    def __getitem__(self, key: Any) -> Any:
        owner = owner_of(key)
        values = self.plain[key if owner is None else owner[1].local]
        return values if owner is None or not isinstance(values, dict) else ShownValues.over(values, owner[1])

    def __setitem__(self, key: Any, values: Any) -> None:
        owner = owner_of(key)
        if owner is None or not isinstance(values, Mapping):
            self.plain[key if owner is None else owner[1].local] = values
            return
        entry, own = owner[1], values.plain if isinstance(values, ShownValues) else values
        self.plain[entry.local] = {name: taken(name, value, entry.local, entry) for name, value in own.items()}

    def __delitem__(self, key: Any) -> None:
        del self.plain[_own_key(key)]

    def __contains__(self, key: object) -> bool:
        return _own_key(key) in self.plain

    def __iter__(self) -> Iterator[Any]:
        for key in self.plain:
            owner = owner_of(key)
            yield key if owner is None else owner[1].sharded

    def __len__(self) -> int:
        return len(self.plain)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.as_table()))

    # A mapping's own would make a missing key.

    def get(self, key: Any, default: Any = None) -> Any:
        """As `dict.get`."""
        return self[key] if key in self else default  # noqa: SIM401 - that would call itself

    def pop(self, key: Any, *default: Any) -> Any:
        """As `dict.pop`."""
        if key not in self:
            return {}.pop(key, *default)
        values = self[key]
        del self[key]
        return values

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As `dict.setdefault`."""
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """As `dict.clear`."""
        self.plain.clear()

    def copy(self) -> defaultdict[Any, Any]:
        """As `dict.copy`: a table of its own."""
        return self.as_table()

    def as_table(self) -> defaultdict[Any, Any]:
        """A table of its own with what is shown: no view, over the same memory."""
        return defaultdict(
            dict, {key: dict(values) if isinstance(values, ShownValues) else values for key, values in self.items()}
        )


def _own_key(key: Any) -> Any:
    """The key of the optimizer's own table: local rows, whichever representation is given."""
    owner = owner_of(key)
    return key if owner is None else owner[1].local
