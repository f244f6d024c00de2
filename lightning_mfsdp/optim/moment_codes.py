"""What the codes of moments in 8 bits stand for. adamw_kernel.py has the same for GPUs.

    second moment   uint8 `u`: the square of a root, which is 0 for `u = 0` and otherwise `2**(e - 32) * (6 + k) / 6`, `6 * e + k = u - 1`
    first moment    int8 `c`: `c * |c| / 512` of that root

So roots are from 2**-32, far below the eps of 1e-8 that is added to them, to 1365, and 9 to 17 % apart. A first moment is a share of
the root, as it is in a step: up to 31.5, by 1/23 at a usual share of 0.23. No number has to do with another one, so that there are no
scales, and any part of a tensor has the codes that it has in the whole. docs/design/moments.md compares that with scales of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LEAST_EXPONENT", "SHARES", "STEPS", "decoded", "encoded", "encoded_at_random"]

STEPS = 6  # roots between two powers of two
LEAST_EXPONENT = -32
SHARES = 512  # a first moment of code 1 is one of so many parts of the root
_MOST, _MOST_SHARES = 255, 127
_BIAS, _DIGITS = 127, 23  # of a float32


def decoded(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments in float32.

    Args:
        mean: Codes, int8.
        variance: Codes of the same shape, uint8.
    """
    root, share = _root(variance.int()), mean.int()
    return (share * share.abs()).float() * (1 / SHARES) * root, root * root


def encoded(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The codes nearest to moments: those that they were decoded from, also if they were rounded to bfloat16 since."""
    half = torch.full_like(mean, 0x8000 << 16 | 0x8000, dtype=torch.int64).to(torch.int32)
    variance = variance.float()
    return encoded_at_random(mean.float(), variance, variance.double().sqrt().float(), half)


def encoded_at_random(mean: Tensor, variance: Tensor, root: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """One of two codes around each moment, by chances such that their mean is the second moment, and the share of the first one.

    Args:
        mean: First moment, float32.
        variance: Second one, at least 0.
        root: Of the second one.
        bits: 32 random ones for each number.
    """
    code = _lower_code(root)
    low, high = _root(code), _root(code + 1)
    low, high = low * low, high * high
    is_next = (((bits >> 16) & 0xFFFF).float() + 0.5) * (high - low) < (variance - low) * 65536
    parts = torch.where(root > 0, mean.abs() / root * SHARES, 0.0)
    parts = torch.where(parts < (_MOST_SHARES + 1) ** 2, parts, (_MOST_SHARES + 1.0) ** 2)  # also what is not a number
    share = parts.double().sqrt().float().int()
    is_next_share = ((bits & 0xFFFF).float() + 0.5) * (2 * share + 1).float() < (
        parts - (share * share).float()
    ) * 65536
    share = (share + is_next_share).clamp(max=_MOST_SHARES)
    return torch.where(mean < 0, -share, share).to(torch.int8), (code + is_next).clamp(max=_MOST).to(torch.uint8)


def _root(code: Tensor) -> Tensor:
    """Of codes in int32."""
    exponent = (code - 1).clamp(min=0) // STEPS
    digits = (code - 1 - exponent * STEPS + STEPS).float() * (1 / STEPS)
    power = ((exponent + (LEAST_EXPONENT + _BIAS)) << _DIGITS).view(torch.float32)
    return torch.where(code > 0, digits * power, 0.0)


def _lower_code(root: Tensor) -> Tensor:
    """The code of a root, or of the next smaller one."""
    bits = root.view(torch.int32)
    exponent = (bits >> _DIGITS) - (_BIAS + LEAST_EXPONENT)
    step = ((bits & ((1 << _DIGITS) - 1)) * STEPS) >> _DIGITS
    return torch.where(exponent >= 0, exponent * STEPS + step + 1, 0).clamp(max=_MOST)
