"""LayerSaver: what stands between the autograd function of one layer and the stash."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.saving import OrdinarySaver, PagedRows
from lightning_mfsdp.moe.stash.held import StashedRows

__all__ = ["LayerSaver"]


class Saves(Protocol):
    """A stash, as layers see it; see `RowStash`."""

    def save(
        self, layer: str, tensors: Sequence[Tensor], live_rows: Tensor, *, to_lend: bool = False
    ) -> StashedRows | None:
        """Take the tensors of one call of a layer."""
        ...


class LayerSaver:
    """The stash, as one layer sees it."""

    def __init__(self, stash: Saves, layer: str) -> None:
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
        return kept if ctx.stashed_rows is None else ctx.stashed_rows.load()

    def lend(self, ctx: Any, kept: Sequence[Tensor]) -> AbstractContextManager[Sequence[Tensor | PagedRows]]:
        """See `LendingSaver.lend`."""
        return nullcontext(kept) if ctx.stashed_rows is None else ctx.stashed_rows.lend()

    def __deepcopy__(self, memo: Any) -> OrdinarySaver:
        """A copy of the layer (averaged weights, say) is no layer of this stash."""
        return OrdinarySaver()

    def _save(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor, *, to_lend: bool) -> Sequence[Tensor]:
        if getattr(ctx, "stashed_rows", None) is not None:
            raise EngineStateError(
                f"paged stash: {self._layer} saves twice in one call of its autograd function, expected one save; give all tensors to it"
            )
        ctx.stashed_rows = self._stash.save(self._layer, tensors, live_rows, to_lend=to_lend)
        return tensors if ctx.stashed_rows is None else ()
