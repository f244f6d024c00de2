"""Who works on pages: Triton's kernels or torch."""

from __future__ import annotations

import torch

from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.moe.stash import reference
from lightning_mfsdp.moe.stash.pages import PageOps

__all__ = ["ops_for"]


def ops_for(device: torch.device) -> PageOps:
    """Triton's kernels on CUDA, torch's reference on CPU.

    Raises:
        EngineStateError: Triton is needed and not installed, or the device is of another type.
    """
    if device.type == "cpu":
        return reference
    if device.type != "cuda":
        raise EngineStateError(f"paged stash: works on cpu and cuda, got {device.type}; train without it there")
    try:
        from lightning_mfsdp.moe.stash import kernels
    except ImportError as error:
        raise EngineStateError(
            f"paged stash: its kernels on CUDA are written in Triton, which cannot be imported ({error}); install triton"
        ) from error
    return kernels
