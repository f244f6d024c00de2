"""Channels: the communicators that the units of a root use, and symmetric memory for what they gather.

Where calls queue on a device (NCCL), reductions get a communicator of their own, so that a gather never waits behind one. With
symmetric memory gathers get one as well, configured to use no compute cores (zero CTA): copy engines move the bytes, and matrix
products keep the whole device.

Source: NCCL 2.28 introduced copy-engine collectives for symmetric windows; "Copy Engine Collectives" in PyTorch's page on
symmetric memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.base.kept_groups import kept
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.comm.mesh import Mesh
from lightning_mfsdp.engine.layout.placement import Placement

__all__ = ["Channels", "check_symmetric_memory"]


class Channels:
    """Communicators in addition to the user's own, one set for each process group; they live as long as the process group does.

    Args:
        device: Where shards live.
        symmetric: Gather into symmetric memory.
    """

    def __init__(self, device: torch.device, *, symmetric: bool) -> None:
        self.symmetric = symmetric
        self._device = device

    def separate(self, axis: Axis) -> Axis:
        """The axis with communicators of its own. Collective over it, the first time."""
        if axis.size == 1 or axis.reduce_group is not None or not compat.uses_nccl(axis.group, self._device):
            return axis
        ranks = dist.get_process_group_ranks(axis.group)
        over = axis.name, *ranks
        reduce_group = kept(("reduce", *over), lambda: compat.new_group(ranks))
        gather_group = kept(("gather", *over), lambda: compat.zero_cta_group(ranks)) if self.symmetric else None
        return replace(axis, reduce_group=reduce_group, gather_group=gather_group)

    def sharing_rows(self, mesh: Mesh, placement: Placement) -> dist.ProcessGroup:
        """The ranks over which the rows of a main weight are distributed. Collective over them, the first time."""
        if not placement.outer_main or mesh.outer is None:
            return mesh.shard.group
        return self.over_both_axes(mesh)

    def over_both_axes(self, mesh: Mesh) -> dist.ProcessGroup:
        """All ranks of a mesh in one group. Collective over them, the first time."""
        ranks = sorted(int(rank) for rank in mesh.data_ranks.flatten())
        return kept(("both axes", *ranks), lambda: compat.new_group(ranks))

    def allocator(self, axis: Axis) -> Callable[[int], Tensor] | None:
        """Makes symmetric memory of a number of bytes, collectively; `None` for ordinary memory."""
        gather_group = axis.gather_group
        if gather_group is None:
            return None
        return lambda size_bytes: compat.symmetric_memory(size_bytes, self._device, gather_group)


def check_symmetric_memory(device: torch.device, axis: Axis, storage: str) -> None:
    """Refuse symmetric memory where it is not available.

    Raises:
        ShardingError: With the reason.
    """
    if not compat.uses_nccl(axis.group, device):
        reason = f"it needs CUDA and NCCL, got {device.type} and {dist.get_backend(axis.group)}"
    elif storage != "pooled":
        reason = f'it needs fixed slots, got storage={storage!r} instead of "pooled"'
    else:
        reason = compat.no_symmetric_memory_because(device)
    if reason:
        raise ShardingError(
            f"fully_shard: symmetric_memory=True on rank {dist.get_rank()}: {reason}. Leave it out here"
        )
