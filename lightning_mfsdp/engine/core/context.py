"""Context: what the units of one root share. Streams, slots, the recorded order, the microbatch, and the end of a backward.

Gathers follow the program, in an order that all ranks share: a unit gathers when it runs, and prefetches what
followed it last time. Reductions follow a list, see reduction_schedule.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.streams import Streams
from lightning_mfsdp.engine.comm.communicators import Channels
from lightning_mfsdp.engine.comm.gather_order import Event, GatherOrder
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.comm.ranges import Ranges
from lightning_mfsdp.engine.core.codec import quantize_all
from lightning_mfsdp.engine.core.gradients import Gradients, Sync
from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.core.planning import MemoryPlanner
from lightning_mfsdp.engine.core.reduction_schedule import ReductionSchedule
from lightning_mfsdp.engine.core.schedule import Schedule, expected_steps
from lightning_mfsdp.engine.core.storage import SlotPool
from lightning_mfsdp.engine.core.unit import Unit
from lightning_mfsdp.engine.core.weights import Age, GatherLane

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.call import GroupedModules

__all__ = ["Context", "OwnCode"]


class OwnCode:
    """The own code of an optimizer, which works on sharded tensors as long as this lives: the closure that its step was given holds it.

    So a step that raised is over when its frame is gone.

    Attributes:
        name: Class of the optimizer.
    """

    __slots__ = ("__weakref__", "name")

    def __init__(self, name: str) -> None:
        self.name = name


class Context:
    """State shared by a root and the units below it.

    Attributes:
        schedule: The order of units.
        reductions: The schedule of gradient reductions.
        order: The order of gathers, which must be the same on all ranks.
        lane: What all-gathers share.
        root: The outermost unit, while it exists.
        needs_refresh: Main weights may have been written since `refresh`.
        weight_writes: How often main weights were written, as far as known to all ranks: by an optimizer, a function, `load_state_dict`.
        gradient_writes: How often gradients were written, as far as known to all ranks: by a backward, an optimizer, a function.
        ignored: Parameters excluded from sharding, by identity.
        keeps_graph: The current or last backward keeps its graph for another one.
        outermost_task: Autograd's number of the current or last backward; what is recomputed in it may run others.
        shown_averages: Averages that currently replace main weights (ema.py).
        own_code: The optimizer's own code that works on sharded tensors now. Without a closure, one that raised ends when a forward begins.
        trace: Trace of the step that is running, if its gathers will be repeated.
    """

    def __init__(
        self, root: Unit, mesh: Mesh, device: torch.device, *, pooled: bool, symmetric: bool, zeros_unused: bool
    ) -> None:
        self.mesh = mesh
        self.device = device
        self.streams = Streams(device)
        self.order = GatherOrder.over(mesh.shard, device)
        self.order.expects = _expected(weakref.ref(self))
        self.ranges = Ranges(self.order.peer_error)
        self.pool = SlotPool(device, pooled=pooled)
        self.lane = GatherLane(streams=self.streams, pool=self.pool, order=self.order, ranges=self.ranges)
        self.channels = Channels(device, symmetric=symmetric)
        self._planner = MemoryPlanner(self.pool, self.channels, mesh, device)
        self.reductions = ReductionSchedule(self.streams, self.ranges, self.order, zeros_unused=zeros_unused)
        self._tracked: set[int] = set()  # parameters whose optimizer reports its steps, by identity of their entries
        self._watched_groups: list[weakref.ref[ParameterGroup]] = []  # whose rows may be written without notice
        self._groups_with_held_rows: list[weakref.ref[ParameterGroup]] = []  # of the watched groups: see `watch`
        self.ignored: dict[int, weakref.ref[nn.Parameter]] = {}
        self.shown_averages: weakref.WeakSet[object] = weakref.WeakSet()
        # Parameters that are not tracked; `None`: not looked up.
        self._untracked: list[weakref.ref[Entry]] | None = None
        self.trace: list[Callable[[], object]] | None = None
        self.backwards_finished = 0  # how many were noticed and have ended
        self._has_stepped = False  # an optimizer has, at least once
        self.root: Callable[[], Unit | None] = weakref.ref(root)
        self._units: list[weakref.ref[Unit]] = []  # in the order they were sharded
        self._num_groups = 0  # that ever joined: the number of the latest
        self.needs_refresh = True
        self.weight_writes = self.gradient_writes = 0
        # What puts back what optimizers hold, should their own code, which is running, raise.
        self.unfinished_steps: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.own_code: weakref.ref[OwnCode] | None = None
        self.schedule = Schedule()
        self._grouped: GroupedModules | None = None  # modules of one unit that run one after the other, at the moment
        # A backward was noticed, and has neither ended nor been forgotten (`recover`) after it raised.
        self._in_backward = False
        self.keeps_graph = False
        self.outermost_task = -1
        # What a backward calls at its end; `None` in a backward: that has raised.
        self._at_end: weakref.ref[Callable[[], None]] | None = None

    # -- units ---------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> list[Unit]:
        """All units, in the order they were sharded."""
        return [unit for reference in self._units if (unit := reference()) is not None]

    @property
    def groups(self) -> list[ParameterGroup]:
        """The groups of all units."""
        return [group for reference in self._units if (unit := reference()) is not None for group in unit.groups]

    @property
    def gradients(self) -> list[Gradients]:
        """Gradients of all groups that ever had one."""
        return [group.gradients for group in self.groups if group.gradients.was_needed]

    @property
    def units_in_backward_order(self) -> list[Unit]:
        """All units, in the order their gradients are reduced."""
        return self.reductions.in_order(self.units)

    def add(self, unit: Unit) -> None:
        """Take a unit in; it may come from a context of its own."""
        unit.context, unit.number = self, len(self._units)
        self._units.append(weakref.ref(unit))
        self._untracked = None
        for group in unit.groups:
            self._num_groups += 1
            group.attach(unit, self, self._num_groups)

    @property
    def hides_gradients(self) -> bool:
        """A forward is being recorded, and gradients are stored temporarily."""
        return self.reductions.hides_gradients

    def reduce_held_back(self) -> None:
        """Reduce what `no_sync` holds back, and what a backward left without notice, before gradients are read or cleared.

        A backward that reached no result of a unit, but something else that its forward computed, notified none. Collective if there is
        anything: what is held back is so on all ranks, and such a backward has to have run on all of them.
        """
        if self._in_backward and self._at_end is None:
            self.recover()  # the last backward raised
        if self._in_backward or compat.backward_task() != -1:
            return
        groups = self.groups
        for group in groups:
            if group.gradients.has_news:
                self._in_backward, self.keeps_graph = True, False
                end = self._end_backward
                self._at_end = self._watched(end)
                self._begin_reductions()
                end()
                break
        for group in groups:
            if group.gradients.held_back is not Sync.ALL:
                self.reductions.reduce_pending(self.units)
                break

    def end(self) -> None:
        """The root is no longer sharded."""
        self._units.clear()
        self.root = lambda: None

    def take_over(self, unit: Unit) -> None:
        """Keep what is known about optimizers and gradients in the context of a unit that moves into this one."""
        unit.forget_graphs()
        unit.reshard()  # its memory is of the pool that it leaves
        before = unit.context
        self._tracked |= before._tracked
        self._watched_groups += before._watched_groups
        self._groups_with_held_rows += before._groups_with_held_rows
        self.ignored.update(before.ignored)
        self.shown_averages.update(before.shown_averages)
        self._untracked = None

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights_changed(self, groups: Iterable[ParameterGroup] | None = None) -> None:
        """Main weights (of all groups, or these) were written: compute shards are refreshed before the next all-gather."""
        self.weight_writes += 1
        self._outdate(self.groups if groups is None else groups)

    def rows_written(self, group: ParameterGroup, *, weights: bool) -> None:
        """A function wrote to rows of a group: to main weights, or definitely to something else, such as gradients."""
        if weights:
            self.weight_writes += 1
        else:
            self.gradient_writes += 1
        self._outdate([group])

    def _outdate(self, groups: Iterable[ParameterGroup]) -> None:
        self.needs_refresh = True
        for group in groups:
            group.weights.outdate(by_optimizer=False)

    def refresh(self) -> None:
        """Bring compute shards up to date with main weights, all groups that changed in one launch (or call of a codec).

        Unsharded weights that a unit uses at the moment (manual optimization, a forward without backward) are filled again.
        """
        if not self.needs_refresh:
            return
        self.needs_refresh = False
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        changed = [group for unit in self.units for group in unit.groups if group.weights.age >= Age.STEPPED]
        for group in changed:
            weights = group.weights
            copies = weights.updates()
            targets += copies[0]
            sources += copies[1]
            if weights.is_sharded and not (weights.registered or weights.leases):
                weights.reshard()
        if targets:
            with torch.no_grad():
                compat.foreach_copy_(targets, sources)
        quantize_all(
            (codec, self.channels.sharing_rows(group.mesh, group.placement), group.weights.fragments())
            for group in changed
            if (codec := group.spec.codec) is not None
        )
        self.lane.weights_ready = self.streams.record()
        self._gather_whole_weights()
        for unit in self.units:
            if unit.uses_weights:
                for group in unit.all_groups:
                    if group.weights.is_sharded and group in changed:
                        group.weights.refill()

    def _gather_whole_weights(self) -> None:
        """Weights that stay whole are gathered once after a change, all of them now, in an order that all ranks share.

        Each rank may then run its units in an order of its own, or skip some. Ranks may differ in which of them are in use (a
        forward whose backward has not come), so that makes no difference.
        """
        for unit in reversed(self.units_in_backward_order):
            for group in unit.groups:
                if group.weights.age is not Age.GATHERED and not group.weights.is_sharded:
                    group.weights.refill()

    def optimizer_stepped(self, groups: Iterable[ParameterGroup]) -> None:
        """An optimizer wrote main weights of some groups; code may read them at once."""
        self.schedule.forget_pass()  # also after a forward whose backward never came
        self.order.stepped()
        self._has_stepped = self.needs_refresh = True
        self.weight_writes += 1
        self.gradient_writes += 1
        stepped = dict.fromkeys(groups)
        for group in stepped:
            group.weights.outdate(by_optimizer=True)
        for unit in dict.fromkeys(group.unit() for group in stepped):
            if unit is not None:
                unit.forget_graphs()
        self.refresh_shown()

    def refresh_shown(self) -> None:
        """Weights changed; where modules show unsharded ones right now, code may read them before any other gather.

        All ranks show the same at that point. They may differ in which units still have memory after forwards without a backward.
        """
        if any(unit.shown.now for unit in self.units):
            self.refresh()

    def track(self, entries: Iterable[Entry]) -> None:
        """An optimizer that reports its steps holds these parameters."""
        self._tracked.update(id(entry) for entry in entries)
        self._untracked = None

    def watch(self, group: ParameterGroup, *, rows_are_held: bool) -> None:
        """Local rows of a group may be written without notice, outside of a step: they are checked when a pass begins.

        Args:
            group: Of this root.
            rows_are_held: They are plain parameters in the hands of an optimizer that may also replace their `data`.
        """
        watched = [self._watched_groups, self._groups_with_held_rows] if rows_are_held else [self._watched_groups]
        for groups in watched:
            if (reference := weakref.ref(group)) not in groups:
                groups.append(reference)

    def note_writes(self) -> None:
        """Detect what was written to local rows that are watched."""
        for reference in self._groups_with_held_rows:
            if (group := reference()) is not None:
                group.weights.take_assigned()
        groups = [group for reference in self._watched_groups if (group := reference()) is not None]
        # The counter is checked inline, since this is done in every step.
        written = [
            group
            for group in groups
            if group.main.segments[0]._version != group.weights.known_writes and group.weights.note_writes()
        ]
        if written:
            self.weight_writes += 1
        if any(group.weights.age < Age.STEPPED for group in written):
            self._outdate(groups)  # all of them, since a rank without rows of one may not have written to it

    @property
    def has_optimizer(self) -> bool:
        """Whether every trainable parameter is held by an optimizer that reports its steps."""
        if self._untracked is None:
            entries = [entry for group in self.groups for entry in group.entries]
            self._untracked = [weakref.ref(entry) for entry in entries if id(entry) not in self._tracked]
        return not any(entry.is_trained for reference in self._untracked if (entry := reference()) is not None)

    # -- forward -------------------------------------------------------------------------------------------------------

    def note_forward(self, unit: Unit) -> Unit | None:
        """A unit's forward begins outside any backward. Returns which came next last time."""
        if self._grouped is not None:
            self.interrupt()
        if self._in_backward:
            self.recover()
        if self.schedule.note_forward(unit.number):
            for group in self.groups:
                group.gradients.close_main()
            if self.unfinished_steps:
                self._finish_steps()
            if not self.has_optimizer:
                self._outdate(self.groups)
            elif self._watched_groups:
                self.note_writes()
        following = self.schedule.next_forward(unit.number)
        return None if following is None else self._units[following]()

    def _finish_steps(self) -> None:
        """An optimizer's own code has raised: optimizers again show what modules show."""
        for reference in self.unfinished_steps:
            if (finish := reference()) is not None:
                finish()
        self.unfinished_steps.clear()

    def note_grouped_modules(self, grouped: GroupedModules | None) -> None:
        """Grouped modules are between two modules, or one runs; `None`: the run has ended."""
        if self._grouped is not grouped:
            self.interrupt()
            self._grouped = grouped

    def interrupt(self) -> None:
        """Anything but the next of grouped modules runs: their run ends, unless this happens inside one of them."""
        if self._grouped is not None and not self._grouped.busy:
            self._grouped.stop()

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by every unit whose backward begins; the first call of a backward prepares its end."""
        if self._in_backward:
            if self._at_end is not None:
                return
            self.recover()  # the previous backward raised, and this is of the same graph or of another one
        self._in_backward, self.keeps_graph = True, compat.keeps_graph()
        self.outermost_task = compat.backward_task()
        self.interrupt()
        self._show_for_backward()
        end: Callable[[], None] = self._end_backward
        if compat.in_transform():
            end = partial(compat.outside_transforms, end)
        self._at_end = self._watched(end)
        compat.on_backward_end(end)
        self._begin_reductions(is_idle=not self._trains())

    def _begin_reductions(self, *, is_idle: bool = False) -> None:
        self.schedule.begin_backward()
        self.reductions.is_idle = is_idle
        if not (self.reductions.is_idle or self.reductions.begin(self.groups)):
            ran = [unit for number in self.schedule.ran if (unit := self._units[number]()) is not None]
            self.reductions.agree_on_order(self.units, ran, self.mesh, self.device)
            self._separate_channels()

    def _trains(self) -> bool:
        """Whether the current backward may compute gradients of parameters, on any rank; `autograd.grad` of inputs does not.

        A rank whose step uses no unit does not detect such a backward, so it may use no collectives but gathers. Which other parameters
        a backward reaches is not checked: reentrant checkpoints run one inside of it, parameters are used outside forwards, and
        other ranks may use others.
        """
        for unit in self.units:
            for group in unit.groups:
                for entry in group.entries:
                    if entry.is_trained and compat.accumulates(entry.full):
                        return True
        return not compat.leaves_gradients_out()

    def _show_for_backward(self) -> None:
        """Modules may read weights in their backward. Units that no call of their own will unshard show theirs from now to the end."""
        for unit in self.units:
            if unit.uses_weights or unit.step_buffers is not None:
                # What was resharded since its step is gathered to where autograd saved it; what was kept is there already.
                unit.unshard(None if unit.uses_weights else unit.step_buffers, for_backward=True)
                unit.register()

    def _watched(self, end: Callable[[], None]) -> weakref.ref[Callable[[], None]]:
        """A reference to what a backward calls at its end. If it dies without having been called, the backward raised."""
        this = weakref.ref(self)

        def gone(reference: weakref.ref[Callable[[], None]]) -> None:
            context = this()
            if context is not None and context._at_end is reference:
                context._at_end = None
                context.backward_raised()

        return weakref.ref(end, gone)

    def backward_raised(self) -> None:
        """A backward, if one was running, is over: code sees sharded weights."""
        if self._in_backward:
            for unit in self.units:
                unit.unregister()

    @property
    def in_backward(self) -> bool:
        """Whether the engine has detected a running backward."""
        return self._in_backward

    def note_backward(self, unit: Unit) -> Unit | None:
        """The backward of a call begins. Returns the unit whose backward is expected next."""
        self.schedule.note_backward(unit.number)
        following = self.schedule.next_backward(unit.number)
        return None if following is None else self._units[following]()

    def _separate_channels(self) -> None:
        """Where calls queue on a device, reductions and gathers get separate communicators in all groups."""
        for unit in self.units:
            for group in unit.groups:
                axes = group.axes
                axes.shard = self.channels.separate(axes.shard)
                axes.outer = self.channels.separate(axes.outer) if axes.outer else None

    def _end_backward(self) -> None:
        """After the last node of a backward: reduce what is missing, join the streams, reset the state."""
        if not self._in_backward:
            return
        self.reductions.finish(self.units)
        self._rest()
        units, event = self.units_in_backward_order, self.streams.record()
        has_stepped = self._has_stepped and not self.reductions.is_idle
        self._planner.after_backward(self.backwards_finished, units, event, has_stepped=has_stepped)
        self.reductions.run_hooks(units)

    def _rest(self) -> None:
        """Release all leases and stop all waiting."""
        self.ranges.end_all("backward")
        units = self.units
        for unit in units:
            unit.end_backward(keeps_graph=self.keeps_graph)
        self.backwards_finished += 1
        self.gradient_writes += 1
        self._in_backward = False
        self.schedule.end_backward()

    def forget_events(self) -> None:
        """Forget events to wait for, between steps and after a synchronization: events must not cross the border of a CUDA graph."""
        self.lane.weights_ready = None
        self.pool.forget_events()
        for unit in self.units:
            for group in unit.groups:
                group.weights.forget_event()
                group.gradients.close_main()
        self.reductions.forget_events()

    def recover(self) -> None:
        """Forget a backward that raised: its gradients are incomplete, so those not yet reduced are dropped."""
        self.reductions.drop(self.groups)
        self._rest()


def _expected(this: weakref.ref[Context]) -> Callable[[], list[list[Event]]]:
    """What a root expects of its first steps, asked when its first unit is gathered."""

    def steps() -> list[list[Event]]:
        context = this()
        assert context is not None, "its units gather"
        return expected_steps(context.units, has_reductions=context.order.has_reductions)

    return steps
