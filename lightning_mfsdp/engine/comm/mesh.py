"""Mesh: says over which axes of the user's mesh parameters are sharded or replicated, and along which they differ.

This is the one file of the engine that knows axes by their names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.kept_groups import kept
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.comm.process_groups import accelerator_type, init_alone

__all__ = [
    "CONTEXT",
    "DATA",
    "EXPERT",
    "OUTER",
    "SHARD",
    "TENSOR",
    "Mesh",
    "are_alike",
    "axis_of",
    "is_expert_axis",
    "resolve_mesh",
    "role_of",
    "sharded_mesh",
]

OUTER = "outer"
SHARD = "shard"
# The names of meshes that say what ranks do with data: parameters are sharded over both together.
DATA = "data"
CONTEXT = "context"
EXPERT = "expert"
TENSOR = "tensor"
# Lightning's names, as in ModelParallelStrategy.
_DATA_PARALLEL = "data_parallel"
_TENSOR_PARALLEL = "tensor_parallel"

_ROLES = {
    OUTER: OUTER,
    SHARD: SHARD,
    DATA: SHARD,
    _DATA_PARALLEL: SHARD,
    CONTEXT: CONTEXT,
    EXPERT: EXPERT,
    TENSOR: TENSOR,
    _TENSOR_PARALLEL: TENSOR,
}


def role_of(name: str) -> str:
    """Which axis a name of an axis means, as one of the constants above; a name that is not known is returned as it is."""
    return _ROLES.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The mesh of a sharded module.

    Attributes:
        device_mesh: As given by the user: with a shard axis, and perhaps an outer axis, an expert axis and a tensor axis.
        shard_dim: Which of its dims is the shard axis.
        outer_dim: Which is the outer axis; `None` without one.
        shard: The shard axis as this rank sees it.
        outer: The outer axis; `None` without one.
        expert_dim: Which is the expert axis; `None` without one, and for one rank along it.
        expert: The axis along which parameters are different parts of one larger parameter (each rank's experts); `None` where they are
            whole. Every part is used for the data of all its ranks.
        tensor_dim: Which is the tensor axis; `None` without one, and for one rank along it.
        tensor: The axis whose ranks compute the same data together: parameters that are marked as parts (base/part.py) are different
            parts along it, and the others are the same.
    """

    device_mesh: DeviceMesh
    shard_dim: int
    outer_dim: int | None
    shard: Axis
    outer: Axis | None
    expert_dim: int | None = None
    expert: Axis | None = None
    tensor_dim: int | None = None
    tensor: Axis | None = None

    @cached_property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process group of each of `axes`."""
        return tuple(axis.group for axis in self.axes)

    @property
    def device_type(self) -> str:
        """The device type that shards are on: "cpu" or "cuda"."""
        return self.device_mesh.device_type

    @property
    def axes(self) -> list[Axis]:
        """Axes with more than one rank whose ranks have the same parts of parameters, for different data; the outer one first."""
        return [axis for axis in (self.outer, self.shard) if axis is not None and axis.size > 1]

    @property
    def replicated_axes(self) -> list[Axis]:
        """Axes with more than one rank along which what is not marked as a part is the same."""
        return [*self.axes, *([self.tensor] if self.tensor is not None else [])]

    @property
    def all_axes(self) -> list[Axis]:
        """Axes with more than one rank."""
        return [*self.axes, *(axis for axis in (self.expert, self.tensor) if axis is not None)]

    @property
    def num_ranks(self) -> int:
        """Ranks for whose data every parameter is used; those of a tensor axis have the same data, and count once."""
        return self.shard.size * math.prod(axis.size for axis in (self.outer, self.expert) if axis is not None)

    def dim_of(self, axis: Axis) -> int | None:
        """Which dim of `device_mesh` an axis is."""
        dims = ((self.shard, self.shard_dim), (self.outer, self.outer_dim), (self.expert, self.expert_dim))
        return next((dim for candidate, dim in dims if candidate is axis), self.tensor_dim)

    @property
    def data_ranks(self) -> Tensor:
        """Global ranks that have the same parts of parameters as this one, int, `[outer, shard]` or `[shard]`."""
        ranks = self.device_mesh.mesh
        others = ((self.expert_dim, self.expert), (self.tensor_dim, self.tensor))
        for dim, axis in sorted(
            ((dim, axis) for dim, axis in others if dim is not None and axis is not None), reverse=True
        ):
            ranks = ranks.select(dim, axis.rank)
        return ranks


def are_alike(described: object, axes: Sequence[Axis], device: torch.device) -> bool:
    """Whether all ranks along some axes describe the same, by one small all-reduce along each. Collective; the same on all ranks."""
    digest = int.from_bytes(hashlib.sha256(repr(described).encode()).digest()[:7], "big")
    bounds = torch.tensor([digest, -digest], device=device)
    for axis in axes:
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=axis.group)
    highest, lowest = bounds.tolist()
    return bool(highest == -lowest)


def sharded_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of the same ranks with one axis in place of "data" and "context": parameters are sharded over both. Collective, if there are.

    Raises:
        ShardingError: A mesh with a context axis that lacks some ranks, or a "data" axis.
    """
    names = mesh.mesh_dim_names or ()
    if CONTEXT not in names:
        return mesh
    described = _described(mesh)
    data = [name for name in names if _ROLES.get(name) == SHARD]
    tensor = [name for name in names if _ROLES.get(name) == TENSOR]
    others = [name for name in names if name not in (OUTER, CONTEXT, *data, *tensor)]
    if len(data) != 1 or others:
        raise ShardingError(
            f'fully_shard: a mesh with the axis "{CONTEXT}" has one named "{DATA}" and perhaps "{OUTER}" and "{TENSOR}" beside it, got '
            f"({described}); rename its axes"
        )
    if mesh.size() != dist.get_world_size():
        raise ShardingError(
            f"fully_shard: the mesh ({described}) has {mesh.size()} of {dist.get_world_size()} ranks, and all ranks are needed to join its "
            f'axes "{data[0]}" and "{CONTEXT}"; pass a mesh of all ranks'
        )
    # Ranks of a context axis have equal weights and gradients of other tokens: a reduce-scatter over both axes costs less than an
    # all-reduce over one of them, and shards are smaller.
    order = [names.index(name) for name in (OUTER, data[0], CONTEXT) if name in names]
    along_tensor = [names.index(name) for name in tensor]
    ranks = mesh.mesh.permute([*order, *along_tensor])
    ranks = ranks.flatten(len(order) - 2, len(order) - 1)
    joined = (*((OUTER,) if OUTER in names else ()), SHARD, *((TENSOR,) if tensor else ()))
    key = ("mesh", mesh.device_type, joined, *ranks.shape, *ranks.flatten().tolist())
    return kept(key, lambda: DeviceMesh(mesh.device_type, ranks, mesh_dim_names=joined))


