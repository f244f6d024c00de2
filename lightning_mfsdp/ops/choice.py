"""Chooses the implementation for a tile of logits: Triton's kernels or PyTorch."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import torch
from torch import Tensor

from lightning_mfsdp.ops.tiles import TileMath, TorchMath

__all__ = ["math_for"]


def math_for(logits: Tensor) -> TileMath:
    """Triton's on CUDA, in 16 and 32 bits; otherwise PyTorch's."""
    if logits.is_cuda and logits.dtype is not torch.float64 and _has_triton():
        from lightning_mfsdp.ops.triton_softmax import TritonMath

        return TritonMath()
    return TorchMath()


@cache
def _has_triton() -> bool:
    is_installed = importlib.util.find_spec("triton") is not None
    if not is_installed:
        warnings.warn(
            "triton is not installed, so log-probabilities on CUDA are computed by several PyTorch operations each, slower and with a "
            "little more memory; install triton",
            stacklevel=2,
        )
    return is_installed
