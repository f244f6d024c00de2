"""Chooses the implementation for a tile of logits: Triton's kernels or PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_mfsdp.base.kernels import has_triton
from lightning_mfsdp.ops.tiles import TileMath, TorchMath

__all__ = ["math_for"]

_WITHOUT = (
    "log-probabilities on CUDA are computed by several PyTorch operations each, slower and with a little more memory"
)


def math_for(logits: Tensor) -> TileMath:
    """Triton's on CUDA, in 16 and 32 bits; otherwise PyTorch's."""
    if logits.is_cuda and logits.dtype is not torch.float64 and has_triton(_WITHOUT):
        from lightning_mfsdp.ops.triton_softmax import TritonMath

        return TritonMath()
    return TorchMath()
