"""ParameterGroup: the parameters of one unit with one dtype, and the buffers they live in.

    main weight      main dtype,     this rank's shard (or sub-shard under HFSDP)     the optimizer's
    held weight      compute dtype,  everything where weights are whole, else this rank's shard: the main weight itself
    when dtypes match, or cast for every gather, or kept beside it (`keep_compute_shard`, HFSDP, main weight in host memory)
    full weight      compute dtype,  everything: the held weight, or a slot filled by a gather (full_weight.py)
    gradients        see reduction.py

Parameters of a codec (codec.py) hold and gather raw data in place of the compute dtype, quantized once after the weights changed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.base.streams import Event, Streams
from lightning_mfsdp.engine.comm.collectives import Axis, Mesh, broadcast_from_first
from lightning_mfsdp.engine.comm.communicators import Channels
from lightning_mfsdp.engine.comm.gather_order import BACKWARD, FORWARD, GatherOrder
from lightning_mfsdp.engine.comm.ranges import Ranges
from lightning_mfsdp.engine.layout.layout import plan_layout
from lightning_mfsdp.engine.layout.placement import Placement
from lightning_mfsdp.engine.memory.buffer import FlatBuffer, buffer_numel
from lightning_mfsdp.engine.memory.host_memory import HostMemory
from lightning_mfsdp.engine.memory.storage import Client, Slot, SlotPool
from lightning_mfsdp.engine.params.codec import Fragment, marks_of
from lightning_mfsdp.engine.params.full_weight import FullWeight
from lightning_mfsdp.engine.params.group_spec import GroupSpec
from lightning_mfsdp.engine.params.parameter import OWNER, Entry, UnshardedParameter, mark_owner
from lightning_mfsdp.engine.params.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.params.rows import whole_shape
from lightning_mfsdp.engine.params.sharded_parameter import ShardedParameter

__all__ = ["OwningUnit", "ParameterGroup", "Root", "owner_of", "place_of"]


class OwningUnit(Protocol):
    """What a group asks of the unit that owns it."""

    name: str

    def release_if_idle(self) -> bool:
        """Give weights back that were only kept because their backward was thought to come next."""

    def use_outside(self) -> None:
        """Its parameters are used in grad mode where no call tells when gradients come."""

    def has_at_hand(self, group: ParameterGroup) -> bool:
        """Whether unsharded parameters of the group equal the main weights and stay where they are until a backward has ended."""


class Root(Protocol):
    """What a group asks of the root around its unit, and tells it.

    Attributes:
        weights_ready: After the last write to a main or held weight.
    """

    weights_ready: Event

    pool: SlotPool
    streams: Streams
    order: GatherOrder
    ranges: Ranges
    channels: Channels

    @property
    def hides_gradients(self) -> bool:
        """A forward is being recorded, and gradients are set aside."""

    def weights_changed(self, groups: Iterable[ParameterGroup] | None = None) -> None:
        """Main weights were written by somebody."""

    def begin_backward(self) -> None:
        """A backward begins, or goes on."""

    def reduce_held_back(self) -> None:
        """Reduce what `no_sync` holds back. Collective."""

    def zero_held_back(self, group: ParameterGroup, index: int) -> None:
        """Make what is held back of a parameter zeros."""


class ParameterGroup:
    """Born with its parameters, given an address by a layout, gathered and released by its unit.

    Attributes:
        entries: The parameters, in module order.
        layout: Where each lies.
        main: The main weight, extent `main_extent`.
        offloads: State of its parameters rests in host memory, and their main weights if they were trained from the start.
        home: Host memory of the main weight; `None` where it lies on the device.
        held: What stays in memory in the storage dtype, by plane: extent `inner`, or everything; empty where each gather casts.
        outdated: The main weight was written since the held weight was brought up to date with it.
        written_elsewhere: By somebody else than an optimizer that was taken over.
        stale: The held weight does not show yet what the optimizer wrote.
        installed: The module shows full parameters.
        lost_writes: Unsharded parameters that a forward wrote to, though main weights of another dtype cannot take that over.
        gradients_outside: Whole gradients, by index, of parameters that were used outside of a forward (outside.py).
        advised: It was said that this costs a gather each time.
        moved: Entries that the module shows as a conversion left them (conversion.py).
        number: Among the groups of its root.
        users_live: How many units are using the full weights.
    """

    def __init__(
        self,
        *,
        name: str,
        named: Sequence[tuple[str, nn.Parameter, list[tuple[dict[str, nn.Parameter | None], str]]]],
        spec: GroupSpec,
        mesh: Mesh,
        placement: Placement,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        offloads: bool = False,
    ) -> None:
        self.name = name
        self.spec = spec
        self.mesh = mesh
        self.placement = (
            Placement(weight=False, gradient=False, main=False, outer_main=False) if spec.whole else placement
        )
        self.policy = policy
        self.device = device
        self.offloads = offloads
        self.shard_axis, self.outer_axis = mesh.shard, mesh.outer
        self._plan([tuple(parameter.shape) for _, parameter, _ in named])
        self._allocate()
        self.entries = [self._entry(index, *item) for index, item in enumerate(named)]
        self._full = self._full_weight()
        self._fill()
        self._gathered_event: Event = None
        self._planes_there: list[int] = []
        self.installed = False
        self.lost_writes: list[Entry] = []
        self.gradients_outside: dict[int, Tensor] = {}
        self.advised = False
        self.moved: set[Entry] = set()
        self.number = 0
        self.users_live = 0
        self._known_writes = 0
        self.stale = self.outdated = self.written_elsewhere = True
        if not self.placement.weight:
            self._full.bind(self.held)

    # -- birth ---------------------------------------------------------------------------------------------------------

    def _plan(self, shapes: list[tuple[int, ...]]) -> None:
        """Address space and which shards of it this rank holds. Inner shards are consecutive sub-shards of the outer axis."""
        shard, outer = self.shard_axis, self.outer_axis
        inner_count, inner_rank = (shard.size, shard.rank) if self.placement.main else (1, 0)
        sub_count, sub_rank = (outer.size, outer.rank) if outer and self.placement.outer_main else (1, 0)
        smallest = self.policy.smallest_itemsize(self.spec.storage_dtype, self.spec.main_dtype)
        count, together = inner_count * sub_count, self.spec.rows_together
        self.layout = plan_layout(shapes, count, itemsize=smallest, rows_together=together)
        self.full_extent = range(count)
        self.inner_extent = range(inner_rank * sub_count, (inner_rank + 1) * sub_count)
        start = inner_rank * sub_count + sub_rank
        self.main_extent = range(start, start + 1)

    def _allocate(self) -> None:
        spec, placement = self.spec, self.placement
        held_extent = self.inner_extent if placement.weight else self.full_extent
        self.home: HostMemory | None = None
        if self.offloads and spec.trainable and not spec.whole:
            main_bytes = buffer_numel(self.layout, self.main_extent) * spec.main_dtype.itemsize
            self.home = HostMemory(main_bytes, self.device)
        self.main_is_held = spec.codec is None and self.home is None and spec.main_dtype == spec.compute_dtype
        keeps = self.policy.keep_compute_shard or spec.codec is not None or self.home is not None
        casts_for_gather = placement.weight and not (self.main_is_held or placement.outer_main or keeps)
        self.held: list[FlatBuffer] = []
        with torch.inference_mode(False):
            if not casts_for_gather:
                self.held += [
                    FlatBuffer.zeros(self.layout, held_extent, spec.storage_dtype, self.device) for _ in spec.planes
                ]
            if self.home is not None:
                self.main = FlatBuffer.over(self.layout, self.main_extent, self.home.seen.view(spec.main_dtype))
            elif self.main_is_held:
                self.main = self.held[0].part(self.main_extent)
            else:
                self.main = FlatBuffer.zeros(self.layout, self.main_extent, spec.main_dtype, self.device)

    def _entry(
        self, index: int, name: str, parameter: nn.Parameter, sites: list[tuple[dict[str, nn.Parameter | None], str]]
    ) -> Entry:
        with torch.inference_mode(False):
            local = nn.Parameter(self.main.view(index), requires_grad=self.spec.trainable)
            local.__dict__.update(marks_of(parameter, self.spec.codec))
            sharded = ShardedParameter.wrap(self, index, name, local, parameter)
        for face in (parameter, sharded, local):
            mark_owner(face, self, index)
        shape = whole_shape(parameter.shape, self.mesh)
        if type(parameter) is nn.Parameter:
            parameter.__class__ = UnshardedParameter
        full = cast("UnshardedParameter", parameter)
        full.data_was_asked_for = False  # always so where a class of the user's or of a codec keeps its own `data`
        return Entry(name=name, full=full, sites=sites, shape=shape, sharded=sharded, local=local)

    @property
    def dtensor_placements(self) -> list[DTensorPlacement]:
        """How the main weight lies on the user's mesh, for DTensor."""
        mesh, by = self.mesh, self.placement
        divided = (mesh.shard_dim if by.main else None, mesh.outer_dim if by.outer_main else None, mesh.parts_dim)
        return [Shard(0) if dim in divided else Replicate() for dim in range(mesh.device_mesh.ndim)]

    def _fill(self) -> None:
        """Cut this rank's rows out of rank 0's values and give the parameters' own memory back, one parameter at a time."""
        codec = self.spec.codec
        with torch.inference_mode(False), torch.no_grad():
            for index, entry in enumerate(self.entries):
                value = entry.full.detach() if codec is None else codec.initial_value(entry.full)
                value = value.to(self.device, copy=False).contiguous()
                broadcast_from_first(value, self.mesh)
                self.write(index, value)
                self._full.rest(index)
                entry.install(entry.sharded)

    def write(self, index: int, value: Tensor) -> None:
        """Keep this rank's rows of a full `value` (the shape it has in its module, any dtype) as the main weight."""
        local = self.entries[index].local
        if local.numel():
            local.copy_(self._rows(value, index, self.main_extent))
        self.stale = True

    def note_writes(self) -> bool:
        """Whether main weights were written since the last call, by whomever. PyTorch does not count writes through `tensor.data`.

        A tensor that was assigned to the `data` of local rows is copied to where the rows belong.
        """
        for entry, rows in zip(self.entries, self.main.views(), strict=True):
            if entry.local.data_ptr() != rows.data_ptr():
                with torch.no_grad():
                    rows.copy_(entry.local)
                compat.set_data(entry.local, rows)
        before = self._known_writes
        self.forget_writes()
        return self._known_writes != before

    def forget_writes(self) -> None:
        """What was written to main weights until now is known, or was the engine."""
        self._known_writes = self.main.segments[0]._version  # all views of a buffer have one counter

    def _full_weight(self) -> FullWeight:
        this = weakref.ref(self)

        def evict() -> bool:
            group = this()
            return group is not None and group.give_up_prefetch()

        made = FullWeight(
            layout=self.layout,
            dtype=self.spec.storage_dtype,
            codec=self.spec.codec,
            entries=self.entries,
            device=self.device,
            evict=evict,
        )
        made.client.name = f"{self.name} weights"
        return made

    @property
    def client(self) -> Client:
        """Who needs slots for the full weight."""
        return self._full.client

    @property
    def held_bytes(self) -> int:
        """Memory of the held weight beside the main weight."""
        return sum(plane.size_bytes for plane in self.held) - (self.main.size_bytes if self.main_is_held else 0)

    def attach(self, unit: OwningUnit, context: Root, number: int) -> None:
        """Join a unit and its root, as one of so many groups: slots come from the root's pool, and work runs on its streams."""
        self.unit = weakref.ref(unit)
        self._context = weakref.ref(context)
        self._pool, self.streams = context.pool, context.streams
        self.streams.join_when_gone(self)
        self._order, self.number = context.order, number
        if self.placement.weight:
            self._pool.add(self.client)

    # -- the unit and the root -----------------------------------------------------------------------------------------

    @property
    def context(self) -> Root | None:
        """What the units of the root share; `None` once the root is gone."""
        return self._context()

    @property
    def unit_name(self) -> str:
        """Of the unit it belongs to; empty once that is gone."""
        unit = self.unit()
        return unit.name if unit is not None else ""

    @property
    def hides_gradients(self) -> bool:
        """A forward is being recorded, and gradients are set aside."""
        context = self.context
        return context is not None and context.hides_gradients

    def around_gather(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Around the gather of one parameter."""
        context = self.context
        return contextlib.nullcontext() if context is None else context.ranges.around("full_tensor", name)

    def over_both_axes(self) -> dist.ProcessGroup:
        """The ranks of the shard axis and the outer one together. Collective, the first time."""
        context = self.context
        assert context is not None, "a group in use belongs to a root"
        return context.channels.over_both_axes(self.mesh)

    def note_write(self) -> None:
        """Main weights may have been written: forward must see it."""
        if (context := self.context) is not None:
            context.weights_changed([self])

    def reduce_held_back(self) -> None:
        """Reduce what `no_sync` holds back in the root, before anybody looks. Collective, and known to all ranks."""
        if (context := self.context) is not None:
            context.reduce_held_back()

    def zero_held_back(self, index: int) -> None:
        """Make what is held back of a parameter zeros."""
        if (context := self.context) is not None:
            context.zero_held_back(self, index)

    def use_outside(self, index: int) -> nn.Parameter | None:
        """A parameter is used outside of forwards in grad mode: the unsharded one, if it is there and stays until a backward has ended."""
        unit = self.unit()
        if unit is None:
            return None
        unit.use_outside()
        return self.entries[index].full if unit.has_at_hand(self) else None

    def begin_backward(self) -> None:
        """A backward begins in which no forward of a unit may take part."""
        if (context := self.context) is not None:
            context.begin_backward()

    # -- weights -------------------------------------------------------------------------------------------------------

    def cast_pairs(self, *, stepped_only: bool) -> tuple[list[Tensor], list[Tensor]]:
        """(targets, sources) that bring the held weight's own part up to date with the main weight.

        Args:
            stepped_only: Nobody but optimizers is known to have written. Where the main weight is in host memory they cast what they wrote.
        """
        known = self.main_is_held or (self.home is not None and not self.home.note_writes() and stepped_only)
        if known or not self.held or self.spec.codec is not None:
            return [], []
        return self.held[0].part(self.main_extent).segments, self.main.segments

    def fragments(self) -> list[Fragment]:
        """What to quantize so that the held weight's own part is up to date with the main weight; one for each parameter of a codec."""
        if self.spec.codec is None:
            return []
        own = [plane.part(self.main_extent).views() for plane in self.held]
        return [
            Fragment(
                parameter=entry.full,
                main=main.view(-1),
                start=self.layout.owned_elements(index, self.main_extent.start)[0] - self.layout.offset_of[index],
                outputs=tuple(views[index].view(-1) for views in own),
            )
            for index, (entry, main) in enumerate(zip(self.entries, self.main.views(), strict=True))
        ]

    @property
    def gathered(self) -> bool:
        """A gather was started (or none is needed) and the weights were not given back."""
        return bool(self._planes_there)

    def is_there(self, *, for_backward: bool) -> bool:
        """Whether what a backward, or a forward, reads was gathered."""
        return self.spec.plane(for_backward=for_backward) in self._planes_there

    def cast_from(self, main: FlatBuffer) -> None:
        """Bring the held weight's own part up to date with a copy of the main weight. A codec does that at the next refresh."""
        if self.spec.codec is not None:
            return
        if self.gathered and not self.installed:
            self.release()  # a gather in advance may still read
        compat.foreach_copy_(self.held[0].part(self.main_extent).segments, main.segments)

    def start_gather(
        self, weights_ready: Event, needed: Slot | None = None, *, apart: bool = False, for_backward: bool = False
    ) -> bool:
        """Start filling the full weight on the gather stream. Returns whether a collective was issued.

        Args:
            weights_ready: After the last write to any held weight.
            needed: The slot that saved tensors of a forward point into.
            apart: Keep out of shared slots, see `SlotPool.acquire`.
            for_backward: What a backward reads is wanted, and not what a forward reads.
        """
        if self.is_there(for_backward=for_backward):
            return False
        if self.placement.weight and self._order.is_on:
            self._order.note(self.number, self.name, BACKWARD if for_backward else FORWARD)
        begins = not self.gathered
        planes = [self.spec.plane(for_backward=for_backward)] if self.placement.weight else list(self.spec.planes)
        self._planes_there += planes
        outer_first = self.stale and self.placement.outer_main
        in_place = self.stale and self.placement.main and not self.placement.weight
        self.stale = False
        if not (self.placement.weight or outer_first or in_place):
            return False
        streams = self.streams
        training = torch.is_grad_enabled() or compat.backward_task() != -1
        with streams.on(streams.gather):
            streams.wait(weights_ready, streams.gather)
            if outer_first and self.outer_axis is not None:
                self._gather_held(self.outer_axis, self.inner_extent, self.main_extent)
            if self.placement.weight:
                if begins:
                    free = self._pool.acquire(self.client, needed, apart=apart, training=training)
                    streams.wait(free, streams.gather)
                self._gather_into(self._full.in_slot(self.client.slot), planes)
            elif in_place:
                self._gather_held(self.shard_axis, self.full_extent, self.inner_extent)
            self._gathered_event = streams.record()
        return True

    def _gather_held(self, axis: Axis, whole: range, part: range) -> None:
        """Fill held weights from what the ranks of an axis hold of them."""
        outputs = [segment for plane in self.held for segment in plane.part(whole).segments]
        axis.gather(outputs, [segment for plane in self.held for segment in plane.part(part).segments])
        self.forget_writes()

    def _gather_into(self, full: list[FlatBuffer], planes: list[int]) -> None:
        """Fill planes of a full weight, and point the parameters there."""
        self._full.bind(full)
        for plane in planes:
            source = self.held[plane] if self.held else self._cast_into(full[plane])
            self.shard_axis.gather(full[plane].segments, source.segments)

    def _cast_into(self, full: FlatBuffer) -> FlatBuffer:
        """This rank's part of the full weight, cast from the main weight; gathered in place."""
        own = full.part(self.main_extent)
        compat.foreach_copy_(own.segments, self.main.segments)
        return own

    def wait(self) -> None:
        """Let what comes next on this stream wait for the gather."""
        if self._gathered_event is not None:
            self.streams.wait(self._gathered_event)
            self._gathered_event = None

    def install(self) -> None:
        """Wait for the gather and show full parameters in the module."""
        self.wait()
        if not self.installed:
            self.installed = True
            self._full.prepare()
            for entry in self.entries:
                table, key = entry.sites[0]
                if table.get(key) is not entry.resting:
                    self._refuse_replaced(entry, table.get(key))
                for table, key in entry.sites:
                    table[key] = entry.full

    def _refuse_replaced(self, entry: Entry, found: object) -> NoReturn:
        for earlier in self.entries[: self.entries.index(entry)]:
            earlier.install(earlier.resting)
        self.installed = False
        raise EngineStateError(
            f"{self.name}: parameter {entry.name} was replaced after fully_shard (expected its sharded DTensor, got "
            f"{_named(found, entry)}), by load_state_dict(assign=True), an assignment, or a conversion such as half() or cpu(). Assign "
            "before fully_shard and copy values in place afterwards; convert it back, or call unshard_model(module) on the root"
        )

    def release(self, *, keep_memory: bool = False) -> None:
        """Show sharded parameters again and give the slot back. Saved tensors keep pointing into it; a gather for backward refills it.

        Args:
            keep_memory: Nobody else may use the slot before the backward has ended.
        """
        self.hide()
        if self.gathered:
            self._planes_there.clear()
            if self.placement.weight:
                self.wait()
                give_back = self._pool.set_aside if keep_memory else self._pool.release
                give_back(self.client, self.streams.record())

    def hide(self, *, takes_over: bool = True) -> None:
        """Show sharded parameters again; unsharded ones stay where they are.

        Args:
            takes_over: What was written to them becomes main weights; else these were written later.
        """
        if self.installed:
            self.installed = False
            self._full.retire()
            for index, entry in enumerate(self.entries):
                resting, full = entry.resting, entry.full
                for table, key in entry.sites:
                    table[key] = resting
                if full._version != entry.version or full.data_was_asked_for:
                    self._take_over(index) if takes_over else entry.forget_writes()

    def _take_over(self, index: int) -> None:
        """Make a parameter's unsharded values, which a forward has or may have written, those of the main weight and the compute shard.

        All ranks compute the same, so each keeps its own rows and nothing is communicated: a rank may have asked for `data` alone, to log.
        Where dtypes differ, values that nobody changed keep their precision, and a forward that surely wrote is refused: what it adds up
        would be lost in rounding.
        """
        entry = self.entries[index]
        is_written = entry.forget_writes()
        if self.spec.codec is not None:
            return
        value = self._full.take_back(index)
        if is_written and self.spec.main_dtype != self.spec.compute_dtype:
            self.lost_writes.append(entry)
            return
        with torch.no_grad():
            for buffer in (self.main, *self.held):
                rows, own = buffer.view(index), self._rows(value, index, buffer.extent)
                if not rows.numel() or own.data_ptr() == rows.data_ptr():
                    continue
                if own.dtype == rows.dtype:
                    rows.copy_(own)
                else:
                    rows.copy_(torch.where(rows.to(own.dtype) == own, rows, own.to(rows.dtype)))
        self.forget_writes()
        if (context := self.context) is not None:
            context.weights_ready = self.streams.record()

    def _rows(self, value: Tensor, index: int, extent: range) -> Tensor:
        """What the shards of `extent` have of a whole parameter."""
        rows = self.layout.owned_rows(index, extent.start, len(extent))
        return value[rows.start : rows.stop] if value.dim() else value

    def refuse_lost_writes(self) -> NoReturn:
        """Name what a forward wrote to in vain."""
        names = ", ".join(entry.name for entry in self.lost_writes)
        self.lost_writes.clear()
        raise EngineStateError(
            f"{self.name}: a forward wrote to its own parameter {names}, which it sees in {self.spec.compute_dtype}, while the main "
            f"weight is {self.spec.main_dtype}, so the write would be lost. Write outside of the module's forward (in training_step or a "
            "hook, where parameters are main weights), keep the module in float32 (MixedPrecisionPolicy(fp32_modules=...)), or use "
            'precision="32-true"'
        )

    def forget_events(self) -> None:
        """Nobody has to wait for the gather that was started."""
        self._gathered_event = None

    def refill(self, weights_ready: Event) -> int:
        """Have what was written to main weights in unsharded ones that are in use. Returns how many collectives that took."""
        planes, shown = list(self._planes_there) or [0], self.installed
        slot = self.slot if self.gathered else None  # saved tensors may point there
        self.hide(takes_over=False)
        self.release()
        started = sum(self.start_gather(weights_ready, slot, for_backward=plane > 0) for plane in planes)
        if shown:
            self.install()
        return started

    def give_up_prefetch(self) -> bool:
        """Let another client have the slot if these weights were only gathered or kept in advance."""
        if not self.gathered:
            return False
        if not (self.installed or self.users_live):
            self.release()
            return True
        unit = self.unit()
        return self.users_live == 1 and unit is not None and unit.release_if_idle()

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What the optimizer's gradients are in."""
        return self.entries[0].local.grad_dtype or self.spec.main_dtype

    @property
    def has_full_gradients(self) -> bool:
        """Whether autograd left gradients that nobody has taken."""
        for entry in self.entries:
            if entry.full.grad is not None:
                return True
        return bool(self.gradients_outside)

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Add to the whole gradient of a parameter, in the main weight's dtype, beside what autograd leaves."""
        if self.entries[index].is_trained:
            known = self.gradients_outside.get(index)
            self.gradients_outside[index] = gradient if known is None else known + gradient

    def drop_full_gradients(self) -> None:
        """Forget what autograd left: the backward failed, or nobody wants it."""
        for entry in self.entries:
            entry.full.grad = None
        self.gradients_outside.clear()

    @property
    def slot(self) -> Slot | None:
        """Where the full weight is now; `None` where it needs no slot."""
        return self.client.slot if self.placement.weight else None


def _named(found: object, entry: Entry) -> str:
    """What stands where a module showed an entry, for messages."""
    if isinstance(found, ShardedParameter) and found._local_face is entry.local:
        return f"its rows in {str(found.dtype).removeprefix('torch.')} on {found.device}"
    return "somebody else's DTensor" if isinstance(found, DTensor) else type(found).__name__


def place_of(parameter: Tensor) -> tuple[ParameterGroup, int] | None:
    """Group of a parameter and its index in it, whichever of its faces is given; `None` if the engine does not manage it."""
    reference, index = getattr(parameter, OWNER, (None, 0))
    group = reference() if reference is not None else None
    return None if group is None else (group, index)


def owner_of(parameter: Tensor) -> tuple[ParameterGroup, Entry] | None:
    """Group and entry of a parameter, whichever of its faces is given; `None` if the engine does not manage it."""
    place = place_of(parameter)
    return None if place is None else (place[0], place[0].entries[place[1]])
