"""Packed weights on CPU without a library: 4-bit numbers, two in a byte, in the two forms that libraries have, and their layers.

Both keep what backward reads as an attribute of its node, as torchao's `NF4Tensor` and bitsandbytes do, where autograd compares no version.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def packed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes `[out, in / 2]`, scales `[out, 1]` relative to the last result, 0-D float64."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    mean = scale.double().mean()
    numbers = (weight / scale).round().add(8).to(torch.uint8)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, scale - mean.float(), mean


def values(raw: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    numbers = torch.stack([raw & 15, raw >> 4], 2).flatten(1)
    return (numbers.float() - 8) * (scale + mean.float())


class Nibbles(torch.Tensor):
    """Tensors inside: bytes, scales, and their mean."""

    @staticmethod
    def __new__(cls, raw: Tensor, scale: Tensor, mean: Tensor) -> Nibbles:
        shape = (raw.shape[0], raw.shape[1] * 2)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=raw.device)
        made.raw, made.scale, made.mean = raw, scale, mean
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw", "scale", "mean"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Nibbles:
        return cls(inner["raw"], inner["scale"], inner["mean"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _Product.apply(args[0], args[1])
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].raw, args[0].scale, args[0].mean)
        raise NotImplementedError(f"{func} on a packed weight")

    def dequantize(self) -> Tensor:
        return values(self.raw, self.scale, self.mean)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return x @ weight.dequantize().t().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.weight.dequantize().to(grad.dtype), None


class State:
    """Scales of a weight whose bytes are elsewhere."""

    def __init__(self, shape: torch.Size, absmax: Tensor, offset: Tensor) -> None:
        self.shape, self.absmax, self.offset, self.state2 = shape, absmax, offset, None
        self.blocksize, self.quant_type = 64, "toy"


class Beside(nn.Parameter):
    """A parameter of bytes `[n, 1]`, in any dtype, that packs its values when it is moved, with its scales as an attribute."""

    def __new__(cls, data: Tensor, quant_storage: torch.dtype) -> Beside:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state, made.bnb_quantized, made.quant_storage = None, False, quant_storage
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if not self.bnb_quantized:
            raw, scale, mean = packed(self.data)
            self.quant_state, self.bnb_quantized = State(self.data.shape, scale, mean), True
            self.data = raw.view(-1).view(self.quant_storage).view(-1, 1)
        return self

    def dequantize(self) -> Tensor:
        return self.over(self.data)

    def over(self, data: Tensor) -> Tensor:
        rows, columns = self.quant_state.shape
        raw = data.contiguous().view(-1).view(torch.uint8).view(rows, columns // 2)
        return values(raw, self.quant_state.absmax, self.quant_state.offset)


class _ProductBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, data: Tensor) -> Tensor:
        ctx.over, ctx.data = weight.over, data.view(-1, 1)
        return x @ weight.over(ctx.data).t().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.over(ctx.data).to(grad.dtype), None, None


class BesideLinear(nn.Linear):
    """A layer with such a weight."""

    def __init__(self, weight: Tensor, quant_storage: torch.dtype) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False)
        self.weight, self.quant_storage = Beside(weight, quant_storage), quant_storage

    def forward(self, x: Tensor) -> Tensor:
        return _ProductBeside.apply(x, self.weight, self.weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self.weight.quant_state
        text = f'{{"nested_offset": {state.offset.item()!r}, "shape": {list(state.shape)}}}'
        destination[f"{prefix}weight.absmax"] = state.absmax
        destination[f"{prefix}weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(text.encode()), dtype=torch.uint8
        )


def layer(kind: str, size: int = 16) -> nn.Linear:
    """A layer with a frozen weight: "inside", "beside", or "floats": beside bytes that are stored in float32."""
    plain = nn.Linear(size, size, bias=False)
    if kind == "inside":
        plain.weight = nn.Parameter(Nibbles(*packed(plain.weight.detach())), requires_grad=False)
        return plain
    return BesideLinear(plain.weight.detach(), torch.float32 if kind == "floats" else torch.uint8)


class Adapted(nn.Module):
    """`base(x) + b(a(x))`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base, self.a, self.b = layer(kind), nn.Linear(16, 3), nn.Linear(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))
