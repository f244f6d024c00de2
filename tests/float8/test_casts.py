"""Casts of a matrix to 8 bits, on the CPU."""

from __future__ import annotations

import pytest
import torch

from lightning_mfsdp.float8.casts import cast, largest_magnitude

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def cast_of(matrix, dtype=E4M3):
    return cast(matrix, largest_magnitude(matrix), dtype, True, True)


@pytest.mark.parametrize(("dtype", "largest", "bits"), [(E4M3, 448.0, 3), (E5M2, 57344.0, 2)])
def test_the_largest_number_becomes_the_largest_of_the_format_and_others_are_rounded_to_its_bits(dtype, largest, bits):
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    as_is, _, inverse = cast_of(matrix, dtype)
    assert as_is.float().abs().max() == largest
    back = as_is.float() * inverse
    big = matrix.abs() > matrix.abs().max() / 64  # no subnormal number
    assert ((back - matrix).abs() <= matrix.abs() * 2.0 ** -(bits + 1) * 1.001)[big].all()
    assert (back != matrix).any()


def test_a_transposed_cast_is_the_transpose_and_zeros_to_a_multiple_of_sixteen_rows():
    as_is, transposed, _ = cast_of(torch.randn(21, 32))
    assert transposed.shape == (32, 32)
    assert torch.equal(transposed[:, :21].float(), as_is.float().t())
    assert not transposed[:, 21:].float().any()


def test_only_what_is_wanted_takes_memory():
    matrix = torch.randn(16, 32)
    assert [tuple(each.shape) for each in cast(matrix, largest_magnitude(matrix), E4M3, True, False)] == [
        (16, 32),
        (0,),
        (),
    ]
    assert [tuple(each.shape) for each in cast(matrix, largest_magnitude(matrix), E4M3, False, True)] == [
        (0,),
        (32, 16),
        (),
    ]


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e-39, 2.0**-100, 1e-12, 3e38])
def test_numbers_of_any_size_stay_finite(value):
    as_is, _, inverse = cast_of(torch.full((16, 16), value))
    back = as_is.float() * inverse
    assert back.isfinite().all()
    if value >= 2.0**-100:
        assert (back - value).abs().max() <= 0.07 * value
    else:
        assert (back - value).abs().max() <= 2.0**-100


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_nan_in_the_cast(dtype, bad):
    matrix = torch.randn(16, 16)
    matrix[2, 3] = bad
    as_is, transposed, _ = cast_of(matrix, dtype)
    assert as_is[2, 3].float().isnan()
    assert transposed[3, 2].float().isnan()


def test_the_operator_agrees_with_what_compilers_are_told_of_it():
    matrix = torch.randn(20, 32)
    for wanted in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(cast, (matrix, largest_magnitude(matrix), E4M3, *wanted))
