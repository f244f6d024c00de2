"""Transformer Engine's quantized weights, as the sharding engine stores and gathers them (`engine.core.codec.WeightCodec`).

    Float8Tensor              one scale a tensor, delayed or current; bytes row by row, a transpose is derived from them on Hopper
    Float8BlockwiseQTensor    a scale for each 128 x 128 block; the same
    MXFP8Tensor               scales along rows and along columns: two sets of bytes, the one for forward, the other for backward

Scales are small and whole on every rank; `quantize_master_weights` updates them along with the bytes. A transpose is as large
as the weight, so it is dropped with the gathered bytes unless `keep_transpose_cache` says otherwise.

Source: `transformer_engine.pytorch.tensor.utils`, Transformer Engine 2.20, for the parts of its tensors and how fragments are cast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.engine.internals import Fragment, WeightCodec
from lightning_mfsdp.te.library import is_a, load
from lightning_mfsdp.te.quantized_weights import quantize_late

__all__ = ["weight_codecs"]

_ROUNDING = 2**-4 + 2**-8  # of E4M3 to nearest, and of the 16-bit numbers before and after


def weight_codecs(*, keep_transpose_cache: bool = False) -> tuple[WeightCodec, ...]:
    """For `MixedPrecisionPolicy(weight_codecs=...)`: all kinds of quantized weights that Transformer Engine has.

    Args:
        keep_transpose_cache: Keep transposes until the weights change: a byte for every parameter of the model, also where weights are
            sharded, and one transposition for each step instead of one for each backward.
    """
    kinds: tuple[type[_Codec], ...] = (_PerTensor, _Blockwise, _Microscaled, _Unknown, _Grouped)
    return tuple(kind(keep_transpose_cache) for kind in kinds)


class _Codec(ABC):
    """The common part of all kinds. The parameter is a tensor of the library; its inner tensors are attributes."""

    storage_dtype = torch.uint8
    planes = 1
    rows_together = 1
    kind = ""

    def __init__(self, keep: bool) -> None:
        self._keep = keep

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self._keep))

    def encode(self, module: nn.Module, device: torch.device) -> None:
        quantize_late(module, device)

    def matches(self, parameter: nn.Parameter) -> bool:
        return is_a(parameter, self.kind)

    def why_not(self, parameter: nn.Parameter) -> str:
        value = _initial_value(parameter)
        if value is None:
            return (
                "its value before quantization was not kept, and the quantized one is too coarse to start from; build the model under "
                "quantized_model_init(preserve_high_precision_init_val=True)"
            )
        if self._is_outdated(value, parameter):
            return (
                "other values were written into it after it was built (load_state_dict, torch.nn.init, ...), and of these only 8 bits "
                "are left. Give its module an init_method, load weights once the model is sharded, or give plain layers theirs and have "
                "them replaced (replace_layers=True)"
            )
        return ""

    @torch.no_grad()
    def _is_outdated(self, value: Tensor, parameter: nn.Parameter) -> bool:
        """Whether some quantized number is farther from the kept one than rounding explains: 3 bits of mantissa, or the smallest number."""
        if not value.numel():
            return False
        now: Tensor = parameter.dequantize().float()
        value = value.to(now.device).view(now.shape).float()
        least, most = self.range_of(value, parameter)
        value = value.clamp(-most, most)
        return bool(((now - value).abs() > value.abs() * _ROUNDING + least).any())

    def range_of(self, value: Tensor, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """The largest error of a number near zero, and the largest number: 0-D. Scales derived from the values cover all of them."""
        most = value.abs().amax()
        return most * 2**-17, most

    def initial_value(self, parameter: nn.Parameter) -> Tensor:
        weight: Any = parameter
        value = _initial_value(parameter)
        assert value is not None, "why_not() asks for it"
        weight.clear_high_precision_init_val()
        if not self._keep:  # otherwise layers would create it in forward already, and keep it through the backward
            weight._quantizer.set_usage(columnwise=False)
        self.drop_transpose(weight)
        return value.view(parameter.shape)

    @abstractmethod
    def bind(self, parameter: nn.Parameter, planes: Sequence[Tensor]) -> None: ...

    def quantize(self, fragments: Sequence[Fragment], group: dist.ProcessGroup) -> None:
        owned = [item.main.numel() > 0 for item in fragments]
        load("pytorch.tensor.utils").quantize_master_weights(
            [item.parameter for item in fragments],
            [self.source(item) if has_rows else None for item, has_rows in zip(fragments, owned, strict=True)],
            [item.start if has_rows else None for item, has_rows in zip(fragments, owned, strict=True)],
            group,
            [self.destination(item) if has_rows else None for item, has_rows in zip(fragments, owned, strict=True)],
            manual_post_all_gather_processing=True,
        )
        for item in fragments:
            self.outdate_transpose(item.parameter)

    def source(self, item: Fragment) -> Tensor:
        """What the library reads of one fragment."""
        return item.main

    def destination(self, item: Fragment) -> Any:
        """The memory, or the object over it, into which the library writes one fragment."""
        return item.outputs[0]

    def after_gather(self, parameters: Sequence[nn.Parameter]) -> None:
        missing = [parameter for parameter in parameters if not self.has_transpose(parameter)] if self._keep else []
        if missing:
            load("pytorch.tensor.utils").post_all_gather_processing(missing)

    def before_release(self, parameters: Sequence[nn.Parameter]) -> None:
        if not self._keep:
            for parameter in parameters:
                self.drop_transpose(parameter)

    @abstractmethod
    def has_transpose(self, weight: Any) -> bool:
        """Whether what backward reads was derived from the current bytes."""

    @abstractmethod
    def outdate_transpose(self, weight: Any) -> None:
        """Mark it outdated: the bytes are about to change. Its memory may be reused."""

    @abstractmethod
    def drop_transpose(self, weight: Any) -> None:
        """Free its memory; the library creates it again when a backward needs it."""


class _PerTensor(_Codec):
    """On Hopper the library's casts also transpose what they write, unless disabled; flat fragments are eighteen times slower then.

    Delayed scaling uses the parameter's quantizer, which is set so. Current scaling creates a new one, so there fragments keep their rows.
    """

    kind = "Float8Tensor"

    def quantize(self, fragments: Sequence[Fragment], group: dist.ProcessGroup) -> None:
        quantizers = [item.parameter._quantizer for item in fragments]  # type: ignore[attr-defined]
        for quantizer in quantizers if self._keep else ():
            quantizer.set_usage(columnwise=False)
        # Delayed scaling: maxima recorded since the last step belong to weights that are gone, such as an average shown in an evaluation.
        for quantizer in quantizers:
            if is_a(quantizer, "Float8Quantizer"):
                quantizer.amax.zero_()
        super().quantize(fragments, group)
        for quantizer in quantizers if self._keep else ():
            quantizer.set_usage(columnwise=True)

    def range_of(self, value: Tensor, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        if not is_a(parameter._quantizer, "Float8Quantizer"):  # type: ignore[attr-defined]
            return super().range_of(value, parameter)
        unit = parameter._scale_inv.reshape(())  # type: ignore[attr-defined]
        return unit * 2**-10, unit * 448

    def source(self, item: Fragment) -> Tensor:
        return item.main.view(-1, item.parameter.shape[-1]) if _is_current(item) else item.main

    def destination(self, item: Fragment) -> Any:
        if not _is_current(item):
            return item.outputs[0]
        rows, parameter = item.outputs[0].view(-1, item.parameter.shape[-1]), item.parameter
        return parameter._quantizer.create_tensor_from_data(rows, parameter.dtype)  # type: ignore[attr-defined]

    def initial_value(self, parameter: nn.Parameter) -> Tensor:
        value = super().initial_value(parameter)
        quantizer = parameter._quantizer  # type: ignore[attr-defined]
        if is_a(quantizer, "Float8Quantizer"):
            quantizer.amax.zero_()  # delayed scaling: it is this rank's own value's, and rank 0's counts
        return value

    def bind(self, parameter: nn.Parameter, planes: Sequence[Tensor]) -> None:
        (parameter._data,) = planes  # type: ignore[attr-defined]

    def has_transpose(self, weight: Any) -> bool:
        return weight._transpose is not None and not weight._transpose_invalid

    def outdate_transpose(self, weight: Any) -> None:
        weight._transpose_invalid = True

    def drop_transpose(self, weight: Any) -> None:
        weight._transpose, weight._transpose_invalid = None, True


def _is_current(item: Fragment) -> bool:
    return not is_a(item.parameter._quantizer, "Float8Quantizer")  # type: ignore[attr-defined]


class _Blockwise(_Codec):
    """The library's cast of a fragment writes whole strips of rows: next to a fragment that ends within one are other weights' bytes.

    Source: `fp8_block_scaling_partial_cast_kernel`, whose warps store 16 rows each as soon as one element of these is the fragment's.
    """

    kind = "Float8BlockwiseQTensor"
    rows_together = 16

    def why_not(self, parameter: nn.Parameter) -> str:
        if not parameter._is_2D_scaled:  # type: ignore[attr-defined]
            return (
                "its scales are for 1 x 128 blocks, from which no transpose can be derived; give weights 128 x 128 blocks "
                "(Float8BlockScaling(w_block_scaling_dim=2))"
            )
        return super().why_not(parameter)

    def bind(self, parameter: nn.Parameter, planes: Sequence[Tensor]) -> None:
        (parameter._rowwise_data,) = planes  # type: ignore[attr-defined]

    def has_transpose(self, weight: Any) -> bool:
        return weight._columnwise_data is not None

    def outdate_transpose(self, weight: Any) -> None:
        self.drop_transpose(weight)  # the library cannot detect an outdated one

    def drop_transpose(self, weight: Any) -> None:
        weight._columnwise_data = weight._columnwise_scale_inv = None


class _Microscaled(_Codec):
    kind = "MXFP8Tensor"
    planes = 2

    def why_not(self, parameter: nn.Parameter) -> str:
        available, reason = load("pytorch").is_mxfp8_available(return_reason=True)
        if not available:
            return f'{reason.rstrip(".")}; use Float8BlockScaling or Float8CurrentScaling (recipe="block" or "current") here'
        return super().why_not(parameter)

    def initial_value(self, parameter: nn.Parameter) -> Tensor:
        value = super().initial_value(parameter)
        parameter._quantizer.set_usage(columnwise=True)  # type: ignore[attr-defined]
        return value

    def bind(self, parameter: nn.Parameter, planes: Sequence[Tensor]) -> None:
        parameter._rowwise_data, parameter._columnwise_data = planes  # type: ignore[attr-defined]

    def destination(self, item: Fragment) -> Any:
        return item.outputs

    def has_transpose(self, weight: Any) -> bool:
        return True

    def outdate_transpose(self, weight: Any) -> None:
        """Nothing is derived: both sets of bytes are gathered."""

    def drop_transpose(self, weight: Any) -> None:
        """Nothing is derived: both sets of bytes are gathered."""


class _Unknown(_Microscaled):
    """Kinds that cannot be sharded, so that they are not treated as ordinary tensors."""

    kind = "QuantizedTensor"
    planes = 1

    def why_not(self, parameter: nn.Parameter) -> str:
        return (
            f"there is no way to gather {type(parameter).__name__}; build this module outside quantized_model_init, so that its weight "
            "is quantized when it is used"
        )


class _Grouped(_Unknown):
    """The weights of all experts of a `GroupedLinear` in one, quantized or not."""

    kind = "GroupedTensor"

    def why_not(self, parameter: nn.Parameter) -> str:
        return (
            "it has several weights inside; build GroupedLinear with single_grouped_weight=False, a parameter for each"
        )


def _initial_value(parameter: nn.Parameter) -> Tensor | None:
    kept = getattr(parameter, "get_high_precision_init_val", None)
    value: Tensor | None = kept() if kept is not None else None
    return value
