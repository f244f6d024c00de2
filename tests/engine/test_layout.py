from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import random
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mfsdp.engine.layout.layout import Layout, Segment, padding_advice, plan_layout
from tests.helpers.nights import thinned


def load_padding_table() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "benchmark" / "padding_table.py"
    spec = importlib.util.spec_from_file_location("padding_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = load_padding_table()
SIZES = st.one_of(st.integers(0, 8), st.integers(1, 400))
SHAPES = st.lists(st.lists(SIZES, max_size=4).map(tuple), max_size=12)
WORLDS = [*range(1, 18), 100, 1000, 4096, 8191]


def check_every_promise(layout: Layout, shapes: list[tuple[int, ...]]) -> None:
    """Checks a layout from its definition, element by element in effect, sharing no code with it."""
    assert layout.shapes == tuple(shapes)
    for index, segment in enumerate(layout.segments):
        assert segment.shard_numel > 0
        assert segment.shard_numel * layout.itemsize % layout.alignment_bytes == 0
        assert list(segment.tensors) == sorted(
            (t for t in range(len(shapes)) if layout.segment_of[t] == index),
            key=lambda t: (layout.offset_of[t], math.prod(shapes[t]), t),
        )
        tensors = [t for t in segment.tensors if math.prod(shapes[t])]
        ranges = [(layout.offset_of[t], layout.offset_of[t] + math.prod(shapes[t])) for t in tensors]
        flat = [edge for pair in ranges for edge in pair]
        assert flat == sorted(flat), "tensors overlap"
        assert not flat or flat[-1] <= layout.num_shards * segment.shard_numel
        for tensor, (start, stop) in zip(tensors, ranges, strict=True):
            assert start * layout.itemsize % 16 == 0
            row = math.prod(shapes[tensor][1:]) * layout.rows_together
            for boundary in range((start // segment.shard_numel + 1) * segment.shard_numel, stop, segment.shard_numel):
                assert (boundary - start) % row == 0, f"boundary {boundary} splits a row of {shapes[tensor]}"
        gaps = layout.gaps(index, 0, layout.num_shards)
        filled = sorted([*ranges, *gaps])
        assert sum(stop - start for start, stop in filled) == layout.num_shards * segment.shard_numel
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(filled)), "a gap overlaps a tensor"
    assert sum(layout.numel(t) for t in range(len(shapes))) == layout.numel_total == sum(map(math.prod, shapes))


def check_ownership(layout: Layout, span: int = 1) -> None:
    """Rows of all shards, in order, join up to all rows; and elements are rows times their size."""
    for tensor, shape in enumerate(layout.shapes):
        rows, elements, next_row = 0, 0, 0
        for shard in range(0, layout.num_shards, span):
            width = min(span, layout.num_shards - shard)
            owned = layout.owned_rows(tensor, shard, width)
            start, stop = layout.owned_elements(tensor, shard, width)
            assert stop - start == len(owned) * layout.row_numel(tensor)
            if owned:
                assert owned.start == next_row
                next_row = owned.stop
            if start < stop:
                shard_numel = layout.segments[layout.segment_of[tensor]].shard_numel
                assert shard * shard_numel <= start < stop <= (shard + width) * shard_numel
                assert start == layout.offset_of[tensor] + owned.start * layout.row_numel(tensor)
            rows, elements = rows + len(owned), elements + stop - start
        assert rows == (shape[0] if shape else 1)
        assert elements == math.prod(shape)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    SHAPES,
    st.sampled_from(WORLDS),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([16, 128, 512]),
    st.sampled_from([1, 2, 16]),
)
def test_any_shapes_are_covered_aligned_and_split_between_rows(
    shapes: list[tuple[int, ...]], num_shards: int, itemsize: int, alignment_bytes: int, rows_together: int
) -> None:
    sizes = {"itemsize": itemsize, "alignment_bytes": alignment_bytes, "rows_together": rows_together}
    layout = plan_layout(shapes, num_shards, **sizes)
    check_every_promise(layout, shapes)
    if num_shards <= 17:
        check_ownership(layout)
        check_ownership(layout, span=3)


@pytest.mark.parametrize("num_shards", WORLDS)
def test_thousands_of_random_groups_keep_the_rules(num_shards: int) -> None:
    generator = random.Random(num_shards)
    for _ in range(150):
        shapes = [
            tuple(generator.choice((1, 3, 5, 16, generator.randint(1, 300))) for _ in range(generator.randint(0, 3)))
            for _ in range(generator.randint(1, 10))
        ]
        layout = plan_layout(shapes, num_shards)
        check_every_promise(layout, shapes)
        if num_shards <= 17:
            check_ownership(layout)


def test_rows_that_belong_together_cost_little_room() -> None:
    """A block of 8 billion parameters, whose weights end up in strips of 16 rows."""
    block: list[tuple[int, ...]] = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    for num_shards in (2, 3, 4, 8, 64):
        layout = plan_layout(block, num_shards, itemsize=1, rows_together=16)
        check_every_promise(layout, block)
        assert layout.padding_fraction < 0.01
    odd: list[tuple[int, ...]] = [(4100, 4096), (1000, 2048), (50257, 1024)]
    assert plan_layout(odd, 8, itemsize=1, rows_together=16).padding_fraction < 0.05, "the last strip may be short"
    advice = padding_advice(plan_layout([(1024, 1024)], 128, itemsize=1, rows_together=16))
    assert "Strips of 16 rows of dim 0 stay whole" in advice
    assert "Cap the shard axis at 64 (0.0%)" in advice, "planned with strips as well"
    by_row = plan_layout(block, 4, itemsize=1)
    cuts = [by_row.owned_rows(tensor, shard).stop for tensor in range(4) for shard in range(4)]
    assert any(cut % 16 for cut in cuts), "nothing would have to be kept together"


def test_layout_that_split_a_row_upstream_keeps_its_rows() -> None:
    shapes: list[tuple[int, ...]] = [(4, 16), (3, 5), (3, 5)]
    for itemsize in (1, 2, 4, 8):
        layout = plan_layout(shapes, 6, itemsize=itemsize, alignment_bytes=16)
        check_every_promise(layout, shapes)
        check_ownership(layout)


def test_each_shard_reports_its_own_gaps() -> None:
    shapes = [(7, 33), (5,), (100, 64), (3, 3)]
    layout = plan_layout(shapes, 5)
    for index, segment in enumerate(layout.segments):
        taken = [False] * (5 * segment.shard_numel)
        for tensor in segment.tensors:
            start = layout.offset_of[tensor]
            taken[start : start + layout.numel(tensor)] = [True] * layout.numel(tensor)
        for first, last in itertools.combinations(range(6), 2):
            window = taken[first * segment.shard_numel : last * segment.shard_numel]
            in_gaps = [False] * len(window)
            for start, stop in layout.gaps(index, first, last):
                assert start < stop
                in_gaps[start:stop] = [True] * (stop - start)
            assert in_gaps == [not filled for filled in window]


@pytest.mark.parametrize("shapes", [[], [(0,)], [(5, 0), (0, 5)], [(0, 3), (2, 3)], [()]])
def test_empty_and_scalar_tensors_are_laid_out(shapes: list[tuple[int, ...]]) -> None:
    for num_shards in (1, 3, 1000):
        layout = plan_layout(shapes, num_shards)
        check_every_promise(layout, shapes)
        check_ownership(layout)
        assert layout.shard_numel == 64
    assert plan_layout([], 3).padding_fraction == 0.0


def test_one_shard_is_padded_only_for_alignment() -> None:
    for shapes in ([(4096, 4096), (4096,)], TABLE.gpt2_model(), TABLE.resnet50()):
        layout = plan_layout(shapes, 1)
        assert len(layout.segments) == 1
        assert layout.padding_bytes <= 16 * len(shapes) + 128


def test_tensor_shorter_than_a_shard_does_not_constrain_it() -> None:
    # The least common multiple of these rows is over 10**9, thousands of times what the group holds.
    shapes = [(9, 1009), (9, 1013), (9, 1019), (100_000,)]
    layout = plan_layout(shapes, 4)
    assert len(layout.segments) == 1
    assert layout.padding_fraction < 0.01


def test_a_group_takes_a_second_segment_only_where_it_saves_padding() -> None:
    block = TABLE.UNITS["Llama-2-13B block"]()
    assert len(plan_layout(block, 8).segments) == 1
    layout = plan_layout(block, 512)
    assert len(layout.segments) == 2
    check_every_promise(layout, block)
    # One segment needs a multiple of lcm(5120, 13824) = 138240, five of them for 619540 elements.
    assert layout.shard_numel < 5 * 138240


def test_equal_groups_are_planned_once() -> None:
    block = TABLE.UNITS["Llama-3-8B block"]()
    assert plan_layout(block, 64) is plan_layout([list(shape) for shape in block], 64)


TWO_PERCENT = [
    "Llama-3-8B block",
    "Llama-3-8B embedding, head",
    "Llama-2-13B block",
    "Llama-2-13B embedding, head",
    "Qwen2.5-7B block",
    "Qwen2.5-7B embedding, head",
    "Qwen2.5-1.5B block",
    "Qwen2.5-1.5B embedding",
    "GPT-2 block",
    "GPT-2 embeddings",
    "GPT-2 whole",
    "ResNet-50 whole",
    "DeepSeek-V2-Lite layer",
    "the same, experts stacked to 2-D",
    "DeepSeek-V3 layer",
]


@pytest.mark.parametrize("unit", TWO_PERCENT)
def test_real_models_pad_at_most_two_percent_up_to_512_shards(unit: str) -> None:
    shapes = TABLE.UNITS[unit]()
    for num_shards in thinned((512, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384), 3):
        layout = plan_layout(shapes, num_shards)
        assert layout.padding_fraction <= 0.02, f"{layout.padding_fraction:.2%} over {num_shards} shards"
    check_every_promise(layout, shapes)


# No layout can do better there (see the next test): 0.875 to 1.75 rows of the down projection for each shard.
PROVABLY_WORSE = {("Llama-2-13B block", 4096), ("Llama-2-13B block", 8192), ("Qwen2.5-7B block", 8192)}
LARGE = [unit for unit in TWO_PERCENT if unit.startswith(("Llama", "Qwen2.5-7B", "DeepSeek"))]


@pytest.mark.parametrize("unit", LARGE)
@pytest.mark.parametrize("num_shards", [1024, 2048, 4096, 8192])
def test_large_models_pad_at_most_ten_percent_in_the_thousands(unit: str, num_shards: int) -> None:
    layout = plan_layout(TABLE.UNITS[unit](), num_shards)
    assert (layout.padding_fraction <= 0.1) == ((unit, num_shards) not in PROVABLY_WORSE)


@pytest.mark.parametrize(("unit", "num_shards"), sorted(PROVABLY_WORSE))
def test_where_ten_percent_is_missed_no_layout_is_shorter(unit: str, num_shards: int) -> None:
    shapes = TABLE.UNITS[unit]()
    assert plan_layout(shapes, num_shards).shard_numel == TABLE.least_shard_numel(shapes, num_shards)


def test_stacked_experts_fit_up_to_one_rank_each() -> None:
    shapes = TABLE.UNITS["the same, experts stacked to 3-D"]()
    assert all(plan_layout(shapes, num_shards).padding_fraction < 0.02 for num_shards in (2, 8, 16, 32, 64))
    # Beyond, a shard still has to hold one whole [2816, 2048] expert.
    layout = plan_layout(shapes, 512)
    assert layout.shard_numel >= 2816 * 2048
    assert "(64, 2816, 2048)" in padding_advice(layout)


def test_documented_tables_are_what_the_script_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design" / "layout.md").read_text(encoding="utf-8")
    for part in TABLE.report():
        assert part in page, (
            "run examples/benchmark/padding_table.py and paste what it prints into docs/design/layout.md"
        )


def test_advice_gives_figure_cause_and_cure_only_where_padding_matters() -> None:
    block = TABLE.UNITS["Qwen2.5-7B block"]()
    assert padding_advice(plan_layout(block, 512)) == ""
    assert padding_advice(plan_layout([(4096,)], 512)) == ""
    advice = padding_advice(plan_layout(block, 8192))
    for part in ("42.2%", "8192 shards", "(3584, 18944)", "outer=2, shard=4096", "8.9%"):
        assert part in advice
    assert "fewer ranks" in padding_advice(plan_layout([(10, 100_000)], 17))


@pytest.mark.parametrize(("shard", "span"), [(-1, 1), (4, 1), (3, 2), (0, 0)])
def test_shards_off_the_axis_are_named(shard: int, span: int) -> None:
    layout = plan_layout([(8, 8)], 4)
    expected = rf"\[{shard}, {shard + span}\) .* rank {shard} .*\[0, 4\)"
    with pytest.raises(ValueError, match=expected):
        layout.owned_rows(0, shard, span)
    with pytest.raises(ValueError, match=expected):
        layout.owned_elements(0, shard, span)
    with pytest.raises(ValueError, match=expected):
        layout.gaps(0, shard, shard + span)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 0}, "num_shards.*at least 1: got 0"),
        ({"num_shards": 2, "itemsize": 3}, "itemsize.*got 3"),
        ({"num_shards": 2, "alignment_bytes": 24}, "alignment_bytes.*multiple of 16: got 24"),
        ({"num_shards": 2, "shapes": [(2,), (-1, 2)]}, r"got shape \(-1, 2\) for tensor 1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_layout(**{"shapes": [(2, 2)], **arguments})  # type: ignore[arg-type]


def two_tensors() -> Layout:
    return Layout(
        shapes=((3, 64), (8,)),
        num_shards=2,
        segments=(Segment(shard_numel=128, tensors=(0, 1)),),
        segment_of=(0, 0),
        offset_of=(0, 192),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset_of": (0, 184)}, r"tensor 1 .* leaves \[192, 256\)"),
        ({"offset_of": (0, 256)}, r"tensor 1 .* leaves \[192, 256\)"),
        ({"offset_of": (0, 196)}, "tensor 1 .* multiple of 16 bytes"),
        ({"offset_of": (8, 208)}, r"tensor 0 of shape \(3, 64\) at offset 8: .* splits a row of 64"),
        ({"segment_of": (0, 1)}, "tensor 1 is in segment 0 and in 1"),
        ({"segments": (Segment(shard_numel=128, tensors=(0,)),)}, "exactly one segment"),
        ({"segments": (Segment(shard_numel=120, tensors=(0, 1)),)}, "multiple of 128 bytes"),
    ],
)
def test_a_layout_that_breaks_a_rule_cannot_be_built(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(two_tensors(), **change)  # type: ignore[arg-type]


def test_every_long_row_must_divide_the_shard() -> None:
    segments = (Segment(shard_numel=64, tensors=(0,)),)
    with pytest.raises(ValueError, match="splits a row of 48"):
        Layout(shapes=((4, 48),), num_shards=4, segments=segments, segment_of=(0,), offset_of=(16,))
