"""CheckpointingStrategy: what Lightning asks of a strategy about checkpoints. A checkpoint is one directory; every rank writes its rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_mfsdp.checkpoint import lightning_io
from lightning_mfsdp.processes import ProcessStrategy

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import LightningModule

__all__ = ["CheckpointingStrategy"]


class CheckpointingStrategy(ProcessStrategy):
    """A strategy whose model is sharded and whose ranks write and read checkpoints together."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Removes checkpoints; writing and reading do not go through it."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if type(io) is not TorchCheckpointIO:
            raise TypeError(
                f"MFSDPStrategy does not use a CheckpointIO, so {type(io).__name__} would be ignored: every rank writes its own part of a "
                "checkpoint through torch.distributed.checkpoint. Remove the plugin"
            )
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read straight into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` restores optimizers."""
        return False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name, of the rows this rank owns."""
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return lightning_io.optimizer_state(self._module, plain)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a directory; every rank its rows, rank 0 the rest.

        Raises:
            TypeError: `storage_options` were given: they belong to a CheckpointIO.
        """
        if storage_options is not None:
            raise TypeError(
                "MFSDPStrategy.save_checkpoint: storage_options belong to a CheckpointIO, which this strategy does not use"
            )
        lightning_io.save(Path(self.broadcast(filepath)), self._module, checkpoint, is_rank_zero=self.is_global_zero)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read weights, and optimizer states when fitting, in place; returns what is left for Lightning.

        Raises:
            ValueError: Nothing that can be read lies at the path.
            RuntimeError: The checkpoint does not fit the model or the optimizers.
        """
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        return lightning_io.load(
            Path(self.broadcast(checkpoint_path)),
            self._module,
            self.optimizers if fitting else [],
            strict=self._module.strict_loading,
            weights_only=weights_only,
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do: `load_checkpoint` read the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to do: `load_checkpoint` read the states."""
