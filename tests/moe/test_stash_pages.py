"""Pages, free lists and copies on the CPU: no page is given twice, all come back, and bits survive."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.stash import StashConfig, reference
from lightning_mfsdp.moe.stash.pages import Counter, PageKind, PoolSize, Tier, host_memory
from lightning_mfsdp.moe.stash.sizing import Demand, grown, sized
from lightning_mfsdp.moe.stash.stash import ops_for
from tests.moe.page_cases import DTYPES, History, available, expected, make_pool, random_rows, run_history

PAGE_ROWS = 4


def pages_held(history: History, tier: Tier) -> list[int]:
    return [page for save in history.kept if save.tier == tier for page in save.pages]


@settings(max_examples=40, deadline=None)
@given(
    pages=st.integers(0, 9),
    host_pages=st.integers(0, 5),
    actions=st.lists(st.tuples(st.integers(-2, 20), st.integers(0, 3)), max_size=60),
)
def test_free_lists_do_what_a_set_of_free_pages_does(pages, host_pages, actions):
    """Each action saves so many rows, then loads the save that far from the oldest. Circles turn round many times."""
    pool = make_pool(torch.uint8, 1, PAGE_ROWS, PoolSize(pages, host_pages))
    history = History(reference, pool)
    for live, which in actions:
        rows = random_rows(16, 1, live, torch.uint8, seed=live + 3)
        free, host_free = (set(part) for part in available(pool))
        save = history.save(rows, live)
        needed = -(-min(max(live, 0), 16) // PAGE_ROWS)
        tier = Tier.DEVICE if needed <= len(free) else Tier.HOST if needed <= len(host_free) else Tier.NOWHERE
        assert save.tier == tier, "whole, and to the first tier with room"
        if tier < Tier.NOWHERE:
            assert len(set(save.pages)) == needed
            assert set(save.pages) <= (free if tier == Tier.DEVICE else host_free)
        if which < len(history.kept):
            oldest = history.kept[which]
            assert torch.equal(history.load(oldest).view(torch.uint8), expected(oldest))
        # Nothing is issued twice, and nothing is lost.
        free, host_free = available(pool)
        assert sorted(free + pages_held(history, Tier.DEVICE)) == list(range(pages))
        assert sorted(host_free + pages_held(history, Tier.HOST)) == list(range(host_pages))
    while history.kept:
        history.load(history.kept[-1])
    counters = pool.counters.tolist()
    assert (sorted(available(pool)[0]), sorted(available(pool)[1])) == (list(range(pages)), list(range(host_pages)))
    assert counters[Counter.WANTED] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 16])
def test_every_bit_pattern_comes_back_and_padding_is_zero(dtype, width):
    pool = make_pool(dtype, width, PAGE_ROWS, PoolSize(11, 4))
    run_history(History(reference, pool), dtype, steps=200, seed=width)
    counters = pool.counters.tolist()
    assert counters[Counter.HEAD] > 3 * 11, "the circle turned round"
    assert counters[Counter.SPILLED] > 0
    assert counters[Counter.OVERFLOWED] > 0
    assert counters[Counter.OVER_CAPACITY] > 0


def test_padding_never_reaches_a_page():
    pool = make_pool(torch.float32, 2, PAGE_ROWS, PoolSize(4))
    history = History(reference, pool)
    history.save(torch.cat([torch.ones(5, 2), torch.full((11, 2), float("nan"))]), 5)
    assert not pool.rows.view(torch.float32).isnan().any()


def test_a_tensor_without_a_place_changes_no_page_and_no_free_list():
    pool = make_pool(torch.float32, 3, PAGE_ROWS, PoolSize(3, 1))
    history = History(reference, pool)
    kept = history.save(random_rows(8, 3, 7, torch.float32, seed=1), 7)
    before = [part.clone() for part in (pool.rows, pool.host_rows, pool.free, pool.host_free, pool.counters[:4])]
    lost = history.save(random_rows(16, 3, 16, torch.float32, seed=2), 16)
    assert lost.tier == Tier.NOWHERE
    assert not history.load(lost).any(), "zeros, not what happens to lie there"
    after = [pool.rows, pool.host_rows, pool.free, pool.host_free, pool.counters[:4]]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert torch.equal(history.load(kept).view(torch.uint8), expected(kept))


def test_giving_back_twice_changes_nothing_and_a_reset_frees_all():
    pool = make_pool(torch.float32, 1, PAGE_ROWS, PoolSize(5, 2))
    history = History(reference, pool)
    save = history.save(torch.ones(16, 1), 10)
    reference.give_back(pool, save.header, save.table)
    before = pool.counters.clone(), pool.free.clone()
    reference.give_back(pool, save.header, save.table)
    assert torch.equal(pool.counters, before[0])
    assert torch.equal(pool.free, before[1])
    history.save(torch.ones(16, 1), 16)
    addresses = [part.data_ptr() for part in (pool.free, pool.host_free, pool.counters, pool.rows)]
    pool.reset()
    assert available(pool) == ([0, 1, 2, 3, 4], [0, 1])
    assert pool.counters[Counter.SAVES] == 2, "statistics stay"
    assert addresses == [part.data_ptr() for part in (pool.free, pool.host_free, pool.counters, pool.rows)]


def test_counters_beyond_32_bits():
    pool = make_pool(torch.uint8, 1, PAGE_ROWS, PoolSize(3))
    history = History(reference, pool)
    far = 2**40 * 3
    pool.counters[:2] += far
    save = history.save(random_rows(8, 1, 8, torch.uint8, seed=4), 8)
    assert save.pages == [0, 1]
    history.load(save)
    assert pool.counters[:2].tolist() == [far + 2, far + 5]


def test_what_shares_pages():
    assert PageKind.of(torch.empty(3, 4, dtype=torch.bfloat16)) == PageKind.of(
        torch.empty(9, 2, 2, dtype=torch.float16)
    )
    assert PageKind.of(torch.empty(3, dtype=torch.float8_e4m3fn)) == PageKind(torch.uint8, 1)
    assert PageKind.of(torch.empty(0, 6)) == PageKind(torch.int32, 6)
    with pytest.raises(EngineStateError, match="expected contiguous tensors"):
        PageKind.of(torch.empty(4, 3).T)
    with pytest.raises(EngineStateError, match="works on cpu and cuda, got meta"):
        ops_for(torch.device("meta"))


def test_what_is_missing_on_cuda_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lightning_mfsdp.moe.stash.kernels", raising=False)
    with pytest.raises(EngineStateError, match="written in Triton, which cannot be imported"):
        ops_for(torch.device("cuda"))

    def refuse(*_, **options):
        assert options["pin_memory"]
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(EngineStateError, match=r"and 320 bytes could not be pinned \(CUDA error.*lower host_factor"):
        host_memory(PageKind(torch.int16, 16), 10, torch.device("cuda"))


def test_sizes_follow_what_was_asked_for():
    kind, other = PageKind(torch.int16, 8), PageKind(torch.int16, 16)
    steps = [{kind: Demand(10)}, {kind: Demand(30), other: Demand(4)}]
    config = StashConfig(device_factor=1.1, host_factor=0.5)
    assert sized(config, steps) == {kind: PoolSize(22, 10), other: PoolSize(3, 1)}
    assert sized(StashConfig(sizing="maximum", device_factor=1.5), steps) == {kind: PoolSize(45), other: PoolSize(6)}
    assert sized(config, [{kind: Demand(0)}])[kind] == PoolSize(1, 0)

    sizes = {kind: PoolSize(10), other: PoolSize(8, 4)}
    assert grown(config, sizes, [{kind: Demand(9)}]) == sizes, "nothing found no place"
    assert grown(config, sizes, [{kind: Demand(20, 1)}])[kind] == PoolSize(22)
    # Whole tensors may fit neither tier although together they have room; so they grow at least a little.
    assert grown(config, sizes, [{other: Demand(11, 1)}])[other] == PoolSize(10, 5)
    assert grown(config, {}, [{other: Demand(8, 1)}])[other] == PoolSize(9, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"page_rows": 0},
        {"page_rows": 8.0},
        {"device_factor": 0},
        {"device_factor": float("nan")},
        {"host_factor": -1},
        {"host_factor": True},
        {"recorded_steps": 0},
        {"overflow": "ignore"},
        {"sizing": "median"},
        {"own_stream": 1},
    ],
)
def test_options_out_of_range_are_refused(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f"paged stash: {name}={value!r}, expected "):
        StashConfig(**options)
