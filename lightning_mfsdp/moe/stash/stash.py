"""RowStash: when rows are copied into pages, when they are fetched, and what happens when there are too few pages.

    save     on a side stream, rows are copied into pages as soon as they exist. The originals live until the next layer or two
             have saved; then the caller's stream waits for the copy, which is done long before, and releases them
    load     rows were prefetched; those of the previous save are fetched while this layer's backward runs
    lend     instead of load, for a backward that reads rows in their pages: nothing is fetched, and pages are free after that

A layer whose originals still exist (the last ones of a forward) loads or lends those. The very last one, as far as the previous forward
shows, is not copied at all, unless another follows; layers that are graphs of their own cannot detect that, so all are. The previous
save is the right one to fetch next for any number of microbatches in the orders forward-backward and forward-forward-backward-
backward; for others it costs time, never correctness. Pages are freed in any order.

`SavedRows` defines what happens to the rows of one save; this file, when. A layer's function calls its `LayerSaver` and keeps a `Claim`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.capacity import CapacityWatch
from lightning_mfsdp.moe.experts import GroupedExperts
from lightning_mfsdp.moe.saving import OrdinarySaver, PagedRows
from lightning_mfsdp.moe.stash import reference
from lightning_mfsdp.moe.stash.config import StashConfig
from lightning_mfsdp.moe.stash.flag import OverflowFlag
from lightning_mfsdp.moe.stash.pages import PageKind, PageOps, PagePool, PoolSize, replace_pools
from lightning_mfsdp.moe.stash.saved_rows import SavedRows, check_recomputed, check_save, warn_of_kept
from lightning_mfsdp.moe.stash.side_stream import SideStream, is_capturing
from lightning_mfsdp.moe.stash.sizing import Demand, everyones, grown, sized
from lightning_mfsdp.moe.stash.statistics import HeldBytes, Occupancy, Snapshot, StashStatistics, Trace

__all__ = ["Claim", "LayerSaver", "RowStash", "ops_for"]

# Saves whose originals may be alive. "keep" lets the host check where rows went before it releases them; with two layers queued
# behind, the device does not idle meanwhile.
_LOOKAHEAD = {"keep": 2, "skip": 1, "rerun": 1}


def ops_for(device: torch.device) -> PageOps:
    """The implementation of page operations: Triton's kernels on CUDA, torch's reference on CPU.

    Raises:
        EngineStateError: Triton is needed and not installed, or the device is of another type.
    """
    if device.type == "cpu":
        return reference
    if device.type != "cuda":
        raise EngineStateError(f"paged stash: works on cpu and cuda, got {device.type}; train without it there")
    try:
        from lightning_mfsdp.moe.stash import kernels
    except ImportError as error:
        raise EngineStateError(
            f"paged stash: its kernels on CUDA are written in Triton, which cannot be imported ({error}); install triton"
        ) from error
    return kernels


class Claim:
    """The right to read the rows of one save, given to `load` or `lend`.

    The stash keeps the rows, and only refers to the claim: when nothing else does anymore and the rows were not read, their pages are freed
    at the end of the step.

    Attributes:
        rows: Of the save.
    """

    def __init__(self, rows: SavedRows) -> None:
        self.rows = rows
        rows.reader = weakref.ref(self)


class LayerSaver:
    """The stash, as the autograd function of one layer sees it."""

    def __init__(self, stash: RowStash, layer: str) -> None:
        self._stash = stash
        self._layer = layer

    def save(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
        """See `ActivationSaver.save`. Autograd keeps nothing, unless this is an ordinary save.

        Raises:
            EngineStateError: It was called with this `ctx` before, or see `RowStash.save`.
        """
        return self._save(ctx, tensors, live_rows, to_lend=False)

    def save_to_lend(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
        """See `LendingSaver.save_to_lend`, and `save`."""
        return self._save(ctx, tensors, live_rows, to_lend=True)

    def load(self, ctx: Any, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `ActivationSaver.load`."""
        return kept if ctx.stash_claim is None else self._stash.load(ctx.stash_claim)

    def lend(self, ctx: Any, kept: Sequence[Tensor]) -> AbstractContextManager[Sequence[Tensor | PagedRows]]:
        """See `LendingSaver.lend`."""
        return nullcontext(kept) if ctx.stash_claim is None else self._stash.lend(ctx.stash_claim)

    def __deepcopy__(self, memo: Any) -> OrdinarySaver:
        """A copy of the layer (for averaged weights, for example) is not a layer of this stash."""
        return OrdinarySaver()

    def _save(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor, *, to_lend: bool) -> Sequence[Tensor]:
        if getattr(ctx, "stash_claim", None) is not None:
            raise EngineStateError(
                f"paged stash: {self._layer} saves twice in one call of its autograd function, expected one save; give all tensors to it"
            )
        ctx.stash_claim = self._stash.save(self._layer, tensors, live_rows, to_lend=to_lend)
        return tensors if ctx.stash_claim is None else ()


