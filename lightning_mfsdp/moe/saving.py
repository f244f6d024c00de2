"""How the experts' autograd function keeps what its backward needs: exactly the expert input and the first projection."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = [
    "ActivationSaver",
    "LendingSaver",
    "OrdinarySaver",
    "PagedRows",
    "SavesActivations",
    "has_saver",
    "lent",
    "save_to_lend",
    "wrong_saver_because",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedRows:
    """A saved `[rows, ...]` tensor whose live rows lie in pages: row r is row `r % page_rows` of page `table[r // page_rows]`.

    Attributes:
        pages: `[pages * page_rows, ...]`, dtype and further dimensions of the tensor.
        header: int64. The first element is 0 if there are pages; if not, all rows read as zero. The second is how many rows are live.
        table: int64, a page for each `page_rows` rows; written as far as rows are live, if there are pages.
        page_rows: Rows in a page.
        rows: Of the tensor, dead ones included.
    """

    pages: Tensor
    header: Tensor
    table: Tensor
    page_rows: int
    rows: int

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return torch.Size((self.rows, *self.pages.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.pages.dtype

    @property
    def device(self) -> torch.device:
        """Device of the pages."""
        return self.pages.device

    def whole(self) -> Tensor:
        """The tensor, with zeros after its live rows, in memory of its own. Does not wait for the device."""
        if not len(self.pages):
            return self.pages.new_zeros(self.shape)
        row = torch.arange(self.rows, device=self.device)
        is_there = (row < self.header[1]) & (self.header[0] == 0)
        place = self.table[row // self.page_rows] * self.page_rows + row % self.page_rows
        # As bytes, for any dtype.
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        pages = self.pages.view(torch.uint8).view(len(self.pages), row_bytes)
        rows = pages.index_select(0, torch.where(is_there, place, 0)).masked_fill_(~is_there[:, None], 0)
        return rows.view(-1).view(self.dtype).view(self.shape)


class ActivationSaver(Protocol):
    """Keeps activations of experts between forward and backward. Set one as `GroupedExperts.saver`.

    It is called only for forwards that are recorded for a backward.
    """

    def save(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
        """Keep tensors of one call.

        Args:
            ctx: Of the autograd function: a place to store anything that `load` will need.
            tensors: `[rows, width]` each, with the same number of rows. Only the first `live_rows` are defined.
            live_rows: int64, 0-D, on the device.

        Returns:
            What autograd must keep like all other saved tensors.
        """

    def load(self, ctx: Any, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of one call, in their order and shape.

        Args:
            ctx: The same as in `save`.
            kept: What `save` returned.
        """


@runtime_checkable
class LendingSaver(ActivationSaver, Protocol):
    """A saver whose backward may read rows where they are kept, instead of getting tensors of its own."""

    def save_to_lend(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
        """As `save`, but the backward will call `lend` and not `load`."""

    def lend(self, ctx: Any, kept: Sequence[Tensor]) -> AbstractContextManager[Sequence[Tensor | PagedRows]]:
        """The tensors of one call, in pages until the context ends, or whole and unchanged if `save` kept them.

        Args:
            ctx: The same as in `save_to_lend`.
            kept: What `save_to_lend` returned. What is lent is read on the stream that is current in the context.
        """


@runtime_checkable
class SavesActivations(Protocol):
    """A module of experts that uses a saver, which can be replaced. `GroupedExperts` is one.

    Its forward calls `self.saver.save` in an autograd function if a backward will follow, and its backward `self.saver.load`; or
    `save_to_lend` and `lent`.
    """

    saver: ActivationSaver


class OrdinarySaver:
    """Autograd keeps everything, whole."""

    def save(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
        """Keep all of them."""
        return tensors

    def load(self, ctx: Any, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """All of them."""
        return kept


def save_to_lend(saver: ActivationSaver, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
    """Keep tensors of one call for a backward that uses `lent`, by any saver. See `ActivationSaver.save`."""
    save = saver.save_to_lend if isinstance(saver, LendingSaver) else saver.save
    return save(ctx, tensors, live_rows)


@contextmanager
def lent(saver: ActivationSaver, ctx: Any, kept: Sequence[Tensor]) -> Iterator[Sequence[Tensor | PagedRows]]:
    """The tensors of one call until the context ends, in pages if the saver lends them. See `LendingSaver.lend`."""
    if isinstance(saver, LendingSaver):
        with saver.lend(ctx, kept) as tensors:
            yield tensors
    else:
        yield saver.load(ctx, kept)


def has_saver(module: nn.Module) -> bool:
    """Whether a module is a `SavesActivations`; an attribute of that name alone may be something else."""
    return isinstance(module, SavesActivations) and not wrong_saver_because(module)


def wrong_saver_because(module: nn.Module) -> str:
    """Why a module's attribute `saver` is not an `ActivationSaver`; empty if it is one, or if there is no such attribute."""
    if not isinstance(module, SavesActivations):
        return ""
    missing = [method for method in ("save", "load") if not callable(getattr(module.saver, method, None))]
    return (
        f"because its saver ({type(module.saver).__name__}) has no method {' and no '.join(missing)}" if missing else ""
    )
