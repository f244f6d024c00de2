"""SavedRows: the tensors of one save of one layer, from the forward that computed them to the backward that reads them.

    WHOLE      as the forward computed them, in their original memory
    COPIED     the same, and in pages as well (none, while pages are still to be allocated)
    PAGED      in pages alone
    FETCHED    whole again, in memory of their own; the pages are reused
    GONE       read, or abandoned: there is nothing to load

Each transition is one method, in this order: `store`, `let_go`, `fetch`, `take` or `lend`. Rows that stay in place skip what
they do not need, and `forget` ends all of them. `stash.py` decides when each is called.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.saving import PagedRows
from lightning_mfsdp.moe.stash.pages import HEADER, Header, PageKind, PageOps, PagePool, Tier, pages_in
from lightning_mfsdp.moe.stash.side_stream import Event, SideStream

__all__ = ["SavedRows", "Stage", "check_recomputed", "check_save", "warn_of_kept"]

_LOADED = "were loaded before, and their pages were reused; call backward once (no retain_graph)"


class Stage(Enum):
    """Where the rows of a save are; see the text of this file."""

    WHOLE = "whole"
    COPIED = "copied"
    PAGED = "paged"
    FETCHED = "fetched"
    GONE = "gone"


class SavedRows:
    """The tensors of one save, which share their live rows, and the record of each.

    Memory is allocated on the stream that uses it last, and freed after an event of the other one was waited for: originals and
    reloaded tensors on the caller's stream, records on the side stream.

    Args:
        layer: Its name, for messages.
        tensors: `[capacity, ...]` each. They must not be written to while they are whole or copied.
        live_rows: int64, one element, on the device.
        pools: Of each tensor, where its pages will be.
        to_lend: Whether the reader will read the pages directly.
        captured: As the attribute.

    Attributes:
        stage: Where the rows are.
        question: How many queries there were before it was stored, or saved if it was not stored.
        captured: Whether it exists in a CUDA graph only.
        nbytes: Of the tensors.
        reader: The object that may read the rows; set by the stash. Once it is gone, the pages are freed at the end of the step.
        previous: The save before this one, which is probably read after it.
        pools: As given; none once the rows are gone.
    """

    def __init__(
        self,
        layer: str,
        tensors: Sequence[Tensor],
        live_rows: Tensor,
        pools: Sequence[PagePool],
        *,
        to_lend: bool,
        captured: bool,
    ) -> None:
        self.layer = layer
        self.stage = Stage.WHOLE
        self.question = 0
        self.captured = captured
        self.capacity = tensors[0].shape[0]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.reader: weakref.ref[object] | None = None
        self.previous: weakref.ref[SavedRows] | None = None
        self.pools = list(pools)
        self._why_gone = ""
        self._to_lend = to_lend
        # Detached: the graph that made a tensor must not be part of a reference cycle.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [tensor._version for tensor in self._tensors]
        self._live_rows: Tensor | None = live_rows
        self._kinds = [PageKind.of(tensor) for tensor in tensors]
        self._like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._headers = self._tables = self._verdict = torch.empty(0, device="cpu")
        self._stored: Event = None  # after the copies into pages; `None` if it was waited for
        self._fetched: Event = None

    # -- forward -------------------------------------------------------------------------------------------------------

    def store(self, ops: PageOps, side: SideStream, *, copies: bool, verdict: bool) -> None:
        """Find pages and copy into them, on the side stream.

        Args:
            ops: The implementation.
            side: The side stream.
            copies: Whether there may be pages at all.
            verdict: Whether the host will read `found_no_place`.
        """
        assert self.stage is Stage.WHOLE
        assert self._live_rows is not None
        with side.fork():
            count = len(self.pools)
            # Even, so that all tables begin at multiples of 16 bytes, for which kernels are compiled.
            most_pages = 2 * pages_in(self.capacity, 2 * self.pools[0].page_rows)
            device = self._live_rows.device
            self._headers = torch.empty(count, HEADER, dtype=torch.int64, device=device)
            self._tables = torch.empty(count, most_pages, dtype=torch.int64, device=device)
            for tensor, kind, (pool, header, table) in zip(
                self._unwritten(), self._kinds, self._records(), strict=True
            ):
                ops.place(pool, header, table, self._live_rows, self.capacity)
                if copies:
                    ops.copy_in(pool, header, table, kind.rows_of(tensor))
            if verdict:
                self._verdict = torch.empty(
                    count, HEADER, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
                )
                self._verdict.copy_(self._headers, non_blocking=True)
            self._stored = side.record()
        self.stage = Stage.COPIED

    def found_no_place(self) -> bool:
        """Whether some tensor found no pages. The host waits until the copies are done; see `store`."""
        if self._stored is not None:
            self._stored.synchronize()
        return bool((self._verdict[:, Header.TIER] == Tier.NOWHERE).any())

    def let_go(self, side: SideStream) -> None:
        """The pages suffice: release the originals, so that their memory can be reused."""
        assert self.has_originals
        self.joined(side)
        self._unwritten()  # raises if the originals were written to before the copy
        assert self.stage is Stage.COPIED
        self.stage, self._tensors = Stage.PAGED, []

    def joined(self, side: SideStream) -> None:
        """Let the caller's stream wait for the copies into pages."""
        side.join(self._stored)
        self._stored = self._live_rows = None

    # -- backward ------------------------------------------------------------------------------------------------------

    @property
    def needs_fetch(self) -> bool:
        """Whether rows are in pages, no fetch has begun, and their reader does not read the pages directly."""
        return self.stage is Stage.PAGED and not self._is_read_in_pages

    @property
    def has_originals(self) -> bool:
        """Whether the tensors are in their original memory."""
        return self.stage in (Stage.WHOLE, Stage.COPIED)

    @property
    def _is_read_in_pages(self) -> bool:
        """On the device only: a kernel that reads rows of the host waits for the bus, whereas a prefetch overlaps that."""
        return self._to_lend and not any(pool.size.host_pages for pool in self.pools)

    @property
    def is_abandoned(self) -> bool:
        """Whether the rows can no longer be loaded."""
        return self.reader is None or self.reader() is None

    def fetch(self, ops: PageOps, side: SideStream) -> None:
        """Start to fetch rows, and free the pages after that."""
        assert self.stage is Stage.PAGED
        self.joined(side)
        self._tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self._like]
        with side.fork():
            for tensor, kind, (pool, header, table) in zip(self._tensors, self._kinds, self._records(), strict=True):
                ops.copy_out(pool, header, table, kind.rows_of(tensor))
                ops.give_back(pool, header, table)
            self._fetched = side.record()
        self.stage = Stage.FETCHED

    def take(self, ops: PageOps, side: SideStream) -> list[Tensor]:
        """The tensors, from wherever they are; the pages are freed."""
        self.joined(side)
        if self.has_originals:
            tensors = self._unwritten()
            self.give_back(ops, side)
        else:
            if self.stage is Stage.PAGED:
                self.fetch(ops, side)
            tensors = self._tensors
            side.join(self._fetched)
        self.forget(_LOADED)
        return tensors

    @contextmanager
    def lend(self, ops: PageOps, side: SideStream) -> Iterator[Sequence[Tensor | PagedRows]]:
        """What `take` returns, or its pages, until the context ends; then the pages are freed, after what was issued inside."""
        if not (self.stage is Stage.PAGED and self._is_read_in_pages):
            yield self.take(ops, side)
            return
        self.joined(side)
        try:
            yield self._in_pages()
        finally:
            # The side stream waits for the readers, and so do the pages' next owners and the records' memory.
            self.give_back(ops, side)
            self.forget(_LOADED)

    def give_back(self, ops: PageOps, side: SideStream) -> None:
        """Return pages, if it has any, without reading them."""
        if self.stage not in (Stage.COPIED, Stage.PAGED):
            return
        with side.fork():
            for pool, header, table in self._records():
                ops.give_back(pool, header, table)

    def forget(self, why: str) -> None:
        """Nothing can be loaded anymore."""
        self.stage, self._why_gone = Stage.GONE, why
        self._live_rows, self._tensors = None, []
        self._headers = self._tables = self._verdict = torch.empty(0, device="cpu")
        self.pools = []

    def check(self) -> None:
        """Raise an EngineStateError if there is nothing to load."""
        if self.stage is Stage.GONE:
            raise EngineStateError(f"paged stash: rows of {self.layer} {self._why_gone}; compute the forward again")

    def _unwritten(self) -> list[Tensor]:
        """The originals, unless one was written to since it was saved."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                raise EngineStateError(
                    f"paged stash: a tensor of shape {list(tensor.shape)} that backward needs was written to in place after it was saved "
                    f"(version {tensor._version}, expected {version}); clone it before writing"
                )
        return self._tensors

    def _in_pages(self) -> list[PagedRows]:
        return [
            PagedRows(
                pages=pool.rows.view(dtype).view(len(pool.rows), *shape[1:]),
                header=header,
                table=table,
                page_rows=pool.page_rows,
                rows=self.capacity,
            )
            for (shape, dtype, _), (pool, header, table) in zip(self._like, self._records(), strict=True)
        ]

    def _records(self) -> list[tuple[PagePool, Tensor, Tensor]]:
        return list(zip(self.pools, self._headers.unbind(), self._tables.unbind(), strict=True))


def check_save(layer: str, tensors: Sequence[Tensor], live_rows: Tensor, device: torch.device) -> None:
    """Raise an EngineStateError unless tensors and their number of live rows are as a save requires them."""
    if live_rows.dtype != torch.int64 or live_rows.numel() != 1 or live_rows.device.type != device.type:
        raise EngineStateError(
            f"paged stash: {layer} gave live_rows as {live_rows.dtype} of shape {list(live_rows.shape)} on {live_rows.device}, expected "
            f"one int64 on {device.type}; the number stays on the device"
        )
    capacities = {tensor.shape[:1] for tensor in tensors}
    if len(capacities) != 1 or any(tensor.device.type != device.type for tensor in tensors):
        raise EngineStateError(
            f"paged stash: {layer} saved tensors {[(list(tensor.shape), str(tensor.device)) for tensor in tensors]}, expected the same "
            f"number of rows in all, on {device.type}; save what has other rows in a save of its own"
        )


def check_recomputed(layer: str, outstanding: Iterable[SavedRows]) -> None:
    """Raise an EngineStateError if rows of a layer that a checkpoint recomputes are in the stash as well."""
    if any(rows.layer == layer for rows in outstanding):
        raise EngineStateError(
            f"paged stash: {layer} is recomputed in backward by an activation checkpoint while its rows are in the stash, so they "
            "cost both. Checkpoint only what is around the experts (modules= of ActivationRecompute), leave this layer out of the "
            "stash, or pass use_reentrant=True to checkpoints of your own"
        )


def warn_of_kept(layer: str) -> None:
    """Warn that there were too few pages; results are still correct."""
    warnings.warn(
        f"paged stash: rows of {layer} found no pages and stay where they are, so nothing is lost but memory; there will be more pages "
        "from the next step on. Raise device_factor or host_factor to avoid it. This is reported once",
        stacklevel=2,
    )
