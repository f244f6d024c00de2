"""Context: what the units of one root share. Streams, slots, the recorded order, the microbatch, and the end of a backward.

Collectives are issued in an order that all ranks share. Gathers follow the program: a unit gathers when it runs, and
what is gathered in advance is what followed it last time. Reductions follow a list that rank 0 dictates at the first
backward: a unit that is ready early waits for its turn, and one whose gradients never came (unused on this rank) is
reduced as zeros at the end.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.channels import Channels
from lightning_mfsdp.engine.collectives import Mesh
from lightning_mfsdp.engine.group import ParameterGroup
from lightning_mfsdp.engine.parameter import Entry
from lightning_mfsdp.engine.planning import MemoryPlanner
from lightning_mfsdp.engine.reduction import Filling, GradientReducer, Sync
from lightning_mfsdp.engine.series import Series
from lightning_mfsdp.engine.storage import Slot, SlotPool
from lightning_mfsdp.engine.streams import Event, Streams
from lightning_mfsdp.engine.unit import Unit

__all__ = ["Context"]

_MAX_BUCKETS = 2


@dataclass(frozen=True)
class _InFlight:
    """A unit's reduction that was issued. Until `done`, its buckets are held and what fills them is kept from the allocator."""

    reducers: list[GradientReducer]
    fillings: list[Filling]
    done: Event


