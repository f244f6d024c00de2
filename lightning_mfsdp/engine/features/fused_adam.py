"""Recognizes Transformer Engine's FusedAdam, by its name: it works element by element, but some of its options would be wrong here.

Source: `transformer_engine.pytorch.optimizers.fused_adam`, version 2.20.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = ["Remainders", "is_fused_adam", "keeps_remainders", "refuse_unfit_options"]

_NAME = ("transformer_engine", "FusedAdam")
_PASSES_OVER_EMPTY = (2, 20)  # NVIDIA/TransformerEngine pull request 3212
_REMAINDER = "master_param"
_MOMENTS = (torch.float32, torch.bfloat16)
_CAPTURABLE = (
    "its step counter would come back from a checkpoint on the CPU; use torch.optim.AdamW(capturable=True, fused=True)"
)
_OWN_WEIGHTS = (
    "the optimizer would go on from float32 weights of its own, whatever is loaded or written into the model; add "
    "store_param_remainders=True, which keeps what bfloat16 main weights lack, or have float32 main weights and leave it out"
)
_NO_REMAINDERS = (
    "main weights are {dtype}, and it keeps the 16 bits that bfloat16 ones lack of float32; leave both out, or have bfloat16 main weights: "
    'precision="bf16-true", or MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)'
)


def is_fused_adam(optimizer: Optimizer) -> bool:
    """Whether it is exactly this class; a subclass may do anything."""
    kind = type(optimizer)
    return (kind.__module__.split(".")[0], kind.__name__) == _NAME


def keeps_remainders(optimizer: Optimizer) -> bool:
    """Whether it stores the bits that bfloat16 weights lack of float32 along with its moments."""
    return is_fused_adam(optimizer) and bool(getattr(optimizer, "store_param_remainders", False))


class Remainders:
    """An `OptimizerDriver`: remainders begin at zero where a checkpoint had only moments. The library creates all of a state or none."""

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add remainders of zero to the state of bfloat16 parameters that lacks them."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state and parameter.dtype is torch.bfloat16 and _REMAINDER not in state:
                    state[_REMAINDER] = torch.zeros_like(parameter, dtype=torch.int16)

    def end(self, optimizer: Optimizer) -> bool:
        """Nothing is left to do after a step; each is the user's."""
        return True


def refuse_unfit_options(optimizer: Any, groups: Sequence[ParameterGroup]) -> None:
    """Raise a ShardingError for an option that cannot be honored.

    Args:
        optimizer: A FusedAdam.
        groups: What it holds parameters of.
    """
    _refuse_old_library()
    if optimizer.capturable:
        raise ShardingError(f"fully_shard_optimizer: FusedAdam(capturable=True): {_CAPTURABLE}")
    _refuse_unfit_weights(optimizer, [group.spec.main_dtype for group in groups if group.spec.trainable])
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = getattr(optimizer, name)
        if dtype not in _MOMENTS:
            raise ShardingError(
                f"fully_shard_optimizer: FusedAdam({name}={dtype}) keeps scales beside its state, which would be in no checkpoint; "
                "expected torch.float32 or torch.bfloat16"
            )
    if any(group.offloads for group in groups):
        raise ShardingError(
            'fully_shard_optimizer: FusedAdam counts the calls of its step, and offload="optimizer" makes several of one; use '
            "torch.optim.AdamW(fused=True)"
        )


def _refuse_old_library() -> None:
    try:
        installed = version("transformer_engine")
    except PackageNotFoundError:  # built by hand: its version is unknown
        return
    if tuple(int(part) for part in installed.split(".")[:2]) < _PASSES_OVER_EMPTY:
        raise ShardingError(
            f"fully_shard_optimizer: FusedAdam of Transformer Engine {installed} leaves out updates where a rank has no rows of a "
            "parameter; install version 2.20 or later, or use torch.optim.AdamW(fused=True)"
        )


def _refuse_unfit_weights(optimizer: Any, dtypes: Sequence[torch.dtype]) -> None:
    if not optimizer.master_weights:
        return
    if not optimizer.store_param_remainders:
        raise ShardingError(f"fully_shard_optimizer: FusedAdam(master_weights=True): {_OWN_WEIGHTS}")
    if dtypes and torch.bfloat16 not in dtypes:
        why = _NO_REMAINDERS.format(dtype=dtypes[0])
        raise ShardingError(
            f"fully_shard_optimizer: FusedAdam(master_weights=True, store_param_remainders=True): {why}"
        )
