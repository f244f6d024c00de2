"""One step of AdamW on one tensor, for every device and dtype; adamw_kernel.py computes the same numbers on GPUs in one pass.

Both round after each operation, in the same order, so that they agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_mfsdp.optim.moment_codes import decoded, encoded_at_random

__all__ = ["GRADIENT_FACTOR", "MIX_1", "MIX_2", "STEP_FACTOR", "Rule", "divided", "joined", "step_"]

# An integer's bits are mixed as in MurmurHash3 (Appleby, 2011), where each bit of the result depends on each bit of what goes in.
GRADIENT_FACTOR, STEP_FACTOR = 0x9E3779B1, 0x7FEB352D
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35
_CHUNK = 1 << 16  # numbers whose temporary tensors stay in a core's cache


@dataclass(frozen=True)
class Rule:
    """Numbers that are the same for all elements of a tensor.

    Attributes:
        keep: What weights are multiplied by first, for weight decay.
        beta1, beta2: Shares of the old moments that are kept; `rest1` and `rest2` those of the new.
        step_size: Learning rate over the first moment's correction.
        root: Of the second moment's correction.
        eps: Added to the root of the second moment.
        sign: -1 to ascend.
        step: From 1.
    """

    keep: float
    beta1: float
    beta2: float
    rest1: float
    rest2: float
    step_size: float
    root: float
    eps: float
    sign: float
    step: int

    @classmethod
    def of(cls, options: Mapping[str, Any], lr: float, step: int) -> Rule:
        """The numbers of a step, from an entry of `param_groups`."""
        beta1, beta2 = map(float, options["betas"])
        return cls(
            keep=1 - lr * float(options["weight_decay"]),
            beta1=beta1,
            beta2=beta2,
            rest1=1 - beta1,
            rest2=1 - beta2,
            step_size=lr / (1 - beta1**step),
            root=math.sqrt(1 - beta2**step),
            eps=float(options["eps"]),
            sign=-1.0 if options["maximize"] else 1.0,
            step=step,
        )


def step_(
    weight: Tensor, gradient: Tensor, mean: Tensor, variance: Tensor, rule: Rule, remainder: Tensor | None = None
) -> None:
    """Update a weight and its moments in place.

    Args:
        weight: Of any shape and floating-point dtype; what is computed is in float32, in float64 for float64.
        gradient: Of the same shape.
        mean: The first moment. In bfloat16 it is rounded stochastically, in int8 it is a code.
        variance: The second one, likewise; its codes are in uint8. See moment_codes.py.
        rule: The step's numbers.
        remainder: What a weight in bfloat16 lacks of one in float32, int16; it is updated as well.
    """
    if has_torch_function((weight,)):  # an estimate of memory has no numbers
        handle_torch_function(step_, (weight,), weight, gradient, mean, variance, rule, remainder)
        return
    tensors = [weight, gradient, mean, variance, *([] if remainder is None else [remainder])]
    if not all(tensor.is_contiguous() for tensor in tensors):
        _step(rule, *tensors)
        return
    for parts in zip(*(tensor.view(-1).split(_CHUNK) for tensor in tensors), strict=True):
        _step(rule, *parts)


def _step(
    rule: Rule, weight: Tensor, gradient: Tensor, mean: Tensor, variance: Tensor, remainder: Tensor | None = None
) -> None:
    wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
    old = weight.to(wide) if remainder is None else joined(weight, remainder)
    grad = gradient.to(wide) * rule.sign + 0.0  # -0.0 has the bits of 0.0 then
    is_coded = mean.dtype is torch.int8
    first, second = decoded(mean, variance) if is_coded else (mean, variance)
    first = first.to(wide) * rule.beta1 + grad * rule.rest1
    second = second.to(wide) * rule.beta2 + grad * rule.rest2 * grad
    root = second.double().sqrt().to(wide)  # MKL's of float32 is off by a bit now and then
    denominator = root / rule.root + rule.eps
    new = old * rule.keep - first * rule.step_size / denominator
    if is_coded:
        first, second = encoded_at_random(first.float(), root.float(), _random_bits(old, grad, rule.step))
    elif mean.dtype is torch.bfloat16:
        bits = _random_bits(old, grad, rule.step)
        first, second = _rounded(first, bits & 0xFFFF), _rounded(second, (bits >> 16) & 0xFFFF)
    if remainder is None:
        weight.copy_(new)
    else:
        for tensor, part in zip((weight, remainder), divided(new), strict=True):
            tensor.copy_(part)
    mean.copy_(first)
    variance.copy_(second)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 that a weight in bfloat16 was rounded from.

    One that a program has written since has the remainder of the old one, which is less than half of its last digit.
    """
    high, low = weight.view(torch.int16).int(), remainder.int()
    # Neither zero nor infinity was rounded from these, and bits of other numbers or of NaN would come out.
    is_written = ((high & 0x7FFF == 0) & (low < 0)) | (high & 0x7F80 == 0x7F80)
    return ((high << 16) + torch.where(is_written, 0, low)).view(torch.float32)


def divided(value: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 as the nearest bfloat16, of two the one that is further from zero, and the difference of their bits in int16."""
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    is_finite = value.isfinite() & (high & 0x7F80 != 0x7F80)  # the largest become infinite
    weight = torch.where(is_finite, high.to(torch.int16).view(torch.bfloat16), value.bfloat16())
    return weight, torch.where(is_finite, bits - (high << 16), 0).to(torch.int16)


def _random_bits(weight: Tensor, gradient: Tensor, step: int) -> Tensor:
    """32 bits for each number, the same wherever it is computed."""
    bits = weight.float().view(torch.int32) ^ (gradient.float().view(torch.int32) * _signed(GRADIENT_FACTOR))
    bits = bits + _signed(step * STEP_FACTOR)
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _signed(MIX_1)
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * _signed(MIX_2)
    return bits ^ ((bits >> 16) & 0xFFFF)


def _rounded(value: Tensor, bits: Tensor) -> Tensor:
    """A value that bfloat16 has: the next smaller magnitude, or the next larger one as often as the rest is large."""
    narrow = value.float()
    up = ((narrow.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(narrow.isfinite(), up, narrow)


def _signed(number: int) -> int:
    """The lower 32 bits as a signed integer."""
    return (number + 0x80000000) % 0x100000000 - 0x80000000
