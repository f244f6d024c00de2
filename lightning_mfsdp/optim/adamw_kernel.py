"""One step of AdamW as a Triton kernel: each number is read once and written once. adamw_rule.py is its reference.

Importing this file imports Triton, so only `adamw.function_for` does, once it gets parameters on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_mfsdp.optim.adamw_rule import GRADIENT_FACTOR, MIX_1, MIX_2, STEP_FACTOR, Rule
from lightning_mfsdp.optim.moment_codes import BEND, BEND_STEPS, LEAST_EXPONENT, LEAST_SHARE, STEPS

__all__ = ["step_in_one_pass_"]

_BLOCK, _WARPS = (
    512,
    8,
)  # two numbers a thread: from eight on, 16 and 32 bits would be laid out in different ways and exchanged
_GRADIENT_FACTOR, _STEP_FACTOR = tl.constexpr(GRADIENT_FACTOR), tl.constexpr(STEP_FACTOR)
_MIX_1, _MIX_2 = tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_STEPS, _LEAST_EXPONENT = tl.constexpr(STEPS), tl.constexpr(LEAST_EXPONENT)
_ROOTS = tl.constexpr(2.0**-LEAST_EXPONENT)
_BEND_STEPS, _BEND = tl.constexpr(BEND_STEPS), tl.constexpr(BEND)
_LARGEST_SHARE, _SHARE_ZERO = tl.constexpr(2.0**-LEAST_SHARE), tl.constexpr(((127 + LEAST_SHARE) << 3) - 1)


def step_in_one_pass_(
    weight: Tensor, gradient: Tensor, mean: Tensor, variance: Tensor, rule: Rule, remainder: Tensor | None = None
) -> None:
    """`adamw_rule.step_` on a GPU, for contiguous tensors."""
    if not weight.numel():
        return
    with torch.cuda.device(weight.device):
        _step[(triton.cdiv(weight.numel(), _BLOCK),)](
            *(weight, gradient, mean, variance, weight if remainder is None else remainder, weight.numel()),
            *(rule.keep, rule.beta1, rule.beta2, rule.rest1, rule.rest2),
            *(rule.step_size, rule.root, rule.eps, rule.sign, rule.step),
            IS_STOCHASTIC=mean.dtype is torch.bfloat16,
            IS_CODED=mean.dtype is torch.int8,
            HAS_REMAINDER=remainder is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # a product that is added is rounded first, as in the reference
        )


@triton.jit
def _rounded(value, bits):  # type: ignore[no-untyped-def]
    up = ((value.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(value) < float("inf"), up, value)


@triton.jit
def _root(code):  # type: ignore[no-untyped-def]
    exponent = tl.maximum(code - 1, 0) // _STEPS
    digits = (code - 1 - exponent * _STEPS + _STEPS).to(tl.float32) * (1 / _STEPS)
    power = ((exponent + (_LEAST_EXPONENT + 127)) << 23).to(tl.float32, bitcast=True)
    return tl.where(code > 0, digits * power, 0.0)


@triton.jit
def _encoded(mean, root, bits):  # type: ignore[no-untyped-def]
    of_root = root.to(tl.int32, bitcast=True)
    exponent = ((of_root >> 23) & 0xFF) - (_LEAST_EXPONENT + 127)
    digits = (of_root & 0x7FFFFF) * _STEPS
    step, way = digits >> 23, (digits & 0x7FFFFF).to(tl.float32) * (1 / 0x800000)
    chance = way - way * (1 - way) * ((step - _BEND_STEPS).to(tl.float32) * _BEND)
    chance = tl.where(exponent < 0, root * _ROOTS, chance)
    code = tl.where(exponent < 0, 0, exponent * _STEPS + step + 1)
    is_next = (bits >> 16).to(tl.float32) + 0.5 < chance * 65536
    share = tl.where(root > 0, tl.div_rn(tl.abs(mean), tl.where(root > 0, root, 1.0)), 0.0)
    share = tl.where(share < _LARGEST_SHARE, share, _LARGEST_SHARE)  # also what is not a number
    at_random = (bits & 0xFFFF).to(tl.int32)
    share_code = ((share.to(tl.int32, bitcast=True) + (at_random << 4) + 8) >> 20) - _SHARE_ZERO
    is_least = at_random.to(tl.float32) + 0.5 < share * (_LARGEST_SHARE * 65536)
    share_code = tl.where(share < 1 / _LARGEST_SHARE, is_least.to(tl.int32), tl.minimum(share_code, 127))
    return tl.where(mean < 0, -share_code, share_code), tl.minimum(code + is_next.to(tl.int32), 255)


@triton.jit(do_not_specialize=["numel", "step"])  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    weights,
    gradients,
    means,
    variances,
    remainders,
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
    IS_CODED: tl.constexpr,  # noqa: N803
    HAS_REMAINDER: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    old = tl.load(weights + at, mask=inside)
    if HAS_REMAINDER:
        high = old.to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(remainders + at, mask=inside).to(tl.int32)
        low = tl.where((((high & 0x7FFF) == 0) & (low < 0)) | ((high & 0x7F80) == 0x7F80), 0, low)
        old = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        old = old.to(tl.float32)
    grad = tl.load(gradients + at, mask=inside).to(tl.float32) * sign + 0.0
    first, second = tl.load(means + at, mask=inside), tl.load(variances + at, mask=inside)
    if IS_CODED:
        share_code, root_before = first.to(tl.int32), _root(second.to(tl.int32))
        share = ((tl.abs(share_code) + _SHARE_ZERO) << 20).to(tl.float32, bitcast=True)
        share = tl.where(share_code == 0, 0.0, tl.where(share_code < 0, -share, share))
        first, second = share * root_before, root_before * root_before
    first = first.to(tl.float32) * beta1 + grad * rest1
    second = second.to(tl.float32) * beta2 + grad * rest2 * grad
    root_after = tl.sqrt_rn(second)
    denominator = tl.div_rn(root_after, root) + eps
    new = old * keep - tl.div_rn(first * step_size, denominator)
    if HAS_REMAINDER:
        of_new = new.to(tl.int32, bitcast=True)
        high = (of_new + 0x8000) >> 16
        is_finite = (tl.abs(new) < float("inf")) & ((high & 0x7F80) != 0x7F80)
        rounded = high.to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(weights + at, tl.where(is_finite, rounded, new.to(tl.bfloat16)), mask=inside)
        tl.store(remainders + at, tl.where(is_finite, of_new - (high << 16), 0).to(tl.int16), mask=inside)
    else:
        tl.store(weights + at, new.to(weights.dtype.element_ty), mask=inside)
    if IS_STOCHASTIC or IS_CODED:
        bits = old.to(tl.uint32, bitcast=True) ^ (grad.to(tl.uint32, bitcast=True) * _GRADIENT_FACTOR)
        bits += step.to(tl.uint32) * _STEP_FACTOR
        bits = (bits ^ (bits >> 16)) * _MIX_1
        bits = (bits ^ (bits >> 13)) * _MIX_2
        bits = bits ^ (bits >> 16)
    if IS_CODED:
        first, second = _encoded(first, root_after, bits)
    elif IS_STOCHASTIC:
        first, second = _rounded(first, bits & 0xFFFF), _rounded(second, bits >> 16)
    tl.store(means + at, first.to(means.dtype.element_ty), mask=inside)
    tl.store(variances + at, second.to(variances.dtype.element_ty), mask=inside)
