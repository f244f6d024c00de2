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
from lightning_mfsdp.engine.core.backward import Backward
from lightning_mfsdp.engine.core.codec import quantize_all
from lightning_mfsdp.engine.core.gradients import Gradients, Sync
from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.planning import MemoryPlanner
from lightning_mfsdp.engine.core.reduction_schedule import ReductionSchedule
from lightning_mfsdp.engine.core.schedule import Schedule, expected_steps
from lightning_mfsdp.engine.core.storage import SlotPool
from lightning_mfsdp.engine.core.unit import Unit
from lightning_mfsdp.engine.core.weights import Age, GatherLane
from lightning_mfsdp.engine.core.writes import Optimizers, RowsOf, Writes

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.call import GroupedModules

__all__ = ["Context"]


class Context:
    """State shared by a root and the units below it.

    Attributes:
        schedule: The order of units.
        reductions: The schedule of gradient reductions.
        lane: What all-gathers share: streams, memory, and the order of gathers, which must be the same on all ranks.
        root: The outermost unit, while it exists.
        backward: The one that is running.
        writes: To main weights and gradients.
        optimizers: Those that step parameters of its units.
        ignored: Parameters excluded from sharding, by identity.
        shown_averages: Averages that currently replace main weights (ema.py).
    """

    def __init__(
        self,
        root: Unit,
        mesh: Mesh,
        device: torch.device,
        *,
        pooled: bool,
        symmetric: bool,
        zeros_unused: bool,
        ignored: dict[int, weakref.ref[nn.Parameter]],
    ) -> None:
        self.mesh = mesh
        self.device = device
        order = GatherOrder.over(mesh.shard, device, _expected(weakref.ref(self)))
        pool, streams, ranges = SlotPool(device, pooled=pooled), Streams(device), Ranges(order.peer_error)
        self.lane = GatherLane(streams=streams, pool=pool, order=order, ranges=ranges)
        self.channels = Channels(device, symmetric=symmetric)
        self._planner = MemoryPlanner(pool, self.channels, mesh, device)
        self.schedule = Schedule()
        self.reductions = ReductionSchedule(streams, ranges, order, zeros_unused=zeros_unused)
        self.backward = Backward(weakref.WeakMethod(self.backward_raised))
        self.writes = Writes()
        self.optimizers = Optimizers(entry for group in root.groups for entry in group.entries)
        self.ignored = ignored
        self.shown_averages: weakref.WeakSet[object] = weakref.WeakSet()
        self.root: Callable[[], Unit | None] = weakref.ref(root)
        self._units: list[weakref.ref[Unit]] = []  # in the order they were sharded
        self._grouped: GroupedModules | None = None  # modules of one unit that run one after the other, at the moment

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
        """Take a unit in."""
        number_of_group = len(self.groups) + 1
        unit.join(self, len(self._units))
        self._units.append(weakref.ref(unit))
        for number, group in enumerate(unit.groups, number_of_group):
            group.attach(unit, self, number)
            self.writes.watch(group, RowsOf.NO_OPTIMIZER)

    def reduce_held_back(self) -> None:
        """Reduce what `no_sync` holds back, and what a backward left without notice, before gradients are read or cleared.

        A backward that reached no result of a unit, but something else that its forward computed, notified none. Collective if there is
        anything: what is held back is so on all ranks, and such a backward has to have run on all of them.
        """
        if self.backward.has_raised:
            self.recover()
        if self.backward.at_end is not None or compat.backward_task() != -1:
            return
        groups = self.groups
        for group in groups:
            if group.gradients.has_news:
                end = self._end_backward
                self.backward.begin(end)
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
        """Take a unit in from a context of its own, with what that knows of writes and optimizers."""
        unit.forget_graphs()
        unit.reshard()  # its memory is of the pool that it leaves
        before = unit.context
        self.writes.take_over(before.writes)
        self.optimizers.take_over(before.optimizers)
        self.ignored.update(before.ignored)
        self.shown_averages.update(before.shown_averages)
        self.add(unit)

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights_changed(self, groups: Iterable[ParameterGroup] | None = None) -> None:
        """Main weights (of all groups, or these) were written: compute shards are refreshed before the next all-gather."""
        self.writes.to_weights(self.groups if groups is None else groups)

    def refresh(self) -> None:
        """Bring compute shards up to date with main weights, all groups that changed in one launch (or call of a codec).

        Unsharded weights that a unit uses at the moment (manual optimization, a forward without backward) are filled again.
        """
        if not self.writes.needs_refresh:
            return
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        changed = self.writes.take_outdated(self.groups)
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
        self.lane.note_written()
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
        self.lane.order.stepped()
        stepped = dict.fromkeys(groups)
        self.writes.by_optimizer(stepped)
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

    # -- forward -------------------------------------------------------------------------------------------------------

    def note_forward(self, unit: Unit) -> Unit | None:
        """A unit's forward begins outside any backward. Returns which came next last time."""
        if self._grouped is not None:
            self.interrupt()
        if self.backward.at_end is not None:
            self.recover()
        begins, following = self.schedule.note_forward(unit.number)
        if begins:
            for group in self.groups:
                group.gradients.close_main()
            self.optimizers.finish()
            if self.optimizers.hold_all:
                self.writes.look()
                self.writes.warn_of_unnoticed()
            else:
                self.writes.outdate(self.groups)
        return None if following is None else self._units[following]()

    def note_grouped_modules(self, grouped: GroupedModules | None) -> None:
        """Grouped modules are between two modules, or one runs; `None`: the run has ended."""
        if self._grouped is not grouped:
            self.interrupt()
            self._grouped = grouped

    def interrupt(self) -> None:
        """Anything but the next of grouped modules runs: their run ends, unless this happens inside one of them."""
        if self._grouped is not None and not self._grouped.busy:
            self._grouped.stop()

    def end_forwards(self) -> None:
        """Code around all forwards has raised, so none runs any more. Of an interrupt (Ctrl-C) PyTorch tells no hook."""
        for unit in self.units:
            unit.calls.end_forwards()

    # -- backward ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called by every unit whose backward begins; the first call of a backward prepares its end."""
        if (at_end := self.backward.at_end) is not None:
            if at_end() is not None:
                return
            self.recover()  # the previous backward raised, and this is of the same graph or of another one
        end: Callable[[], None] = self._end_backward
        if compat.in_transform():
            end = partial(compat.outside_transforms, end)
        self.backward.begin(end)
        compat.on_backward_end(end)
        del end  # the traceback of an error below may be kept, and only autograd may hold it
        self.interrupt()
        self.optimizers.finish()
        self.writes.outdate_graphs()
        self._show_for_backward()
        self._begin_reductions(is_idle=not self._trains())

    def _begin_reductions(self, *, is_idle: bool = False) -> None:
        self.schedule.begin_backward()
        if not self.reductions.begin(self.groups, is_idle=is_idle):
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
                buffers = None if unit.uses_weights else unit.step_buffers
                unit.unshard(buffers, used=True, for_backward=True)
                unit.register()

    def backward_raised(self) -> None:
        """A backward, if one was running, is over: code sees sharded weights."""
        if self.backward.is_noticed:
            for unit in self.units:
                unit.unregister()

    def note_backward(self, unit: Unit) -> Unit | None:
        """The backward of a call begins. Returns the unit whose backward is expected next."""
        following = self.schedule.note_backward(unit.number)
        return None if following is None else self._units[following]()

    def _separate_channels(self) -> None:
        """Where calls queue on a device, reductions and gathers get separate communicators in all groups."""
        for unit in self.units:
            for group in unit.groups:
                group.axes.replace(self.channels.separate)

    def _end_backward(self) -> None:
        """After the last node of a backward: reduce what is missing, join the streams, reset the state."""
        if self.backward.at_end is None:
            return
        self.reductions.finish(self.units)
        self._rest()
        units, event = self.units_in_backward_order, self.lane.streams.record()
        has_stepped = self.writes.has_stepped and not self.reductions.is_idle
        self._planner.after_backward(self.backward.num_ended, units, event, has_stepped=has_stepped)
        self.reductions.run_hooks(units)

    def _rest(self) -> None:
        """Release all leases and stop all waiting."""
        self.lane.ranges.end_all("backward")
        for unit in self.units:
            unit.end_backward(keeps_graph=self.backward.keeps_graph)
        self.backward.end()
        self.schedule.forget_pass()

    def forget_events(self) -> None:
        """Forget events to wait for, between steps and after a synchronization: events must not cross the border of a CUDA graph."""
        self.lane.forget_events()
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
        return expected_steps(context.units, has_reductions=context.lane.order.has_reductions)

    return steps
