"""CheckpointingStrategy: what Lightning asks of a strategy about checkpoints. One is a directory with rows of every rank, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp.callback_hooks import HasParameterState, PreparesOptimizers
from lightning_mfsdp.checkpoint import lightning_io
from lightning_mfsdp.checkpoint.parameter_state import ParameterState, row_shards, whole_rows
from lightning_mfsdp.checkpoint.whole import whole_model_state, whole_optimizer_state
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

    state_dict_type: Literal["sharded", "full"] = "sharded"

    @property
    def parameter_states(self) -> dict[str, ParameterState]:
        """What callbacks of this Trainer keep for parameters, by its name in checkpoints. They save it in `on_save_checkpoint`."""
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        found = [callback for callback in callbacks if isinstance(callback, HasParameterState)]
        return {callback.checkpoint_key: callback.parameter_state for callback in found}

    def _prepare_optimizers(self, checkpoint: dict[str, Any]) -> None:
        trainer = self._module.trainer
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = checkpoint.get("callbacks", {}).get(callback.state_key)
            if isinstance(callback, PreparesOptimizers) and state is not None:
                callback.prepare_optimizers(trainer, state)

    def parameter_state(self, state: ParameterState) -> dict[str, Tensor]:
        """What a callback puts into `checkpoint["parameter_states"]` under its key: rows, or whole tensors on rank 0. Collective."""
        if self.state_dict_type == "full":
            return whole_rows(self._module, state.rows(), keep=self.is_global_zero)
        return row_shards(self._module, state.rows())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What hooks of the module see before it is saved: sharded tensors, or whole ones on rank 0 and nothing elsewhere."""
        state = super().lightning_module_state_dict()
        return whole_model_state(state, keep=self.is_global_zero) if self.state_dict_type == "full" else state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State by parameter name, of the rows this rank owns; or whole, as without sharding, on rank 0."""
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self.state_dict_type == "full":
            return whole_optimizer_state(plain, keep=self.is_global_zero)
        return lightning_io.optimizer_state(self._module, plain)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a directory, every rank its rows and rank 0 the rest; or one file, from rank 0.

        Raises:
            TypeError: `storage_options` were given: they belong to a CheckpointIO.
        """
        if storage_options is not None:
            raise TypeError(
                "MFSDPStrategy.save_checkpoint: storage_options belong to a CheckpointIO, which this strategy does not use"
            )
        path = Path(self.broadcast(filepath))
        if self.state_dict_type == "full":
            lightning_io.save_file(path, checkpoint, is_rank_zero=self.is_global_zero)
        else:
            lightning_io.save(path, self._module, checkpoint, is_rank_zero=self.is_global_zero)

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
            is_rank_zero=self.is_global_zero,
            parameter_states=self.parameter_states,
            prepare=self._prepare_optimizers if fitting else None,
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do: `load_checkpoint` read the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to do: `load_checkpoint` read the states."""
