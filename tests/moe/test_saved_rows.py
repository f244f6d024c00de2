"""The life of one saved tensor: from the forward of its layer, through pages, to its backward, and out of memory."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.saving import PagedRows
from lightning_mfsdp.moe.stash import RowStash, StashConfig, reference
from lightning_mfsdp.moe.stash.pages import PageKind, PagePool, PoolSize
from lightning_mfsdp.moe.stash.saved_rows import SavedRows, Stage
from lightning_mfsdp.moe.stash.side_stream import SideStream
from tests.moe.page_cases import available

CPU = torch.device("cpu")
ROWS, LIVE, WIDTH, PAGE_ROWS = 24, 6, 8, 4  # two of six pages are enough for what is live


def tensor() -> Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + 1


def zero_behind(found: Tensor) -> bool:
    return torch.equal(found[:LIVE], tensor()[:LIVE]) and not found[LIVE:].any()


class OneSave:
    """Rows of one layer, a pool for them, and what the stash would do with both."""

    def __init__(self, *, to_lend: bool = False, pages: int = 6, host_pages: int = 0) -> None:
        self.side = SideStream(CPU)
        self.original = tensor()
        self.pool = PagePool(PageKind.of(self.original), PAGE_ROWS, CPU, PoolSize(pages, host_pages))
        self.rows = SavedRows(
            "experts", [self.original], torch.tensor(LIVE), [self.pool], to_lend=to_lend, captured=False
        )

    @property
    def pages(self) -> int:
        """In use."""
        size = self.pool.size
        return size.pages + size.host_pages - sum(map(len, available(self.pool)))

    def store(self) -> None:
        self.rows.store(reference, self.side, copies=True, verdict=True)

    def fetch(self) -> None:
        self.rows.fetch(reference, self.side)

    def take(self) -> Tensor:
        (found,) = self.rows.take(reference, self.side)
        return found

    def lend(self) -> Tensor:
        with self.rows.lend(reference, self.side) as (found,):
            return found.whole() if isinstance(found, PagedRows) else found

    def bring_to(self, stage: Stage) -> None:
        if stage is Stage.WHOLE:
            return
        if stage is Stage.GONE:
            self.rows.forget("were given up")
            return
        self.store()
        if stage is not Stage.COPIED:
            self.rows.let_go(self.side)
        if stage is Stage.FETCHED:
            self.fetch()


def test_the_whole_life_of_a_tensor():
    """As the stash leads it; at each stage where it is, how many pages it has, and whether the original is in memory."""
    layer = OneSave()
    memory = StorageWeakRef(layer.original.untyped_storage())
    assert (layer.rows.stage, layer.pages) == (Stage.WHOLE, 0)
    layer.store()
    assert (layer.rows.stage, layer.pages) == (Stage.COPIED, 2)
    assert not layer.rows.found_no_place()
    layer.original = None
    assert not memory.expired()
    layer.rows.let_go(layer.side)
    assert (layer.rows.stage, layer.pages) == (Stage.PAGED, 2)
    assert memory.expired()
    assert layer.rows.needs_fetch
    layer.fetch()
    assert (layer.rows.stage, layer.pages) == (Stage.FETCHED, 0)
    assert zero_behind(layer.take())
    assert (layer.rows.stage, layer.pages) == (Stage.GONE, 0)
    with pytest.raises(EngineStateError, match="rows of experts were loaded before"):
        layer.rows.check()


# What each reader finds, by where the rows are when it comes: the original, or a copy with zeros behind what was live.
READERS = {Stage.WHOLE: "original", Stage.COPIED: "original", Stage.PAGED: "copy", Stage.FETCHED: "copy"}


@pytest.mark.parametrize("reader", ["take", "lend"])
@pytest.mark.parametrize("stage", READERS)
def test_rows_are_read_wherever_they_are_and_no_page_is_lost(stage, reader):
    layer = OneSave(to_lend=reader == "lend")
    layer.bring_to(stage)
    found = getattr(layer, reader)()
    is_original = found.data_ptr() == layer.original.data_ptr()
    assert is_original == (READERS[stage] == "original")
    assert is_original or zero_behind(found)
    assert (layer.rows.stage, layer.pages) == (Stage.GONE, 0)


@pytest.mark.parametrize("stage", Stage)
def test_what_nobody_will_read_gives_its_pages_back(stage):
    layer = OneSave()
    layer.bring_to(stage)
    layer.rows.give_back(reference, layer.side)
    layer.rows.forget("were given up")
    assert (layer.rows.stage, layer.pages) == (Stage.GONE, 0)
    layer.rows.give_back(reference, layer.side)
    assert layer.pages == 0
    with pytest.raises(EngineStateError, match="rows of experts were given up"):
        layer.rows.check()


# The one stage in which each step of a life is right.
STEPS = {"store": Stage.WHOLE, "let_go": Stage.COPIED, "fetch": Stage.PAGED}


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_out_of_order_is_refused(step, stage):
    layer = OneSave()
    layer.bring_to(stage)
    with nullcontext() if STEPS[step] is stage else pytest.raises(AssertionError):
        layer.rows.let_go(layer.side) if step == "let_go" else getattr(layer, step)()


@pytest.mark.parametrize("stage", [Stage.WHOLE, Stage.COPIED])
def test_an_original_that_was_written_to_is_not_handed_out(stage):
    layer = OneSave()
    layer.bring_to(stage)
    layer.original.add_(1)
    with pytest.raises(EngineStateError, match=r"of shape \[24, 8\] that backward needs was written to in place"):
        layer.store() if stage is Stage.WHOLE else layer.rows.let_go(layer.side)


def test_pages_of_the_host_are_fetched_also_where_rows_would_be_lent():
    layer = OneSave(to_lend=True, pages=1, host_pages=6)
    layer.bring_to(Stage.PAGED)
    assert layer.rows.needs_fetch
    assert zero_behind(layer.lend())
    assert layer.pages == 0
    assert not OneSave(to_lend=True).rows.needs_fetch


def test_too_few_pages_are_noticed_by_whoever_asks():
    layer = OneSave(pages=1)
    layer.store()
    assert layer.rows.found_no_place()
    assert torch.equal(layer.take(), tensor())


def test_a_layer_and_the_stash_lead_the_same_life():
    """Through the seam that an autograd function uses: what it was given is gone from memory while the rows are in pages."""
    stash = RowStash(StashConfig(page_rows=PAGE_ROWS, overflow="skip", device_factor=2.0), CPU)
    saver = stash.saver("experts")
    live = torch.tensor(LIVE)

    def forward(original: Tensor) -> tuple[SimpleNamespace, weakref.ref[Tensor]]:
        ctx = SimpleNamespace()
        assert saver.save(ctx, [original], live) == ()
        *_, rows = stash._outstanding.values()
        return ctx, weakref.ref(rows._tensors[0])

    for _ in range(2):  # recorded, and then as it will be for good
        first, original = forward(tensor())
        second, _ = forward(tensor())
        rows, last = stash._outstanding.values()
        assert (rows.stage, last.stage) == (
            (Stage.COPIED, Stage.WHOLE) if stash.is_recording else (Stage.PAGED, Stage.WHOLE)
        )
        assert (original() is None) == (not stash.is_recording)
        (found,) = saver.load(second, ())
        assert torch.equal(found, tensor())
        assert (rows.stage, last.stage) == ((Stage.COPIED if stash.is_recording else Stage.FETCHED), Stage.GONE)
        (found,) = saver.load(first, ())
        assert torch.equal(found, tensor()) if stash.is_recording else zero_behind(found)
        assert rows.stage is Stage.GONE
        assert not stash.overflowed()
        stash.end_step()

    # Nobody reads: the claim goes with the graph, and the pages come back at the end of the step.
    lost, _ = forward(tensor())
    forward(tensor())
    rows = next(iter(stash._outstanding.values()))
    assert not rows.is_abandoned
    del lost
    gc.collect()
    assert rows.is_abandoned
    assert rows.stage is not Stage.GONE
    assert not stash.overflowed()
    stash.end_step()
    assert (rows.stage, stash._outstanding) == (Stage.GONE, {})
