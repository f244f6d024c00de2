"""Parts of parameters: cutting, joining, shapes and marks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mfsdp import ShardingError
from lightning_mfsdp.base.part import Strip, copy_marks, mark_part, mark_summed
from lightning_mfsdp.tensor_parallel import Part, is_summed, part_of

WHOLE = torch.arange(2 * 12 * 6).view(2, 12, 6)
# dim, sections
CASES = {
    "rows": (1, (12,)),
    "first dim": (0, (2,)),
    "last dim": (2, (6,)),
    "packed": (1, (6, 6)),
    "packed, last dim": (2, (2, 4)),
    "queries, keys, values": (1, (8, 2, 2)),
}


def parts_of(case: str) -> list[Part]:
    dim, sections = CASES[case]
    return [Part(dim=dim, sections=sections, size=2, rank=rank) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_parts_join_to_the_whole_tensor(case: str) -> None:
    parts = parts_of(case)
    own = [part.own(WHOLE) for part in parts]
    assert all(piece.is_contiguous() and piece.numel() == WHOLE.numel() // 2 for piece in own)
    assert torch.equal(parts[0].joined(own), WHOLE)
    for part, piece in zip(parts, own, strict=True):
        assert part.local_shape(WHOLE.shape) == piece.shape
        assert part.whole_shape(piece.shape) == WHOLE.shape
        for strip in part.strips:
            whole = WHOLE.narrow(part.dim, strip.whole, strip.length)
            assert torch.equal(piece.narrow(part.dim, strip.local, strip.length), whole)


def test_each_section_is_divided_by_itself() -> None:
    part = Part(dim=1, sections=(8, 2, 2), size=2, rank=1)
    assert part.strips == (Strip(4, 0, 4), Strip(9, 4, 1), Strip(11, 5, 1))
    assert part.own(torch.arange(12)[None]).tolist() == [[4, 5, 6, 7, 9, 11]]


def test_a_part_shares_no_memory_with_the_whole_tensor() -> None:
    whole = torch.zeros(4, 2)
    own = Part(dim=0, sections=(4,), size=2, rank=0).own(whole)
    whole.add_(1)
    assert own.sum() == 0


def test_cutting_is_differentiable() -> None:
    whole = torch.zeros(4, 3, requires_grad=True)
    Part(dim=0, sections=(2, 2), size=2, rank=1).own(whole).sum().backward()
    assert whole.grad is not None
    assert whole.grad.sum(1).tolist() == [0, 3, 0, 3]


def test_a_section_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"dim 1 of length 8 \+ 3 \+ 3 cannot be divided into 2 equal parts"):
        Part(dim=1, sections=(8, 3, 3), size=2, rank=0)


def test_marks_go_to_replacements() -> None:
    parameter, part = nn.Parameter(torch.zeros(2)), parts_of("packed")[0]
    assert part_of(parameter) is None
    assert not is_summed(parameter)
    mark_part(parameter, part)
    mark_summed(parameter)
    replacement = nn.Parameter(torch.zeros(2))
    copy_marks(parameter, replacement)
    assert part_of(replacement) == part
    assert is_summed(replacement)
    plain = nn.Parameter(torch.zeros(2))
    copy_marks(nn.Parameter(torch.zeros(2)), plain)
    assert part_of(plain) is None