class Context:
    """State shared by a root and the units below it.

    Attributes:
        sync: How far the gradients of the current microbatch are reduced.
        weights_ready: After the last write to a main or held weight; `None` once the gather stream has waited for it.
        gathers_started: Collectives issued for weights so far, for inspection.
    """

    def __init__(self, root: Unit, mesh: Mesh, device: torch.device, *, pooled: bool, symmetric: bool) -> None:
        self.mesh = mesh
        self.device = device
        self.streams = Streams(device)
        self.pool = SlotPool(device, pooled=pooled)
        self.channels = Channels(device, symmetric=symmetric)
        self._planner = MemoryPlanner(self.pool, self.channels, mesh, device)
        self.sync = Sync.ALL
        self._covered: set[int] = set()
        self.weights_ready: Event = None
        self.gathers_started = 0
        self.reductions_started = 0
        self.backwards_finished = 0
        self._has_stepped = False
        self._root = weakref.ref(root)
        self._units: list[weakref.ref[Unit]] = []
        self._weights_changed = True
        self._first_of_pass: weakref.ref[Unit] | None = None
        self._last_forward: weakref.ref[Unit] | None = None
        self._ends_forward: weakref.ref[Unit] | None = None
        self._last_backward: weakref.ref[Unit] | None = None
        self._series: Series | None = None
        self._in_backward = False
        self._order: list[weakref.ref[Unit]] = []
        self._turn = 0
        self._done: set[int] = set()
        self._in_flight: deque[_InFlight] = deque()
        self._reducers: weakref.WeakKeyDictionary[ParameterGroup, GradientReducer] = weakref.WeakKeyDictionary()

    # -- units ---------------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Unit | None:
        """The outermost unit."""
        return self._root()

    @property
    def units(self) -> list[Unit]:
        """All units, in the order they were sharded."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    def add(self, unit: Unit) -> None:
        """Take a unit in; it may come from a context of its own."""
        unit.context = self
        self._units.append(weakref.ref(unit))
        for group in unit.groups:
            group.attach(unit, self)

    def take_over(self, other: Context) -> None:
        """Keep what is known about optimizers in a context whose units move into this one."""
        self._covered |= other._covered

    def reducer(self, group: ParameterGroup) -> GradientReducer:
        """The group's gradients; their buffers are made when the first gradient arrives."""
        known = self._reducers.get(group)
        if known is None:
            known = self._reducers[group] = GradientReducer(group, self.streams)
        return known

    def known_reducer(self, group: ParameterGroup) -> GradientReducer | None:
        """The group's gradients, if there ever were any."""
        return self._reducers.get(group)

    @property
    def units_in_backward_order(self) -> list[Unit]:
        """Units in the order they are reduced."""
        ordered = [unit for reference in self._order if (unit := reference()) is not None]
        return ordered or self.units[::-1]

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Main weights were written: held weights are refreshed before the next gather."""
        self._weights_changed = True

    def refresh(self) -> None:
        """Bring held weights up to date with main weights, all groups in one launch, if anything changed.

        Full weights that a unit shows at the moment (manual optimization, a forward without backward) are filled again.
        """
        if not self._weights_changed:
            return
        self._weights_changed = False
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for unit in self.units:
            for group in unit.groups:
                pair = group.cast_pairs()
                targets += pair[0]
                sources += pair[1]
                group.stale = True
                if group.gathered and not group.installed:
                    group.release()
        if targets:
            with torch.no_grad():
                compat.foreach_copy_(targets, sources)
        self.weights_ready = self.streams.record()
        self._gather_whole_weights()
        for unit in self.units:
            if unit.live:
                for group in unit.all_groups:
                    group.refill(self.weights_ready)

    def _gather_whole_weights(self) -> None:
        """Weights that stay whole are gathered once after a change, all of them now, in an order that all ranks share.

        Each rank may then run its units in an order of its own, or leave some out.
        """
        for unit in reversed(self.units_in_backward_order):
            for group in unit.groups:
                if not group.placement.weight:
                    self.gather(group)

    def gather(self, group: ParameterGroup, needed: Slot | None = None, *, apart: bool = False) -> None:
        """Start a group's gather unless it is there; see `ParameterGroup.start_gather`."""
        if group.start_gather(self.weights_ready, needed, apart=apart):
            self.gathers_started += 1
            self.weights_ready = None

    def optimizer_stepped(self) -> None:
        """An optimizer wrote main weights; code may read them at once."""
        self._has_stepped = True
        self.weights_changed()
        self.refresh_live()

    def refresh_live(self) -> None:
        """Weights changed; where a unit shows full parameters right now, code may read them before any other gather."""
        if any(unit.live for unit in self.units):
            self.refresh()

    def cover(self, entries: Iterable[Entry]) -> None:
        """An optimizer that reports its steps holds these parameters."""
        self._covered.update(id(entry) for entry in entries)

    @property
    def has_optimizer(self) -> bool:
        """Whether every trained parameter is held by an optimizer that reports its steps."""
        return all(
            id(entry) in self._covered
            for unit in self.units
            for group in unit.groups
            for entry in group.entries
            if entry.is_trained
        )

    # -- forward -------------------------------------------------------------------------------------------------------

    def note_forward(self, unit: Unit) -> None:
        """A unit's forward begins outside any backward: learn what follows what."""
        if self._in_backward:
            self.recover()
        last = self._last_forward() if self._last_forward is not None else None
        first = self._first_of_pass() if self._first_of_pass is not None else None
        if first is None or unit is first:
            self._first_of_pass = weakref.ref(unit)
            unit.previous_forward = None
            for reducer in self._reducers.values():
                reducer.close_main()
            if not self.has_optimizer:
                self.weights_changed()
        elif last is not None and last is not unit:
            last.next_forward = weakref.ref(unit)
            unit.previous_forward = weakref.ref(last)
        self._last_forward = weakref.ref(unit)

    def note_series(self, series: Series | None) -> None:
        """A series stands between two of its modules, or runs one; `None`: it has ended."""
        if self._series is not series:
            self.interrupt()
            self._series = series

    def interrupt(self) -> None:
        """Something else than the next module of a series comes: the series ends, unless this happens inside one of its modules."""
        if self._series is not None and not self._series.busy:
            self._series.stop()

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether a unit's weights stay between forward and backward: the root's, and those that backward needs first."""
        return unit is self.root or (self._ends_forward is not None and self._ends_forward() is unit)

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by every unit whose backward begins; the first call of a backward prepares its end."""
        if self._in_backward:
            return
        self._in_backward = True
        self.interrupt()
        compat.on_backward_end(self._end_backward)
        self._ends_forward = self._last_forward
        self._turn = 0
        if not self._order:
            self._agree_on_order()

    def note_backward(self, unit: Unit) -> None:
        """Learn in which order backwards come."""
        last = self._last_backward() if self._last_backward is not None else None
        if last is not None and last is not unit:
            last.next_backward = weakref.ref(unit)
        self._last_backward = weakref.ref(unit)

    def _agree_on_order(self) -> None:
        """Fix the order of reductions: reverse of rank 0's first forward; then units that did not run.

        Units that others borrow from come last (weights tied between the two ends of a model are done when all is), and
        so do those whose end nobody notices because no input of theirs needs a gradient.
        """
        units = self.units
        chain: list[Unit] = []
        unit = self._first_of_pass() if self._first_of_pass is not None else None
        while unit is not None and unit not in chain:
            chain.append(unit)
            unit = unit.next_forward() if unit.next_forward is not None else None
        order = [units.index(unit) for unit in reversed(chain)]
        order += [index for index in reversed(range(len(units))) if units[index] not in chain]
        order.sort(key=lambda index: len(units[index].users) > 1 or not units[index].hears_end)
        message = [order]
        for axis in self.mesh.axes:
            if dist.get_backend(axis.group) != "fake":
                dist.broadcast_object_list(message, group=axis.group, group_src=0, device=self.device)
        self._order = [weakref.ref(units[index]) for index in message[0]]
        for unit in units:
            for group in unit.groups:
                group.shard_axis = self.channels.separate(group.shard_axis)
                group.outer_axis = self.channels.separate(group.outer_axis) if group.outer_axis else None

    def unit_done(self, unit: Unit) -> None:
        """A unit's gradients are all there. Reduce it and whoever waited for it, if it is their turn."""
        self._done.add(id(unit))
        while self._turn < len(self._order):
            current = self._order[self._turn]()
            if current is not None and not (id(current) in self._done and current.is_done) and current.is_trainable:
                return
            self._turn += 1
            if current is not None:
                self._collect(current)

    def _collect(self, unit: Unit) -> None:
        """Take a unit's gradients and start their reduction."""
        groups = []
        for group in unit.groups:
            if any(entry.is_trained for entry in group.entries):
                groups.append(group)
            else:
                group.drop_full_gradients()
        if not groups:
            return
        with torch.no_grad():
            waiting = []
            for group in groups:
                reducer = self.reducer(group)
                if reducer.is_alone:
                    reducer.collect_alone()
                elif self._reduces(reducer.group):
                    waiting.append(reducer)
                else:
                    reducer.accumulate()
            if waiting:
                self._reduce(waiting)

    def _reduces(self, group: ParameterGroup) -> bool:
        """Whether this backward communicates the group's gradients."""
        return self.sync is Sync.ALL or (self.sync is Sync.SHARD and group.placement.gradient)

    def _reduce(self, reducers: list[GradientReducer]) -> None:
        while len(self._in_flight) >= _MAX_BUCKETS or any(
            reducer in sent.reducers for sent in self._in_flight for reducer in reducers
        ):
            self._retire()
        fillings = [reducer.prepare() for reducer in reducers]
        ready = self.streams.record()
        with self.streams.on(self.streams.reduce):
            self.streams.wait(ready, self.streams.reduce)
            for reducer, filling in zip(reducers, fillings, strict=True):
                reducer.reduce(reducer.fill(filling), self.sync)
                self.reductions_started += 1
            done = self.streams.record()
        self._in_flight.append(_InFlight(reducers, fillings, done))

    def _retire(self) -> None:
        """Wait, on the compute stream, for the oldest reduction and give its buckets back."""
        oldest = self._in_flight.popleft()
        self.streams.wait(oldest.done)
        for reducer in oldest.reducers:
            reducer.release_bucket()

    def _end_backward(self) -> None:
        """After the last node of a backward: reduce what is missing, join the streams, be at rest."""
        if not self._in_backward:
            return
        for reference in self._order[self._turn :]:
            unit = reference()
            if unit is not None:
                self._collect(unit)
        self._turn = len(self._order)
        for unit in self.units:
            if any((reducer := self.known_reducer(group)) and reducer.has_arrived for group in unit.groups):
                self._collect(unit)
        while self._in_flight:
            self._retire()
        for reducer in self._reducers.values():
            reducer.finish()
        self._rest()
        units, event = self.units_in_backward_order, self.streams.record()
        self._planner.after_backward(self.backwards_finished, units, event, has_stepped=self._has_stepped)

    def _rest(self) -> None:
        """Nobody holds weights, nobody waits."""
        for unit in self.units:
            unit.rest()
        self.backwards_finished += 1
        self._done.clear()
        self._in_backward = False
        self._first_of_pass = None
        self._last_forward = None
        self._last_backward = None

    def forget_events(self) -> None:
        """Forget what work waits for, at rest and after a synchronisation: events do not cross the border of a CUDA graph."""
        self.weights_ready = None
        self.pool.forget_events()
        for reducer in self._reducers.values():
            reducer.close_main()

    def recover(self) -> None:
        """Forget a backward that raised: its gradients are incomplete, so those not yet reduced are dropped."""
        while self._in_flight:
            self._retire()
        for unit in self.units:
            for group in unit.groups:
                group.drop_full_gradients()
        for reducer in self._reducers.values():
            reducer.release_bucket()
            reducer.drop()
        self._rest()

    @contextmanager
    def synchronizing(self, sync: Sync) -> Iterator[None]:
        """Inside, backwards reduce gradients only as far as `sync`."""
        previous, self.sync = self.sync, sync
        try:
            yield
        finally:
            self.sync = previous
