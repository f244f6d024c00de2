"""One step of AdamW as a Triton kernel: each number is read once and written once. adamw_rule.py is its reference.

Importing this file imports Triton, so only `adamw.function_for` does, once it gets parameters on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mfsdp.optim.adamw_rule import GRADIENT_FACTOR, MIX_1, MIX_2, STEP_FACTOR, Rule

__all__ = ["step_in_one_pass_"]

_BLOCK, _WARPS = (
    512,
    8,
)  # two numbers a thread: from eight on, 16 and 32 bits would be laid out in different ways and exchanged
_GRADIENT_FACTOR, _STEP_FACTOR = tl.constexpr(GRADIENT_FACTOR), tl.constexpr(STEP_FACTOR)
_MIX_1, _MIX_2 = tl.constexpr(MIX_1), tl.constexpr(MIX_2)


def step_in_one_pass_(weight: Tensor, gradient: Tensor, mean: Tensor, variance: Tensor, rule: Rule) -> None:
    """`adamw_rule.step_` on a GPU, for contiguous tensors."""
    if not weight.numel():
        return
    with torch.cuda.device(weight.device):
        _step[(triton.cdiv(weight.numel(), _BLOCK),)](
            *(weight, gradient, mean, variance, weight.numel()),
            *(rule.keep, rule.beta1, rule.beta2, rule.rest1, rule.rest2),
            *(rule.step_size, rule.root, rule.eps, rule.sign, rule.step),
            IS_STOCHASTIC=mean.dtype is torch.bfloat16,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # a product that is added is rounded first, as in the reference
        )


@triton.jit
def _rounded(value, bits):  # type: ignore[no-untyped-def]
    up = ((value.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(value) < float("inf"), up, value)


@triton.jit(do_not_specialize=["numel", "step"])  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    weights,
    gradients,
    means,
    variances,
    numel,
    keep,
    beta1,
    beta2,
    rest1,
    rest2,
    step_size,
    root,
    eps,
    sign,
    step,
    IS_STOCHASTIC: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    old = tl.load(weights + at, mask=inside).to(tl.float32)
    grad = tl.load(gradients + at, mask=inside).to(tl.float32) * sign + 0.0
    first = tl.load(means + at, mask=inside).to(tl.float32) * beta1 + grad * rest1
    second = tl.load(variances + at, mask=inside).to(tl.float32) * beta2 + grad * rest2 * grad
    denominator = tl.div_rn(tl.sqrt_rn(second), root) + eps
    new = old * keep - tl.div_rn(first * step_size, denominator)
    tl.store(weights + at, new.to(weights.dtype.element_ty), mask=inside)
    if IS_STOCHASTIC:
        bits = old.to(tl.uint32, bitcast=True) ^ (grad.to(tl.uint32, bitcast=True) * _GRADIENT_FACTOR)
        bits += step.to(tl.uint32) * _STEP_FACTOR
        bits = (bits ^ (bits >> 16)) * _MIX_1
        bits = (bits ^ (bits >> 13)) * _MIX_2
        bits = bits ^ (bits >> 16)
        first, second = _rounded(first, bits & 0xFFFF), _rounded(second, bits >> 16)
    tl.store(means + at, first.to(means.dtype.element_ty), mask=inside)
    tl.store(variances + at, second.to(variances.dtype.element_ty), mask=inside)
