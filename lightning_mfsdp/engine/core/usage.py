"""Which parameters got a gradient on any rank. The others keep `.grad` as it was, mostly `None`, as under DDP(find_unused_parameters=True).

A rank knows what its own backwards used. After the last reduction of a backward the ranks take the maximum of one byte for each parameter.
A rank that used all of its parameters knows the answer, so it sends ones and does not read what comes back. Only a rank that left a
parameter unused waits for the bytes, and only for the stream of the reductions.

Alternatives considered: bytes in the buckets of the gradients, which have the gradients' dtype, reach one shard where all ranks need
them, and would make every unit's reduction larger; a query at the first step alone, which is wrong as soon as ranks choose what they use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base.streams import Streams
from lightning_mfsdp.engine.core.gradients import Gradients

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

    def exchange(self, reduced: Sequence[Gradients]) -> None:
        """Exchange what was used, and show the gradients of what any rank used. Collective.

        Args:
            reduced: What was reduced, in an order that all ranks share.
        """
        by_ranks: dict[tuple[dist.ProcessGroup, ...], list[Gradients]] = {}
        for one in reduced:
            by_ranks.setdefault(one.mesh.process_groups, []).append(one)
        for key, members in by_ranks.items():
            with torch.no_grad(), self._streams.on(self._streams.reduce):
                if any(one.undecided for one in members):
                    self._ask(members)
                else:
                    self._answer(key, members)

    def _answer(self, key: tuple[dist.ProcessGroup, ...], members: list[Gradients]) -> None:
        """Report that everything was used here."""
        numel = sum(one.num_parameters for one in members)
        ones = self._ones.get(key)
        if ones is None or ones.numel() != numel:
            ones = self._ones[key] = torch.ones(numel, dtype=torch.uint8, device=members[0].device)
        _maximum(ones, members[0])  # which leaves ones

    def _ask(self, members: list[Gradients]) -> None:
        """Report what was not used here, and wait for the other ranks' reports."""
        used = [int(index not in one.undecided) for one in members for index in range(one.num_parameters)]
        device = members[0].device
        there = torch.tensor(used, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda").to(
            device, non_blocking=True
        )
        _maximum(there, members[0])
        self.waits += 1
        used = there.tolist()  # waits for the stream of the reductions alone
        for one in members:
            one.decide(used[: one.num_parameters])
            used = used[one.num_parameters :]


def _maximum(used: Tensor, one: Gradients) -> None:
    """Take the maximum over all ranks that have the parameters of a group."""
    for axis in (one.axes.shard, one.axes.outer):
        if axis is not None and axis.size > 1:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=axis.reduce_group or axis.group)
