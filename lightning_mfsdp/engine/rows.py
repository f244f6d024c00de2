"""Which rows of a parameter this rank owns, and the whole from everybody's.

Rows are counted in the parameter as users and checkpoints see it. Where ranks along the mesh's axis of parts hold different parameters
of one name (experts, under expert parallelism), that is all of them one after the other.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_mfsdp.engine.collectives import Mesh

if TYPE_CHECKING:
    from lightning_mfsdp.engine.group import ParameterGroup

__all__ = ["gather_rows", "join_parts", "own_part", "owned_rows", "whole_shape"]


def whole_shape(shape: torch.Size, mesh: Mesh) -> torch.Size:
    """The shape of all parts of a parameter together; `shape` is that of one."""
    return shape if mesh.parts is None else torch.Size([mesh.parts.size * shape[0], *shape[1:]])


def owned_rows(group: ParameterGroup, index: int) -> range:
    """Rows of a parameter's main weight that this rank holds; a 0-D parameter counts as one row."""
    rows = group.layout.owned_rows(index, group.main_extent.start, len(group.main_extent))
    parts = group.mesh.parts
    before = parts.rank * group.layout.shapes[index][0] if parts is not None else 0
    return range(before + rows.start, before + rows.stop)


def gather_rows(group: ParameterGroup, index: int, rows: Tensor) -> Tensor:
    """The whole of something shaped like one parameter, from every rank's rows of it. Collective.

    Args:
        group: Of the parameter.
        index: Which parameter.
        rows: This rank's rows, `[len(owned), *shape[1:]]`.

    Returns:
        A new tensor of the parameter's global shape on every rank.
    """
    layout, shape = group.layout, group.entries[index].shape
    counts = [
        len(layout.owned_rows(index, shard)) * layout.row_numel(index) if shape else 1
        for shard in range(layout.num_shards)
    ]
    piece = rows.new_zeros(max(counts))
    context, name = group.context, group.entries[index].name
    piece[: rows.numel()].copy_(rows.flatten())
    for axis, split in ((group.outer_axis, group.placement.outer_main), (group.shard_axis, group.placement.main)):
        if split and axis is not None:
            gathered = piece.new_empty(axis.size * piece.numel())
            with context.ranges.around("full_tensor", name) if context is not None else nullcontext():
                axis.gather([gathered], [piece])
            piece = gathered
    pieces = piece.view(layout.num_shards, -1)
    whole = torch.cat([pieces[shard, :count] for shard, count in enumerate(counts)])
    return join_parts(whole.view(torch.Size(layout.shapes[index])), group.mesh)


def join_parts(part: Tensor, mesh: Mesh) -> Tensor:
    """All parts of a parameter from every rank's one; `part` itself where there is only one. Collective."""
    if mesh.parts is None:
        return part
    whole = part.new_empty(whole_shape(part.shape, mesh))
    mesh.parts.gather([whole.view(-1)], [part.contiguous().view(-1)])
    return whole


def own_part(whole: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part of a whole parameter."""
    return whole if mesh.parts is None else whole.chunk(mesh.parts.size)[mesh.parts.rank]
