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
        plain: The optimizer's own values, which are read and written.
        entry: The parameter; `None` shows values as they are.
    """

    __slots__ = ("_entry", "plain")

    def __init__(self, plain: Mapping[str, Any] | None = None, entry: Entry | None = None) -> None:
        # Lightning rebuilds mappings of their class, from one argument, to move what is in them.
        self.plain: dict[str, Any] = plain if isinstance(plain, dict) else dict(plain or {})
        self._entry = entry

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
        plain: The optimizer's own table.
    """

    __slots__ = ("plain",)

    def __init__(self, plain: MutableMapping[Any, Any]) -> None:
        self.plain = plain

    @classmethod
    def of(cls, state: Mapping[Any, Any]) -> ShownState:
        """A table of whichever representation of parameters, with values of whichever.

        Collective for DTensors whose rows are not placed as in the layout.
        """
        shown = cls(defaultdict(dict))
        shown.update(state)
        return shown

    def __getitem__(self, key: Any) -> Any:
        owner = owner_of(key)
        values = self.plain[key if owner is None else owner[1].local]
        return values if owner is None or not isinstance(values, dict) else ShownValues(values, owner[1])

    def __setitem__(self, key: Any, values: Any) -> None:
        owner = owner_of(key)
        if owner is None or not isinstance(values, Mapping):
            self.plain[key if owner is None else owner[1].local] = values
            return
        entry, own = owner[1], values.plain if isinstance(values, ShownValues) else values
        plain = {name: taken(name, value, entry.local, entry) for name, value in own.items()}
        if isinstance(own, dict):  # references to it see what becomes of the state
            own.clear()
            own.update(plain)
            plain = own
        self.plain[entry.local] = plain

    def __delitem__(self, key: Any) -> None:
        del self.plain[key]

    def __contains__(self, key: object) -> bool:
        return key in self.plain  # representations of one parameter are equal keys

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
        return self[key] if key in self.plain else default

    def pop(self, key: Any, *default: Any) -> Any:
        """As `dict.pop`."""
        if key not in self.plain:
            return {}.pop(key, *default)
        values = self[key]
        del self.plain[key]
        return values

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As `dict.setdefault`."""
        if key not in self.plain:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        """As `dict.clear`."""
        self.plain.clear()

    def as_table(self) -> defaultdict[Any, Any]:
        """A table of its own with what is shown: no view, over the same memory."""
        return defaultdict(
            dict, {key: dict(values) if isinstance(values, ShownValues) else values for key, values in self.items()}
        )
