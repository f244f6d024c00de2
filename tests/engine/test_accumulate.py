"""Sums of gradients: any dtypes, tensor by tensor."""

from __future__ import annotations

import pytest
import torch

from lightning_mfsdp.base.accumulate import accumulate_

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


@pytest.mark.parametrize("wide", DTYPES, ids=str)
@pytest.mark.parametrize("narrow", DTYPES[:4], ids=str)
def test_each_sum_keeps_its_dtype_and_has_the_bits_of_add(wide: torch.dtype, narrow: torch.dtype) -> None:
    torch.manual_seed(0)
    sums = [torch.randn(size, dtype=wide) for size in ((3, 5), (7,), (0, 2), ())]
    addends = [torch.randn(total.shape).to(narrow) for total in sums]
    expected = [total.clone().add_(addend) for total, addend in zip(sums, addends, strict=True)]
    accumulate_(sums, addends)
    assert [total.dtype for total in sums] == [wide] * len(sums)
    assert all(torch.equal(total, one) for total, one in zip(sums, expected, strict=True))


def test_nothing_is_added_to_nothing() -> None:
    accumulate_([], [])


def test_a_sum_without_an_addend_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        accumulate_([torch.ones(1), torch.ones(1)], [torch.ones(1)])
