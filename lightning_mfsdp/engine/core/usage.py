"""Which parameters got a gradient on any rank. The others keep `.grad` as it was, mostly `None`, as under DDP(find_unused_parameters=True).

A rank knows what its own backwards used. After the last reduction of a backward the ranks take the maximum of one byte for each parameter.
A rank that used all of its parameters knows the answer, so it sends ones and does not read what comes back. Only a rank that left a
parameter unused waits for the bytes, and only for the stream of the reductions.

Alternatives considered: bytes in the buckets of the gradients, which have the gradients' dtype, reach one shard where all ranks need
them, and would make every unit's reduction larger; a query at the first step alone, which is wrong as soon as ranks choose what they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base.streams import Streams

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = ["Usage"]


class Usage:
    """Decides which gradients are shown for parameters that this rank did not use.

    Attributes:
        waits: How often the host waited for an answer, for inspection.
    """

    def __init__(self, streams: Streams) -> None:
        self.waits = 0
        self._streams = streams
        self._ones: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}

    def exchange(self, reduced: Sequence[ParameterGroup]) -> None:
        """Exchange what was used, and show the gradients of what any rank used. Collective.

        Args:
            reduced: Whose gradients were reduced, in an order that all ranks share.
        """
        by_ranks: dict[tuple[dist.ProcessGroup, ...], list[ParameterGroup]] = {}
        for group in reduced:
            by_ranks.setdefault(group.mesh.process_groups, []).append(group)
        for ranks, groups in by_ranks.items():
            with torch.no_grad(), self._streams.on(self._streams.reduce):
                if any(group.gradients.unused and group.gradients.undecided() for group in groups):
                    self._ask(groups)
                else:
                    self._answer(ranks, groups)

    def _answer(self, ranks: tuple[dist.ProcessGroup, ...], groups: list[ParameterGroup]) -> None:
        """Report that this rank used everything."""
        numel = sum(len(group.entries) for group in groups)
        ones = self._ones.get(ranks)
        if ones is None or ones.numel() != numel:
            ones = self._ones[ranks] = torch.ones(numel, dtype=torch.uint8, device=groups[0].device)
        self._maximum(ones, groups[0])  # which leaves ones

    def _ask(self, groups: list[ParameterGroup]) -> None:
        """Report what this rank did not use, and wait for the other ranks' reports."""
        used: list[int] = []
        for group in groups:
            undecided = group.gradients.undecided()
            used += [int(index not in undecided) for index in range(len(group.entries))]
        device = groups[0].device
        reports = torch.tensor(used, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda").to(
            device, non_blocking=True
        )
        self._maximum(reports, groups[0])
        self.waits += 1
        used = reports.tolist()  # waits for the stream of the reductions alone
        for group in groups:
            group.gradients.decide(used[: len(group.entries)])
            used = used[len(group.entries) :]

    def _maximum(self, used: Tensor, group: ParameterGroup) -> None:
        """Take the maximum over all ranks that have the parameters of a group.

        Each axis on the stream of its reductions, so that a communicator has one order of calls on the device.
        """
        shard, outer = group.axes.shard, group.axes.outer
        if shard.size > 1:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=shard.reduce_group or shard.group)
        if outer is not None and outer.size > 1:
            streams = self._streams
            reduced = streams.record()
            with streams.on(streams.outer):
                streams.wait(reduced, streams.outer)
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=outer.reduce_group or outer.group)
                done = streams.record()
            streams.wait(done, streams.reduce)
