"""The mesh of a sharded module: which axes of the user's mesh parameters are sharded over, replicated over, or differ along.

This is the one file of the engine that knows axes by their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.comm.process_groups import accelerator_type, init_alone, kept

__all__ = [
    "CONTEXT",
    "DATA",
    "EXPERT",
    "OUTER",
    "SHARD",
    "Mesh",
    "axis_of",
    "broadcast_from_first",
    "resolve_mesh",
    "sharded_mesh",
]

OUTER = "outer"
SHARD = "shard"
# The names of meshes that say what ranks do with data: parameters are sharded over both together.
DATA = "data"
CONTEXT = "context"
EXPERT = "expert"
# Lightning's names, as in ModelParallelStrategy.
_DATA_PARALLEL = "data_parallel"
_TENSOR_PARALLEL = "tensor_parallel"

_ROLES = {OUTER: OUTER, SHARD: SHARD, DATA: SHARD, _DATA_PARALLEL: SHARD, CONTEXT: CONTEXT, EXPERT: EXPERT}


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


def sharded_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks with one axis in place of "data" and "context": parameters are sharded over both. Collective, if there are both.

    Raises:
        ShardingError: A mesh with a context axis that lacks some ranks, or a "data" axis.
    """
    names = mesh.mesh_dim_names or ()
    if CONTEXT not in names:
        return mesh
    described = _described(mesh)
    data = [name for name in names if _ROLES.get(name) == SHARD]
    others = [name for name in names if name not in (OUTER, CONTEXT, *data)]
    if len(data) != 1 or others:
        raise ShardingError(
            f'fully_shard: a mesh with the axis "{CONTEXT}" has one named "{DATA}" and perhaps "{OUTER}" beside it, got ({described}); '
            "rename its axes"
        )
    if mesh.size() != dist.get_world_size():
        raise ShardingError(
            f"fully_shard: the mesh ({described}) has {mesh.size()} of {dist.get_world_size()} ranks, and all ranks are needed to join its "
            f'axes "{data[0]}" and "{CONTEXT}"; pass a mesh of all ranks'
        )
    order = [names.index(name) for name in (OUTER, data[0], CONTEXT) if name in names]
    ranks = mesh.mesh.permute(order)
    ranks = ranks.flatten(-2)
    joined = (OUTER, SHARD) if OUTER in names else (SHARD,)
    key = ("mesh", mesh.device_type, joined, *ranks.shape, *ranks.flatten().tolist())
    return kept(key, lambda: DeviceMesh(mesh.device_type, ranks, mesh_dim_names=joined))


def resolve_mesh(mesh: DeviceMesh | None) -> Mesh:
    """The axes of the user's mesh, or a 1-D mesh over all ranks; of a process alone without a process group, over one that is made.

    An axis named "expert" is the expert axis, and one named "context" a part of the shard axis. Of the others, those named "outer" and
    "shard" (or "data", "data_parallel") are taken by name in either order; otherwise a single one is the shard axis and two are
    (outer, shard).

    Raises:
        ShardingError: One of several processes without a process group, or a mesh that does not fit; names its axes and sizes.
    """
    if mesh is None:
        if not dist.is_initialized():
            init_alone()
        device_type = "cpu" if dist.get_backend() in ("gloo", "mpi") else accelerator_type()
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(SHARD,))
    mesh = sharded_mesh(_without_tensor_axis(mesh))
    names = mesh.mesh_dim_names
    described = _described(mesh)
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
    data = [_ROLES.get(names[dim], names[dim]) for dim in dims] if names else []
    if len(data) == 2 and set(data) != {OUTER, SHARD} and (data[0] == SHARD or data[1] == OUTER):
        raise ShardingError(
            f'fully_shard: expected a 2-D mesh (outer, shard), or axes named both "outer" and "shard", got ({described}), '
            "whose names contradict their places; rename the axes or pass the part of the mesh that is meant"
        )
    shard_dim, outer_dim = dims[-1], dims[0] if len(dims) == 2 else None
    if data == [SHARD, OUTER]:
        shard_dim, outer_dim = dims[0], dims[1]
    if expert_dim is not None and mesh.size(expert_dim) == 1:
        expert_dim = None
    return Mesh(
        device_mesh=mesh,
        shard_dim=shard_dim,
        outer_dim=outer_dim,
        shard=axis_of(mesh, shard_dim, SHARD),
        outer=None if outer_dim is None else axis_of(mesh, outer_dim, OUTER),
        expert_dim=expert_dim,
        expert=None if expert_dim is None else axis_of(mesh, expert_dim, EXPERT),
    )


def _without_tensor_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Lightning's mesh always has a tensor axis; with one rank along it, it is the mesh of the others."""
    names = mesh.mesh_dim_names or ()
    if _TENSOR_PARALLEL not in names or mesh.ndim == 1:
        return mesh
    if (size := mesh.size(names.index(_TENSOR_PARALLEL))) > 1:
        raise ShardingError(
            f"fully_shard: the mesh ({_described(mesh)}) has {size} ranks along its tensor axis; parameters that differ along it are not "
            f'supported in this version. Use tensor_parallel_size=1, and pass mesh["{_DATA_PARALLEL}"]'
        )
    rest = tuple(name for name in names if name != _TENSOR_PARALLEL)
    return mesh[rest[0] if len(rest) == 1 else rest]


def _described(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    return ", ".join(f"{names[dim] if names else dim}={mesh.size(dim)}" for dim in range(mesh.ndim))


def axis_of(mesh: DeviceMesh, dim: int, default_name: str) -> Axis:
    """One dim of a mesh as this rank sees it, named by its role; by its own name where that says none, `default_name` without one."""
    name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else default_name
    name = _ROLES.get(name, name)
    group = mesh.get_group(dim)
    averages = compat.averages(group, mesh.device_type)
    return Axis(name=name, size=mesh.size(dim), rank=mesh.get_local_rank(dim), group=group, averages=averages)
