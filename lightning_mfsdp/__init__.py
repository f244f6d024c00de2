"""Megatron-style fully sharded training for any LightningModule: `Trainer(strategy="mfsdp")`.

Importing this package registers "mfsdp", "mfsdp_optim_grads", "mfsdp_optim" and "mfsdp_no_shard" with Lightning. Its public rooms, such as
`lightning_mfsdp.moe`, are attributes of it and are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_mfsdp.checkpoint.state.full_state import full_state_dict
from lightning_mfsdp.engine import (
    AveragedWeights,
    CapturedLoss,
    CapturedStep,
    EngineStateError,
    GradientWatch,
    MixedPrecisionPolicy,
    NonFiniteGradients,
    NonFiniteLoss,
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
from lightning_mfsdp.launch.elastic import ElasticEnvironment, launched_nodes
from lightning_mfsdp.options.loss_scaling import DistributedGradScaler
from lightning_mfsdp.options.unit_selection import select_units
from lightning_mfsdp.recompute import Recompute, apply_recompute
from lightning_mfsdp.trainer.latest import latest_checkpoint
from lightning_mfsdp.trainer.loading import load_from_checkpoint
from lightning_mfsdp.trainer.precision import MFSDPPrecision
from lightning_mfsdp.trainer.strategy import MFSDPStrategy, register_strategies

if TYPE_CHECKING:
    from lightning_mfsdp import callbacks as callbacks
    from lightning_mfsdp import checkpoint as checkpoint
    from lightning_mfsdp import context_parallel as context_parallel
    from lightning_mfsdp import fabric as fabric
    from lightning_mfsdp import moe as moe
    from lightning_mfsdp import mtp as mtp
    from lightning_mfsdp import ops as ops
    from lightning_mfsdp import optim as optim
    from lightning_mfsdp import ray as ray
    from lightning_mfsdp import recompute as recompute
    from lightning_mfsdp import te as te
    from lightning_mfsdp import tensor_parallel as tensor_parallel

# The only place of the version; pyproject.toml reads it from this line. Metadata would be the other choice, but there is none in a checkout
# that is only on the path, and that of an older installation there would be wrong.
__version__ = "0.1.0"

__all__ = [
    "AveragedWeights",
    "CapturedLoss",
    "CapturedStep",
    "DistributedGradScaler",
    "ElasticEnvironment",
    "EngineStateError",
    "GradientWatch",
    "MFSDPPrecision",
    "MFSDPStrategy",
    "MixedPrecisionPolicy",
    "NonFiniteGradients",
    "NonFiniteLoss",
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
    "latest_checkpoint",
    "launched_nodes",
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

_ROOMS = (
    "callbacks",
    "checkpoint",
    "context_parallel",
    "fabric",
    "moe",
    "mtp",
    "ops",
    "optim",
    "ray",
    "recompute",
    "te",
    "tensor_parallel",
)

if not TYPE_CHECKING:  # to a type checker it would say that every name exists

    def __getattr__(name: str) -> object:
        """Import a room at its first use; the import makes it an ordinary attribute of the package."""
        if name in _ROOMS:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])


register_strategies()
