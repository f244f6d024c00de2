"""The product of a linear layer in 8 bits, forward and backward.

Shapes: T tokens, I input features, O output features. Every matrix has one scale, made from its largest number at the moment. Inputs and
weights are cast to e4m3, gradients to e5m2. Results are rounded once, to the dtype that a linear layer's would have. Sums for gradients,
which are long (T) or go on through all layers, are in float32; those for outputs are fast ones, as in Transformer Engine and torchao.

    output     [T, O] = input [T, I] x weight [O, I], along I
    to input   [T, I] = gradient [T, O] x weight, along O: of the transposed weight
    to weight  [O, I] = gradient x input, along T: of both transposed
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from lightning_mfsdp.base import compat
from lightning_mfsdp.float8.casts import cast, largest_magnitude

__all__ = ["DTYPES", "MULTIPLE", "float8_linear"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs and weights
MULTIPLE = 16  # of both sizes of a weight: products read 16 bytes at a time

_VALUES, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of matrices in 8 bits.

    Args:
        x: `[..., I]`. Under autocast it has autocast's dtype first.
        weight: `[O, I]`; O and I are multiples of 16.
        bias: `[O]`, or `None`.

    Returns:
        `[..., O]`, in the dtype of `x`.

    Raises:
        ValueError: Sizes or dtypes that 8-bit products cannot have.
    """
    if has_torch_function((x, weight)):  # such as a sharded weight, outside of its unit's forward
        handled: Tensor = handle_torch_function(float8_linear, (x, weight), x, weight, bias)
        return handled
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype in DTYPES:
        x = x.to(torch.get_autocast_dtype(device))
    elif x.dtype is not weight.dtype or x.dtype not in DTYPES:
        raise ValueError(
            f"a product in FP8 of an input of {x.dtype} and a weight of {weight.dtype}: expected one dtype for both, of float32, bfloat16 "
            "and float16, or an input of one of these under autocast"
        )
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE or weight.dtype not in DTYPES:
        raise ValueError(
            f"a product in FP8 with a weight of {weight.dtype} and shape {list(weight.shape)}: expected multiples of {MULTIPLE}, also of "
            "the part that a tensor axis leaves to a rank, of at most 32 bits; keep the layer in high precision (keep_high_precision)"
        )
    if not x.numel():
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    output: Tensor = _Float8Product.apply(flat, weight)
    output = output.view(*x.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias.to(output.dtype)


class _Float8Product(torch.autograd.Function):
    """It keeps input and weight as they are, as a linear layer does, and casts them again in backward.

    Kept in 8 bits the input would take half of that memory beside the norm or activation that keeps it anyway, and the weight, sharded,
    would stay whole from forward to backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        largest_x, largest_weight = largest_magnitude(x), largest_magnitude(weight)
        to_x, to_weight = ctx.needs_input_grad
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None, largest_x, largest_weight)
        x_8, _, x_scale = cast(x, largest_x, _VALUES, True, False)
        weight_8, _, weight_scale = cast(weight, largest_weight, _VALUES, True, False)
        return compat.scaled_mm(x_8, weight_8.t(), x_scale, weight_scale, x.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, largest_x, largest_weight = ctx.saved_tensors
        to_x, to_weight = ctx.needs_input_grad
        as_is, transposed, scale = cast(gradient, largest_magnitude(gradient), _GRADIENTS, to_x, to_weight)
        gradient_x = gradient_weight = None
        if to_x:
            _, weight_8, weight_scale = cast(weight, largest_weight, _VALUES, False, True)
            gradient_x = compat.scaled_mm(as_is, weight_8.t(), scale, weight_scale, gradient.dtype)
        if to_weight:
            _, x_8, x_scale = cast(x, largest_x, _VALUES, False, True)
            gradient_weight = compat.scaled_mm(transposed, x_8.t(), scale, x_scale, ctx.weight_dtype)
        return gradient_x, gradient_weight
