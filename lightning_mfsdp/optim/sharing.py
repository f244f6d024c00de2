"""Plans which rank orthogonalizes which matrix, and in which batches they are exchanged.

Pure arithmetic: equal arguments give equal plans on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_mfsdp.optim.orthogonalize import work_of

__all__ = ["WIRE_DTYPE", "Batch", "SharedMatrix", "plan_batches"]

# The dtype that Newton-Schulz computes in.
WIRE_DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class SharedMatrix:
    """One matrix whose rows lie on several ranks.

    Attributes:
        shape: `[R, C]`, global.
        rows: Of dim 0, by rank.
    """

    shape: torch.Size
    rows: tuple[range, ...]

    def bytes_on(self, rank: int) -> int:
        """Bytes of this matrix's rows on one rank, on the wire."""
        return len(self.rows[rank]) * self.shape[1] * WIRE_DTYPE.itemsize


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Matrices that are exchanged together.

    Attributes:
        members: Numbers of the matrices, those of the first owner first.
        owners: The rank that orthogonalizes each member.
    """

    members: tuple[int, ...]
    owners: tuple[int, ...]


def plan_batches(matrices: Sequence[SharedMatrix], exchange_bytes: int) -> list[Batch]:
    """Assign every matrix to one rank, with balanced work, and cut the exchange into batches.

    Args:
        matrices: In an order that all ranks share.
        exchange_bytes: What a rank sends, and what it receives, in one batch at most; a matrix that is larger is a batch of its own.

    Returns:
        Batches in which all ranks have work, if there are enough matrices.
    """
    owners = _owners(matrices)
    queues: dict[int, list[int]] = {}
    for number, owner in owners.items():
        queues.setdefault(owner, []).append(number)
    waves = itertools.zip_longest(*(queues[owner] for owner in sorted(queues)))
    in_turn = [number for wave in waves for number in wave if number is not None]
    batches: list[list[int]] = []
    traffic: list[int] = []
    for number in in_turn:
        matrix, owner = matrices[number], owners[number]
        ranks = range(len(matrix.rows))
        whole = sum(map(matrix.bytes_on, ranks))
        more = [matrix.bytes_on(rank) for rank in ranks] + [whole if rank == owner else 0 for rank in ranks]
        together = [before + added for before, added in zip(traffic, more, strict=True)] if batches else []
        if batches and max(together) <= exchange_bytes:
            batches[-1].append(number)
            traffic = together
        else:
            batches.append([number])
            traffic = more
    return [_batch(members, owners) for members in batches]


def _owners(matrices: Sequence[SharedMatrix]) -> dict[int, int]:
    """The heaviest matrix first, each to the rank with the least work so far, and among those to the one with most of its rows."""
    load = [0] * (len(matrices[0].rows) if matrices else 0)
    owners: dict[int, int] = {}
    for number in sorted(range(len(matrices)), key=lambda number: (-work_of(matrices[number].shape), number)):
        matrix = matrices[number]
        owner = min(range(len(load)), key=lambda rank: (load[rank], -len(matrix.rows[rank]), rank))
        load[owner] += work_of(matrix.shape)
        owners[number] = owner
    return owners


def _batch(members: list[int], owners: dict[int, int]) -> Batch:
    ordered = sorted(members, key=lambda number: (owners[number], number))
    return Batch(members=tuple(ordered), owners=tuple(owners[number] for number in ordered))
