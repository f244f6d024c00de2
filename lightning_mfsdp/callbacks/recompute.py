"""ActivationRecompute: `Recompute` as a callback, for runs whose strategy is chosen by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_mfsdp._lightning_api import Callback, LightningModule, Trainer
from lightning_mfsdp.recompute import Recompute
from lightning_mfsdp.trainer.callback_hooks import ChoosesRecompute
from lightning_mfsdp.trainer.strategy import MFSDPStrategy

__all__ = ["ActivationRecompute"]


class ActivationRecompute(Callback, ChoosesRecompute):
    """Activations are recomputed in backward, as with `MFSDPStrategy(recompute=Recompute(...))`; use one of the two.

    Args:
        method: As in `Recompute`.
        num_layers: As in `Recompute`.
        modules: As in `Recompute`.
        every_nth: As in `Recompute`.
        save_ops: As in `Recompute`.
        offload: As in `Recompute`.
        tiled_modules: As in `Recompute`.
        tiles: As in `Recompute`.

    Raises:
        ValueError, TypeError: As `Recompute` does; `TypeError` too, when the run starts, if the strategy is not `MFSDPStrategy`.
    """

    def __init__(
        self,
        *,
        method: Literal["none", "uniform", "block", "selective"] = "uniform",
        num_layers: int | None = None,
        modules: Sequence[str] = (),
        every_nth: int = 1,
        save_ops: Sequence[str] = (),
        offload: bool = False,
        tiled_modules: Sequence[str] = (),
        tiles: int | None = None,
    ) -> None:
        self._recompute = Recompute(
            method=method,
            num_layers=num_layers,
            modules=modules,
            every_nth=every_nth,
            save_ops=save_ops,
            offload=offload,
            tiled_modules=tiled_modules,
            tiles=tiles,
        )

    @property
    def recompute(self) -> Recompute:
        """The options, which the strategy reads before it shards the model."""
        return self._recompute

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that would not read it."""
        if not isinstance(trainer.strategy, MFSDPStrategy):
            raise TypeError(
                f"ActivationRecompute: expected MFSDPStrategy, got {type(trainer.strategy).__name__}, which does not ask callbacks what to "
                "recompute; call apply_recompute(model, Recompute(...)) in configure_model"
            )