class RowStash:
    """Keeps live rows in pages from forward to backward.

    Set a `saver` with its own name on each layer. Between backward and `optimizer.step()` call `overflowed()`, unless `overflow` is "keep";
    call `end_step()` after each optimizer step, on all ranks, and `abort()` after an exception in a step.

    Args:
        config: Sizes, and what happens on overflow.
        device: Where tensors are: cpu or cuda.

    Attributes:
        is_recording: Whether pages are still to be allocated, after `config.recorded_steps`; until then saves are ordinary ones.
        is_paused: Whether saves are ordinary at the moment.
        growths: How often pages were enlarged.
        found_no_pages: Whether the last `overflowed()` was true because pages were missing.
        needed_capacity: The capacity factor that watched experts would have needed then; 0.0 if theirs was enough.
    """

    def __init__(self, config: StashConfig, device: torch.device) -> None:
        self.device = device
        self.config = config
        self.is_recording = True
        self.is_paused = self.found_no_pages = False
        self.needed_capacity = 0.0
        self.growths = 0
        self._side = SideStream(device, is_own=config.own_stream)
        self._pools: dict[PageKind, PagePool] = {}
        self._snapshot: Snapshot | None = None
        self._trace: Trace | None = None
        self._ops = ops_for(device)
        self._flag = OverflowFlag()
        self._recorded: list[dict[PageKind, Demand]] = []
        self._outstanding: dict[int, SavedRows] = {}
        self._pending: deque[SavedRows] = deque()
        self._late: SavedRows | None = None
        self._last: weakref.ref[SavedRows] | None = None
        self._must_grow = self._has_warned = False
        self._run = self._usual_run = 0
        self._bytes = HeldBytes()

    def saver(self, layer: str) -> LayerSaver:
        """The saver for a layer: `layer.saver = stash.saver(name)`.

        Args:
            layer: Its name, for messages.
        """
        return LayerSaver(self, layer)

    def watch(self, experts: Mapping[str, GroupedExperts]) -> None:
        """Also check for rows beyond the capacity factor of these experts, so that they need not wait; not under "keep".

        `overflowed()` is true if they dropped rows, and `needed_capacity` is the factor that would have been enough. Under
        `paused()`, and in evaluations, they make room for all rows.

        Args:
            experts: By the names their savers were made with.
        """
        self.unwatch()
        if self.config.overflow != "keep" and experts:
            self._flag.capacity = CapacityWatch(experts, self.device, lambda: not self.is_paused)

    def unwatch(self) -> None:
        """Stop watching experts, which then make room for all rows by themselves again."""
        if self._flag.capacity is not None:
            self._flag.capacity.close()
            self._flag.capacity = None

    # -- in a step -----------------------------------------------------------------------------------------------------

    def save(self, layer: str, tensors: Sequence[Tensor], live_rows: Tensor, *, to_lend: bool = False) -> Claim | None:
        """Save the tensors of one call of a layer.

        Args:
            layer: Its name, for messages.
            tensors: `[rows, ...]` each, with the same number of rows, contiguous. They must not be written to afterwards.
            live_rows: int64, one element, on the device: how many first rows are live. It must not be written to afterwards.
            to_lend: Whether `lend` will be called and not `load`, so that nothing is prefetched.

        Returns:
            The claim that `load` and `lend` take; `None` if autograd must keep them: the stash is paused, or a checkpoint recomputes.

        Raises:
            EngineStateError: Tensors or `live_rows` are not as the protocol requires, a checkpoint recomputes a layer whose rows are in
                the stash, or a CUDA graph is being recorded with `overflow="keep"`.
        """
        check_save(layer, tensors, live_rows, self.device)
        if self.is_paused:
            return None
        if compat.backward_task() != -1:  # a checkpoint recomputes, and will load at once
            check_recomputed(layer, self._outstanding.values())
            return None
        captured = is_capturing(self.device)
        if captured:
            self._begin_capture(layer)
        else:
            self._drop_captured()
        pools = [self._pool(PageKind.of(tensor)) for tensor in tensors]
        rows = SavedRows(layer, tensors, live_rows, pools, to_lend=to_lend, captured=captured)
        rows.question = self._flag.questions
        claim = Claim(rows)
        rows.previous, self._last = self._last, weakref.ref(rows)
        late, self._late = self._late, None
        if late is not None:
            self._store(late)
        self._run += 1
        if self.config.own_stream and (self.is_recording or self._run == self._usual_run):
            self._late = rows
        else:
            self._store(rows)
        self._outstanding[id(rows)] = rows
        self._bytes.add(rows.nbytes)
        if not self.is_recording:
            self._pending.append(rows)
            self._retire(_LOOKAHEAD[self.config.overflow])
        if captured and self._run == self._usual_run:  # the forward may be a graph by itself
            self._side.join(self._side.record())
        return claim

    def load(self, claim: Claim) -> list[Tensor]:
        """The tensors of a save, once, and start fetching those of the previous save.

        Rows past the live ones are zero, unless the tensors are the original buffers.

        Args:
            claim: From `save`.

        Raises:
            EngineStateError: They were loaded before, or the step was abandoned.
        """
        with self._leaving(claim.rows):
            return claim.rows.take(self._ops, self._side)

    @contextmanager
    def lend(self, claim: Claim) -> Iterator[Sequence[Tensor | PagedRows]]:
        """As `load`; in pages, if they were saved to lend and are in pages of the device. For work on the current stream, until the end."""
        with self._leaving(claim.rows), claim.rows.lend(self._ops, self._side) as tensors:
            yield tensors

    @contextmanager
    def _leaving(self, rows: SavedRows) -> Iterator[None]:
        """Context around handing the rows of a save to their reader."""
        rows.check()
        if self._bytes.has_grown:
            self._bytes.keep(sum(save.nbytes for save in self._staying()))
        del self._outstanding[id(rows)]
        self._leave(rows)
        self._bytes.remove(rows.nbytes)
        capacity = self._flag.capacity
        is_asked_about = not rows.has_originals or (capacity is not None and rows.layer in capacity.names)
        if is_asked_about and not rows.captured:
            self._flag.note_read(rows.layer, rows.question)
        self._usual_run, self._run = self._run or self._usual_run, 0
        pools = rows.pools
        try:
            yield
            self._note(rows.layer, "load", pools)
            before = rows.previous() if rows.previous is not None else None
            if before is not None and before.needs_fetch and not before.is_abandoned:
                before.fetch(self._ops, self._side)
                self._note(before.layer, "fetch", before.pools)
        finally:
            # Memory of pages that were replaced is freed now, and not before the side stream is done with them.
            if not self._outstanding or any(pool is not self._pools.get(pool.kind) for pool in pools):
                self._side.join(self._side.record())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Saves inside are ordinary; what is in pages stays there."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def submit_overflow(self) -> None:
        """Start the query over all ranks whether a tensor that was saved so far found no place. Collective; does not wait.

        Best before backward, and before each if there are several: a later query covers all earlier saves.
        """
        self._flag.submit(list(self._pools.values()), self._side, self.device)

    def overflowed(self) -> bool:
        """Whether gradients of this step are wrong on some rank, the same answer on all. Collective unless it was submitted before.

        If so, skip the optimizer step or repeat the step under `paused()`. The host waits until the answer has arrived.

        Raises:
            EngineStateError: Rows were read in backward that had been saved after `submit_overflow`.
        """
        if not self._flag.is_submitted:
            self.submit_overflow()
        if self.config.overflow != "keep":
            self._flag.check()
        overflowed, self.needed_capacity = self._flag.wait()
        self.found_no_pages = overflowed and not self.is_recording and self.config.overflow != "keep"
        self._must_grow |= self.found_no_pages
        return self.found_no_pages or self.needed_capacity > 0

    def overflow_on_device(self) -> Tensor:
        """The same answer as float32 0 or 1 on the device, for optimizer steps inside a CUDA graph. Collective; does not wait.

        `optimizer.found_inf = stash.overflow_on_device()` after backward makes torch's fused optimizers skip a step that overflowed.
        """
        self._side.join(self._side.record())
        pages, needed = self._flag.most_overflowed(list(self._pools.values()), self.device)
        counts_here = self.config.overflow != "keep" and not self.is_recording
        return torch.maximum(pages.clamp(max=int(counts_here)), needed.clamp(max=1)).float()

    def abort(self) -> None:
        """Abandon a step: all pages are freed, and what was saved can no longer be loaded."""
        self._side.join(self._side.record())
        for rows in self._outstanding.values():
            rows.forget("belong to a step that was abandoned")
        self._outstanding.clear()
        self._pending.clear()
        self._late = None
        self._bytes.give_up()
        self._run = 0
        self._flag.clear()
        if self._flag.capacity is not None:
            self._flag.capacity.needed.zero_()
        with self._side.fork():
            for pool in self._pools.values():
                pool.reset()
                pool.clear_statistics()
        self._side.join(self._side.record())

    # -- between steps -------------------------------------------------------------------------------------------------

    def end_step(self) -> bool:
        """After the optimizer step, on all ranks: pages of abandoned saves are freed, and pages are added if there were too few.

        A save may be loaded in a later step, unless "skip" or "rerun" found too few pages in its own and the query covered it:
        no later query would. What was saved after the query is part of the next one.

        Returns:
            Whether pages moved, so that CUDA graphs that use them must be recorded again.

        Raises:
            EngineStateError: `overflowed()` was not called, or did not cover all that was read, so gradients may have been wrong.
        """
        has_pages = self.config.overflow != "keep" and not self.is_recording and bool(self._pools)
        if has_pages or self._flag.capacity is not None:
            self._flag.check_read(self.config.overflow)
        self._drop_captured()
        if self._late is not None:  # otherwise it would go unnoticed that it found no pages
            self._leave(self._late)
        self._retire(0)
        self._reclaim()
        self._run = 0
        self._bytes.end_step()
        self._flag.clear()
        moved = self._settle_pages()
        self._side.join(self._side.record())  # the next step may be a replay, which waits for the caller's stream alone
        return moved

    # -- statistics ----------------------------------------------------------------------------------------------------

    def statistics(self, *, wait: bool = False) -> StashStatistics | None:
        """Of the last step; `None` if there was none, or its numbers have not arrived and waiting is not requested."""
        if self._snapshot is None or not (wait or self._snapshot.is_ready):
            return None
        return self._snapshot.statistics()

    @property
    def page_bytes(self) -> int:
        """Memory of the pages on the device."""
        return sum(pool.size_bytes for pool in self._pools.values())

    @property
    def host_bytes(self) -> int:
        """Memory of the pages on the host."""
        return sum(pool.host_bytes for pool in self._pools.values())

    def start_trace(self) -> None:
        """Record the pages in use after every save and load from now on."""
        self._trace = Trace()

    def stop_trace(self) -> list[Occupancy]:
        """What was recorded since. Waits for the device."""
        trace, self._trace = self._trace, None
        return trace.read() if trace is not None else []

    def _note(self, layer: str, event: str, pools: Sequence[PagePool]) -> None:
        if self._trace is not None and not is_capturing(self.device):
            self._trace.note(layer, event, pools, self._side)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _pool(self, kind: PageKind) -> PagePool:
        if kind not in self._pools:
            self._pools[kind] = PagePool(kind, self.config.page_rows, self.device, PoolSize())
        return self._pools[kind]

    def _begin_capture(self, layer: str) -> None:
        if self.config.overflow == "keep":
            raise EngineStateError(
                f'paged stash: {layer} is recorded in a CUDA graph, but overflow="keep" decides on the host, which a replay never runs; '
                'use overflow="skip"'
            )
        if self._late is not None and not self._late.captured:  # its copy would be recorded and not executed
            self._leave(self._late)
        if not self._outstanding:  # a replay begins with all pages, also after one that was not finished
            with self._side.fork():
                for pool in self._pools.values():
                    pool.reset()

    def _drop_captured(self) -> None:
        """Forget what was recorded and not loaded: it belongs to a failed recording that never ran, and has no pages."""
        for key, rows in list(self._outstanding.items()):
            if rows.captured:
                del self._outstanding[key]
                self._bytes.remove(rows.nbytes)
                self._leave(rows)
                rows.forget("belong to a CUDA graph that could not be recorded")

    def _store(self, rows: SavedRows) -> None:
        """Put rows into pages, if there are any; while recording, only count what they would need."""
        keeps = self.config.overflow == "keep"
        rows.question = self._flag.questions
        rows.store(self._ops, self._side, copies=not self.is_recording, verdict=keeps and not self.is_recording)
        self._note(rows.layer, "save", rows.pools)

    def _leave(self, rows: SavedRows) -> None:
        """Keep the originals of a save in place until it is loaded, or abandoned."""
        if rows in self._pending:
            self._pending.remove(rows)
        if rows is self._late:
            self._late = None

    def _staying(self) -> list[SavedRows]:
        """Saves whose originals are alive; while recording, those whose originals would be if there were pages."""
        saves = list(self._outstanding.values())
        if self.is_recording:
            return saves[-_LOOKAHEAD[self.config.overflow] :]
        return [rows for rows in saves if rows.has_originals]

    def _retire(self, remaining: int) -> None:
        """Release the originals of all but the last saves."""
        while len(self._pending) > remaining:
            rows = self._pending.popleft()
            if self.config.overflow == "keep" and rows.found_no_place():
                self._must_grow = True
                if not self._has_warned:
                    warn_of_kept(rows.layer)
                self._has_warned = True
            else:
                rows.let_go(self._side)

    def _reclaim(self) -> None:
        """Free the pages of saves that can or may no longer be loaded."""
        is_wrong = self._must_grow and self.config.overflow != "keep"
        for key, rows in list(self._outstanding.items()):
            is_lost = is_wrong and rows.question < self._flag.questions
            if rows.is_abandoned or is_lost:
                del self._outstanding[key]
                self._bytes.remove(rows.nbytes)
                rows.joined(self._side)
                rows.give_back(self._ops, self._side)
                rows.forget("belong to a step in which rows found no pages" if is_lost else "were abandoned")
        self._side.join(self._side.record())

    def _settle_pages(self) -> bool:
        """Reset counts; allocate pages if that is due. Returns whether it was."""
        if self._pools:
            self._snapshot = Snapshot(self._pools, self._side, self._bytes, recorded=self.is_recording)
            is_unchecked = self.is_recording or self.config.overflow == "keep"
            with self._side.fork():
                for pool in self._pools.values():
                    pool.clear_statistics() if is_unchecked else pool.begin_step()
        if self.is_recording:
            return self._finish_recording(self._snapshot.demand() if self._snapshot is not None else {})
        if self._must_grow:
            # A rank that has not saved anything yet grows with the others.
            self._grow(self._snapshot.demand() if self._snapshot is not None else {})
            return True
        return False

    def _finish_recording(self, demand: dict[PageKind, Demand]) -> bool:
        self._recorded.append(demand)
        if len(self._recorded) < self.config.recorded_steps:
            return False
        self._allocate(sized(self.config, [step for rank in everyones(self._recorded) for step in rank]))
        self.is_recording = False
        return True

    def _grow(self, demand: dict[PageKind, Demand]) -> None:
        # Unless "keep", all ranks know this, and stay alike.
        demands = [demand] if self.config.overflow == "keep" else everyones(demand)
        self._allocate(grown(self.config, {kind: pool.size for kind, pool in self._pools.items()}, demands))
        self._must_grow = False
        self.growths += 1

    def _allocate(self, sizes: dict[PageKind, PoolSize]) -> None:
        """Replace the pools. Saves that are still to be loaded keep theirs."""
        replace_pools(self._pools, sizes, self.config.page_rows, self.device, self._ops, self._side)
