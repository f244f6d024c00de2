"""Packed and padded batches: what a plain loop over samples gives, for any samples and recipe."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_mfsdp.ops import AlignedCollator, alignment_of
from tests.engine.internals import described

RECIPES = [None, "delayed", "current", "mxfp8", "block", "nvfp4", 12]
IGNORED, PADDING = -7, 99

SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=40), min_size=1, max_size=7
)


def labeled(samples: list[list[tuple[int, bool]]]) -> list[dict[str, list[int]]]:
    """Some tokens of each are not to be learned."""
    return [
        {"input_ids": [i for i, _ in sample], "labels": [i if learned else IGNORED for i, learned in sample]}
        for sample in samples
    ]


def labels_by_a_loop(labels: list[int], shift: bool) -> list[int]:
    return [*labels[1:], IGNORED] if shift else [IGNORED, *labels[1:]]


def packed_by_a_loop(
    samples: list[dict[str, list[int]]], alignment: int, shift: bool, piece: int | None = None
) -> dict[str, Any]:
    """`piece`: how much padding counts as one sample."""
    ids, labels, positions, ends = [], [], [], [0]
    for sample in samples:
        ids += sample["input_ids"]
        positions += range(len(sample["input_ids"]))
        labels += labels_by_a_loop(sample["labels"], shift)
        ends.append(len(ids))
    real = len(ids)
    while len(ids) % alignment:
        if piece and len(ids) > real and (len(ids) - real) % piece == 0:
            ends.append(len(ids))
        ids.append(PADDING)
        labels.append(IGNORED)
        positions.append(len(ids) - 1 - ends[-1])
    if len(ids) > real:
        ends.append(len(ids))
    return {
        "input_ids": [ids],
        "labels": [labels],
        "position_ids": [positions],
        "mask": [[place < real for place in range(len(ids))]],
        "cu_seqlens": ends,
        "max_seqlen": max(stop - start for start, stop in pairwise(ends)),
    }


def as_lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, recipe=st.sampled_from(RECIPES), shift=st.booleans())
def test_a_packed_batch_is_what_a_loop_makes(
    samples: list[list[tuple[int, bool]]], recipe: str | int | None, shift: bool
) -> None:
    collate = AlignedCollator(recipe, ignore_index=IGNORED, padding_id=PADDING, shift_labels=shift)
    batch = collate(labeled(samples))
    assert as_lists(batch) == packed_by_a_loop(labeled(samples), alignment_of(recipe), shift)
    assert batch["input_ids"].numel() % alignment_of(recipe) == 0
    assert [batch[name].dtype for name in ("input_ids", "labels", "position_ids")] == [torch.int64] * 3
    assert batch["cu_seqlens"].dtype is torch.int32


@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, recipe=st.sampled_from(RECIPES), shift=st.booleans())
def test_a_padded_batch_has_the_least_columns_that_make_its_total_fit(
    samples: list[list[tuple[int, bool]]], recipe: str | int | None, shift: bool
) -> None:
    collate = AlignedCollator(recipe, packed=False, ignore_index=IGNORED, padding_id=PADDING, shift_labels=shift)
    batch = as_lists(collate(labeled(samples)))
    longest, alignment = max(map(len, samples)), alignment_of(recipe)
    width = next(w for w in range(longest, longest + alignment) if w * len(samples) % alignment == 0)
    for row, sample in enumerate(labeled(samples)):
        length = len(sample["input_ids"])
        rest = width - length
        assert batch["input_ids"][row] == sample["input_ids"] + [PADDING] * rest
        assert batch["labels"][row] == labels_by_a_loop(sample["labels"], shift) + [IGNORED] * rest
        assert batch["position_ids"][row] == [*range(length), *range(rest)]
        assert batch["mask"][row] == [True] * length + [False] * rest


def test_samples_may_be_tensors_or_lists_and_the_collator_serves_a_loader() -> None:
    samples = [torch.tensor([1, 2, 3]), [4, 5], {"input_ids": [6]}]
    (batch,) = DataLoader(samples, 3, collate_fn=AlignedCollator("delayed"))
    assert batch["input_ids"].shape == (1, 16)
    assert batch["labels"][0, :6].tolist() == [2, 3, -100, 5, -100, -100]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6, 16]


@pytest.mark.parametrize("recipe", ["fp8", 0, -16, 1.5, True])
def test_an_unknown_recipe_is_refused_when_the_collator_is_made(recipe: Any) -> None:
    with pytest.raises(
        ValueError, match="expected one of 'delayed', 'current', 'mxfp8', 'block', 'nvfp4', a positive number"
    ):
        AlignedCollator(recipe)


@pytest.mark.parametrize(
    "sample", [[], [[1, 2]], {"input_ids": [1, 2], "labels": [1]}], ids=["empty", "two dims", "labels missing"]
)
def test_a_sample_that_does_not_fit_is_named(sample: Any) -> None:
    with pytest.raises(ValueError, match="sample 1: expected at least one token id, 1-D, and as many labels"):
        AlignedCollator()([[1, 2], sample])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"ids": [1]}, r"expected \"input_ids\" among its fields, got \['ids'\]"),
        ([1.5, 2.5], "sample 1: expected integers, got torch.float32"),
        ({"input_ids": [0, 1], "attention_mask": [0, 1]}, "sample 1 is padded, its attention_mask has zeros"),
    ],
)
def test_nothing_of_a_sample_is_lost_silently(sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlignedCollator()([[1, 2], sample])


def test_switches_are_true_or_false() -> None:
    with pytest.raises(TypeError, match="packed='no': expected True or False"):
        AlignedCollator(packed="no")  # type: ignore[arg-type]


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no sample in this batch"):
        AlignedCollator()([])


@settings(max_examples=60, deadline=None)
@given(
    samples=SAMPLES,
    recipe=st.sampled_from(RECIPES),
    slack=st.integers(0, 3),
    spare=st.one_of(st.none(), st.integers(0, 3), st.just(500)),
)
def test_batches_of_one_size_are_smaller_ones_with_more_padding(
    samples: list[list[tuple[int, bool]]], recipe: str | int | None, slack: int, spare: int | None
) -> None:
    """In pieces no longer than the longest sample; `spare`: how much longer samples might have been."""
    real, longest = sum(map(len, samples)), max(map(len, samples))
    num_tokens = (-(-real // alignment_of(recipe)) + slack) * alignment_of(recipe)
    max_length = None if spare is None else longest + spare
    options = {"max_length": max_length, "ignore_index": IGNORED, "padding_id": PADDING}
    batch = as_lists(AlignedCollator(recipe, num_tokens=num_tokens, **options)(labeled(samples)))
    # Alignment to the whole size is what the same loop makes of a recipe of that many tokens.
    expected = packed_by_a_loop(labeled(samples), num_tokens, shift=True, piece=max_length or longest)
    if max_length is not None:
        missing = len(samples) + -(-num_tokens // max_length) + 1 - len(expected["cu_seqlens"])
        expected["cu_seqlens"] += [num_tokens] * missing
        expected["max_seqlen"] = max_length
    assert batch == expected
    assert max(batch["position_ids"][0]) < batch["max_seqlen"] == (max_length or longest)

    width = alignment_of(recipe) * longest
    padded = AlignedCollator(recipe, packed=False, num_tokens=width * len(samples), **options)(labeled(samples))
    least = AlignedCollator(recipe, packed=False, **options)(labeled(samples))
    assert padded["mask"].shape == (len(samples), width)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(padded[name][padded["mask"]], least[name][least["mask"]])
    assert padded["input_ids"][~padded["mask"]].eq(PADDING).all()
    assert padded["labels"][~padded["mask"]].eq(IGNORED).all()
    for row, sample in zip(padded["position_ids"].tolist(), samples, strict=True):
        assert row[len(sample) :] == [place % (max_length or longest) for place in range(width - len(sample))]


BATCHES = [[[1] * length for length in lengths] for lengths in ((90, 70), (1, 1), (100, 100), (100, 28))]


@pytest.mark.parametrize("packed", [True, False])
def test_batches_of_equally_many_samples_are_one_input_to_a_recorded_step(packed: bool) -> None:
    """Whose numbers and shapes must not change; without a longest sample those of packed batches do, and their tokens do not."""
    batches = list(map(AlignedCollator("current", packed, num_tokens=256, max_length=100), BATCHES))
    assert len({tuple(described(batch)) for batch in batches}) == 1
    position = torch.nn.Embedding(100, 1)
    assert all(position(batch["position_ids"]).shape[:2] == batch["mask"].shape for batch in batches)

    batches = list(map(AlignedCollator("current", packed, num_tokens=256), BATCHES))
    assert (len({tuple(described(batch)) for batch in batches}) == 1) is not packed
    for batch in batches:
        batch.pop("cu_seqlens", None)
        batch.pop("max_seqlen", None)
    assert len({tuple(described(batch)) for batch in batches}) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_a_sample_that_is_too_long_is_refused_with_or_without_a_size(packed: bool) -> None:
    for num_tokens in (None, 64):
        collate = AlignedCollator("current", packed, num_tokens=num_tokens, max_length=9)
        collate([[1], [1] * 9])
        with pytest.raises(ValueError, match="sample 1 has 10 tokens, more than max_length=9; shorten samples"):
            collate([[1], [1] * 10])


def test_a_longest_sample_without_a_size_bounds_positions_in_padding() -> None:
    batch = AlignedCollator("mxfp8", max_length=9)([[1] * 9, [1] * 3])
    assert batch["cu_seqlens"].tolist() == [0, 9, 12, 21, 30, 32]
    assert batch["position_ids"].max() == 8
    assert batch["max_seqlen"] == 9


@pytest.mark.parametrize("max_length", [0, -1, True, 8.0])
def test_a_longest_sample_that_is_no_number_of_tokens_is_refused_when_the_collator_is_made(max_length: Any) -> None:
    with pytest.raises(ValueError, match=r"max_length=.*: expected None or a positive number of tokens"):
        AlignedCollator("current", max_length=max_length)


@pytest.mark.parametrize("num_tokens", [0, -16, 24, True, 32.0])
def test_a_size_that_the_recipe_cannot_take_is_refused_when_the_collator_is_made(num_tokens: Any) -> None:
    with pytest.raises(
        ValueError, match=r"num_tokens=.*: expected None or a positive multiple of 16, for recipe='current'"
    ):
        AlignedCollator("current", num_tokens=num_tokens)


def test_a_batch_that_does_not_fit_its_size_is_refused() -> None:
    with pytest.raises(ValueError, match="2 samples have 18 tokens, more than num_tokens=16; give fewer"):
        AlignedCollator("current", num_tokens=16)([[1] * 9, [2] * 9])
    padded = AlignedCollator("current", packed=False, num_tokens=16)
    with pytest.raises(ValueError, match="num_tokens=16 in 2 rows, of which the longest has 9 tokens: expected"):
        padded([[1] * 9, [2]])
    with pytest.raises(ValueError, match="num_tokens=16 in 3 rows"):
        padded([[1], [2], [3]])
