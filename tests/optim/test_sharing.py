"""Which rank gets which matrix, and in which batches: every matrix once, work even, traffic bounded, ranks agreed."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from lightning_mfsdp.optim.orthogonalize import orthogonalize, work_of
from lightning_mfsdp.optim.sharing import Batch, SharedMatrix, plan_batches

# A block of a 1B decoder, scaled down: attention in one matrix, its output, and a gated network.
BLOCK = ((96, 32), (32, 32), (2 * 86, 32), (32, 86))


def laid_out(world: int, blocks: int) -> list[SharedMatrix]:
    """Each block's matrices one after the other in one address space, cut into equal parts at the next row."""
    found = []
    for _ in range(blocks):
        start, length = 0, -(-sum(rows * width for rows, width in BLOCK) // world)
        for rows, width in BLOCK:
            cuts = [min(max(-(-(rank * length - start) // width), 0), rows) for rank in range(world + 1)]
            cuts[-1] = rows
            found.append(
                SharedMatrix(
                    shape=torch.Size((rows, width)),
                    rows=tuple(range(cuts[rank], cuts[rank + 1]) for rank in range(world)),
                )
            )
            start += rows * width
    return found


def traffic(matrices: list[SharedMatrix], batch: Batch, world: int) -> int:
    """Most that any rank sends or receives."""
    sent = [sum(matrices[member].bytes_on(rank) for member in batch.members) for rank in range(world)]
    received = [
        sum(
            2 * matrices[m].shape.numel() for m, owner in zip(batch.members, batch.owners, strict=True) if owner == rank
        )
        for rank in range(world)
    ]
    return max(sent + received)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_matrix_has_one_owner_and_work_is_even(world: int) -> None:
    matrices = laid_out(world, blocks=12)
    batches = plan_batches(matrices, 10**9)
    assert len(batches) == 1
    assert sorted(batches[0].members) == list(range(len(matrices)))
    assert list(batches[0].owners) == sorted(batches[0].owners)
    work = [0] * world
    for member, owner in zip(batches[0].members, batches[0].owners, strict=True):
        work[owner] += work_of(matrices[member].shape)
    assert max(work) - min(work) <= max(work_of(matrix.shape) for matrix in matrices)
    assert max(work) <= 1.1 * sum(work) / world


def test_batches_are_as_large_as_allowed_and_no_larger() -> None:
    world, blocks = 4, 8
    matrices = laid_out(world, blocks)
    largest = max(2 * matrix.shape.numel() for matrix in matrices)
    for limit in (1, largest, 3 * largest):
        batches = plan_batches(matrices, limit)
        assert sorted(member for batch in batches for member in batch.members) == list(range(len(matrices)))
        for batch in batches:
            assert len(batch.members) == 1 or traffic(matrices, batch, world) <= limit
        for batch, following in pairwise(batches):
            assert any(
                traffic(matrices, Batch(members=(*batch.members, member), owners=(*batch.owners, owner)), world) > limit
                for member, owner in zip(following.members, following.owners, strict=True)
            )
    assert len(plan_batches(matrices, 1)) == len(matrices)
    per_rank = sum(2 * matrix.shape.numel() for matrix in matrices) / world
    assert len(plan_batches(matrices, 3 * largest)) <= 2 * -(-per_rank // (3 * largest))


def test_batches_of_several_matrices_give_work_to_all_ranks_or_all_but_one() -> None:
    matrices = laid_out(4, blocks=8)
    limit = 2 * max(2 * matrix.shape.numel() for matrix in matrices)
    batches = plan_batches(matrices, limit)[:-1]
    assert len(batches) > 2
    assert min(len(set(batch.owners)) for batch in batches) >= 3


def test_the_owner_of_the_first_matrix_is_who_has_most_of_it() -> None:
    rows = (range(1), range(1, 1), range(1, 6))
    (batch,) = plan_batches([SharedMatrix(shape=torch.Size((6, 4)), rows=rows)], 1)
    assert batch.owners == (2,)


def test_nothing_to_share_is_no_batch() -> None:
    assert plan_batches([], 1) == []


@pytest.mark.parametrize(("shape", "steps"), list(product([(5, 9), (9, 5), (6, 6), (1, 4)], [0, 5])))
def test_the_iteration_is_the_one_of_pytorch(shape: tuple[int, int], steps: int) -> None:
    """torch.optim.Muon with momentum, weight decay and rate taken out of the way."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = gradient.clone()
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, ns_steps=steps).step()
    found = orthogonalize(gradient.bfloat16(), (3.4445, -4.7750, 2.0315), steps, 1e-7)
    scale = max(1, shape[0] / shape[1]) ** 0.5
    assert torch.equal(parameter.detach(), torch.zeros(shape).add_(found, alpha=-scale))
