"""The state of an optimizer that steps local rows: `StateTable`, which its own code reads, and `ShownState`, which programs see.

State is kept once, in the table. Of parameters whose rows are stepped as one tensor (flat_rows.py) it lies there in one of two ways:

    joined      under the flat tensor: moments as long as that, and one number (`step`) for all members
    separate    under each member's local rows: moments that are views of the same memory, and a number for each

It is joined when the optimizer's own code begins, if it can be so, and separate once a program has read or written a number of it, which it
may keep and write to. Each member has a dictionary of its own, which a program may hold; it is empty while state is joined.

A `ShownState` is a view of the table with the keys of `module.parameters()` and with DTensors of their shape, over the same memory. What is
written to the view is written to the table, and what is taken out of it is gone, so moving or clearing state frees its memory: that of
joined moments once the last member's part is gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from lightning_mfsdp.engine.core.group import as_local, as_sharded
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.optimizer.flat_rows import FlatRows
from lightning_mfsdp.engine.optimizer.state import as_shown, taken

__all__ = ["ShownState", "ShownValues", "StateTable"]

STEPS_APART = 16  # until state that was made separate is joined again: a program may look at it, or leave gradients out, in every step
MOST_STEPS_APART = 4096  # after state was found in step upon step that cannot be joined


class _States(MutableMapping[Any, Any]):
    """State by key. Indexing makes an empty table for a missing key, as in any optimizer; what follows does not."""

    __slots__ = ()

    def get(self, key: Any, default: Any = None) -> Any:
        """The values of a key, or `default`."""
        return self[key] if key in self else default  # noqa: SIM401 - that would call itself

    def pop(self, key: Any, *default: Any) -> Any:
        """Take the values of a key out, as `dict.pop` does; a missing one raises a KeyError."""
        if key not in self:
            return {}.pop(key, *default)
        values = self[key]
        del self[key]
        return values

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The values of a key, which are set to `default` if there are none."""
        if key not in self:
            self[key] = default
        return self[key]


class StateTable(_States):
    """State by what the optimizer steps. Its own code finds tables by flat rows; looking for a member makes that one's state separate.

    Args:
        held: Local rows of all parameters, in the order of `param_groups`.
        flat: The flat rows of each of them that has some.

    Attributes:
        flat: As given.
    """

    __slots__ = ("_apart", "_held", "_joined_values", "_tables", "flat")

    def __init__(self, held: Sequence[Tensor] = (), flat: Mapping[Any, FlatRows] | None = None) -> None:
        self.flat = {} if flat is None else flat
        self._held = held
        self._tables: dict[Any, Any] = {}
        # By member: what holds its values while they are separate.
        self._joined_values: dict[Tensor, dict[str, Any]] = {}
        # What does not join for some steps: how many to go, of how many.
        self._apart: dict[FlatRows, tuple[int, int]] = {}

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._tables[key]
        except KeyError:
            self.separate(self.joined(key))
            return self._tables.setdefault(key, {})

    def __setitem__(self, key: Any, values: Any) -> None:
        self.separate(self.joined(key))
        self._tables[key] = values.own() if isinstance(values, ShownValues) else values

    def __delitem__(self, key: Any) -> None:
        self.separate(self.joined(key))
        del self._tables[key]

    def __contains__(self, key: object) -> bool:
        return key in self._tables or self.joined(key) is not None

    def __iter__(self) -> Iterator[Any]:
        self.separate_all()
        return iter(list(self._tables))

    def __len__(self) -> int:
        return len(self.keys_shown())

    def copy(self) -> defaultdict[Any, Any]:
        """An ordinary table of the same."""
        return defaultdict(dict, self)

    __copy__ = copy

    def joined(self, local: Any) -> FlatRows | None:
        """The flat rows under which the state of a key lies; `None`: under the key."""
        flat = self.flat.get(local)
        return flat if flat is not None and flat.rows in self._tables else None

    def own(self, key: Any) -> Any:
        """What holds the values of a key while they are separate."""
        return self[key] if self.joined(key) is None else self._joined_values.setdefault(key, {})

    def joined_values(self, local: Any, values: dict[str, Any]) -> dict[str, Any] | None:
        """The joined state that a member's own values, which are empty then, are among; `None`: they are separate."""
        flat = self.joined(local)
        return self._tables[flat.rows] if flat is not None and self._joined_values.get(local) is values else None

    def keys_shown(self) -> list[Any]:
        """Keys with local rows in the place of flat ones: in the order of `param_groups`, which all ranks have, and then others."""
        held = [local for local in self._held if local in self]
        known = {*held, *(flat.rows for flat in self.flat.values())}
        return held + [key for key in self._tables if key not in known]

    def join(self, flat: FlatRows) -> bool:
        """Join the state of members in a step, if it can be so. Returns whether it is joined, or there is none."""
        if flat.rows in self._tables:
            return True
        left, steps = self._apart.get(flat, (0, STEPS_APART))
        if left:
            self._apart[flat] = (left - 1, steps)
            return False
        values = {member.local: self._tables.get(member.local, {}) for member in flat.members}
        if any(type(own) is not dict or own for own in values.values()):
            joined = flat.joined(list(values.values()))
            if joined is None:
                self._apart[flat] = (steps, min(2 * steps, MOST_STEPS_APART))
                return False
            for local in values:
                self._tables.pop(local, None)
            self._tables[flat.rows] = joined
        self._joined_values.update(values)  # also of those that the optimizer's own code may bring state of now
        self._apart.pop(flat, None)
        return True

    def separate(self, flat: FlatRows | None) -> None:
        """Make the state of all members separate, if it is joined."""
        if flat is None or (joined := self._tables.get(flat.rows)) is None:
            return
        parts = {
            member.local: {name: flat.part(value, member.local) for name, value in joined.items()}
            for member in flat.members
        }
        # Nothing can fail from here on.
        del self._tables[flat.rows]
        for local, values in parts.items():
            self._tables[local] = self._joined_values.pop(local, {})
            self._tables[local].update(values)
        self._apart[flat] = (STEPS_APART, STEPS_APART)

    def separate_all(self) -> None:
        """Make all state separate, which is then that of local rows."""
        for flat in dict.fromkeys(self.flat.values()):
            self.separate(flat)


