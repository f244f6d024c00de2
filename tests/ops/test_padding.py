"""Left padding removed and restored: what a loop over rows does, for any lengths, and differentiable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_mfsdp.ops import alignment_of, remove_left_padding, restore_left_padding

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def left_padded(lengths: list[int], width: int, trailing: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = True
    values = torch.randn(len(lengths), width, *trailing, dtype=torch.float64)
    return values, mask


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, more=st.integers(0, 3), trailing=st.sampled_from([(), (2,), (2, 3)]), fixed=st.booleans())
def test_both_ways_do_what_a_loop_over_rows_does(
    lengths: list[int], more: int, trailing: tuple[int, ...], fixed: bool
) -> None:
    width = max(lengths) + more
    values, mask = left_padded(lengths, width, trailing)
    moved, kept = remove_left_padding(values, mask.long(), width=max(lengths) + 1 if fixed else None, fill=-1)
    assert moved.shape[1] == kept.shape[1] == max(lengths) + fixed
    restored = restore_left_padding(moved, mask, fill=-2)
    for row, length in enumerate(lengths):
        assert kept[row].tolist() == [True] * length + [False] * (kept.shape[1] - length)
        assert torch.equal(moved[row, :length], values[row, width - length :])
        assert (moved[row, length:] == -1).all()
        assert torch.equal(restored[row, width - length :], values[row, width - length :])
        assert (restored[row, : width - length] == -2).all()


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, recipe=st.sampled_from(["current", "mxfp8", "nvfp4", 6, None]))
def test_columns_suit_a_recipe_with_as_few_as_it_takes(lengths: list[int], recipe: str | int | None) -> None:
    values, mask = left_padded(lengths, max(lengths) + 1, (2,))
    moved, kept = remove_left_padding(values, mask, recipe=recipe)
    width, alignment = moved.shape[1], alignment_of(recipe)
    suiting = (each for each in range(max(lengths), 10**6) if len(lengths) * each % alignment == 0)
    assert width == kept.shape[1] == next(suiting)
    assert torch.equal(restore_left_padding(moved, mask), values * mask[..., None])
    remove_left_padding(values, mask, width=width, recipe=recipe)
    if alignment > len(lengths):
        with pytest.raises(ValueError, match=rf"needs a multiple of {alignment}; give width=\d+, or none"):
            remove_left_padding(values, mask, width=width + 1, recipe=recipe)


def test_gradients_go_back_to_where_the_tokens_were() -> None:
    values, mask = left_padded([3, 0, 5], 6, (2,))
    moved, _ = remove_left_padding(values.requires_grad_(), mask)
    weights = torch.randn(3, 6, 2, dtype=torch.float64)
    (grad,) = torch.autograd.grad((restore_left_padding(moved, mask) * weights).sum(), values)
    assert torch.equal(grad, weights * mask[..., None])


def test_what_would_lose_tokens_is_refused() -> None:
    values, mask = left_padded([3, 5], 6, ())
    with pytest.raises(ValueError, match="width=4 would cut tokens off, the longest row has 5"):
        remove_left_padding(values, mask, width=4)
    with pytest.raises(ValueError, match="the mask has rows of 5 tokens, and values has 4 columns"):
        restore_left_padding(values[:, :4], mask)
    with pytest.raises(ValueError, match="row 1 of the mask has padding after a token"):
        remove_left_padding(values, mask.roll(1, 1).index_fill(0, torch.tensor([0]), True))
    with pytest.raises(
        ValueError, match=r"expected values \[B, S, ...\] and a mask \[B, S\] of them, got \(2, 5\) and \(2, 6\)"
    ):
        remove_left_padding(values[:, :5], mask)
