"""FP8 weights of the small engine: tensors of one scale that know their value from before, and the functions for their main weights.

As the library's: the nominal dtype is that of the value which was quantized, main weights are rounded to it first, and under delayed
scaling the scale comes from the module's history, into which quantizing writes a maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LARGEST = 448.0


class QuantizedTensor(torch.Tensor):
    pass


class Float8Tensor(QuantizedTensor):
    """`_data`: uint8 of its shape. The scale belongs to the quantizer, its reciprocal to the tensor."""

    @staticmethod
    def __new__(cls, data: Tensor, scale_inv: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        made._data, made._scale_inv, made._quantizer = data, scale_inv, quantizer
        made._transpose, made._transpose_invalid = None, True
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        as_it_is = func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape)
        if func is torch.ops.aten.detach.default or as_it_is:
            return cls(args[0]._data, args[0]._scale_inv, args[0]._quantizer, args[0].dtype)
        if func is torch.ops.aten.copy_.default:  # quantized as it comes; what was kept from before stays as it is
            raw = args[0]._quantizer(args[1])
            args[0]._data.copy_(raw._data)
            args[0]._scale_inv.copy_(raw._scale_inv)
            return args[0]
        raise NotImplementedError(f"{func} on a quantized weight")

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(self.dtype)  # type: ignore[attr-defined]


class Float8CurrentScalingQuantizer:
    """One scale from the present values; `state` is nothing it reads."""

    def __init__(self, state: Any, index: int) -> None:
        self.usage: dict[str, bool] = {}

    def set_usage(self, **usage: bool) -> None:
        self.usage |= usage

    def note(self, value: Tensor) -> Tensor:
        """The largest number, where the scale is found from."""
        return value.abs().amax().float() if value.numel() else torch.zeros(())

    def scale_for(self, amax: Tensor) -> Tensor:
        return LARGEST / amax.clamp(min=1e-12)

    def create_tensor_from_data(self, data: Tensor, dtype: torch.dtype) -> Any:
        return Float8Tensor(data, torch.empty(1), self, dtype)

    def __call__(self, value: Tensor) -> Any:
        scale = self.scale_for(self.note(value.detach()))
        made: Any = nn.Parameter(Float8Tensor(_raw(value.detach(), scale), (1 / scale).reshape(1), self, value.dtype))
        return made


class Float8Quantizer(Float8CurrentScalingQuantizer):
    """Delayed scaling."""

    def __init__(self, state: Any, index: int) -> None:
        super().__init__(state, index)
        self._state, self._index = state, index

    @property
    def amax(self) -> Tensor:
        part: Tensor = self._state.amax_history[0, self._index : self._index + 1]
        return part

    def note(self, value: Tensor) -> Tensor:
        with torch.inference_mode():
            self.amax.copy_(torch.maximum(self.amax, super().note(value)))
        return self.amax.clone()

    def scale_for(self, amax: Tensor) -> Tensor:
        scale: Tensor = self._state.scale[self._index].clone()
        return scale


for _kind in (QuantizedTensor, Float8Tensor, Float8CurrentScalingQuantizer, Float8Quantizer):
    _kind.__module__ = "transformer_engine.pytorch.tensor"


def quantize_master_weights(
    weights: Sequence[Any],
    masters: Sequence[Tensor | None],
    starts: Sequence[int | None],
    group: Any,
    shards: Sequence[Tensor | None],
    *,
    manual_post_all_gather_processing: bool,
) -> None:
    assert manual_post_all_gather_processing
    rounded = [None if main is None else main.to(weight.dtype) for weight, main in zip(weights, masters, strict=True)]
    amaxes = torch.stack(
        [
            weight._quantizer.note(torch.empty(0) if main is None else main).reshape(())
            for weight, main in zip(weights, rounded, strict=True)
        ]
    )
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
    for weight, main, shard, amax in zip(weights, rounded, shards, amaxes, strict=True):
        quantizer = weight._quantizer
        if isinstance(quantizer, Float8Quantizer):
            quantizer.amax.copy_(amax)
        scale = quantizer.scale_for(amax)
        weight._scale_inv.copy_(1 / scale)
        if main is not None and shard is not None:
            is_current = not isinstance(quantizer, Float8Quantizer)
            assert main.dim() == (2 if is_current else 1), "what the library would transpose slowly"
            (shard._data if is_current else shard).copy_(_raw(main, scale))  # type: ignore[attr-defined]


def post_all_gather_processing(weights: Sequence[Any]) -> None:
    for weight in weights:
        weight._transpose, weight._transpose_invalid = weight._data.t().contiguous(), False


def _raw(value: Tensor, scale: Tensor) -> Tensor:
    return (value.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


tensor_utils = SimpleNamespace(
    quantize_master_weights=quantize_master_weights, post_all_gather_processing=post_all_gather_processing
)
