"""One save of one layer, from forward to backward: as it was, in pages as well, in pages alone, on its way back, or gone."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.saving import PagedRows
from lightning_mfsdp.moe.stash.originals import Originals
from lightning_mfsdp.moe.stash.pages import HEADER, Header, PageKind, PageOps, PagePool, Tier, pages_in
from lightning_mfsdp.moe.stash.stream import Event, SideStream

__all__ = ["Held", "StashedRows", "check_recomputed", "check_save", "warn_of_kept"]

_LOADED = "were loaded before, and their pages belong to others now; call backward once (no retain_graph)"


class Lender(Protocol):
    """A stash, as what it handed out sees it; see `RowStash`."""

    def load(self, held: Held) -> list[Tensor]:
        """The tensors of a save."""
        ...

    def lend(self, held: Held) -> AbstractContextManager[Sequence[Tensor | PagedRows]]:
        """The same, until the context ends."""
        ...


class StashedRows:
    """What a layer loads its buffers from. When nobody holds it any more without a load, the pages come back at the end of the step."""

    def __init__(self, stash: Lender, held: Held) -> None:
        self._stash = stash
        self._held = held
        held.owner = weakref.ref(self)

    def load(self) -> list[Tensor]:
        """The tensors that were saved; rows past the live ones are zero, unless the buffers never left. Once.

        Raises:
            EngineStateError: They were loaded before, or the step was given up.
        """
        return self._stash.load(self._held)

    def lend(self) -> AbstractContextManager[Sequence[Tensor | PagedRows]]:
        """The tensors that were saved, or the pages they lie in, until the context ends; instead of `load`, and as often.

        Raises:
            EngineStateError: As `load`, when the context begins.
        """
        return self._stash.lend(self._held)


class Held:
    """The tensors of one save, which share their live rows, and the record of each.

    Memory is allocated on the stream that uses it last, and given back after an event of the other one was waited for: originals and
    reloaded tensors on the caller's stream, records on the side.

    Attributes:
        gone: Why there is nothing to load any more; empty while there is.
        question: How many questions all ranks were asked before it was stored, or saved if it was not.
        captured: Whether it exists in a CUDA graph only.
        stored: After the copies into pages; `None` if somebody has waited for it.
        fetched: Reloaded tensors that nobody has asked for yet.
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
        self.question = 0
        self.captured = captured
        self.gone = ""
        self.capacity = tensors[0].shape[0]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.owner: weakref.ref[StashedRows] | None = None
        self.previous: weakref.ref[Held] | None = None
        self.stored: Event = None
        self.fetched: list[Tensor] | None = None
        self._fetched_at: Event = None
        self._to_lend = to_lend
        self._originals: Originals | None = Originals(tensors)
        self._live_rows: Tensor | None = live_rows
        self.pools = list(pools)
        self._kinds = [PageKind.of(tensor) for tensor in tensors]
        self._like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._headers = self._tables = self._verdict = torch.empty(0, device="cpu")

    # -- forward -------------------------------------------------------------------------------------------------------

    def store(self, ops: PageOps, side: SideStream, *, copies: bool, verdict: bool) -> None:
        """Find pages and copy into them, on the side.

        Args:
            ops: Do the work.
            side: The stream beside.
            copies: Whether there may be pages at all.
            verdict: Whether the host will ask `found_no_place`.
        """
        assert self._originals is not None
        assert self._live_rows is not None
        with side.fork():
            count = len(self.pools)
            # Even, so that all tables begin at multiples of 16 bytes, for which kernels are compiled.
            most_pages = 2 * pages_in(self.capacity, 2 * self.pools[0].page_rows)
            device = self._live_rows.device
            self._headers = torch.empty(count, HEADER, dtype=torch.int64, device=device)
            self._tables = torch.empty(count, most_pages, dtype=torch.int64, device=device)
            for tensor, kind, (pool, header, table) in zip(
                self._originals.tensors(), self._kinds, self._records(), strict=True
            ):
                ops.place(pool, header, table, self._live_rows, self.capacity)
                if copies:
                    ops.copy_in(pool, header, table, kind.rows_of(tensor))
            if verdict:
                self._verdict = torch.empty(
                    count, HEADER, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
                )
                self._verdict.copy_(self._headers, non_blocking=True)
            self.stored = side.record()

    def found_no_place(self) -> bool:
        """Whether some tensor is in no page. The host waits until the copies are done; see `store`."""
        if self.stored is not None:
            self.stored.synchronize()
        return bool((self._verdict[:, Header.TIER] == Tier.NOWHERE).any())

    def let_go(self, side: SideStream) -> None:
        """The pages are enough: the originals' memory may be used again."""
        self.joined(side)
        assert self._originals is not None
        self._originals.tensors()  # raises if the copies are of what was written later
        self._originals = None

    def joined(self, side: SideStream) -> None:
        """The caller's stream goes on after the copies into pages."""
        side.join(self.stored)
        self.stored = self._live_rows = None

    # -- backward ------------------------------------------------------------------------------------------------------

    @property
    def needs_fetch(self) -> bool:
        """Whether rows are in pages, nobody has begun to bring them back, and their reader does not come to the pages."""
        return self._is_in_pages and not self._is_read_in_pages

    @property
    def has_originals(self) -> bool:
        """Whether the tensors are where they were."""
        return self._originals is not None

    @property
    def _is_in_pages(self) -> bool:
        return not self.gone and self._originals is None and self.fetched is None

    @property
    def _is_read_in_pages(self) -> bool:
        """On the device only: a kernel that reads rows of the host waits for the bus, and a fetch ahead of it does that beside."""
        return self._to_lend and not any(pool.size.host_pages for pool in self.pools)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody can load any more."""
        return self.owner is None or self.owner() is None

    def fetch(self, ops: PageOps, side: SideStream) -> None:
        """Begin to bring rows back, and give the pages back after that."""
        self.joined(side)
        self.fetched = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self._like]
        with side.fork():
            for tensor, kind, (pool, header, table) in zip(self.fetched, self._kinds, self._records(), strict=True):
                ops.copy_out(pool, header, table, kind.rows_of(tensor))
                ops.give_back(pool, header, table)
            self._fetched_at = side.record()

    def take(self, ops: PageOps, side: SideStream) -> list[Tensor]:
        """The tensors, wherever they are; the pages go back."""
        self.joined(side)
        if self._originals is not None:
            tensors = self._originals.tensors()
            self.give_back(ops, side)
        else:
            if self.fetched is None:
                self.fetch(ops, side)
            assert self.fetched is not None
            tensors = self.fetched
            side.join(self._fetched_at)
        self.forget(_LOADED)
        return tensors

    @contextmanager
    def lend(self, ops: PageOps, side: SideStream) -> Iterator[Sequence[Tensor | PagedRows]]:
        """What `take` returns, or where it lies, until the context ends; then the pages go back, after what was issued inside."""
        if not (self._is_in_pages and self._is_read_in_pages):
            yield self.take(ops, side)
            return
        self.joined(side)
        try:
            yield self._in_pages()
        finally:
            # The side waits for the readers, and so do the pages' next owners and the records' memory.
            self.give_back(ops, side)
            self.forget(_LOADED)

    def give_back(self, ops: PageOps, side: SideStream) -> None:
        """Return pages, if it has any, without reading them."""
        if not self._headers.numel():
            return
        with side.fork():
            for pool, header, table in self._records():
                ops.give_back(pool, header, table)

    def forget(self, why: str) -> None:
        """Nothing can be loaded any more."""
        self.gone = why
        self._originals = self._live_rows = self.fetched = None
        self._headers = self._tables = self._verdict = torch.empty(0, device="cpu")
        self.pools = []

    def check(self) -> None:
        """Raise an EngineStateError if there is nothing to load."""
        if self.gone:
            raise EngineStateError(f"paged stash: rows of {self.layer} {self.gone}")

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
    """Raise an EngineStateError unless tensors and their number of live rows are as a save wants them."""
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


def check_recomputed(layer: str, outstanding: Iterable[Held]) -> None:
    """Raise an EngineStateError if rows of a layer that a checkpoint computes again are in the stash as well."""
    if any(held.layer == layer for held in outstanding):
        raise EngineStateError(
            f"paged stash: {layer} is computed again in backward by an activation checkpoint while its rows are in the stash, so they "
            "cost both. Checkpoint only what is around the experts (modules= of ActivationRecompute), leave this layer out of the "
            "stash, or pass use_reentrant=True to checkpoints of your own"
        )


def warn_of_kept(layer: str) -> None:
    """Say that there were too few pages and nothing is wrong."""
    warnings.warn(
        f"paged stash: rows of {layer} found no pages and stay where they are, so nothing is lost but memory; there will be more pages "
        "from the next step on. Larger device_factor or host_factor avoid it. This is said once",
        stacklevel=2,
    )
