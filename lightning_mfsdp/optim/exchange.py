"""Sends the rows of a batch of matrices to the matrices' owners, and the rows of the owners' results back.

    rows here, of every member        ->  all-to-all  ->  rows of every rank, of the members this rank owns
    results of those, row by row      ->  all-to-all  ->  result rows of every member, as they lie here

Everything travels in bfloat16. An exchange is started and waited for separately, so that it overlaps with the work on another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.optim.sharing import WIRE_DTYPE, Batch, SharedMatrix

__all__ = ["BatchExchange"]


class BatchExchange:
    """One batch of matrices, gathered and scattered again. All ranks of the group create the same batches, in the same order.

    Args:
        batch: Which matrices.
        matrices: All matrices that the batch's numbers index.
        updates: This rank's rows of each member, `[len(rows), C]`, in any float dtype; being sent when this returns.
        group: The ranks that share the rows.
        device: Of the rows.
    """

    def __init__(
        self,
        batch: Batch,
        matrices: Sequence[SharedMatrix],
        updates: Sequence[Tensor],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._members = [matrices[number] for number in batch.members]
        self._owners = batch.owners
        self._group, self._device = group, device
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._own = [matrix for matrix, owner in zip(self._members, self._owners, strict=True) if owner == self._rank]
        self._outwards = [0] * self._size
        for matrix, owner in zip(self._members, self._owners, strict=True):
            self._outwards[owner] += _numel(matrix, self._rank)
        self._inwards = [sum(_numel(matrix, rank) for matrix in self._own) for rank in range(self._size)]
        sent = self._memory(self._outwards)
        pairs = [pair for pair in zip(self._pieces_here(sent), updates, strict=True) if pair[1].numel()]
        if pairs:
            compat.foreach_copy_([piece for piece, _ in pairs], [update for _, update in pairs])
        self._received = self._memory(self._inwards)
        self._work = self._start(self._received, self._inwards, sent, self._outwards)

    def work(self, function: Callable[[Tensor], Tensor]) -> None:
        """Wait for the matrices this rank owns, apply `function` to each, and send the rows of the results back."""
        self._work.wait()
        pieces, results = self._pieces_of_owned(self._received), self._memory(self._inwards)
        for matrix, parts, targets in zip(self._own, pieces, self._pieces_of_owned(results), strict=True):
            in_order = sorted(range(self._size), key=lambda rank: matrix.rows[rank].start)
            result = function(torch.cat([parts[rank] for rank in in_order if len(parts[rank])]))
            for rank, rows in enumerate(matrix.rows):
                targets[rank].copy_(result[rows.start : rows.stop])
        self._received = self._memory(self._outwards)
        self._work = self._start(self._received, self._outwards, results, self._inwards)

    def results(self) -> list[Tensor]:
        """Wait for the result rows that belong to this rank, `[len(rows), C]` of each member."""
        self._work.wait()
        return self._pieces_here(self._received)

    def _memory(self, counts: list[int]) -> Tensor:
        return torch.empty(sum(counts), dtype=WIRE_DTYPE, device=self._device)

    def _start(self, received: Tensor, inwards: list[int], sent: Tensor, outwards: list[int]) -> dist.Work:
        work = dist.all_to_all_single(received, sent, inwards, outwards, group=self._group, async_op=True)
        return cast(dist.Work, work)  # none is for ranks that are not in the group

    def _pieces_here(self, flat: Tensor) -> list[Tensor]:
        """Rows on this rank of every member; owners follow each other in both buffers."""
        parts = torch.split(flat, [_numel(matrix, self._rank) for matrix in self._members])
        return [part.view(-1, matrix.shape[1]) for part, matrix in zip(parts, self._members, strict=True)]

    def _pieces_of_owned(self, flat: Tensor) -> list[list[Tensor]]:
        """Rows by rank, of each member that this rank owns; the buffer holds them rank by rank."""
        counts = [_numel(matrix, rank) for rank in range(self._size) for matrix in self._own]
        parts, count = torch.split(flat, counts), len(self._own)
        return [
            [parts[rank * count + number].view(-1, matrix.shape[1]) for rank in range(self._size)]
            for number, matrix in enumerate(self._own)
        ]


def _numel(matrix: SharedMatrix, rank: int) -> int:
    return len(matrix.rows[rank]) * matrix.shape[1]
