"""Quantized weights on CPU: 8-bit numbers with one scale a tensor, a layer that computes with them, and their codec.

As with Transformer Engine's: the parameter keeps the value it was quantized from until somebody takes it, backward derives a transpose
of the raw data and leaves it at the parameter, and a parameter saved for backward is read when backward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.internals import Fragment

MASK = 0x55  # what the second plane differs by, so that a plane read in place of the other shows


class Int8Tensor(torch.Tensor):
    """Looks like float32. `raw`: uint8 of its shape, one for each plane; `scale`: `[1]`."""

    @staticmethod
    def __new__(cls, raw: Sequence[Tensor], scale: Tensor) -> Int8Tensor:
        made = torch.Tensor._make_wrapper_subclass(cls, raw[0].shape, dtype=torch.float32, device=raw[0].device)
        made._raw, made._scale, made._transposed, made._initial = list(raw), scale, None, None
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            made = cls(args[0]._raw, args[0]._scale)
            made._transposed = args[0]._transposed
            return made
        raise NotImplementedError(f"{func} on a quantized weight")

    def read(self, plane: int) -> Tensor:
        """The values, from one plane."""
        raw = self._raw[plane]
        return (raw ^ MASK if plane else raw).view(torch.int8).float() * self._scale

    def dequantize(self) -> Tensor:
        """The values."""
        return self.read(0)


def raw_of(value: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale > 0, value / scale, 0).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)


def scale_of(amax: Tensor) -> Tensor:
    return amax.reshape(1) / 127


def parameter_of(value: Tensor, planes: int = 1, *, keeps_initial: bool = True) -> nn.Parameter:
    """A quantized parameter that remembers what it was made from."""
    scale = scale_of(value.abs().max())
    raw = raw_of(value, scale)
    made = nn.Parameter(Int8Tensor([raw, raw ^ MASK][:planes], scale))
    made._initial = value.detach().clone() if keeps_initial else None
    return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.read(0).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        if weight._transposed is None:
            weight._transposed = weight.read(len(weight._raw) - 1).t().contiguous()
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return grad @ weight._transposed.t(), to_weight


class Int8Linear(nn.Module):
    """`x @ weight.t()`, without a bias."""

    def __init__(self, inner: int, outer: int, planes: int = 1) -> None:
        super().__init__()
        self.weight = parameter_of(torch.randn(outer, inner) / inner**0.5, planes)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight)


class LateInt8Linear(Int8Linear):
    """Its weight is an ordinary one until it is sharded; or until it is reset, if `by_itself`. It may be on meta."""

    def __init__(self, inner: int, outer: int, *, by_itself: bool = False) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(outer, inner))
        self.by_itself = by_itself
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.by_itself:
            self.weight = parameter_of(self.weight.detach())


class Int8Codec:
    """Stores `Int8Tensor`s.

    Args:
        planes: How many of them.
        keep: Keep transposes until the weights change.
    """

    storage_dtype = torch.uint8

    def __init__(self, planes: int = 1, *, keep: bool = False, rows_together: int = 1) -> None:
        self.planes, self.keep, self.rows_together = planes, keep, rows_together

    def encode(self, module: nn.Module, device: torch.device) -> None:
        for part in module.modules():
            if isinstance(part, LateInt8Linear) and type(part.weight) is nn.Parameter:
                made = parameter_of(part.weight.detach().to(device), self.planes)
                part.weight = made.requires_grad_(part.weight.requires_grad)

    def matches(self, parameter: nn.Parameter) -> bool:
        return isinstance(parameter, Int8Tensor)

    def why_not(self, parameter: nn.Parameter) -> str:
        return "" if parameter._initial is not None else "it does not know what it was quantized from"

    def initial_value(self, parameter: nn.Parameter) -> Tensor:
        value, parameter._initial = parameter._initial, None
        return value

    def bind(self, parameter: nn.Parameter, planes: Sequence[Tensor]) -> None:
        parameter._raw = list(planes)

    def quantize(self, fragments: Sequence[Fragment], group: dist.ProcessGroup) -> None:
        amaxes = torch.stack([item.main.abs().amax() if item.main.numel() else torch.zeros(()) for item in fragments])
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        for item, amax in zip(fragments, amaxes, strict=True):
            strip, end = self.rows_together * item.parameter.shape[-1], item.start + item.main.numel()
            assert item.start % strip == 0, "begins within rows that belong together"
            assert end % strip == 0 or end == item.parameter.numel(), "ends within rows that belong together"
            item.parameter._scale.copy_(scale_of(amax))
            item.parameter._transposed = None
            raw = raw_of(item.main, item.parameter._scale)
            for plane, output in enumerate(item.outputs):
                output.copy_(raw ^ MASK if plane else raw)

    def after_gather(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if self.keep and self.planes == 1 and parameter._transposed is None:
                parameter._transposed = parameter.read(0).t().contiguous()

    def before_release(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if not self.keep:
                parameter._transposed = None
