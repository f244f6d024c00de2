"""ReductionSchedule: when the gradients of which unit are reduced, in an order that all ranks share.

The order is a list that rank 0 determines at the first backward: a unit that is ready early waits for its turn, and one whose
gradients never arrive (unused on this rank) is reduced as zeros at the end. Parameters that no rank used have no gradient (usage.py).

Where there is an outer axis, each axis reduces on a stream of its own, so that the links of both are busy at once:

    shard axis, in buckets          unit 3    unit 2    unit 1    unit 0
    outer axis, of this rank's part           unit 3    unit 2    unit 1    unit 0

A bucket is free when the shard axis is done with it. Both axes have the units in the same order, and on the host a unit's two reductions
are issued one after the other: ranks issue the same in the same order, whatever runs at the same time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.base.streams import Event, Streams
from lightning_mfsdp.engine.comm.gather_order import REDUCTION, GatherOrder
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.comm.ranges import Ranges
from lightning_mfsdp.engine.core.buffer import FlatBuffer
from lightning_mfsdp.engine.core.gradient_hooks import run_gradient_hooks
from lightning_mfsdp.engine.core.gradients import DirectWrites, Filling, Sync
from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.unit import Unit, is_trained
from lightning_mfsdp.engine.core.usage import Usage

__all__ = ["ReductionSchedule"]

_MAX_BUCKETS = 2
_MAX_OVER_OUTER = 2


class _InFlight(NamedTuple):
    """A unit's reduction over one axis, or over the only one, that was issued.

    Attributes:
        groups: Whose buckets are free after it.
        kept: What it reads and writes, kept alive until
        done: it is done.
    """

    groups: list[ParameterGroup]
    kept: Sequence[Filling | FlatBuffer]
    done: Event


class ReductionSchedule:
    """The gradients of one root's units.

    Attributes:
        sync: How far the gradients of the current microbatch are reduced.
        started: Collectives issued for gradients so far, for inspection.
        zeros_unused: Parameters that no rank used get zeros as their gradient, instead of none.
        recordings: How many CUDA graphs include backwards, now or later. A graph cannot query whether a parameter was used: zeros then.
        is_idle: The current backward computes no gradients of parameters.
        hides_gradients: A forward is being recorded, and gradients are stored temporarily.
        watches: Called with each unit whose gradients have arrived and are not reduced yet; mostly empty (gradient_watch.py).
    """

    def __init__(self, streams: Streams, ranges: Ranges, order: GatherOrder, *, zeros_unused: bool) -> None:
        self.sync = Sync.ALL
        self.zeros_unused = zeros_unused
        self.recordings = 0
        self.hides_gradients = self.is_idle = False
        self.started = 0
        self.watches: list[Callable[[Unit], None]] = []
        self._streams = streams
        self._ranges = ranges
        self._gather_order = order
        self._order: list[weakref.ref[Unit]] = []  # in which all ranks reduce; empty before the first backward
        self._turn = 0  # index in it of the unit that is reduced next
        self._done: set[int] = set()  # numbers of units whose gradients are complete in this backward
        self._with_news: dict[ParameterGroup, list[int]] = {}  # shown by the last wait, for hooks
        self._in_flight: deque[_InFlight] = deque()  # reductions that were issued, and whose buckets have memory
        self._over_outer: deque[_InFlight] = deque()  # those that were issued over the outer axis
        self._reduced: dict[ParameterGroup, None] = {}  # in this backward, in an order that all ranks share
        self._usage = Usage(streams)

    def writes(self, group: ParameterGroup) -> DirectWrites | None:
        """Where a layer may write gradients of a group in this backward; `None`: leave them to autograd."""
        return None if self.is_idle or not group.mesh.process_groups else self.required_writes(group)

    def required_writes(self, group: ParameterGroup) -> DirectWrites:
        """Where a layer writes gradients of a group in this backward that it cannot leave to autograd."""
        if group.gradients.writes is None:
            while self._is_on_its_way(group):
                self._retire() if self._in_flight else self._retire_outer()
        return group.gradients.begin_writes(self.sync)

    def in_order(self, units: Sequence[Unit]) -> list[Unit]:
        """A root's units in the order they are reduced."""
        ordered = [unit for reference in self._order if (unit := reference()) is not None]
        return ordered or list(units[::-1])

    def begin(self, groups: Sequence[ParameterGroup], *, is_idle: bool) -> bool:
        """A backward of a root with these groups begins. Returns whether the order of its reductions is fixed, if it has some.

        Args:
            groups: All of the root.
            is_idle: It computes no gradients of parameters.
        """
        self.is_idle = is_idle
        if is_idle:
            return True
        self._turn = 0
        for group in groups:
            group.gradients.begin_backward()
        return bool(self._order)

    def agree_on_order(self, units: Sequence[Unit], ran: Sequence[Unit], mesh: Mesh, device: torch.device) -> None:
        """Fix the order of reductions: reverse of rank 0's first forward; then units that did not run.

        Units whose parameters others share come last (weights tied between the two ends of a model are complete only at the end), and
        so do those whose end cannot be detected because none of their inputs needs a gradient. Collective.

        Args:
            units: Of the root, in the order they were sharded.
            ran: Those whose forward ran in this pass, in their order.
            mesh: Whose first rank decides.
            device: Of the message.
        """
        order = [units.index(unit) for unit in reversed(ran)]
        order += [index for index in reversed(range(len(units))) if units[index] not in ran]
        hears = {
            index
            for index in order
            if units[index].calls.notice_their_end or units[index].calls.recomputations.expected
        }
        order.sort(key=lambda index: len(units[index].users) > 1 or index not in hears)
        message = [order]
        for axis in mesh.all_axes:
            if dist.get_backend(axis.group) != "fake":
                dist.broadcast_object_list(message, group=axis.group, group_src=0, device=device)
        self._order = [weakref.ref(units[index]) for index in message[0]]

    def unit_done(self, unit: Unit) -> None:
        """A unit's gradients are complete. If it is its turn, reduce it and the units that waited for it."""
        if self.is_idle:
            return
        self._done.add(unit.number)
        while self._turn < len(self._order):
            current = self._order[self._turn]()
            if current is not None and current.number not in self._done and current.is_trainable:
                return
            self._turn += 1
            if current is not None:
                self._collect(current)

    def _collect(self, unit: Unit) -> None:
        """Take a unit's gradients and start their reduction."""
        for watch in self.watches:
            watch(unit)
        groups = self._trained(unit.groups)
        if not groups:
            return
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            waiting = []
            for group in groups:
                gradients = group.gradients
                if not group.mesh.process_groups:  # one rank
                    gradients.collect_alone(zeros_unused=self.zeros_unused)
                elif self.sync is Sync.ALL or gradients.communicates(self.sync):
                    waiting.append(group)
                else:
                    gradients.accumulate()
            if waiting:
                self._reduce(waiting)

    def _trained(self, groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
        """Groups whose gradients are required, or were when they were held back; gradients of others are dropped."""
        trained = []
        for group in groups:
            if is_trained(group) or group.gradients.held:
                trained.append(group)
            else:
                group.gradients.drop_news()
        return trained

    def _make_room(self, groups: Sequence[ParameterGroup]) -> None:
        """Free the buckets needed for the given reductions, which come next on all ranks."""
        if self._gather_order.has_reductions:  # those of whole weights, too: they come between gathers of others
            self._gather_order.note(groups[0].weights.number, groups[0].name, REDUCTION)
        while len(self._in_flight) >= _MAX_BUCKETS:
            self._retire()
        while self._over_outer and len(self._over_outer) >= _MAX_OVER_OUTER:
            self._retire_outer()
        for group in groups:
            while self._is_on_its_way(group):
                self._retire() if self._in_flight else self._retire_outer()

    def _is_on_its_way(self, group: ParameterGroup) -> bool:
        """Whether gradients of a group are being reduced."""
        for sent in self._in_flight:
            if group in sent.groups:
                return True
        for sent in self._over_outer:  # noqa: SIM110 - a generator costs host time, in every unit
            if group in sent.groups:
                return True
        return False

    def _reduce(self, groups: list[ParameterGroup], reached: Sync = Sync.NONE) -> None:
        """Start the reduction of what groups have; `reached`: of what waits, how far it is reduced (`Gradients.prepare`)."""
        self._make_room(groups)
        fillings = [group.gradients.prepare(reached) for group in groups]
        ready, zeros_unused = self._streams.record(), self.zeros_unused or self.recordings > 0
        outer_later = self.sync is Sync.SHARD
        rests: list[tuple[ParameterGroup, FlatBuffer, bool]] = []
        with self._streams.on(self._streams.reduce):
            self._streams.wait(ready, self._streams.reduce)
            for group, filling in zip(groups, fillings, strict=True):
                with self._ranges.around("reduce", group.name):
                    rest = group.gradients.reduce(filling, outer_later=outer_later, zeros_unused=zeros_unused)
                if rest is not None:
                    rests.append((group, rest, filling.adds))
                waits = outer_later and (outer := group.axes.outer) is not None and outer.size > 1
                if not (waits or zeros_unused):
                    self._reduced[group] = None
                self.started += 1
            done = self._streams.record()
        # What stays whole is in its bucket until the outer axis has reduced it, too.
        buckets = [group for group in groups if group.placement.main] if rests else groups
        self._in_flight.append(_InFlight(buckets, fillings, done))
        if rests:
            self._reduce_over_outer(rests, done, zeros_unused=zeros_unused)

    def _reduce_over_outer(
        self, rests: Sequence[tuple[ParameterGroup, FlatBuffer, bool]], ready: Event, *, zeros_unused: bool
    ) -> None:
        """Start the reduction over the outer axis of what was reduced over the shard axis.

        Args:
            rests: Groups, what they have, and whether that is added to their main gradients.
            ready: After it was reduced over the shard axis.
            zeros_unused: Parameters that no rank used get zeros.
        """
        streams, groups = self._streams, [group for group, _, _ in rests]
        with streams.on(streams.outer):
            streams.wait(ready, streams.outer)
            for group, rest, adds in rests:
                with self._ranges.around("reduce", group.name):
                    group.gradients.reduce_outer(rest, adds=adds, zeros_unused=zeros_unused)
            done = streams.record()
        self._over_outer.append(_InFlight(groups, [rest for _, rest, _ in rests], done))

    def _retire(self) -> None:
        """Wait, on the compute stream, for the oldest reduction over the shard axis, and free its buckets."""
        oldest = self._in_flight.popleft()
        if oldest.done is not None:
            self._streams.wait(oldest.done)
        for group in oldest.groups:
            group.gradients.release_bucket()

    def _retire_outer(self) -> None:
        """The same for the oldest reduction over the outer axis; some of what it kept is memory of the stream of the shard axis."""
        oldest = self._over_outer.popleft()
        if oldest.done is not None:
            self._streams.wait(oldest.done)
            self._streams.wait(oldest.done, self._streams.reduce)
        for group in oldest.groups:
            group.gradients.release_bucket()

    def finish(self, units: Sequence[Unit]) -> None:
        """The last node of a backward has run: reduce what is missing, and wait on the compute stream."""
        if self.is_idle:
            return
        groups = [group for unit in units for group in unit.groups]
        for reference in self._order[self._turn :]:
            unit = reference()
            if unit is not None:
                self._collect(unit)
        self._turn = len(self._order)
        if self.sync is not Sync.NONE:
            self._gather_order.end_backward()
        late = [unit for unit in units if self._has_unreduced(unit)]
        for unit in late:
            if not self._communicates(unit):
                self._collect(unit)
        self._wait(groups)
        self._done.clear()
        if self.sync is not Sync.ALL:
            for group in groups:
                group.gradients.hold_back(self.sync)
        if reduced := [unit.name for unit in late if self._communicates(unit)]:
            raise EngineStateError(
                f"{', '.join(reduced)}: on rank {dist.get_rank()} a gradient came after the gradients of this unit had been reduced, which "
                "happens once in a backward. It comes from a backward inside the backward, such as that of an autograd function that runs "
                "modules, or of a checkpoint that is older than two backwards; run such a backward under no_sync(module), and "
                "reduce_pending(module) after it"
            )

    def reduce_pending(self, units: Sequence[Unit]) -> None:
        """Between backwards: reduce what is held back, over the axes that it waits for."""
        groups = [group for unit in units for group in unit.groups]
        reached = {group: group.gradients.take_back() for group in groups}
        with self.synchronizing(Sync.ALL), torch.no_grad():
            for unit in self.in_order(units):
                waiting = [group for group in unit.groups if reached[group] is not Sync.ALL]
                if not waiting:
                    continue
                for watch in self.watches:
                    watch(unit)
                waiting = self._trained(waiting)
                for sync in (Sync.SHARD, Sync.NONE):
                    if alike := [group for group in waiting if reached[group] is sync]:
                        self._reduce(alike, sync)
        self._wait(groups)
        self.run_hooks(units)

    def _wait(self, groups: Sequence[ParameterGroup]) -> None:
        """Have the compute stream wait for all reductions, and show their results."""
        while self._in_flight:
            self._retire()
        while self._over_outer:
            self._retire_outer()
        if self._reduced:
            self._usage.exchange(list(self._reduced))
            self._reduced.clear()
        self._with_news = {}
        for group in groups:
            news = group.gradients.finish()
            if news and group.gradients.hooks:
                self._with_news[group] = news

    def run_hooks(self, units: Sequence[Unit]) -> None:
        """Hooks of parameters whose gradients were reduced last, in an order that all ranks share."""
        news, self._with_news = self._with_news, {}
        if news:
            groups = [group for unit in self.in_order(units) for group in unit.groups if group in news]
            run_gradient_hooks([(group, news[group]) for group in groups])

    def _has_unreduced(self, unit: Unit) -> bool:
        """Whether there are gradients of a unit that were not taken yet; those that are not required are dropped."""
        found = False
        for group in unit.groups:
            if group.gradients.has_news:
                if is_trained(group):
                    found = True
                else:
                    group.gradients.drop_news()
        return found

    def _communicates(self, unit: Unit) -> bool:
        """Whether this backward reduces the unit's gradients over ranks."""
        return any(group.gradients.communicates(self.sync) for group in unit.groups)

    def drop(self, groups: Sequence[ParameterGroup]) -> None:
        """A backward raised: forget what it left."""
        while self._in_flight:
            self._retire()
        while self._over_outer:
            self._retire_outer()
        for group in groups:
            group.gradients.drop_news()
            group.gradients.drop()
            group.gradients.finish()
        self._reduced.clear()
        self._done.clear()

    def forget_events(self) -> None:
        """Drop the events of what was issued; see `Context.forget_events`."""
        self._in_flight = deque(sent._replace(done=None) for sent in self._in_flight)
        self._over_outer = deque(sent._replace(done=None) for sent in self._over_outer)

    @contextmanager
    def hiding_gradients(self) -> Iterator[None]:
        """Inside, a forward is recorded, and a step that reads gradients is refused."""
        self.hides_gradients = True
        try:
            yield
        finally:
            self.hides_gradients = False

    def include_in_graph(self) -> None:
        """A CUDA graph includes backwards from now on, or will, until `leave_graph`."""
        self.recordings += 1

    def leave_graph(self) -> None:
        """The opposite of `include_in_graph`."""
        self.recordings -= 1

    @contextmanager
    def synchronizing(self, sync: Sync) -> Iterator[None]:
        """Inside, backwards reduce gradients only as far as `sync`."""
        previous, self.sync = self.sync, sync
        try:
            yield
        finally:
            self.sync = previous
