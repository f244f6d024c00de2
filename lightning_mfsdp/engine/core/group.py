"""ParameterGroup: the parameters of one unit with one dtype; where they are stored, and how they get there.

    main weight         main dtype,     this rank's shard (or sub-shard under HFSDP)     the optimizer's
    compute weights     see weights.py
    gradients           see gradients.py

A group takes rank 0's values of its parameters, keeps this rank's rows as the main weight, and frees the parameters' own memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.part import Part
from lightning_mfsdp.engine.comm.collectives import TOGETHER_BYTES, Axes, Axis, broadcast_from_first
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.core.buffer import FlatBuffer, buffer_numel
from lightning_mfsdp.engine.core.codec import marks_of
from lightning_mfsdp.engine.core.gradients import Gradients, Sync
from lightning_mfsdp.engine.core.group_spec import GroupSpec
from lightning_mfsdp.engine.core.host_memory import HostMemory
from lightning_mfsdp.engine.core.parameter import OWNER, Entry, UnshardedParameter, mark_owner
from lightning_mfsdp.engine.core.piece import Piece
from lightning_mfsdp.engine.core.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.core.rows import divisions, sharded_axes
from lightning_mfsdp.engine.core.sharded_parameter import SHARDED, ShardedParameter
from lightning_mfsdp.engine.core.weights import Weights
from lightning_mfsdp.engine.layout.layout import plan_layout
from lightning_mfsdp.engine.layout.placement import Placement

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.context import Context
    from lightning_mfsdp.engine.core.unit import Unit

__all__ = ["ParameterGroup", "as_local", "as_sharded", "owner_of", "place_of"]


class ParameterGroup:
    """Parameters of one kind, in one address space.

    Attributes:
        entries: The parameters, in module order.
        layout: Where each lies.
        main: The main weight, extent `main_extent`.
        weights: What forward and backward read.
        gradients: What backward leaves, from autograd to the optimizer.
        axes: Of the mesh.
        root: What the units of the root share, while it exists.
        offloads: Optimizer state is in host memory between steps, and so are main weights of parameters that were trainable from the start.
        host_buffer: Host memory of the main weight; `None` where it lies on the device.
        advised: The warning that this costs a gather each time was issued.
        moved: Entries that the module shows as a conversion left them (conversion.py).
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
        self.policy = policy
        self.device = device
        self.offloads = offloads
        self.placement = self.placement_for(placement)
        self.axes = Axes(mesh.shard, mesh.outer)
        self._plan([tuple(parameter.shape) for _, parameter, _ in named])
        shards = self._allocate()
        self.entries = [self._entry(index, *item) for index, item in enumerate(named)]
        self.weights = Weights(self, shards)
        self.gradients = Gradients(self)
        self._fill()
        self.advised = False
        self.moved: set[Entry] = set()

    # -- creation ------------------------------------------------------------------------------------------------------

    def _plan(self, shapes: list[tuple[int, ...]]) -> None:
        """Address space and which shards of it this rank holds. Inner shards are consecutive sub-shards of the outer axis."""
        shard, outer = self.axes.shard, self.axes.outer
        inner_count, inner_rank = (shard.size, shard.rank) if self.placement.main else (1, 0)
        sub_count, sub_rank = (outer.size, outer.rank) if outer and self.placement.outer_main else (1, 0)
        smallest = self.policy.smallest_itemsize(self.spec.storage_dtype, self.spec.main_dtype)
        count, together = inner_count * sub_count, self.spec.rows_together
        self.layout = plan_layout(shapes, count, itemsize=smallest, rows_together=together)
        self.full_extent = range(count)
        self.inner_extent = range(inner_rank * sub_count, (inner_rank + 1) * sub_count)
        start = inner_rank * sub_count + sub_rank
        self.main_extent = range(start, start + 1)

    def placement_for(self, placement: Placement) -> Placement:
        """What a strategy's placement is for these parameters: a weight stays whole where sharding it would bring nothing.

        That is where no other rank has a shard, unless the weight is cast for its use. A rank that is alone keeps the result: programs
        may then do with weights all that they do without sharding.
        """
        if self.spec.whole:
            return Placement(weight=False, gradient=False, main=False, outer_main=False)
        saves = self.mesh.shard.size > 1 or (bool(self.mesh.all_axes) and self._casts_when_used(placement))
        return replace(placement, weight=placement.weight and saves)

    def _casts_when_used(self, placement: Placement) -> bool:
        """Whether each all-gather casts the main weight: it has another dtype, and there is no compute shard beside it."""
        spec, policy = self.spec, self.policy
        keeps = policy.keep_compute_shard or placement.outer_main or spec.codec is not None or self._is_in_host_memory
        return placement.weight and spec.main_dtype != spec.compute_dtype and not keeps

    @property
    def _is_in_host_memory(self) -> bool:
        """Whether the main weight is."""
        return self.offloads and self.spec.trainable and not self.spec.whole

    def _allocate(self) -> list[FlatBuffer]:
        """Make the main weight; returns the compute shards."""
        spec, placement = self.spec, self.placement
        extent = self.inner_extent if placement.weight else self.full_extent
        self.host_buffer: HostMemory | None = None
        if self._is_in_host_memory:
            main_bytes = buffer_numel(self.layout, self.main_extent) * spec.main_dtype.itemsize
            self.host_buffer = HostMemory(main_bytes, self.device)
        main_is_shard = spec.codec is None and self.host_buffer is None and spec.main_dtype == spec.compute_dtype
        shards: list[FlatBuffer] = []
        with torch.inference_mode(False):
            if not self._casts_when_used(placement):
                shards += [FlatBuffer.zeros(self.layout, extent, spec.storage_dtype, self.device) for _ in spec.planes]
            if self.host_buffer is not None:
                self.main = FlatBuffer.over(self.layout, self.main_extent, self.host_buffer.seen.view(spec.main_dtype))
            elif main_is_shard:
                self.main = shards[0].part(self.main_extent)
            else:
                self.main = FlatBuffer.zeros(self.layout, self.main_extent, spec.main_dtype, self.device)
        return shards

    def _entry(
        self, index: int, name: str, parameter: nn.Parameter, sites: list[tuple[dict[str, nn.Parameter | None], str]]
    ) -> Entry:
        divided = divisions(parameter, self.mesh)
        piece = self._piece(index, tuple(part for _, part in divided))
        with torch.inference_mode(False):
            # With a version counter of its own: views of a buffer share one.
            nothing = torch.empty(0, dtype=self.main.dtype, device=self.main.segments[0].device)
            local = nn.Parameter(nothing, requires_grad=self.spec.trainable)
            compat.set_data(local, self.main.view(index))
            local.__dict__.update(marks_of(parameter, self.spec.codec))
            placements = self._placements(divided)
            sharded = ShardedParameter.wrap(self, index, name, local, parameter, piece, placements)
        for one in (parameter, sharded, local):
            mark_owner(one, self, index)
        if type(parameter) is nn.Parameter:
            parameter.__class__ = UnshardedParameter
        full = cast("UnshardedParameter", parameter)
        full.data_was_asked_for = False  # stays so if a class of the user or of a codec has its own `data`
        axes = tuple(axis for axis, _ in divided)
        return Entry(name=name, full=full, sites=sites, piece=piece, part_axes=axes, sharded=sharded, local=local)

    def _piece(self, index: int, parts: tuple[Part, ...]) -> Piece:
        """What this rank holds of a parameter's main weight."""
        rows = self.layout.owned_rows(index, self.main_extent.start, len(self.main_extent))
        shape = torch.Size(self.layout.shapes[index])
        for part in reversed(parts):
            shape = part.whole_shape(shape)
        return Piece(shape=shape, rows=rows, parts=parts)

    def _placements(self, divided: Sequence[tuple[Axis, Part]]) -> list[DTensorPlacement]:
        """How a main weight lies on the user's mesh, for DTensor."""
        mesh, by = self.mesh, self.placement
        dims = dict.fromkeys((mesh.shard_dim if by.main else None, mesh.outer_dim if by.outer_main else None), 0)
        dims |= {mesh.dim_of(axis): part.dim for axis, part in divided}
        return [Shard(dims[dim]) if dim in dims else Replicate() for dim in range(mesh.device_mesh.ndim)]

    def _fill(self) -> None:
        """Cut this rank's rows out of rank 0's values and free the parameters' own memory, a few parameters at a time."""
        codec = self.spec.codec
        with torch.inference_mode(False), torch.no_grad():
            together: dict[int, Tensor] = {}
            same: list[Axis] = []
            for index, entry in enumerate(self.entries):
                value = entry.full.detach() if codec is None else codec.initial_value(entry.full)
                value = value.to(self.device, copy=False).contiguous()
                before, same = same, [axis for axis in self.mesh.replicated_axes if axis not in entry.part_axes]
                size_bytes = value.nbytes + sum(one.nbytes for one in together.values())
                if together and (same != before or size_bytes > TOGETHER_BYTES):
                    self._keep(together, before)
                    together = {}
                together[index] = value
            self._keep(together, same)
        self.weights.begin()

    def _keep(self, values: dict[int, Tensor], same: Sequence[Axis]) -> None:
        """Take whole values of some parameters, by index, from the first rank along the axes where they are the same."""
        # `data`: it is no write of the program that the parameters' versions would tell of.
        broadcast_from_first([value.data for value in values.values()], same)
        for index, value in values.items():
            self.write(index, value)
            self.weights.leave_empty(index)
            self.entries[index].show(self.entries[index].sharded)

    def write(self, index: int, value: Tensor) -> None:
        """Keep this rank's rows of a full `value` (the shape it has in its module, any dtype) as the main weight."""
        local = self.entries[index].local
        if local.numel():
            local.copy_(self.weights.rows_of(value, index, self.main_extent))

    def make_replicas_equal(self) -> None:
        """Take the main weights of the first rank of those that have the same rows. Collective if there are several."""
        with torch.no_grad():
            for index, entry in enumerate(self.entries):
                divided = sharded_axes(self, index)
                same = [axis for axis in self.mesh.replicated_axes if axis not in divided]
                if same and entry.local.numel():
                    value = entry.local.detach().to(self.device).contiguous()
                    broadcast_from_first([value], same)
                    entry.local.copy_(value)

    def attach(self, unit: Unit, root: Context, number: int) -> None:
        """Join a unit and its root, as one of several groups: buffers come from the root's pool, and work runs on its streams."""
        self.unit = weakref.ref(unit)
        self.root: Callable[[], Context | None] = weakref.ref(root)
        self.streams = root.lane.streams
        self.streams.join_when_gone(self)
        self.weights.join(root.lane, number)

    def rename(self, name: str) -> None:
        """Update the name after its unit was renamed."""
        self.name = name
        self.weights.rename(name)

    # -- the unit and the root -----------------------------------------------------------------------------------------

    @property
    def unit_name(self) -> str:
        """Of the unit it belongs to; empty once that is gone."""
        unit = self.unit()
        return unit.name if unit is not None else ""

    @property
    def hides_gradients(self) -> bool:
        """A forward is being recorded, and gradients are stored temporarily."""
        context = self.root()
        return context is not None and context.reductions.hides_gradients

    def around_gather(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Context around the gather of one parameter."""
        context = self.root()
        return contextlib.nullcontext() if context is None else context.lane.ranges.around("full_tensor", name)

    def over_both_axes(self) -> dist.ProcessGroup:
        """The ranks of the shard axis and the outer one together. Collective, the first time."""
        context = self.root()
        assert context is not None, "a group in use belongs to a root"
        return context.channels.over_both_axes(self.mesh)

    def known_writes(self, *, weights: bool) -> int:
        """How often main weights, or else gradients, were written, counting only writes that are known to all ranks."""
        if (context := self.root()) is None:
            return 0
        if weights:
            context.writes.look()
            return context.writes.weights
        return context.writes.gradients + context.backward.num_ended

    def note_write(self, *, weights: bool = True) -> None:
        """Note that main weights may have been written, or that gradients were: forward must read the new values."""
        if (context := self.root()) is not None:
            context.writes.to_rows(self, of_weights=weights)

    def outdate_graphs(self, index: int) -> None:
        """Note that a main weight was written: a graph that saved the unsharded parameter raises."""
        self.weights.refuse_late_writes()
        self.weights.versions.outdate([index])
        self.weights.know_row(index)

    def reduce_held_back(self) -> None:
        """As `Context.reduce_held_back`, if anything of this group waits. Collective if so."""
        gradients = self.gradients
        if (gradients.held_back is not Sync.ALL or gradients.has_news) and (context := self.root()) is not None:
            context.reduce_held_back()

    def unsharded_outside(self, index: int) -> nn.Parameter | None:
        """A parameter that is used outside of forwards in grad mode, unsharded, if it is so and stays until a backward has ended."""
        unit = self.unit()
        return self.entries[index].full if unit is not None and unit.is_unsharded_and_current(self) else None

    def begin_backward(self) -> None:
        """A backward begins that may not involve any forward of a unit."""
        if (context := self.root()) is not None:
            context.begin_backward()

    # -- gradients -----------------------------------------------------------------------------------------------------

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Add to the whole gradient of a parameter, in the main weight's dtype, in addition to what autograd leaves."""
        self.gradients.add_outside(index, gradient)


def place_of(parameter: Tensor) -> tuple[ParameterGroup, int] | None:
    """Group of a parameter and its index in it, whichever representation is given; `None` if the engine does not manage it."""
    reference, index = getattr(parameter, OWNER, (None, 0))
    group = reference() if reference is not None else None
    return None if group is None else (group, index)


def owner_of(parameter: Tensor) -> tuple[ParameterGroup, Entry] | None:
    """Group and entry of a parameter, whichever representation is given; `None` if the engine does not manage it."""
    place = place_of(parameter)
    return None if place is None else (place[0], place[0].entries[place[1]])


def as_sharded(parameter: Any) -> ShardedParameter | None:
    """What the module shows of a parameter, whichever representation is given, also once the module is gone; `None` of anything else."""
    if isinstance(parameter, ShardedParameter):
        return parameter
    owner = owner_of(parameter)
    if owner is not None:
        return owner[1].sharded
    reference = getattr(parameter, SHARDED, None)
    return None if reference is None else reference()


def as_local(parameter: Any) -> Any:
    """The local rows of a parameter, whichever representation is given, also once the module is gone; anything else is returned itself."""
    sharded = as_sharded(parameter)
    return parameter if sharded is None else sharded._local
