"""What the codes of moments in 8 bits stand for. adamw_kernel.py has the same for GPUs.

    second moment   uint8 `u`: the square of a root, which is 0 for `u = 0` and otherwise `2**(e - 32) * (6 + k) / 6`, `6 * e + k = u - 1`
    first moment    int8 `c`: `2**(e - 11) * (8 + k) / 8` of that root, `8 * e + k = |c| - 1`, with the sign of `c`; 0 for `c = 0`

So roots are from 2**-32, far below the eps of 1e-8 that is added to them, to 1365, and 9 to 17 % apart. A first moment is a share of
the root, as it is in a step: from 1/2048 to 28, 7 to 13 % apart. No number has to do with another one, so that there are no
scales, and any part of a tensor has the codes that it has in the whole. docs/design/moments.md compares that with scales of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BEND", "BEND_STEPS", "LEAST_EXPONENT", "LEAST_SHARE", "STEPS", "decoded", "encoded", "encoded_at_random"]

STEPS = 6  # roots between two powers of two
LEAST_EXPONENT, LEAST_SHARE = -32, -11  # of the smallest root and share, which are powers of two
# `(BEND_STEPS - k) * BEND` is linear in k and equals `1 / (4 * (STEPS + k))` for the first and the last k; between, it is up to 9 % more.
BEND_STEPS = 2 * STEPS - 1
BEND = 1 / (4 * STEPS * BEND_STEPS)
_MOST, _MOST_SHARE = 255, 127
_BIAS, _DIGITS = 127, 23  # of a float32
_DROPPED = 20  # of its digits; a share keeps three
_SHARE_ZERO = ((_BIAS + LEAST_SHARE) << (_DIGITS - _DROPPED)) - 1  # what code 0 would be of a float32


def decoded(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments in float32.

    Args:
        mean: Codes, int8.
        variance: Codes of the same shape, uint8.
    """
    root, code = _root(variance.int()), mean.int()
    share = torch.where(code == 0, 0.0, ((code.abs() + _SHARE_ZERO) << _DROPPED).view(torch.float32))
    return torch.where(code < 0, -share, share) * root, root * root


def encoded(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The codes nearest to moments: those that they were decoded from, also if they were rounded to bfloat16 since."""
    half = torch.full_like(mean, 0x8000 << 16 | 0x8000, dtype=torch.int64).to(torch.int32)
    return encoded_at_random(mean.float(), variance.double().sqrt().float(), half)


def encoded_at_random(mean: Tensor, root: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """One of two codes around the root of a second moment, and around the share of the first one, by chances that are right on the mean.

    Roots are so that steps are as long as with exact ones: docs/design/moments.md.

    Args:
        mean: First moment, float32.
        root: Of the second moment, float32, at least 0.
        bits: 32 random ones for each number.
    """
    code, chance = _around(root)
    is_next = ((bits >> 16) & 0xFFFF).float() + 0.5 < chance * 65536
    share = torch.where(root > 0, mean.abs() / root, 0.0).clamp(max=2.0**-LEAST_SHARE)
    rounded = ((share.view(torch.int32) + ((bits & 0xFFFF) << 4) + 8) >> _DROPPED) - _SHARE_ZERO
    is_least = (bits & 0xFFFF).float() + 0.5 < share * 2.0 ** (16 - LEAST_SHARE)
    share_code = torch.where(share < 2.0**LEAST_SHARE, is_least, rounded.clamp(max=_MOST_SHARE))
    share_code = torch.where(share == share, share_code, _MOST_SHARE)
    return torch.where(mean < 0, -share_code, share_code).to(torch.int8), (code + is_next).clamp(max=_MOST).to(
        torch.uint8
    )


def _root(code: Tensor) -> Tensor:
    """Of codes in int32."""
    exponent = (code - 1).clamp(min=0) // STEPS
    digits = (code - 1 - exponent * STEPS + STEPS).float() * (1 / STEPS)
    power = ((exponent + (LEAST_EXPONENT + _BIAS)) << _DIGITS).view(torch.float32)
    return torch.where(code > 0, digits * power, 0.0)


def _around(root: Tensor) -> tuple[Tensor, Tensor]:
    """The largest code of at most a root, unless there are none so large, and the chance of the next one."""
    bits = root.view(torch.int32)
    exponent = ((bits >> _DIGITS) & 0xFF) - (_BIAS + LEAST_EXPONENT)  # what is not a number has the largest
    digits = (bits & ((1 << _DIGITS) - 1)) * STEPS
    step = digits >> _DIGITS
    way = (digits & ((1 << _DIGITS) - 1)).float() * 2.0**-_DIGITS  # from this code to the next one
    # Not `way` itself, so that the square root of the root is right on the mean.
    chance = way + way * (1 - way) * ((BEND_STEPS - step).float() * BEND)
    is_least = exponent < 0
    return (
        torch.where(is_least, 0, exponent * STEPS + step + 1),
        torch.where(is_least, root * 2.0**-LEAST_EXPONENT, chance),
    )
