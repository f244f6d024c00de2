"""The mesh of a run, from the sizes that a user gives: which ranks train on different data, and which divide a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp.engine.comm.mesh import CONTEXT, DATA, EXPERT, OUTER
from lightning_mfsdp.engine.comm.process_groups import kept

__all__ = ["MeshSizes", "RunMesh"]

# Lightning's names for the axes of a mesh (ModelParallelStrategy).
_LIGHTNING_AXES = ("data_parallel", "tensor_parallel")


@dataclass(frozen=True, kw_only=True)
class RunMesh:
    """The mesh of the ranks of a run.

    Attributes:
        device_mesh: What a LightningModule sees: axes (data,), with outer before it and context after it where they were asked for, or
            Lightning's two under Lightning's names where its words were used.
        sharded: What the engine shards over.
        context: The ranks that divide the sequences of a batch among themselves; `None` if each has whole ones.
    """

    device_mesh: DeviceMesh
    sharded: DeviceMesh
    context: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Numbers of ranks along the axes of the mesh, as given: checked at once for what they are, and later against the number of ranks.

    Attributes:
        data: "auto": what the other axes leave.
        outer: Groups of ranks that each hold the whole model.
        context: Ranks that divide sequences.
        data_parallel: Lightning's word for all of them; `None` if it was not used.
        with_outer_axis: The mesh has an outer axis, even of one rank.
        mesh: The user's own, instead of sizes.

    Raises:
        ValueError: A size that is none, or sizes beside a mesh.
    """

    data: int | Literal["auto"] = "auto"
    outer: int = 1
    context: int = 1
    data_parallel: int | Literal["auto"] | None = None
    with_outer_axis: bool = False
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        sizes = {
            "data": self.data,
            "outer": self.outer,
            "context": self.context,
            "data_parallel_size": self.data_parallel,
        }
        for argument, size in sizes.items():
            named = (size == "auto" and argument in ("data", "data_parallel_size")) or size is None
            if not named and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{argument}={size!r}: expected a positive number of ranks")
        if self.mesh is not None:
            self._check_mesh(self.mesh)
        if self.data != "auto" and self.data_parallel not in (None, "auto"):
            raise ValueError(
                f"data={self.data} and data_parallel_size={self.data_parallel} both say how many ranks there are; give one of the two"
            )

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        given = {
            "data": self.data,
            "outer": self.outer,
            "context": self.context,
            "data_parallel_size": self.data_parallel,
        }
        for argument, size in given.items():
            if size not in (None, 1, "auto"):
                raise ValueError(f"{argument}={size} and mesh={mesh}: a mesh already has its axes; give one of the two")
        names = mesh.mesh_dim_names or ()
        if EXPERT in names:
            raise ValueError(
                f'mesh={mesh}: its axis "{EXPERT}" is for modules of experts, whose parameters differ along it; give the strategy a mesh '
                "over the same ranks without it, and this one to fully_shard(experts, mesh) in configure_model"
            )
        if mesh.ndim - (CONTEXT in names) not in (1, 2):
            raise ValueError(
                f"mesh={mesh}: expected one axis (data) or two (outer, data), and perhaps one named context, got {mesh.ndim}; pass the "
                'part of it along which data differ, such as mesh["outer", "data"]'
            )

    def of_world(self, world_size: int) -> dict[str, int]:
        """Sizes of the axes outer, data and context for this number of ranks; a mesh of the user's has its own.

        Raises:
            ValueError: They do not fit; names the product and the ranks.
        """
        if self.mesh is not None:
            return self._of_mesh(self.mesh, world_size)
        if self.data_parallel not in (None, "auto", world_size):
            raise ValueError(
                f"data_parallel_size={self.data_parallel}, but there are {world_size} ranks, and every rank is a data-parallel one: it "
                'stands for outer x data x context. Leave data_parallel_size at "auto", or start another number of processes'
            )
        others = self.outer * self.context
        data = self.data if isinstance(self.data, int) else max(world_size // others, 1)
        if others * data != world_size:
            raise ValueError(
                f"outer x data x context = {self.outer} x {data} x {self.context} = {others * data}, but there are {world_size} ranks; "
                + (
                    "use sizes that divide it"
                    if self.data == "auto"
                    else 'leave data at "auto", which is what the others leave'
                )
                + ", or start another number of processes"
            )
        return {OUTER: self.outer, DATA: data, CONTEXT: self.context}

    def _of_mesh(self, mesh: DeviceMesh, world_size: int) -> dict[str, int]:
        if mesh.size() != world_size:
            raise ValueError(
                f"mesh={mesh} has {mesh.size()} ranks, but there are {world_size}; give a mesh of all ranks"
            )
        names = mesh.mesh_dim_names or ()
        context = mesh.size(names.index(CONTEXT)) if CONTEXT in names else 1
        outer = mesh.size(names.index(OUTER)) if OUTER in names else 1
        return {OUTER: outer, DATA: world_size // outer // context, CONTEXT: context}

    def data_place(self, world_size: int, rank: int) -> tuple[int, int]:
        """How many ranks have different batches, and the number of `rank` among them. Known before processes are connected."""
        context = self.of_world(world_size)[CONTEXT]
        if self.mesh is None or context == 1:
            return world_size // context, rank // context
        dim = (self.mesh.mesh_dim_names or ()).index(CONTEXT)
        along = self.mesh.mesh.movedim(dim, -1).reshape(-1, context)
        return len(along), int((along == rank).any(-1).nonzero())

    @property
    def divides_sequences(self) -> bool:
        """Whether there is a context axis of more than one rank."""
        names = (self.mesh.mesh_dim_names or ()) if self.mesh is not None else ()
        return self.context > 1 or (
            self.mesh is not None and CONTEXT in names and self.mesh.size(names.index(CONTEXT)) > 1
        )

    def connect(self, device_type: str, world_size: int) -> RunMesh:
        """The mesh over connected processes. Context ranks are neighbors. Collective.

        Raises:
            ValueError: As `of_world`.
        """
        sizes = self.of_world(world_size)
        optional = {OUTER: self.with_outer_axis or sizes[OUTER] > 1, DATA: True, CONTEXT: sizes[CONTEXT] > 1}
        sharded = self.mesh or _made(device_type, {name: sizes[name] for name in sizes if optional[name]})
        shown = sharded
        if self.data_parallel is not None:
            shown = _made(device_type, dict(zip(_LIGHTNING_AXES, (world_size, 1), strict=True)))
        return RunMesh(
            device_mesh=shown,
            sharded=sharded,
            context=sharded.get_group(CONTEXT) if sizes[CONTEXT] > 1 else None,
        )


def _made(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    names, shape = tuple(sizes), tuple(sizes.values())
    return kept(("mesh", device_type, names, shape), lambda: init_device_mesh(device_type, shape, mesh_dim_names=names))