def is_expert_axis(axis: Axis) -> bool:
    """Whether the ranks of an axis have experts of their own, which compute for each other's tokens."""
    return axis.name == EXPERT


def resolve_mesh(mesh: DeviceMesh | None) -> Mesh:
    """The axes of the user's mesh, or a 1-D mesh over all ranks; of a process alone without a process group, over one that is made.

    An axis named "expert" is the expert axis, one named "tensor" (or "tensor_parallel") the tensor axis, and one named "context" a part of
    the shard axis. Of the others, those named "outer" and "shard" (or "data", "data_parallel") are taken by name in either order; otherwise
    a single one is the shard axis and two are (outer, shard).

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
    tensor_dim = next((dim for dim, name in enumerate(names or ()) if _ROLES.get(name) == TENSOR), None)
    dims = [dim for dim in range(mesh.ndim) if dim not in (expert_dim, tensor_dim)]
    if len(dims) not in (1, 2):
        raise ShardingError(
            f"fully_shard: expected a mesh with one axis (shard) or two (outer, shard), got {mesh.ndim} axes ({described}); "
            'pass the part of it that is meant, such as mesh["outer", "shard"]; axes named "expert" and "tensor" may be beside those'
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
        tensor_dim=tensor_dim,
        tensor=None if tensor_dim is None else axis_of(mesh, tensor_dim, TENSOR),
    )


def _without_tensor_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh without a tensor axis of one rank, which Lightning's always have."""
    names = mesh.mesh_dim_names or ()
    alone = [name for dim, name in enumerate(names) if _ROLES.get(name) == TENSOR and mesh.size(dim) == 1]
    if not alone or mesh.ndim == 1:
        return mesh
    rest = tuple(name for name in names if name not in alone)
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
