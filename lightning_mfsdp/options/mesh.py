"""Makes the mesh of a run from the sizes that a user gives: which ranks train on different data, and which divide sequences or weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.kept_groups import kept
from lightning_mfsdp.engine.internals import CONTEXT, DATA, EXPERT, OUTER, SHARD, TENSOR, role_of

__all__ = ["MeshSizes", "RunMesh"]

_MAY_BE_AUTO = ("data", "data_parallel_size", "tensor_parallel_size")

# Lightning's names for the axes of a mesh (ModelParallelStrategy).
_LIGHTNING_AXES = ("data_parallel", "tensor_parallel")


@dataclass(frozen=True, kw_only=True)
class RunMesh:
    """The mesh of the ranks of a run.

    Attributes:
        device_mesh: What a LightningModule sees: axes (data,), with outer before it, and context and tensor after it where they were asked
            for, or Lightning's two under Lightning's names where its words were used.
        sharded: What the engine shards over.
        experts: What it shards experts over, with an axis along which they differ; `None` if each rank has all of them.
        context: The ranks that divide the sequences of a batch among themselves; `None` if each has whole ones.
        tensor: The ranks that divide weights among themselves; `None` if each computes with whole ones.
        same_batches: The ranks that need the same batches as this one; `None` if there is no other.
        different_data: The ranks over which sums and metrics are taken, one of each tensor group; `None`: all.
    """

    device_mesh: DeviceMesh
    sharded: DeviceMesh
    experts: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    same_batches: dist.ProcessGroup | None = None
    different_data: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Numbers of ranks along the axes of the mesh, as given: checked at once for what they are, and later against the number of ranks.

    Attributes:
        data: "auto": what the other axes leave.
        outer: Groups of ranks that each hold the whole model.
        context: Ranks that divide sequences.
        tensor: Ranks that divide weights.
        expert: Ranks that have different experts, a divisor of data x context.
        data_parallel: Lightning's word for outer x data x context; `None` if it was not used.
        tensor_parallel: Lightning's word for tensor, "auto" for the ranks of a node; `None` if it was not used.
        with_outer_axis: The mesh has an outer axis, even of one rank.
        mesh: The user's own, instead of sizes.

    Raises:
        ValueError: A size that is none, or sizes beside a mesh.
        TypeError: A mesh that is none.
    """

    data: int | Literal["auto"] = "auto"
    outer: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    data_parallel: int | Literal["auto"] | None = None
    tensor_parallel: int | Literal["auto"] | None = None
    with_outer_axis: bool = False
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        for argument, size in self._sizes_by_argument().items():
            named = (size == "auto" and argument in _MAY_BE_AUTO) or size is None
            if not named and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                choices = "a positive number of ranks" + (' or "auto"' if argument in _MAY_BE_AUTO else "")
                raise ValueError(f"{argument}={size!r}: expected {choices}, such as {argument}=2")
        if self.mesh is not None:
            if not isinstance(self.mesh, DeviceMesh):
                raise TypeError(
                    f"mesh={self.mesh!r}: expected a DeviceMesh or None; sizes of axes are options of their own, such as data=4, outer=2"
                )
            self._check_mesh(self.mesh)
        if self.data != "auto" and self.data_parallel not in (None, "auto"):
            raise ValueError(
                f"data={self.data} and data_parallel_size={self.data_parallel} both say how many ranks have data; give one of the two"
            )
        if self.tensor != 1 and self.tensor_parallel not in (None, self.tensor):
            raise ValueError(
                f"tensor={self.tensor} and tensor_parallel_size={self.tensor_parallel!r} are two names of one axis; give one of the two"
            )

    def _sizes_by_argument(self) -> dict[str, object]:
        return {
            "data": self.data,
            "outer": self.outer,
            "context": self.context,
            "tensor": self.tensor,
            "expert": self.expert,
            "data_parallel_size": self.data_parallel,
            "tensor_parallel_size": self.tensor_parallel,
        }

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        for argument, size in self._sizes_by_argument().items():
            if size not in (None, 1, "auto"):
                raise ValueError(f"{argument}={size} and mesh={mesh}: a mesh already has its axes; give one of the two")
        names = _roles(mesh)
        if EXPERT in names:
            raise ValueError(
                f'mesh={mesh}: its axis "{EXPERT}" is for modules of experts, whose parameters differ along it; give the strategy a mesh '
                "over the same ranks without it, and this one to fully_shard(experts, mesh) in configure_model"
            )
        if mesh.ndim - (CONTEXT in names) - (TENSOR in names) not in (1, 2):
            raise ValueError(
                f"mesh={mesh}: expected one axis (data) or two (outer, data), and perhaps others named context and tensor, got {mesh.ndim} "
                'axes; pass the part of it that is meant, such as mesh["outer", "data"]'
            )

    def of_world(self, world_size: int, node_size: int | None = None) -> dict[str, int]:
        """Sizes of the axes outer, data, context and tensor for this number of ranks; a mesh of the user's has its own.

        Args:
            world_size: Number of ranks.
            node_size: Of those of a node; `None`: all are on one.

        Raises:
            ValueError: They do not fit; names the product and the ranks.
        """
        if self.mesh is not None:
            return self._of_mesh(self.mesh, world_size)
        tensor = self.tensor
        if self.tensor_parallel is not None:
            tensor = (
                self.tensor_parallel if self.tensor_parallel != "auto" else max(self.tensor, node_size or world_size)
            )
        if self.data_parallel not in (None, "auto") and self.data_parallel * tensor != world_size:
            raise ValueError(
                f"data_parallel_size x tensor_parallel_size = {self.data_parallel} x {tensor}, but there are {world_size} ranks, and the "
                'first stands for outer x data x context. Leave data_parallel_size at "auto", or start another number of processes'
            )
        others = self.outer * self.context * tensor
        data = self.data if isinstance(self.data, int) else max(world_size // others, 1)
        if others * data != world_size:
            raise ValueError(
                f"outer x data x context x tensor = {self.outer} x {data} x {self.context} x {tensor} = {others * data}, but there are "
                f"{world_size} ranks; "
                + (
                    "use sizes that divide it"
                    if self.data == "auto"
                    else 'leave data at "auto", which is what the others leave'
                )
                + ", or start another number of processes"
            )
        if data * self.context % self.expert:
            raise ValueError(
                f"expert={self.expert} does not divide data x context = {data} x {self.context}, and experts are divided over those "
                "ranks; use a number that divides it"
            )
        return {OUTER: self.outer, DATA: data, CONTEXT: self.context, TENSOR: tensor}

    def _of_mesh(self, mesh: DeviceMesh, world_size: int) -> dict[str, int]:
        if mesh.size() != world_size:
            raise ValueError(
                f"mesh={mesh} has {mesh.size()} ranks, but there are {world_size}; give a mesh of all ranks"
            )
        names = _roles(mesh)
        sizes = {name: mesh.size(names.index(name)) if name in names else 1 for name in (OUTER, CONTEXT, TENSOR)}
        return {
            OUTER: sizes[OUTER],
            DATA: world_size // prod(sizes.values()),
            CONTEXT: sizes[CONTEXT],
            TENSOR: sizes[TENSOR],
        }

    def data_place(
        self, world_size: int, rank: int, node_size: int | None = None, *, parts_differ: bool = False
    ) -> tuple[int, int]:
        """How many ranks have different batches, and the number of `rank` among them. Known before processes are connected.

        Args:
            world_size: Number of ranks.
            rank: One of them.
            node_size: As in `of_world`.
            parts_differ: Ranks of one context group have different batches, too.

        Raises:
            ValueError: The launcher numbers more ranks than the run was configured for; otherwise as `of_world`.
        """
        if rank >= world_size:
            raise ValueError(
                f"this process is rank {rank}, so there are at least {rank + 1}, but the Trainer or Fabric was given {world_size} "
                "(num_nodes x devices); make them agree"
            )
        sizes = self.of_world(world_size, node_size)
        together = self._ranks(sizes).reshape(-1, sizes[TENSOR] if parts_differ else sizes[CONTEXT] * sizes[TENSOR])
        return len(together), int((together == rank).any(-1).nonzero())

    def _ranks(self, sizes: dict[str, int]) -> Tensor:
        """Global ranks, `[outer x data, context, tensor]`."""
        if self.mesh is None:
            return torch.arange(prod(sizes.values()), device="cpu").reshape(-1, sizes[CONTEXT], sizes[TENSOR])
        names, ranks = _roles(self.mesh), self.mesh.mesh
        for name in (CONTEXT, TENSOR):
            ranks = ranks.movedim(names.index(name), -1) if name in names else ranks.unsqueeze(-1)
            names = (*(other_name for other_name in names if other_name != name), name)
        return ranks.reshape(-1, sizes[CONTEXT], sizes[TENSOR])

    @property
    def divides_sequences(self) -> bool:
        """Whether there is a context axis of more than one rank."""
        names = _roles(self.mesh) if self.mesh is not None else ()
        return self.context > 1 or (
            self.mesh is not None and CONTEXT in names and self.mesh.size(names.index(CONTEXT)) > 1
        )

    def connect(self, device_type: str, world_size: int, node_size: int | None = None) -> RunMesh:
        """The mesh over connected processes. Tensor ranks are neighbors, and so are context ranks with equal places. Collective.

        Raises:
            ValueError: As `of_world`.
        """
        sizes = self.of_world(world_size, node_size)
        # An axis of one rank would cost a process group, of which NCCL makes a communicator.
        optional = {
            OUTER: self.with_outer_axis or sizes[OUTER] > 1,
            DATA: True,
            CONTEXT: sizes[CONTEXT] > 1,
            TENSOR: sizes[TENSOR] > 1,
        }
        sharded = self.mesh or _kept_mesh(device_type, {name: sizes[name] for name in sizes if optional[name]})
        visible_mesh = sharded
        if self.data_parallel is not None or self.tensor_parallel is not None:
            # For programs that read Lightning's axes; the engine shards over `sharded`.
            by_lightning = (world_size // sizes[TENSOR], sizes[TENSOR])
            visible_mesh = _kept_mesh(device_type, dict(zip(_LIGHTNING_AXES, by_lightning, strict=True)))
        ranks = self._ranks(sizes)
        roles = _roles(sharded)
        context = sharded.get_group(roles.index(CONTEXT)) if optional[CONTEXT] else None
        tensor = sharded.get_group(roles.index(TENSOR)) if optional[TENSOR] else None
        return RunMesh(
            device_mesh=visible_mesh,
            sharded=sharded,
            experts=self._experts(device_type, sizes, with_outer_axis=optional[OUTER]),
            context=context,
            tensor=tensor,
            same_batches=_group_of(ranks.flatten(1)) if context and tensor else context or tensor,
            different_data=_group_of(ranks.flatten(0, 1).T) if tensor else None,
        )

    def _experts(self, device_type: str, sizes: dict[str, int], *, with_outer_axis: bool) -> DeviceMesh | None:
        if self.expert == 1:
            return None
        # The expert axis is cut out of data x context: the other of these ranks hold the same experts, which are sharded over them.
        sizes_of_axes = {OUTER: sizes[OUTER]} if with_outer_axis else {}
        sizes_of_axes |= {SHARD: sizes[DATA] * sizes[CONTEXT] // self.expert, EXPERT: self.expert}
        return _kept_mesh(device_type, sizes_of_axes | ({TENSOR: sizes[TENSOR]} if sizes[TENSOR] > 1 else {}))


def _roles(mesh: DeviceMesh) -> tuple[str, ...]:
    """Which axes a mesh has, in its order: Lightning's names of axes are understood, too."""
    return tuple(map(role_of, mesh.mesh_dim_names or ()))


def _kept_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    names, shape = tuple(sizes), tuple(sizes.values())
    return kept(("mesh", device_type, names, shape), lambda: init_device_mesh(device_type, shape, mesh_dim_names=names))


def _group_of(rows: Tensor) -> dist.ProcessGroup:
    """The process group of the row of ranks that this rank is in. Collective over them."""
    ranks_of_row = sorted(next(row for row in rows.tolist() if dist.get_rank() in row))
    return kept(("ranks", *ranks_of_row), lambda: compat.new_group(ranks_of_row))
