"""Boxes of a whole parameter that a rank holds, for any parts and rows."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mfsdp.tensor_parallel import Part
from tests.engine.internals import Piece

DIVISIONS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3)), max_size=2
)


@st.composite
def divided(draw: st.DrawFn) -> tuple[torch.Size, list[tuple[Part, ...]], int]:
    """A shape, the parts of every rank, and over how many ranks the rows of a part are distributed."""
    shape = [draw(st.integers(1, 4)) for _ in range(3)]
    chains: list[tuple[int, tuple[int, ...], int]] = []
    # From the innermost division outwards, so that every length divides.
    for dim, size, weights in draw(DIVISIONS):
        base = shape[dim]
        cuts = [0, *sorted(draw(st.integers(0, base)) for _ in weights[1:]), base]
        sections = tuple((stop - start) * size for start, stop in itertools.pairwise(cuts) if stop > start)
        chains.insert(0, (dim, sections, size))
        shape[dim] = base * size
    ranks = itertools.product(*(range(size) for _, _, size in chains))
    every = [
        tuple(
            Part(dim=dim, sections=sections, size=size, rank=rank)
            for (dim, sections, size), rank in zip(chains, place, strict=True)
        )
        for place in ranks
    ]
    return torch.Size(shape), every, draw(st.integers(1, 3))


def cut_rows(length: int, ranks: int) -> list[range]:
    bounds = [length * rank // ranks for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


@settings(max_examples=200, deadline=None)
@given(divided())
def test_pieces_of_all_ranks_are_the_whole_once(case: tuple[torch.Size, list[tuple[Part, ...]], int]) -> None:
    shape, every, sharers = case
    whole = torch.arange(shape.numel(), device="cpu").reshape(shape)
    times = torch.zeros(shape, dtype=torch.int64, device="cpu")
    for parts in every:
        own = whole
        for part in parts:
            own = part.own(own)
        for rows in cut_rows(own.shape[0], sharers):
            piece = Piece(shape=shape, rows=rows, parts=parts)
            assert piece.part_shape == own.shape
            expected = own[rows.start : rows.stop]
            if expected.numel():
                assert torch.equal(piece.of(whole), expected)
            found = torch.full_like(expected, -1)
            for box in piece.boxes:
                box.in_rows(found).copy_(box.in_whole(whole))
                box.in_whole(times).add_(1)
            assert torch.equal(found, expected)
            if piece.has_whole_rows and expected.numel():
                assert torch.equal(piece.rows_of(whole[:, 0, 0]), expected[:, 0, 0])
                assert sum(map(len, piece.row_ranges)) == len(rows)
    assert torch.equal(times, torch.ones_like(times))


def test_a_piece_of_one_box_is_a_view() -> None:
    whole = torch.arange(24.0, device="cpu").reshape(4, 6)
    piece = Piece(shape=whole.shape, rows=range(1, 3), parts=(Part(dim=1, sections=(6,), size=2, rank=1),))
    own = piece.of(whole)
    assert torch.equal(own, whole[1:3, 3:])
    assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert piece.boxes == (((1, 3), (2, 3), (0, 0)),)


def test_a_packed_part_is_several_boxes() -> None:
    part = Part(dim=0, sections=(8, 8), size=2, rank=1)
    piece = Piece(shape=torch.Size([16, 2]), rows=range(2, 7), parts=(part,))
    assert [(box.offsets, box.sizes, box.places) for box in piece.boxes] == [
        ((6, 0), (2, 2), (0, 0)),
        ((12, 0), (3, 2), (2, 0)),
    ]
    assert piece.row_ranges == (range(6, 8), range(12, 15))


def test_numbers_and_tensors_without_elements_are_whole_or_nothing() -> None:
    number = torch.ones((), device="cpu")
    assert Piece(shape=number.shape, rows=range(1)).of(number) is number
    assert Piece(shape=number.shape, rows=range(0)).of(number).shape == (0,)
    assert len(Piece(shape=number.shape, rows=range(1)).boxes) == 1
    assert Piece(shape=number.shape, rows=range(1)).row_range == range(1)
    empty = torch.ones(0, 3, device="cpu")
    assert Piece(shape=empty.shape, rows=range(0)).of(empty).shape == (0, 3)
    assert Piece(shape=torch.Size([4, 3]), rows=range(2, 2)).boxes == ()
