"""Adds gradients to sums, tensor by tensor, where the two may have different dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.kernels import has_triton

__all__ = ["KERNEL_NUMEL", "accumulate_"]

# Smaller tensors save less time on the device than the launch of the kernel takes on the host.
KERNEL_NUMEL = 1 << 23
_WITHOUT = "float32 sums of 16-bit gradients take 1.7 times as long"


def accumulate_(sums: Sequence[Tensor], addends: Sequence[Tensor]) -> None:
    """Add each addend to its sum, which keeps its dtype and is rounded once.

    PyTorch's kernel for a float32 sum and 16-bit numbers reads one number at a time. Large ones go through accumulate_kernel.py.

    Args:
        sums: Of a floating-point or complex dtype.
        addends: Of the same shapes and devices.
    """
    rest: tuple[list[Tensor], list[Tensor]] = ([], [])
    for total, addend in zip(sums, addends, strict=True):
        if _has_kernel(total, addend):
            from lightning_mfsdp.base.accumulate_kernel import add_in_one_pass_

            add_in_one_pass_(total, addend)
        else:
            rest[0].append(total)
            rest[1].append(addend)
    if rest[0]:
        compat.foreach_add_(*rest)


def _has_kernel(total: Tensor, addend: Tensor) -> bool:
    return (
        total.numel() >= KERNEL_NUMEL
        and total.dtype is torch.float32
        and addend.dtype in (torch.bfloat16, torch.float16)
        and total.is_cuda
        and addend.is_contiguous()
        and total.is_contiguous()
        and has_triton(_WITHOUT)
    )