class ShownValues(MutableMapping[str, Any]):
    """The state of one parameter, by name: DTensors where it is shaped like the parameter.

    Args:
        values: A copy of them, of no parameter: Lightning rebuilds mappings of their class in that way, to move what is in them.
    """

    __slots__ = ("_local", "_parameter", "_table", "_values")

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = dict(values or {})
        self._table = StateTable()
        self._local: Any = None
        self._parameter: ShardedParameter | None = None

    @classmethod
    def over(cls, table: StateTable, local: Any, parameter: ShardedParameter) -> ShownValues:
        """A view of the optimizer's own values of a parameter, which are read and written."""
        view = cls.__new__(cls)
        view._table, view._local, view._parameter = table, local, parameter
        view._values = table.own(local)
        return view

    def own(self) -> dict[str, Any]:
        """The optimizer's own values, which are this parameter's alone from now on."""
        if self._table.joined_values(self._local, self._values) is not None:
            self._table.separate(self._table.joined(self._local))
        return self._values

    def _to_look_at(self) -> dict[str, Any]:
        """The optimizer's own values, which may be those of several parameters together."""
        joined = self._table.joined_values(self._local, self._values)
        return self._values if joined is None else joined

    def __getitem__(self, name: str) -> Any:
        values = self._to_look_at()
        value = values[name]
        if values is not self._values:
            flat = self._table.flat[self._local]
            value = self.own()[name] if flat.is_number(value) else flat.part(value, self._local)
        return value if self._parameter is None else as_shown(name, value, self._parameter)

    def __setitem__(self, name: str, value: Any) -> None:
        self.own()[name] = value if self._parameter is None else taken(name, value, self._parameter)

    def __delitem__(self, name: str) -> None:
        del self.own()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._to_look_at()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._to_look_at()))

    def __len__(self) -> int:
        return len(self._to_look_at())

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        """A plain dictionary of what is shown, over the same memory."""
        return dict(self)


class ShownState(_States):
    """State by parameter, as the module shows parameters. A key that is not there has an empty table, as in any optimizer.

    Args:
        state: Of which a table of its own is made, with keys and values of whichever representation. Collective for DTensors whose rows are
            not placed as in the layout.
        plain: An empty one.

    Attributes:
        plain: The table that the optimizer's own code uses.
    """

    __slots__ = ("plain",)

    def __init__(self, state: Mapping[Any, Any] | None = None, plain: StateTable | None = None) -> None:
        self.plain = StateTable() if plain is None else plain
        self.update(state or {})

    @classmethod
    def over(cls, plain: StateTable) -> ShownState:
        """A view of the table that the optimizer's own code uses."""
        view = cls.__new__(cls)
        view.plain = plain
        return view

    def __getitem__(self, key: Any) -> Any:
        local, parameter = as_local(key), as_sharded(key)
        values = self.plain.own(local)
        if parameter is None or not isinstance(values, dict):
            return values
        return ShownValues.over(self.plain, local, parameter)

    def __setitem__(self, key: Any, values: Any) -> None:
        local, parameter = as_local(key), as_sharded(key)
        if parameter is not None and isinstance(values, Mapping):
            plain_values = values.own() if isinstance(values, ShownValues) else values
            values = {name: taken(name, value, parameter) for name, value in plain_values.items()}
        self.plain[local] = values

    def __delitem__(self, key: Any) -> None:
        del self.plain[as_local(key)]

    def __contains__(self, key: object) -> bool:
        return as_local(key) in self.plain

    def __iter__(self) -> Iterator[Any]:
        for key in self.plain.keys_shown():
            parameter = as_sharded(key)
            yield key if parameter is None else parameter

    def __len__(self) -> int:
        return len(self.plain.keys_shown())

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.as_table()))

    def clear(self) -> None:
        """Remove all values from the optimizer's own table, which frees their memory unless a program has kept them."""
        self.plain.clear()

    def copy(self) -> defaultdict[Any, Any]:
        """A table of its own with what is shown, as `as_table` makes it."""
        return self.as_table()

    def as_table(self) -> defaultdict[Any, Any]:
        """A table of its own with what is shown: no view, over the same memory."""
        return defaultdict(
            dict, {key: dict(values) if isinstance(values, ShownValues) else values for key, values in self.items()}
        )
