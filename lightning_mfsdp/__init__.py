"""Megatron-style fully sharded training for any LightningModule: `Trainer(strategy="mfsdp")`.

Importing this package registers "mfsdp", "mfsdp_optim_grads", "mfsdp_optim" and "mfsdp_no_shard" with Lightning.
"""

from lightning_mfsdp.checkpoint.state.whole import full_state_dict
from lightning_mfsdp.engine import (
    AveragedWeights,
    CapturedLoss,
    CapturedStep,
    EngineStateError,
    GradientWatch,
    MixedPrecisionPolicy,
    NonFiniteGradients,
    NonFiniteParameter,
    ShardingError,
    around_backward,
    broadcast_buffers,
    capture_loss,
    capture_step,
    clip_grad_norm_,
    clip_grad_value_,
    flat_gradients,
    fully_shard,
    fully_shard_optimizer,
    fully_shard_units,
    grad_norm,
    lerp_,
    no_sync,
    record_ranges,
    refresh_weights,
    sharded_parameters,
    units,
    unshard,
    unshard_model,
)
from lightning_mfsdp.options.loss_scaling import DistributedGradScaler
from lightning_mfsdp.options.unit_selection import select_units
from lightning_mfsdp.recompute import Recompute, apply_recompute
from lightning_mfsdp.trainer.loading import load_from_checkpoint
from lightning_mfsdp.trainer.precision import MFSDPPrecision
from lightning_mfsdp.trainer.strategy import MFSDPStrategy, register_strategies

__version__ = "0.1.0"

__all__ = [
    "AveragedWeights",
    "CapturedLoss",
    "CapturedStep",
    "DistributedGradScaler",
    "EngineStateError",
    "GradientWatch",
    "MFSDPPrecision",
    "MFSDPStrategy",
    "MixedPrecisionPolicy",
    "NonFiniteGradients",
    "NonFiniteParameter",
    "Recompute",
    "ShardingError",
    "apply_recompute",
    "around_backward",
    "broadcast_buffers",
    "capture_loss",
    "capture_step",
    "clip_grad_norm_",
    "clip_grad_value_",
    "flat_gradients",
    "full_state_dict",
    "fully_shard",
    "fully_shard_optimizer",
    "fully_shard_units",
    "grad_norm",
    "lerp_",
    "load_from_checkpoint",
    "no_sync",
    "record_ranges",
    "refresh_weights",
    "select_units",
    "sharded_parameters",
    "units",
    "unshard",
    "unshard_model",
]

register_strategies()
