"""Combines what the ranks that divide a vocabulary have found of their parts, by one exchange of four numbers for each token.

It comes once, after the last tile. All ranks combine the same numbers in the same order, so they agree to the bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.ops.tiles import LSE, MEAN, TARGET, TOTAL

__all__ = ["add_over_parts", "whole_vocabulary"]


def whole_vocabulary(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Statistics `[4, T]` of the whole vocabulary from those of this rank's part. Collective over `group`."""
    if group is None:
        return part
    num_parts = dist.get_world_size(group)
    gathered = part.new_empty(num_parts * part.shape[0], part.shape[1])
    gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # the latter warns from torch 2.13 on
    gather(gathered, part, group=group)
    parts = gathered.view(num_parts, *part.shape)
    statistics = torch.empty_like(part)
    peak = parts[:, LSE].amax(0)
    shares = (parts[:, LSE] - peak).exp_()
    share_sum = shares.sum(0)
    statistics[LSE] = share_sum.log() + peak
    statistics[MEAN] = (shares * (parts[:, MEAN] - peak)).sum(
        0
    ) / share_sum + peak  # as in tiles.py, means may be large
    statistics[TARGET] = parts[:, TARGET].sum(0)  # zero but for one part
    statistics[TOTAL] = parts[:, TOTAL].sum(0)
    return statistics


def add_over_parts(to_hidden: Tensor | None, group: dist.ProcessGroup | None) -> Tensor | None:
    """Gradients to hidden states, to which every part of the vocabulary contributes. Collective over `group`."""
    if group is not None and to_hidden is not None:
        dist.all_reduce(to_hidden, group=group)
    return to_hidden
