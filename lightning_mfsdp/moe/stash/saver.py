"""LayerSaver: what stands between the autograd function of one layer and the stash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.saving import OrdinarySaver

if TYPE_CHECKING:
    from lightning_mfsdp.moe.stash.stash import RowStash

__all__ = ["LayerSaver"]


class LayerSaver:
    """The stash, as one layer sees it."""

    def __init__(self, stash: RowStash, layer: str) -> None:
        self._stash = stash
        self._layer = layer

    def save(self, ctx: Any, tensors: Sequence[Tensor], live_rows: Tensor) -> Sequence[Tensor]:
        """See `ActivationSaver.save`. Autograd keeps nothing, unless this is an ordinary save.

        Raises:
            EngineStateError: It was called with this `ctx` before, or see `RowStash.save`.
        """
        if getattr(ctx, "stashed_rows", None) is not None:
            raise EngineStateError(
                f"paged stash: {self._layer} saves twice in one call of its autograd function, expected one save; give all tensors to it"
            )
        ctx.stashed_rows = self._stash.save(self._layer, tensors, live_rows)
        return tensors if ctx.stashed_rows is None else ()

    def load(self, ctx: Any, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `ActivationSaver.load`."""
        return kept if ctx.stashed_rows is None else ctx.stashed_rows.load()

    def __deepcopy__(self, memo: Any) -> OrdinarySaver:
        """A copy of the layer (averaged weights, say) is no layer of this stash."""
        return OrdinarySaver()
