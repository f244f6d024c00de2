"""Which dtype each copy of a parameter has, and how gradients are reduced. It depends only on torch dtypes and on the codec interface."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.codec import WeightCodec

__all__ = ["MixedPrecisionPolicy"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionPolicy:
    """Dtypes of weights, gradients and communication for one call of `fully_shard`.

    Attributes:
        main_params_dtype: What the optimizer updates. `None`: the native weight, as the module was built, is the main
            weight.
        main_grads_dtype: What gradients are accumulated in over microbatches. `None`: as each main weight, which is how FSDP2 keeps them.
        grad_comm_dtype: What gradients are in on the wire. `None`: as they are accumulated. A lower precision gets a bucket
            of its own that exists only around the reduction.
        compute_dtype: What forward and backward see, and what is gathered. `None`: as the module was built.
        fp32_modules: Modules whose own parameters stay in float32: classes, or `fnmatch` patterns of the module's name inside the module
            given to `fully_shard`. Their floating-point inputs are cast to float32 and their outputs back to the compute dtype.
        cast_forward_inputs: Cast floating-point inputs of each unit to `compute_dtype`; without effect when that is
            `None`.
        keep_compute_shard: Keep this rank's shard of the compute weight in addition to the main weight, refreshed once after each
            step, instead of casting it again for every gather. Costs the shard's memory and saves a cast per gather. Without effect
            where weights stay whole, where both have one dtype, and with an outer axis that shards the main weight: there it is
            always kept.
        grad_reduce: "mean" over all data-parallel ranks, "sum" (per-token losses), or a number: the sum divided by it.
        direct_weight_gradients: Linear layers write the gradients of their weights into the buffer that is reduced, in its dtype: no
            rounding to the compute dtype in between, and no copy. "auto": large layers on CUDA, where it saves time; True: all, on more
            than one rank; False: none. What autograd must handle itself (hooks on the weight, compiled code) is not written directly.
        weight_codecs: Kinds of quantized parameters that are stored and gathered as raw data (codec.py), each queried in turn for whether a
            parameter is of its kind. `compute_dtype` does not apply to those.
        high_precision_reduce: Send `grad_comm_dtype`, add in float32: all-to-all, then a local sum.

    Raises:
        ShardingError: A field that cannot be honored; names the field, what was expected and what was given.

    Source:
        The three dtypes are those of Megatron-FSDP 0.6 (NVIDIA/Megatron-LM pull request 3067).
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = torch.float32
    grad_comm_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    fp32_modules: tuple[type[nn.Module] | str, ...] = ()
    cast_forward_inputs: bool = True
    grad_reduce: str | float = "mean"
    high_precision_reduce: bool = False
    keep_compute_shard: bool = False
    direct_weight_gradients: bool | Literal["auto"] = "auto"
    weight_codecs: tuple[WeightCodec, ...] = ()

    def __post_init__(self) -> None:
        for field in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype", "compute_dtype"):
            value = getattr(self, field)
            if value is not None and value not in _FLOATS:
                names = ", ".join(str(dtype) for dtype in _FLOATS) + " or None"
                raise ShardingError(f"MixedPrecisionPolicy.{field}: expected one of {names}, got {value!r}")
        self._check_float16()
        if not isinstance(self.fp32_modules, tuple):
            raise ShardingError(
                "MixedPrecisionPolicy.fp32_modules: expected a tuple of module classes or name patterns, got "
                f"{self.fp32_modules!r}; "
                "write (value,)"
            )
        if isinstance(self.grad_reduce, str):
            if self.grad_reduce not in ("mean", "sum"):
                raise ShardingError(
                    f'MixedPrecisionPolicy.grad_reduce: expected "mean", "sum" or a divisor, got {self.grad_reduce!r}'
                )
        elif not (math.isfinite(self.grad_reduce) and self.grad_reduce > 0):
            raise ShardingError(
                f"MixedPrecisionPolicy.grad_reduce: expected a positive divisor, got {self.grad_reduce!r}"
            )
        if self.direct_weight_gradients not in (True, False, "auto"):
            raise ShardingError(
                f'MixedPrecisionPolicy.direct_weight_gradients: expected True, False or "auto", got {self.direct_weight_gradients!r}'
            )
        for codec in self.weight_codecs:
            lacking = [name for name in vars(WeightCodec) if name[0] != "_" and not hasattr(codec, name)]
            if lacking or isinstance(codec, type):
                raise ShardingError(
                    f"MixedPrecisionPolicy.weight_codecs: expected objects with the methods of WeightCodec, got {codec!r}, which "
                    + ("is a class" if isinstance(codec, type) else f"lacks {', '.join(lacking)}")
                )
        comm_dtype = self.grad_comm_dtype or self.main_grads_dtype
        if self.high_precision_reduce and comm_dtype not in (torch.bfloat16, torch.float16):
            raise ShardingError(
                "MixedPrecisionPolicy.high_precision_reduce: it sends low precision and sums in float32, so "
                "grad_comm_dtype must be "
                f"torch.bfloat16 or torch.float16, got {comm_dtype}; set grad_comm_dtype or leave "
                "high_precision_reduce off"
            )

    def _check_float16(self) -> None:
        """float16 gradients need scaled losses, so a float16 compute dtype; with `None` the module may have been built in it."""
        for field in ("main_grads_dtype", "grad_comm_dtype"):
            if getattr(self, field) is torch.float16 and self.compute_dtype not in (None, torch.float16):
                raise ShardingError(
                    f"MixedPrecisionPolicy.{field}: torch.float16 with compute_dtype={self.compute_dtype}: there is no loss scaling, so "
                    "small gradients become zero and large ones infinite; expected torch.bfloat16, which has float32's range"
                )

    def sum_dtype(self, main_dtype: torch.dtype) -> torch.dtype:
        """Dtype that gradients of main weights of `main_dtype` are accumulated in; that of complex ones is their own."""
        return main_dtype if main_dtype.is_complex else self.main_grads_dtype or main_dtype

    def wire_dtype(self, main_dtype: torch.dtype) -> torch.dtype:
        """Dtype of those gradients on the wire."""
        return main_dtype if main_dtype.is_complex else self.grad_comm_dtype or self.sum_dtype(main_dtype)

    def smallest_itemsize(self, storage_dtype: torch.dtype, main_dtype: torch.dtype) -> int:
        """Bytes of an element in the narrowest buffer of weights that are stored and kept in these dtypes."""
        return min(dtype.itemsize for dtype in (storage_dtype, main_dtype, self.wire_dtype(main_dtype)))

    def codec_for(self, parameter: nn.Parameter) -> WeightCodec | None:
        """The first codec whose kind a parameter is of; `None` for ordinary ones."""
        return next((codec for codec in self.weight_codecs if codec.matches(parameter)), None)

    def reduction_factor(self, num_ranks: int) -> float:
        """What each rank's gradient is multiplied by before the sum over `num_ranks` ranks."""
        if self.grad_reduce == "mean":
            return 1.0 / num_ranks
        return 1.0 if self.grad_reduce == "sum" else 1.0 / float(self.grad_reduce)
