"""What a root knows of writes to its main weights and gradients (`Writes`), and of the optimizers that write them (`Optimizers`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum

from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.core.weights import Age

__all__ = ["Optimizers", "OwnCode", "RowsOf", "Writes"]


class RowsOf(IntEnum):
    """Who steps local rows of a group.

    What an optimizer steps, programs write on all ranks alike. Other rows may be written on those ranks alone that have some: to gather
    weights because of that would wait for the others.
    """

    NO_OPTIMIZER = 0
    OPTIMIZER = 1
    ASSIGNING_OPTIMIZER = 2  # has them as plain parameters, and may replace their `data`


class Writes:
    """Which main weights were written since compute shards were made of them, and how often weights and gradients were written.

    Attributes:
        needs_refresh: Main weights may have been written since `take_outdated`.
        weights: How often main weights were written, as far as known to all ranks: by an optimizer, a function, `load_state_dict`.
        gradients: How often gradients were written, as far as known to all ranks, by other than a backward: an optimizer, a function.
        has_stepped: An optimizer has, at least once.
    """

    def __init__(self) -> None:
        self.needs_refresh = True
        self.weights = self.gradients = 0
        self.has_stepped = False
        # Which optimizers hold local rows of each group, which may be written without notice: see `watch`.
        self._watched: dict[weakref.ref[ParameterGroup], RowsOf] = {}

    def take_over(self, other: Writes) -> None:
        """What is known of another root, whose units move into this one."""
        self._watched.update(other._watched)

    def watch(self, group: ParameterGroup, rows_of: RowsOf) -> None:
        """Check local rows of a group whenever a pass begins: a program may write them without notice.

        Args:
            group: Of this root.
            rows_of: Who holds its rows; what is known already stays.
        """
        reference = weakref.ref(group)
        self._watched[reference] = max(rows_of, self._watched.get(reference, RowsOf.NO_OPTIMIZER))

    def look(self) -> None:
        """Detect what was written to local rows that an optimizer steps, or assigned to their `data`."""
        found = False
        for reference, rows_of in self._watched.items():
            if rows_of is not RowsOf.NO_OPTIMIZER and (group := reference()) is not None:
                if rows_of is RowsOf.ASSIGNING_OPTIMIZER and group.weights.take_assigned():
                    found = True
                for row, known in group.weights.known_rows:  # inline, since this is done in every step
                    if row._version != known:
                        group.weights.take_written()
                        found = True
                        break
        if found:
            self.weights += 1
            # All of them, since a rank without rows of one may not have written to it.
            self.outdate(
                group
                for reference, rows_of in self._watched.items()
                if rows_of is not RowsOf.NO_OPTIMIZER and (group := reference()) is not None
            )

    def warn_of_unnoticed(self) -> None:
        """Weights are not refreshed in this pass: warn of what was written to other local rows."""
        for reference, rows_of in self._watched.items():
            if rows_of is RowsOf.NO_OPTIMIZER and (group := reference()) is not None:
                for row, known in group.weights.known_rows:
                    if row._version != known:
                        group.weights.warn_of_unnoticed()
                        break

    def outdate_graphs(self) -> None:
        """A backward begins: graphs that saved parameters whose rows were written since are out of date.

        Compute shards are refreshed from the next pass on. Ranks may differ in what was written, and here they would gather differently.
        """
        for reference, rows_of in self._watched.items():
            if rows_of is not RowsOf.NO_OPTIMIZER and (group := reference()) is not None:
                for row, known in group.weights.known_rows:
                    if row._version != known:
                        group.weights.versions.outdate(group.weights.written_rows())
                        break

    def to_weights(self, groups: Iterable[ParameterGroup]) -> None:
        """Main weights of some groups were written."""
        self.weights += 1
        self.outdate(groups)

    def to_rows(self, group: ParameterGroup, *, of_weights: bool) -> None:
        """A function wrote to rows of a group: to main weights, or definitely to something else, such as gradients."""
        if of_weights:
            self.weights += 1
        else:
            self.gradients += 1
        self.outdate([group])

    def by_optimizer(self, groups: Iterable[ParameterGroup]) -> None:
        """An optimizer has stepped some groups, and may have written gradients."""
        self.has_stepped = self.needs_refresh = True
        self.weights += 1
        self.gradients += 1
        for group in groups:
            group.weights.outdate(by_optimizer=True)

    def outdate(self, groups: Iterable[ParameterGroup]) -> None:
        """Main weights of some groups may have been written: compute shards are refreshed before the next all-gather."""
        self.needs_refresh = True
        for group in groups:
            group.weights.outdate(by_optimizer=False)

    def take_outdated(self, groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
        """Of these, which are all there are, those whose compute shards are out of date: the caller refreshes them now."""
        self.needs_refresh = False
        return [group for group in groups if group.weights.age >= Age.STEPPED]


class OwnCode:
    """The own code of an optimizer, which works on sharded tensors as long as this lives: the closure that its step was given holds it.

    So a step that raised is over when its frame is gone.

    Attributes:
        name: Class of the optimizer.
    """

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str) -> None:
        self.name = name


class Optimizers:
    """The optimizers that step parameters of a root: which parameters they report steps of, and which of them step now.

    Attributes:
        own_code: The optimizer's own code that works on sharded tensors now. Without a closure, one that raised ends when a forward begins.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        # Parameters of which no optimizer reports its steps, by identity.
        self._untracked = {id(entry): weakref.ref(entry) for entry in entries}
        # What puts back what optimizers hold, should their own code, which is running, raise.
        self._unfinished: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.own_code: weakref.ref[OwnCode] | None = None

    def take_over(self, other: Optimizers) -> None:
        """Those of another root, whose units move into this one."""
        self._untracked.update(other._untracked)

    def track(self, entries: Iterable[Entry]) -> None:
        """An optimizer that reports its steps holds these parameters."""
        for entry in entries:
            self._untracked.pop(id(entry), None)

    @property
    def hold_all(self) -> bool:
        """Whether every trainable parameter is held by an optimizer that reports its steps."""
        if not self._untracked:
            return True
        entries = (entry for reference in self._untracked.values() if (entry := reference()) is not None)
        return not any(entry.is_trained for entry in entries)

    def begin(self, finish: weakref.WeakMethod[Callable[[], None]]) -> None:
        """The own code of one will run; `finish` puts back what it holds, should that raise."""
        self._unfinished.append(finish)

    def works_on_tensors(self, own_code: OwnCode | None) -> None:
        """The own code of one begins to work on sharded tensors; `None`: it calls its closure, or has raised."""
        self.own_code = None if own_code is None else weakref.ref(own_code)

    def end(self, finish: weakref.WeakMethod[Callable[[], None]]) -> None:
        """The step that began with `finish` has ended."""
        self.own_code = None
        self._unfinished.remove(finish)

    def finish(self) -> None:
        """A pass or a backward begins: own code that has not ended has raised. Optimizers again show what modules show."""
        unfinished, self._unfinished = self._unfinished, []
        for reference in unfinished:
            if (finish := reference()) is not None:
                finish()
