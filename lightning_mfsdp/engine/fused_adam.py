"""Transformer Engine's FusedAdam, known by its name: it works element by element, and some of its options would go wrong here.

Source: `transformer_engine.pytorch.optimizers.fused_adam`, version 2.20.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from lightning_mfsdp.engine.errors import ShardingError

__all__ = ["is_fused_adam", "refuse_unfit_options"]

_NAME = ("transformer_engine", "FusedAdam")
_MOMENTS = (torch.float32, torch.bfloat16)
_SWITCHES = {
    "master_weights": "main weights are float32 already, and weights that only the optimizer knows would be in no checkpoint or average; "
    "leave it out, and store_param_remainders with it",
    "use_decoupled_grad": "gradients are where they always are, in the dtype of the main weight; leave it out",
    "capturable": "its step counter would come back from a checkpoint on the CPU; use torch.optim.AdamW(capturable=True, fused=True)",
}


def is_fused_adam(optimizer: Optimizer) -> bool:
    """Whether it is exactly this class; a subclass may do anything."""
    kind = type(optimizer)
    return (kind.__module__.split(".")[0], kind.__name__) == _NAME


def refuse_unfit_options(optimizer: Any, *, offloads: bool) -> None:
    """Raise a ShardingError for an option that cannot be honoured.

    Args:
        optimizer: A FusedAdam.
        offloads: Some of its parameters were sharded with `offload="optimizer"`.
    """
    for name, why in _SWITCHES.items():
        if getattr(optimizer, name):
            raise ShardingError(f"fully_shard_optimizer: FusedAdam({name}=True): {why}")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = getattr(optimizer, name)
        if dtype not in _MOMENTS:
            raise ShardingError(
                f"fully_shard_optimizer: FusedAdam({name}={dtype}) keeps scales beside its state, which would be in no checkpoint; "
                "expected torch.float32 or torch.bfloat16"
            )
    if offloads:
        raise ShardingError(
            'fully_shard_optimizer: FusedAdam counts the calls of its step, and offload="optimizer" makes several of one; use '
            "torch.optim.AdamW(fused=True)"
        )
