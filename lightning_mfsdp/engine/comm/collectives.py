"""Gather and reduce over one mesh axis.

Everything here takes lists of flat tensors, one per segment of a group, and issues them as one coalesced call. It runs
on the current stream and is independent of groups, schedules and strategies. On an axis of size 1 callers do not call
these functions at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.comm.process_groups import accelerator_type, init_alone

__all__ = ["EXPERT", "Axes", "Axis", "Mesh", "axis_of", "broadcast_from_first", "resolve_mesh"]

EXPERT = "expert"  # the name of the expert axis


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of the mesh as this rank sees it.

    Attributes:
        name: For messages.
        size: Number of ranks along it.
        rank: This rank's position, `0 <= rank < size`.
        group: Carries gathers and reductions, unless the two below are set.
        reduce_group: A communicator of its own for reductions, so that a gather never queues behind one. `None`: share
            `group`.
        averages: The backend can divide by the number of ranks while it sums.
        gather_group: A communicator for gathers of weights into symmetric memory. `None`: `group`.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup
    averages: bool = False
    reduce_group: dist.ProcessGroup | None = None
    gather_group: dist.ProcessGroup | None = None

    def gather(self, outputs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        """Fill each output with the pieces of all ranks in rank order. A piece may be the output's own part at this rank's place."""
        group = self.gather_group or self.group
        if not outputs[0].is_floating_point():  # backends do not support all integers
            outputs, pieces = ([tensor.view(torch.uint8) for tensor in part] for part in (outputs, pieces))
        if len(outputs) == 1:
            compat.all_gather_flat(outputs[0], pieces[0], group)
        else:
            compat.all_gather_coalesced(outputs, pieces, group)

    def reduce_scatter(self, pieces: Sequence[Tensor], sources: Sequence[Tensor], factor: float) -> None:
        """Sum `factor` times each source over the ranks; keep this rank's piece. Sources may be overwritten (scaled)."""
        group = self.reduce_group or self.group
        op = self._scaled_sum(group, sources, factor)
        if len(pieces) == 1:
            compat.reduce_scatter_flat(pieces[0], sources[0], op, group)
        else:
            compat.reduce_scatter_coalesced(pieces, sources, op, group)

    def all_reduce(self, tensors: Sequence[Tensor], factor: float) -> None:
        """Replace each tensor by `factor` times its sum over the ranks."""
        group = self.reduce_group or self.group
        op = self._scaled_sum(group, tensors, factor)
        compat.all_reduce_coalesced(tensors, op, group)

    def sum_scatter_high_precision(self, pieces: Sequence[Tensor], sources: Sequence[Tensor], factor: float) -> None:
        """Reduce-scatter with low precision on the wire and sums in the pieces' dtype: all-to-all, then a local sum.

        Args:
            pieces: `[L]` each, in the dtype of the sums.
            sources: `[size * L]` each, in the dtype on the wire.
            factor: Applied once, to the sum.

        Source:
            Megatron-LM pull request 3067 measures what fp32 sums are worth; the all-to-all form needs no support from
            NCCL.
        """
        group = self.reduce_group or self.group
        for piece, source in zip(pieces, sources, strict=True):
            received = torch.empty_like(source)
            dist.all_to_all_single(received, source, group=group)
            torch.sum(received.view(self.size, -1), dim=0, dtype=piece.dtype, out=piece)
            if factor != 1.0:
                piece.mul_(factor)

    def all_reduce_high_precision(self, tensors: Sequence[Tensor], factor: float) -> None:
        """All-reduce with low precision on the wire and float32 sums: scatter by all-to-all, sum, gather the rounded sums."""
        group = self.reduce_group or self.group
        for tensor in tensors:
            length = -(-tensor.numel() // self.size)
            padded = tensor.new_zeros(length * self.size)
            padded[: tensor.numel()].copy_(tensor)
            piece = torch.empty(length, dtype=torch.float32, device=tensor.device)
            self.sum_scatter_high_precision([piece], [padded], factor)
            compat.all_gather_flat(padded, piece.to(tensor.dtype), group)
            tensor.copy_(padded[: tensor.numel()])

    def _scaled_sum(self, group: dist.ProcessGroup, sources: Sequence[Tensor], factor: float) -> object:
        """The reduction op for `factor`; if the backend cannot scale, the sources are scaled here instead."""
        if factor == 1.0:
            return dist.ReduceOp.SUM
        if self.averages and factor == 1.0 / self.size:
            return dist.ReduceOp.AVG
        wide = sources[0].dtype.itemsize >= 4  # NCCL rounds the factor to the dtype on the wire
        if wide and compat.uses_nccl(group, sources[0].device):
            return compat.premul_sum(factor)
        for source in sources:
            source.mul_(factor)
        return dist.ReduceOp.SUM


@dataclass(eq=False)
class Axes:
    """The mesh axes of a group. They are replaced by axes with communicators of their own when the first backward begins.

    Attributes:
        shard: Along which parameters are sharded.
        outer: Along which they are replicated, or the main weight is sharded once more; `None` without one.
    """

    shard: Axis
    outer: Axis | None


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The data-parallel mesh of a sharded module.

    Attributes:
        device_mesh: As given by the user: with a shard axis, and perhaps an outer axis and an expert axis.
        shard_dim: Which of its dims is the shard axis.
        outer_dim: Which is the outer axis; `None` without one.
        shard: The shard axis as this rank sees it.
        outer: The outer axis; `None` without one.
        expert_dim: Which is the expert axis; `None` without one, and for one rank along it.
        expert: The axis along which parameters are different parts of one larger parameter (each rank's experts); `None` where they are
            whole. Every part is used for the data of all its ranks.
    """

    device_mesh: DeviceMesh
    shard_dim: int
    outer_dim: int | None
    shard: Axis
    outer: Axis | None
    expert_dim: int | None = None
    expert: Axis | None = None

    @cached_property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The product of the sizes of `axes`."""
        return tuple(axis.group for axis in self.axes)

    @property
    def device_type(self) -> str:
        """Where shards live: "cpu" or "cuda"."""
        return self.device_mesh.device_type

    @property
    def axes(self) -> list[Axis]:
        """Axes with more than one rank along which parameters are the same, the outer one first."""
        return [axis for axis in (self.outer, self.shard) if axis is not None and axis.size > 1]

    @property
    def all_axes(self) -> list[Axis]:
        """Axes with more than one rank."""
        return [*self.axes, *([self.expert] if self.expert is not None else [])]

    @property
    def num_ranks(self) -> int:
        """Ranks whose data every parameter is used for."""
        return self.shard.size * (self.outer.size if self.outer else 1) * self.expert_size

    @property
    def expert_size(self) -> int:
        """Ranks along the expert axis: of how many parts a parameter consists."""
        return self.expert.size if self.expert is not None else 1

    @property
    def data_ranks(self) -> Tensor:
        """Global ranks that have the same parameters as this one, int, `[outer, shard]` or `[shard]`."""
        ranks = self.device_mesh.mesh
        if self.expert is not None and self.expert_dim is not None:
            ranks = ranks.select(self.expert_dim, self.expert.rank)
        return ranks


def broadcast_from_first(value: Tensor, mesh: Mesh) -> None:
    """Overwrite a contiguous tensor of any dtype with that of the mesh's first rank: bytes, because backends do not support all dtypes."""
    content = value.detach().view(-1).view(torch.uint8)
    for axis in mesh.axes:
        dist.broadcast(content, group=axis.group, group_src=0)


def resolve_mesh(mesh: DeviceMesh | None) -> Mesh:
    """The axes of the user's mesh, or a 1-D mesh over all ranks; of a process alone without a process group, over one that is made.

    An axis named "expert" is the expert axis. Of the others, those named "outer" and "shard" are taken by name in either order; otherwise
    a single one is the shard axis and two are (outer, shard).

    Raises:
        ShardingError: One of several processes without a process group, or a mesh that does not fit; names its axes and sizes.
    """
    if mesh is None:
        if not dist.is_initialized():
            init_alone()
        device_type = "cpu" if dist.get_backend() in ("gloo", "mpi") else accelerator_type()
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    names = mesh.mesh_dim_names
    described = ", ".join(f"{names[i] if names else i}={mesh.size(i)}" for i in range(mesh.ndim))
    expert_dim = names.index(EXPERT) if names and EXPERT in names else None
    dims = [dim for dim in range(mesh.ndim) if dim != expert_dim]
    if len(dims) not in (1, 2):
        raise ShardingError(
            f"fully_shard: expected a mesh with one axis (shard) or two (outer, shard), got {mesh.ndim} axes ({described}); "
            'pass the data-parallel part of it, such as mesh["outer", "shard"], for experts with their own axis, mesh["shard", "expert"]'
        )
    if mesh.get_coordinate() is None:
        raise ShardingError(
            f"fully_shard: rank {dist.get_rank()} is not part of the mesh ({described}); call it on the mesh's ranks "
            "only"
        )
    data = [names[dim] for dim in dims] if names else []
    if len(data) == 2 and set(data) != {"outer", "shard"} and (data[0] == "shard" or data[1] == "outer"):
        raise ShardingError(
            f'fully_shard: expected a 2-D mesh (outer, shard), or axes named both "outer" and "shard", got ({described}), '
            "whose names contradict their places; rename the axes or pass the part of the mesh that is meant"
        )
    shard_dim, outer_dim = dims[-1], dims[0] if len(dims) == 2 else None
    if data == ["shard", "outer"]:
        shard_dim, outer_dim = dims[0], dims[1]
    if expert_dim is not None and mesh.size(expert_dim) == 1:
        expert_dim = None
    return Mesh(
        device_mesh=mesh,
        shard_dim=shard_dim,
        outer_dim=outer_dim,
        shard=axis_of(mesh, shard_dim, "shard"),
        outer=None if outer_dim is None else axis_of(mesh, outer_dim, "outer"),
        expert_dim=expert_dim,
        expert=None if expert_dim is None else axis_of(mesh, expert_dim, EXPERT),
    )


def axis_of(mesh: DeviceMesh, dim: int, default_name: str) -> Axis:
    """One dim of a mesh as this rank sees it; `default_name` where it has none."""
    name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else default_name
    group = mesh.get_group(dim)
    averages = compat.averages(group, mesh.device_type)
    return Axis(name=name, size=mesh.size(dim), rank=mesh.get_local_rank(dim), group=group, averages=averages)
