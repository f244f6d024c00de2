"""Which rows of a parameter this rank owns, and the whole tensor from all ranks' rows.

The whole is the parameter as users and checkpoints see it. Where ranks compute with different parts of it, it is all parts together: along
the mesh's expert axis those of all parameters (different experts, under expert parallelism), along its tensor axis those of the parameters
that are marked as parts (base/part.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base.part import Part, part_of
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.comm.mesh import Mesh

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = ["divisions", "gather_rows", "holders", "join_parts", "sharded_axes"]


def divisions(parameter: Tensor, mesh: Mesh) -> tuple[tuple[Axis, Part], ...]:
    """Along which axes ranks compute with different parts of a parameter, and this rank's; the outermost division first.

    Args:
        parameter: As its module has it.
        mesh: Of its group.
    """
    found: list[tuple[Axis, Part]] = []
    shape, part = parameter.shape, part_of(parameter)
    if part is not None and mesh.tensor is not None:
        found.append((mesh.tensor, part))
        shape = part.whole_shape(shape)
    if (axis := mesh.expert) is not None:
        experts = Part(dim=0, sections=(axis.size * shape[0],), size=axis.size, rank=axis.rank)
        found.insert(0, (axis, experts))
    return tuple(found)


def sharded_axes(group: ParameterGroup, index: int) -> tuple[Axis, ...]:
    """The mesh axes along which ranks hold different numbers of a parameter's main weight."""
    axes = []
    if group.placement.main:
        axes.append(group.axes.shard)
    if group.placement.outer_main and group.axes.outer is not None:
        axes.append(group.axes.outer)
    return (*axes, *group.entries[index].part_axes)


def holders(group: ParameterGroup) -> tuple[dist.ProcessGroup | None, list[int]]:
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


def gather_rows(group: ParameterGroup, index: int, rows: Tensor) -> Tensor:
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
    return join_parts(whole.view(torch.Size([*layout.shapes[index][:1], *row_shape])), group, index)


def join_parts(part: Tensor, group: ParameterGroup, index: int) -> Tensor:
    """All parts of a parameter from each rank's part; `part` itself where there is only one. Collective."""
    entry = group.entries[index]
    for axis, own in zip(reversed(entry.part_axes), reversed(entry.piece.parts), strict=True):
        gathered = part.new_empty(axis.size, part.numel())
        axis.gather([gathered.view(-1)], [part.contiguous().view(-1)])
        part = own.joined([theirs.view(part.shape) for theirs in gathered])
    return part
