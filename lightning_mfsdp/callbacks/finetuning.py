"""Finetuning callbacks: Lightning's, for sharded parameters.

Lightning's compare parameters by value, look them up by object and rebuild groups after the optimizer was restored. Here a parameter is
identified by its owner in the engine, and what is trainable is restored from a checkpoint before optimizers are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mfsdp._lightning_api import BackboneFinetuning, BaseFinetuning, LightningModule, Trainer
from lightning_mfsdp.base import compat
from lightning_mfsdp.checkpoint.state.index import ParameterIndex, plain_name
from lightning_mfsdp.engine.internals import view_of
from lightning_mfsdp.trainer.callback_hooks import PreparesOptimizers

__all__ = ["ShardedBackboneFinetuning", "ShardedFinetuning"]

Modules = nn.Module | Iterable[nn.Module | Iterable[Any]]


class ShardedFinetuning(BaseFinetuning, PreparesOptimizers):
    """Lightning's `BaseFinetuning` for `MFSDPStrategy`: override `freeze_before_training` and `finetune_function` as there.

    Frozen parameters are sharded and gathered like others; they have no gradient and no optimizer state. A checkpoint holds which
    parameters are trainable, which batch norms keep statistics and which groups the optimizers have, so training resumes at any epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._progress: dict[str, Any] = {}

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Any]) -> list[Any]:
        """The parameters among `params` that the optimizer does not hold yet; warns of the others."""
        held = {_identity(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        wanted = list(params)
        missing = [parameter for parameter in wanted if _identity(parameter) not in held]
        if len(missing) < len(wanted):
            rank_zero_warn(
                f"finetuning: {len(wanted) - len(missing)} of {len(wanted)} parameters to be unfrozen are in the optimizer already and "
                "keep their group. Give configure_optimizers trained parameters only: filter(lambda p: p.requires_grad, self.parameters())"
            )
        return missing

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules and add their parameters to an optimizer as a new group.

        Args:
            modules: To unfreeze.
            optimizer: Takes the parameters that it does not hold yet.
            lr: Learning rate of the group. `None`: that of the first group divided by `initial_denom_lr`.
            initial_denom_lr: See `lr`.
            train_bn: Whether batch norms are trained, too.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        unfrozen = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        missing = ShardedFinetuning.filter_on_optimizer(optimizer, unfrozen)
        if missing:
            optimizer.add_param_group({"params": missing, "lr": rate})

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let `finetune_function` freeze and unfreeze, and record the outcome for checkpoints."""
        for optimizer in trainer.optimizers:
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
        index = ParameterIndex(pl_module)
        self._progress = {
            "trained": [name for name, parameter in _parameters(pl_module).items() if parameter.requires_grad],
            "tracking": [name for name, norm in _batch_norms(pl_module).items() if norm.track_running_stats],
            "groups": [index.names_by_group(optimizer) for optimizer in trainer.optimizers],
        }

    def state_dict(self) -> dict[str, Any]:
        """What is trainable, and in which groups."""
        return {**super().state_dict(), **self._progress}

    def prepare_optimizers(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Freeze, unfreeze and add groups as at the time of saving; the optimizers' states fill the groups with options."""
        if "groups" not in state:
            return  # saved before the first epoch
        module = trainer.lightning_module
        parameters = _parameters(module)
        trained = set(state["trained"])
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
        for name, norm in _batch_norms(module).items():
            norm.track_running_stats = name in state["tracking"]
        for optimizer, groups in zip(trainer.optimizers, state["groups"], strict=False):
            for names in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({"params": [parameters[name] for name in names if name in parameters]})


class ShardedBackboneFinetuning(ShardedFinetuning, BackboneFinetuning):
    """Lightning's `BackboneFinetuning` for `MFSDPStrategy`: `self.backbone` is frozen until an epoch, then trained at a rate of its own.

    Arguments are those of `lightning.pytorch.callbacks.BackboneFinetuning`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        BackboneFinetuning.__init__(self, *args, **kwargs)
        self._progress = {}


def _identity(parameter: Tensor) -> int:
    """A number that is the same for all representations of a parameter."""
    view = view_of(parameter)
    return id(parameter if view is None else view.local)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def _batch_norms(module: nn.Module) -> dict[str, compat.BatchNorm]:
    return {plain_name(name): part for name, part in module.named_modules() if isinstance(part, compat.BatchNorm)}
