"""The sum of float32 and 16-bit numbers as a Triton kernel; `Tensor.add_` is its reference.

Importing this file imports Triton, so only `accumulate.accumulate_` does, once it gets tensors on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_in_one_pass_"]

_BLOCK, _WARPS = (
    1024,
    8,
)  # four numbers a thread: from eight on, 16 and 32 bits would be laid out differently and exchanged


def add_in_one_pass_(total: Tensor, addend: Tensor) -> None:
    """`total.add_(addend)`.

    Args:
        total: Float32, contiguous, on a GPU.
        addend: As many numbers of 16 bits, contiguous, on the same GPU.
    """
    with torch.cuda.device(total.device):
        _add[(triton.cdiv(total.numel(), _BLOCK),)](total, addend, total.numel(), BLOCK=_BLOCK, num_warps=_WARPS)
    torch.autograd.graph.increment_version(total)


@triton.jit  # type: ignore[untyped-decorator]
def _add(total, addend, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    summed = tl.load(total + at, mask=inside) + tl.load(addend + at, mask=inside).to(tl.float32)
    tl.store(total + at, summed, mask=inside)
