"""Which rows of a parameter this rank owns, and the whole tensor from all ranks' rows.

Rows are counted in the parameter as users and checkpoints see it. Where ranks along the mesh's expert axis hold different parameters
of one name (experts, under expert parallelism), that is all of them one after the other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.params.managed import ManagedGroup

__all__ = ["gather_rows", "holders", "join_parts", "own_part", "owned_rows", "sharded_axes", "whole_shape"]


def whole_shape(shape: torch.Size, mesh: Mesh) -> torch.Size:
    """The shape of all parts of a parameter together; `shape` is that of one."""
    return shape if mesh.expert is None else torch.Size([mesh.expert.size * shape[0], *shape[1:]])


def owned_rows(group: ManagedGroup, index: int) -> range:
    """Rows of a parameter's main weight that this rank holds; a 0-D parameter counts as one row."""
    rows = group.layout.owned_rows(index, group.main_extent.start, len(group.main_extent))
    parts = group.mesh.expert
    before = parts.rank * group.layout.shapes[index][0] if parts is not None else 0
    return range(before + rows.start, before + rows.stop)


def sharded_axes(group: ManagedGroup) -> tuple[Axis, ...]:
    """The mesh axes along which ranks hold different rows of a group's main weights."""
    axes = []
    if group.placement.main:
        axes.append(group.axes.shard)
    if group.placement.outer_main and group.axes.outer is not None:
        axes.append(group.axes.outer)
    if group.mesh.expert is not None:
        axes.append(group.mesh.expert)
    return tuple(axes)


def holders(group: ManagedGroup) -> tuple[dist.ProcessGroup | None, list[int]]:
    """The ranks that hold different shards of a group's main weights, and the shard of each; `None` where each has all of them.

    The first call for a group that is split over both axes of a mesh is collective: it may make a process group.
    """
    placement, mesh, outer = group.placement, group.mesh, group.axes.outer
    if not placement.outer_main or outer is None:
        return (group.axes.shard.group, list(range(group.axes.shard.size))) if placement.main else (None, [0])
    if not placement.main:
        return outer.group, list(range(outer.size))
    both = group.over_both_axes()
    shard_comes_first = mesh.outer_dim is None or mesh.shard_dim < mesh.outer_dim
    ranks_by_shard = mesh.data_ranks if shard_comes_first else mesh.data_ranks.T
    shard_of = {int(rank): shard for shard, rank in enumerate(ranks_by_shard.flatten())}
    return both, [shard_of[rank] for rank in dist.get_process_group_ranks(both)]


def gather_rows(group: ManagedGroup, index: int, rows: Tensor) -> Tensor:
    """The whole of a tensor whose rows are distributed as those of one parameter, from every rank's rows of it. Collective.

    Args:
        group: Of the parameter.
        index: Which parameter.
        rows: This rank's rows, `[len(owned), ...]`; a row may have another shape than the parameter's.

    Returns:
        A new tensor with all rows on every rank.
    """
    layout, shape = group.layout, group.entries[index].shape
    row_shape = rows.shape[1:]
    counts = [len(owned) * row_shape.numel() if shape else 1 for owned in layout.rows_by_shard[index]]
    piece = rows.new_zeros(max(counts))
    name = group.entries[index].name
    piece[: rows.numel()].copy_(rows.flatten())
    for axis, split in ((group.axes.outer, group.placement.outer_main), (group.axes.shard, group.placement.main)):
        if split and axis is not None:
            gathered = piece.new_empty(axis.size * piece.numel())
            with group.around_gather(name):
                axis.gather([gathered], [piece])
            piece = gathered
    pieces = piece.view(layout.num_shards, -1)
    whole = torch.cat([pieces[shard, :count] for shard, count in enumerate(counts)])
    return join_parts(whole.view(torch.Size([*layout.shapes[index][:1], *row_shape])), group.mesh)


def join_parts(part: Tensor, mesh: Mesh) -> Tensor:
    """All parts of a parameter from each rank's part; `part` itself where there is only one. Collective."""
    if mesh.expert is None:
        return part
    whole = part.new_empty(whole_shape(part.shape, mesh))
    mesh.expert.gather([whole.view(-1)], [part.contiguous().view(-1)])
    return whole


def own_part(whole: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part of a whole parameter."""
    return whole if mesh.expert is None else whole.chunk(mesh.expert.size)[mesh.expert.rank]
