"""Weights: what forward and backward read of a group, from the main weight to the parameters that modules show.

    main weight           main dtype, this rank's rows: the optimizer's
      | cast once after each change, or quantized (codec.py); or cast by each all-gather where no compute shard is kept
    compute shard         compute dtype, this rank's shard, or everything where weights are whole; the main weight itself if dtypes match
      | all-gather
    unsharded weight      compute dtype, everything: a pooled buffer, or the compute shard where weights are whole
      | views
    unsharded parameters  what modules show while they run

Three questions are kept apart:

    what is in memory     `present`, and in which pooled buffer (`buffer`)
    how old it is         `age`: whether the compute shard has the main weight's values, and other ranks' shards were gathered since
    what modules show     `registered`

and memory changes by these moves alone:

    state                          move                  next         what happens
    sharded                        unshard               gathering    the pooled buffer is taken and the all-gather starts
    sharded                        unshard ahead         sharded      if another client holds the buffer that saved tensors point into
    gathering, unsharded           unshard               the same     another form that a codec keeps is gathered in addition
    gathering, unsharded, in use   unshard elsewhere     gathering    resharded and gathered where saved tensors point; never ahead
    gathering                      wait                  unsharded    the current stream waits for the all-gather
    gathering, unsharded           reshard               sharded      modules show sharded parameters, the buffer is free again
    gathering, unsharded, unused   give up               sharded      another group would have the buffer
    gathering, unsharded           give up, required     sharded      another group's saved tensors point into the buffer
    any                            refill                the same     the main weight has changed while the unsharded one is being read

A unit that computes with the weights holds a lease. Without one, what is in memory was gathered ahead or kept for a backward, and goes as
soon as its memory is needed or the main weight changes.

Alternatives considered: a lease for each call of a unit (units end the leases of all calls at once, so counting units is equivalent); two
objects for the two forms of a codec (registration, memory and age exist once).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.base.streams import Event, Streams
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.comm.gather_order import BACKWARD, FORWARD, GatherOrder
from lightning_mfsdp.engine.comm.ranges import Ranges
from lightning_mfsdp.engine.core.buffer import FlatBuffer, buffer_numel
from lightning_mfsdp.engine.core.codec import Fragment
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.core.storage import Client, Slot, SlotPool
from lightning_mfsdp.engine.core.versions import Place, Versions

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = ["Age", "GatherLane", "Weights"]


@dataclass(eq=False, kw_only=True)
class GatherLane:
    """What the all-gathers of all groups of a root share.

    Attributes:
        weights_ready: Event after the last write to any main weight or compute shard; `None` once the gather stream has waited for it.
        started: How many were issued, for inspection.
    """

    streams: Streams
    pool: SlotPool
    order: GatherOrder
    ranges: Ranges
    weights_ready: Event = None
    started: int = 0

    def note_written(self) -> None:
        """Work that writes main weights or compute shards was issued on the current stream: gathers wait for it."""
        self.weights_ready = self.streams.record()

    def forget_events(self) -> None:
        """All work is done: no gather has to wait for it."""
        self.weights_ready = None
        self.pool.forget_events()


_READ_BY_FORWARD = 1  # the first of the forms that a codec keeps; the last one is read by backward


class Age(IntEnum):
    """What the compute shard was made of, from new to old."""

    GATHERED = 0  # the main weight's values, which were gathered since
    CAST = 1  # the main weight's values
    STEPPED = 2  # earlier values: an adopted optimizer has written the main weight since
    WRITTEN = 3  # earlier values: something else has


class Weights:
    """The compute weights of one group.

    Attributes:
        name: Of the group.
        number: Of the group among those of its root.
        shards: The compute shard, one buffer for each form that a codec keeps; empty where each all-gather casts.
        present: Which forms of the unsharded weight are in memory or on their way, one bit each.
        stays: Its memory stays and keeps its values while it is resharded, until an optimizer steps: a forward has left tensors that point
            there, by which no backward asks for it. It is gathered as often as otherwise, since other ranks may have found no such tensors.
        registered: Modules show unsharded parameters.
        leases: How many units compute with them.
        age: Of the compute shard, or of what was gathered where there is none.
        known_rows: Local rows, which have version counters of their own, and what these were when they were last checked.
        cast_versions: What they were when an optimizer cast the main weight, which is in host memory, to the compute shard.
        lost_writes: Unsharded parameters that a forward wrote to, though main weights of another dtype cannot adopt that.
        client: Holds pooled buffers for the unsharded weight.
        is_sharded: It is unsharded only while it is used: gathered from other ranks, or at least cast.
    """

    def __init__(self, owner: ParameterGroup, shards: list[FlatBuffer]) -> None:
        self.name, self.number = owner.name, 0
        self.shards = shards
        self.present = 0
        self.stays = self.registered = False
        self.leases = 0
        self.age = Age.WRITTEN
        self.lost_writes: list[Entry] = []
        self.is_sharded = owner.placement.weight
        self._spec, self._placement, self._axes = owner.spec, owner.placement, owner.axes
        self._entries, self._main, self._host_buffer = owner.entries, owner.main, owner.host_buffer
        self._inner = owner.inner_extent
        self._read_by_backward = 1 << (len(owner.spec.planes) - 1)
        self._nothing = self._stand_ins(owner.device)  # what resharded parameters are pointed at
        self.known_rows: list[tuple[Tensor, int]] = []
        self.cast_versions: list[int] = []
        self._event: Event = None  # after the all-gather
        self._lane: GatherLane  # of its root
        self.versions = Versions([entry.full for entry in self._entries])
        # Where parameters lie in each slot that they were in.
        self._by_slot: weakref.WeakKeyDictionary[Slot, Place] = weakref.WeakKeyDictionary()
        self._latest: tuple[Slot, Place] | None = None  # of `_by_slot`
        numel = len(owner.spec.planes) * buffer_numel(owner.layout, owner.full_extent)
        size_bytes = numel * owner.spec.storage_dtype.itemsize
        self.client = Client(name="", size_bytes=size_bytes, evict=_give_up(weakref.ref(self)))
        self.rename(owner.name)

    def rename(self, name: str) -> None:
        """Update the name after the group was renamed."""
        self.name, self.client.name = name, f"{name} weights"

    def join(self, lane: GatherLane, number: int) -> None:
        """Gather together with the other groups of a root from now on."""
        self._lane, self.number = lane, number
        if self.is_sharded:
            lane.pool.add(self.client)

    @property
    def buffer(self) -> Slot | None:
        """The pooled buffer it is in, or was in last; `None` where it needs none."""
        return self.client.slot if self.is_sharded else None

    @property
    def memory(self) -> Tensor:
        """`[bytes]` uint8, what the pooled buffer is made of."""
        return self.client.slot.memory

    @property
    def _is_left_in_memory(self) -> bool:
        """Whether it counts as resharded, and its values are in memory still (`stays`)."""
        return not self.present and self.is_sharded and self.versions.place is not None

    def name_of(self, number: int) -> str:
        """Of a parameter, by its number in a `Place`."""
        return self._entries[number % len(self._entries)].name

    @property
    def extra_bytes(self) -> int:
        """Memory of the compute shard in addition to the main weight."""
        shared_bytes = self._main.size_bytes if self.follows_main and self._host_buffer is None else 0
        return sum(shard.size_bytes for shard in self.shards) - shared_bytes

    @property
    def follows_main(self) -> bool:
        """Whether unsharded parameters have exactly the main weight's values."""
        return self._spec.codec is None and self._spec.main_dtype == self._spec.compute_dtype

    # -- how old -------------------------------------------------------------------------------------------------------

    def outdate(self, *, by_optimizer: bool) -> None:
        """Note that the main weight was written."""
        self.take_written()
        age = Age.STEPPED if by_optimizer else Age.WRITTEN
        if self.age < age:
            self.age = age

    def take_assigned(self) -> bool:
        """Copy what was assigned to the `data` of local rows to where the rows belong. Returns whether anything was."""
        if [entry.local.data_ptr() for entry in self._entries] == self._main.addresses():
            return False
        found = False
        for entry, rows in zip(self._entries, self._main.views, strict=True):
            if entry.local.data_ptr() != rows.data_ptr():
                found = True
                with torch.no_grad():
                    rows.copy_(entry.local)
                compat.set_data(entry.local, rows)
        self.cast_versions = []  # an assignment moves no counter
        return found

    def take_written(self) -> bool:
        """Whether local rows were written since the last call, by whomever: graphs that saved their parameters are out of date then.

        PyTorch counts no writes through `tensor.data`, and what is written to the buffer itself, by the engine, is no write to local rows.
        """
        for row, known in self.known_rows:
            if row._version != known:
                self.versions.outdate(self.written_rows())
                self.know_rows()
                return True
        return False

    def written_rows(self) -> list[int]:
        """Which local rows were written since `take_written`, by index."""
        return [index for index, (row, known) in enumerate(self.known_rows) if row._version != known]

    def warn_of_unnoticed(self) -> None:
        """Warn of what this rank has written to local rows, if modules go on with what they have: other ranks may not have written."""
        names = [self._entries[index].name for index in self.written_rows()]
        self.know_rows()
        if self.shards or not self.is_sharded or self.present:
            warnings.warn(
                f"{self.name}: the local rows of {', '.join(names[:4])} were written, which other ranks cannot see, so modules compute "
                "with the old values until refresh_weights(module) is called on all ranks. Call it after such writes, or write to the "
                "parameter itself",
                stacklevel=2,
            )

    def know_rows(self) -> None:
        """What was written to local rows until now is known."""
        self.known_rows = [(entry.local, entry.local._version) for entry in self._entries]

    def know_row(self, index: int) -> None:
        """What was written to one of them until now is known."""
        local = self._entries[index].local
        self.known_rows[index] = (local, local._version)

    def _row_versions(self) -> list[int]:
        return [entry.local._version for entry in self._entries]

    def updates(self) -> tuple[list[Tensor], list[Tensor]]:
        """What to copy where (targets, sources) so that the own part of the compute shard equals the main weight; it counts as done.

        Where the main weight is in host memory, an optimizer casts what it wrote.
        """
        age, self.age = self.age, Age.CAST
        if not self.shards or self._spec.codec is not None:
            return [], []
        is_part = self._host_buffer is None and self._main.dtype == self.shards[0].dtype  # of the compute shard
        is_cast = age is Age.STEPPED and bool(self.cast_versions) and self.cast_versions == self._row_versions()
        if is_part or is_cast:
            return [], []
        return self.shards[0].part(self._main.extent).segments, self._main.segments

    def fragments(self) -> list[Fragment]:
        """What to quantize so that the own part of the compute shard equals the main weight; one for each parameter of a codec."""
        if self._spec.codec is None:
            return []
        own = [shard.part(self._main.extent).views for shard in self.shards]
        return [
            Fragment(
                parameter=entry.full,
                main=main.view(-1),
                start=self._main.layout.owned_elements(index, self._main.extent.start)[0]
                - self._main.layout.offset_of[index],
                outputs=tuple(views[index].view(-1) for views in own),
            )
            for index, (entry, main) in enumerate(zip(self._entries, self._main.views, strict=True))
        ]

    def cast_from(self, main: FlatBuffer) -> None:
        """Bring the own part of the compute shard up to date with a copy of the main weight. A codec does that at the next refresh."""
        if self._spec.codec is not None:
            return
        self.cast_versions = self._row_versions()
        if self.present and not self.registered:
            self.reshard()  # a prefetching all-gather may still read it
        compat.foreach_copy_(self.shards[0].part(self._main.extent).segments, main.segments)

    # -- what is in memory ---------------------------------------------------------------------------------------------

    def unshard(
        self,
        buffer: Slot | None = None,
        *,
        for_backward: bool = False,
        ahead: bool = False,
    ) -> None:
        """Start the all-gather, unless what is read is in memory or on its way.

        Args:
            buffer: Where saved tensors of a forward point.
            for_backward: Gather what a backward reads, not what a forward reads.
            ahead: It is not read yet: postpone if another client is in `buffer`, or this weight is being read elsewhere.
        """
        form = self._read_by_backward if for_backward else _READ_BY_FORWARD
        if self.present & form and (buffer is None or self.client.slot is buffer):
            return
        if buffer is not None:
            if ahead and not self._lane.pool.is_free(buffer, self.client):
                return
            if (self.present or self.versions.place is not None) and self.client.slot is not buffer:
                if ahead and self.leases:
                    return
                self.let_go()
                self.reshard()
        if not self.present & form:
            self._gather(form, buffer, BACKWARD if for_backward else FORWARD)

    def unshard_form(self, form: int) -> None:
        """Start the all-gather of one of the forms that a codec keeps, wherever there is room, for a backward that reads it now."""
        self.unshard(for_backward=1 << form == self._read_by_backward)

    def _gather(self, form: int, buffer: Slot | None, kind: int) -> None:
        outer_first = self._placement.outer_main and self.age is not Age.GATHERED
        in_place = self._placement.main and not self.is_sharded and self.age is not Age.GATHERED
        if not (self.is_sharded or outer_first or in_place):
            self.present = 2 * self._read_by_backward - 1
            return
        lane, streams = self._lane, self._lane.streams
        slot, free, age = None, None, self.age
        training = torch.is_grad_enabled() or compat.backward_task() != -1
        if self.is_sharded:
            if self.versions.place is None:
                slot = lane.pool.clear(self.client, buffer)
            elif not self.present:  # it stayed in memory, where it may be being read
                self.refuse_late_writes()
                lane.pool.resume(self.client, training=training)
                free = streams.record()
        with lane.ranges.around("gather", self.name):
            if self.is_sharded and lane.order.is_on:
                lane.order.note(self.number, self.name, kind)
            try:
                with streams.on(streams.gather):
                    if lane.weights_ready is not None:
                        streams.wait(lane.weights_ready, streams.gather)
                    if self.age is Age.CAST:
                        self.age = Age.GATHERED
                    if outer_first and self._axes.outer is not None:
                        self._gather_shards(self._axes.outer, self._inner, self._main.extent)
                    if self.is_sharded:
                        if slot is not None:
                            free = lane.pool.acquire(self.client, slot, training=training)
                        if free is not None:
                            streams.wait(free, streams.gather)
                        self.present |= form
                        latest = self._latest
                        if latest is None or latest[0] is not self.client.slot:
                            latest = self._latest = self.client.slot, self._in_slot(self.client.slot)
                            self._bind(latest[1])
                            self.client.slot.count_own_users()
                        self._gather_into(latest[1], form)
                    else:
                        self.present = 2 * self._read_by_backward - 1
                        if in_place:
                            self._gather_shards(self._axes.shard, range(self._main.layout.num_shards), self._inner)
                    self._event = streams.record()
            except BaseException:  # an interrupt, too: what is in memory is not the weight; re-raised
                self.age = age
                self.abandon()
                raise
        lane.started += 1
        lane.weights_ready = None

    def _gather_shards(self, axis: Axis, whole: range, part: range) -> None:
        """Fill compute shards from what the ranks of an axis hold of them."""
        outputs = [segment for shard in self.shards for segment in shard.part(whole).segments]
        axis.gather(outputs, [segment for shard in self.shards for segment in shard.part(part).segments])

    def _gather_into(self, place: Place, forms: int) -> None:
        """Fill forms of an unsharded weight, and point the parameters there."""
        versions = self.versions
        if versions.place is not place:
            if not versions.are_as_set():
                self._refuse_late_write(versions.written()[0])
            if self._spec.codec is None:
                with compat.without_torch_function():  # a third of the time
                    for index, view in enumerate(place.buffers[0].views):
                        parameter = self._entries[index].full
                        if parameter.data_was_asked_for:
                            if compat.get_data(parameter).data_ptr() != self._nothing[index].data_ptr():
                                self._refuse_late_write(index)
                            parameter.data_was_asked_for = False
                        compat.set_data(parameter, view)
            versions.lie_in(place)
        for index, full in enumerate(place.buffers):
            if forms >> index & 1:
                if self.shards:
                    source = self.shards[index]
                else:  # the own part is cast into its final place, and gathered in place
                    source = full.part(self._main.extent)
                    compat.foreach_copy_(source.segments, self._main.segments)
                if self._axes.shard.size > 1:
                    self._axes.shard.gather(full.segments, source.segments)

    def _in_slot(self, slot: Slot) -> Place:
        """The place in a slot's memory, made once for each slot."""
        place = self._by_slot.get(slot)
        if place is None:
            layout = self._main.layout
            with torch.inference_mode(False):
                memory = slot.memory[: self.client.size_bytes].view(self._spec.storage_dtype)
                forms = memory.view(len(self._spec.planes), -1).unbind()
                place = self._place_over([FlatBuffer.over(layout, range(layout.num_shards), form) for form in forms])
            self._by_slot[slot] = place
        return place

    def _place_over(self, buffers: list[FlatBuffer]) -> Place:
        parameters = [entry.full for entry in self._entries]
        # `data` of views: a version counter of its own, so that a gather does not disturb tensors saved for backward.
        raw = [] if self._spec.codec is None else [view.data for form in buffers for view in form.views]
        for buffer in buffers:  # made once, and counted among those that refer to the memory
            _ = buffer.part(self._main.extent), buffer.views
        return Place(buffers, parameters, raw)

    def _bind(self, place: Place) -> None:
        """Point a codec's parameters at their raw data, once for each place that they are moved to."""
        if self._spec.codec is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            for index, entry in enumerate(self._entries):
                self._spec.codec.bind(entry.full, place.raw[index :: len(self._entries)])

    def begin(self) -> None:
        """Point unsharded parameters, left empty, at the compute shard where weights are whole: they lie there permanently."""
        self.know_rows()
        if self.is_sharded:
            self.versions.leave()
            return
        place = self._place_over(self.shards)
        self._bind(place)
        self._gather_into(place, 0)

    def leave_empty(self, index: int) -> None:
        """Leave a parameter without memory of its own, and without a gradient."""
        full = self._entries[index].full
        full._grad = None
        if self._spec.codec is None:
            compat.set_data(full, self._nothing[index])
        else:  # its shape is that of what it reads
            nothing = torch.empty(1, dtype=self._spec.storage_dtype, device=self._nothing[index].device).expand(
                full.shape
            )
            self._spec.codec.bind(full, [nothing] * len(self._spec.planes))

    def refuse_late_writes(self) -> None:
        """Raise if the program wrote to a parameter, or assigned its `data`, while values rest in memory."""
        if not self._is_left_in_memory:
            return
        if not self.versions.are_as_set():
            self._refuse_late_write(self.versions.written()[0])
        place = self.versions.place
        for index, entry in enumerate(self._entries):
            if entry.full.data_was_asked_for and place is not None and self._spec.codec is None:
                entry.full.data_was_asked_for = False
                if compat.get_data(entry.full).data_ptr() != place.buffers[0].views[index].data_ptr():
                    self._refuse_late_write(index)

    def _refuse_late_write(self, index: int) -> NoReturn:
        """Raise: the program wrote to an unsharded parameter, which it kept, while the weights were sharded."""
        self._entries[index].full.data_was_asked_for = False
        self._nothing = self._stand_ins(self._nothing[0].device)  # this one may have been written
        self.stays = False
        if self.present:  # it is being gathered
            self.versions.leave()
        self.reshard()
        raise EngineStateError(
            f"{self.name}: the unsharded parameter {self._entries[index].name} was written while its unit was resharded, so the write has "
            "no effect. The program kept it from before it was sharded, or from a forward; write to module.parameter outside of forwards"
        )

    def _stand_ins(self, device: torch.device) -> list[Tensor]:
        """What resharded parameters are pointed at: of their shape, since gradients that need no value still arrive, and NaN.

        An integer has no NaN, and no gradient.
        """
        dtype = self._spec.storage_dtype
        value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
        with torch.inference_mode(False):
            # One for each parameter, since `zero_` writes even to these.
            each = torch.full((len(self._entries),), value, dtype=dtype, device=device)
            return [
                stand_in.expand(entry.piece.part_shape) for stand_in, entry in zip(each, self._entries, strict=True)
            ]

    def wait(self) -> None:
        """Let the work that follows on this stream wait for the all-gather."""
        if self._event is not None:
            self._lane.streams.wait(self._event)
            self._event = None

    def forget_event(self) -> None:
        """No stream has to wait for the all-gather that was started."""
        self._event = None

    def reshard(self) -> None:
        """Show sharded parameters and return the buffer to the pool. Saved tensors point into it; a gather for backward refills it."""
        if self.registered:
            self.unregister()
        elif self.present and not self.versions.are_as_set():
            self._take_over_writes()
        held, self.present = bool(self.present) or self.versions.place is not None, 0
        if held and self.is_sharded:
            if self._event is not None:
                self.wait()
            lane = self._lane
            if self.stays:
                lane.pool.pause(self.client)
                return
            self.versions.leave()
            if self._spec.codec is None:
                with compat.without_torch_function():  # a third of the time
                    for entry, nothing in zip(self._entries, self._nothing, strict=True):
                        compat.set_data(entry.full, nothing)
            if lane.pool.release(self.client, lane.streams.record()):
                self._latest = None

    def stay(self) -> None:
        """A forward has left tensors that point into the memory."""
        self.stays = self.is_sharded

    def abandon(self) -> None:
        """A forward or an all-gather has raised, so nothing that it left counts."""
        self.stays = False
        self.reshard()

    def let_go(self) -> None:
        """What a forward left is out of date: the memory need not stay any longer."""
        self.stays = False
        self.refuse_late_writes()
        if self._is_left_in_memory:
            self.reshard()

    def refill(self) -> None:
        """Bring what is in memory up to date with the main weight, where saved tensors may point."""
        forms, shown = self.present or 1, self.registered
        buffer = self.buffer if self.present else None
        self.unregister(takes_over=False)
        if self.present:
            self._take_over_writes(takes_over=False)
        self.reshard()
        for form, kind in ((_READ_BY_FORWARD, FORWARD), (self._read_by_backward, BACKWARD)):
            if forms & form & ~self.present:
                self._gather(form, buffer, kind)
        if shown:
            self.register()

    def give_up(self, required: bool) -> bool:
        """Hand the buffer to another client, if that is required or no unit computes with these weights. Returns whether it may have it."""
        if not (self.present or self.versions.place is not None) or (not required and (self.registered or self.leases)):
            return False
        if required:
            self.let_go()
        self.reshard()  # as on ranks where it does not stay: it is gathered when it is read next
        return not self.stays

    # -- what modules show ---------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Wait for the all-gather, and have modules show unsharded parameters."""
        if self._event is not None:
            self.wait()
        if self.registered:
            return
        if not self.present:  # what is shown would be NaN
            raise EngineStateError(
                f"{self.name}: its memory was given to another unit between its all-gather and its use, which is a defect of "
                'lightning_mfsdp. Pass storage="dynamic", with which units share no memory, and report it'
            )
        self.registered = True
        if self._spec.codec is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._spec.codec.after_gather([entry.full for entry in self._entries])
        for entry in self._entries:
            at_rest = entry.at_rest
            for table, key in entry.sites:
                if key in table and table[key] is at_rest:
                    table[key] = entry.full
                else:
                    self._check_replaced(entry, table.get(key))

    def _check_replaced(self, entry: Entry, shown: object) -> None:
        """Raise unless a plain tensor is shown in place of a parameter: `torch.func.functional_call` computes with that."""
        if isinstance(shown, Tensor) and not isinstance(shown, nn.Parameter):
            if not any(isinstance(wrapped, DTensor) for wrapped in compat.at_all_levels(shown)[1:]):
                return
            problem = (
                f"parameter {entry.name} is a sharded tensor inside a transform of torch.func (grad, vmap, jacrev), which computes with "
                "plain tensors alone. Pass functional_call whole ones: {name: parameter.detach().full_tensor() for name, parameter in "
                "module.named_parameters()}, on all ranks"
            )
        else:
            problem = (
                f"parameter {entry.name} was replaced after fully_shard (expected its sharded DTensor, got "
                f"{_named(shown, entry)}), by load_state_dict(assign=True), an assignment, functional_call with parameters of another "
                "module (pass their detach()), or a conversion such as half() or cpu(). Assign before fully_shard and copy values in place "
                "afterwards; convert it back, or call unshard_model(module) on the root, before parameters are tied, too"
            )
        self._show_at_rest()
        self.registered = False
        raise EngineStateError(f"{self.name}: {problem}")

    def _show_at_rest(self) -> None:
        for entry in self._entries:
            for table, key in entry.sites:
                if key in table and table[key] is entry.full:
                    table[key] = entry.at_rest

    def unregister(self, *, takes_over: bool = True) -> None:
        """Have modules show sharded parameters; unsharded ones stay in memory.

        Args:
            takes_over: What was written to them becomes main weights; otherwise main weights were written later.
        """
        if not self.registered:
            return
        self.registered = False
        if self._spec.codec is not None:
            self._spec.codec.before_release([entry.full for entry in self._entries])
        data_was_asked_for = False
        for entry in self._entries:
            at_rest, full = entry.at_rest, entry.full
            for table, key in entry.sites:
                if key in table and table[key] is full:  # else what `functional_call` has put there stays
                    table[key] = at_rest
            if full.data_was_asked_for:
                data_was_asked_for = True
        if data_was_asked_for or not self.versions.are_as_set():
            self._take_over_writes(takes_over=takes_over)

    def _take_over_writes(self, *, takes_over: bool = True) -> None:
        """Make what the program has written, or may have, to unsharded parameters the main weights; or forget it."""
        written = self.versions.written()
        if written:
            self.versions.take_over(written)
        for index, entry in enumerate(self._entries):
            if index in written or entry.full.data_was_asked_for:
                entry.full.data_was_asked_for = False
                if takes_over and self._spec.codec is None:
                    self._take_over(index, is_written=index in written)

    def _take_over(self, index: int, *, is_written: bool) -> None:
        """Make a parameter's unsharded values, which a forward has or may have written, those of the main weight and the compute shard.

        All ranks compute the same, so each keeps its own rows and nothing is communicated: a rank may have asked for `data` alone, to log.
        Where dtypes differ, unchanged values keep their precision, and a forward that definitely wrote is refused: what it accumulates
        would be lost in rounding.
        """
        value = self._where_it_belongs(index)
        if is_written and self._spec.main_dtype != self._spec.compute_dtype:
            self.lost_writes.append(self._entries[index])
            return
        with torch.no_grad():
            for buffer in (self._main, *self.shards):
                rows, own = buffer.view(index), self.rows_of(value, index, buffer.extent)
                if not rows.numel() or own.data_ptr() == rows.data_ptr():
                    continue
                if own.dtype == rows.dtype:
                    rows.copy_(own)
                else:
                    rows.copy_(torch.where(rows.to(own.dtype) == own, rows, own.to(rows.dtype)))
        self._lane.note_written()

    def _where_it_belongs(self, index: int) -> Tensor:
        """The value that a parameter holds now, in the memory it was pointed at before its `data` was set."""
        place = self.versions.place
        assert place is not None, "only parameters in memory can be written"
        full, view = self._entries[index].full, place.buffers[0].views[index]
        with torch.inference_mode(False), torch.no_grad():
            if full.untyped_storage().data_ptr() != view.untyped_storage().data_ptr():
                view.copy_(full)
                compat.set_data(full, view)
        return view

    def rows_of(self, value: Tensor, index: int, extent: range) -> Tensor:
        """The part of a whole parameter that belongs to the shards of `extent`."""
        rows = self._main.layout.owned_rows(index, extent.start, len(extent))
        return value[rows.start : rows.stop] if value.dim() else value

    def refuse_lost_writes(self) -> NoReturn:
        """Raise an error that names the parameters whose writes would be lost."""
        names = ", ".join(entry.name for entry in self.lost_writes)
        self.lost_writes.clear()
        raise EngineStateError(
            f"{self.name}: a forward wrote to its own parameter {names}, which it sees in {self._spec.compute_dtype}, while the main "
            f"weight is {self._spec.main_dtype}, so the write would be lost. Write outside of the module's forward (in training_step or a "
            "hook, where parameters are main weights), keep the module in float32 (MixedPrecisionPolicy(fp32_modules=...)), or use "
            'precision="32-true"'
        )


def _give_up(this: weakref.ref[Weights]) -> Callable[[bool], bool]:
    def evict(required: bool) -> bool:
        weights = this()
        return weights is not None and weights.give_up(required)

    return evict


def _named(shown: object, entry: Entry) -> str:
    """What is found where a module showed an entry, for messages."""
    if isinstance(shown, ShardedParameter) and shown._local is entry.local:
        return f"its rows in {str(shown.dtype).removeprefix('torch.')} on {shown.device}"
    if isinstance(shown, ShardedParameter):
        return f"parameter {shown.described}"
    return "a foreign DTensor" if isinstance(shown, DTensor) else type(shown).__name__
