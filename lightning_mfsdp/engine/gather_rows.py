"""The whole of something that lies by rows as a parameter does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_mfsdp.engine.group import ParameterGroup

__all__ = ["gather_rows"]


def gather_rows(group: ParameterGroup, index: int, rows: Tensor) -> Tensor:
    """The whole of something shaped like one parameter, from every rank's rows of it. Collective.

    Args:
        group: Of the parameter.
        index: Which one of it.
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
    piece[: rows.numel()].copy_(rows.flatten())
    for axis, split in ((group.outer_axis, group.placement.outer_main), (group.shard_axis, group.placement.main)):
        if split and axis is not None:
            gathered = piece.new_empty(axis.size * piece.numel())
            axis.gather([gathered], [piece])
            piece = gathered
    pieces = piece.view(layout.num_shards, -1)
    return torch.cat([pieces[shard, :count] for shard, count in enumerate(counts)]).view(shape)
