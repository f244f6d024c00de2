"""DistributedGradScaler: scales losses so that all ranks skip a step with an overflow, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.base import compat

__all__ = ["DistributedGradScaler", "agreeing_scaler", "unscales_by_itself"]


class DistributedGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose decision to skip a step is the same on all ranks.

    Each rank sees only its own rows of a gradient, so an overflow may show on one rank alone. The flag is reduced over the whole
    world; ranks that own no element of an optimizer's parameters join it as well. Overrides `GradScaler._unscale_grads_`, whose
    signature is the same in torch 2.11 to 2.15.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in _local_gradients(optimizer):
            by_dtype.setdefault(grad.dtype, []).append(grad)
        with torch.no_grad():
            for grads in by_dtype.values():
                compat.foreach_unscale_(grads, found_inf, inv_scale)
            if dist.is_initialized():
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}


def _local_gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None and grad.numel():
                yield grad.to_local() if isinstance(grad, DTensor) else grad


def unscales_by_itself(optimizer: Any) -> bool:
    """Fused optimizers take the scale and the overflow flag as attributes (contract of torch.amp)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def agreeing_scaler(scaler: torch.amp.GradScaler | None, device_type: str) -> torch.amp.GradScaler:
    """A scaler whose ranks agree, with the settings of a plain one; any other class must ensure agreement by itself."""
    if scaler is None:
        return DistributedGradScaler(device_type)
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        return scaler
    return DistributedGradScaler(
        device_type,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )
