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

__all__ = ["GRADIENT_FACTOR", "MIX_1", "MIX_2", "STEP_FACTOR", "Rule", "step_"]

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


def step_(weight: Tensor, gradient: Tensor, mean: Tensor, variance: Tensor, rule: Rule) -> None:
    """Update a weight and its moments in place.

    Args:
        weight: Of any shape and floating-point dtype; what is computed is in float32, in float64 for float64.
        gradient: Of the same shape.
        mean: The first moment. In bfloat16 it is rounded stochastically.
        variance: The second one, likewise.
        rule: The step's numbers.
    """
    if has_torch_function((weight,)):  # an estimate of memory has no numbers
        handle_torch_function(step_, (weight,), weight, gradient, mean, variance, rule)
        return
    if not all(tensor.is_contiguous() for tensor in (weight, gradient, mean, variance)):
        _step(weight, gradient, mean, variance, rule)
        return
    parts = (tensor.view(-1).split(_CHUNK) for tensor in (weight, gradient, mean, variance))
    for some_weights, their_gradients, means, variances in zip(*parts, strict=True):
        _step(some_weights, their_gradients, means, variances, rule)


def _step(weight: Tensor, gradient: Tensor, mean: Tensor, variance: Tensor, rule: Rule) -> None:
    wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
    old, grad = weight.to(wide), gradient.to(wide) * rule.sign + 0.0  # -0.0 has the bits of 0.0 then
    first = mean.to(wide) * rule.beta1 + grad * rule.rest1
    second = variance.to(wide) * rule.beta2 + grad * rule.rest2 * grad
    root = second.double().sqrt().to(wide)  # MKL's of float32 is off by a bit now and then
    denominator = root / rule.root + rule.eps
    new = old * rule.keep - first * rule.step_size / denominator
    if mean.dtype is torch.bfloat16:
        bits = _random_bits(old, grad, rule.step)
        first, second = _rounded(first, bits & 0xFFFF), _rounded(second, (bits >> 16) & 0xFFFF)
    weight.copy_(new)
    mean.copy_(first)
    variance.copy_(second)


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
