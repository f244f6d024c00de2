"""A small Transformer Engine for the CPU: the names that lightning_mfsdp uses, doing what version 2.20 does as far as that matters here.

Matrix products are rounded to 8 bits and computed in the dtype they came in. Scales, histories, their update when the outermost
autocast is left and after the backward of the first module, extra state and parameters made anew by a reset are the library's; a test
on GPUs compares names and signatures. `calls` and `updates` tell what happened.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.te import codec as te_codec
from lightning_mfsdp.te import library
from tests.te.fake_weights import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, tensor_utils

LARGEST = {"scaling_fwd": 448.0, "scaling_bwd": 57344.0}
ROUNDED = {"scaling_fwd": torch.float8_e4m3fn, "scaling_bwd": torch.float8_e5m2}


# -- recipes -----------------------------------------------------------------------------------------------------------


class Recipe:
    kind = ""
    fp8_dpa = fp8_mha = False

    @classmethod
    def delayed(cls) -> bool:
        return cls.kind == "delayed"

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return cls.kind == "block"

    @classmethod
    def mxfp8(cls) -> bool:
        return cls.kind == "mxfp8"

    @classmethod
    def nvfp4(cls) -> bool:
        return cls.kind == "nvfp4"


@dataclass
class DelayedScaling(Recipe):
    kind = "delayed"
    amax_history_len: int = 1024
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling(Recipe):
    kind = "current"


@dataclass
class Float8BlockScaling(Recipe):
    kind = "block"


@dataclass
class MXFP8BlockScaling(Recipe):
    kind = "mxfp8"


@dataclass
class NVFP4BlockScaling(Recipe):
    kind = "nvfp4"


# -- what is global in the library -------------------------------------------------------------------------------------


@dataclass
class Call:
    """A module's forward: what it computed with; `recipe` is None in high precision."""

    module: nn.Module
    recipe: Any
    group: Any
    grad: bool
    dtype: torch.dtype


@dataclass
class _Global:
    enabled: bool = False
    recipe: Any = None
    group: Any = None
    is_first: bool = False
    depth: int = 0
    quantizes: bool = False
    quantizing_recipe: Any = None
    keeps_initial: bool = False
    kept_scales: list[Tensor] | None = None
    computes_again: bool = False


state = _Global()
calls: list[Call] = []
updates: list[str] = []  # "scaling_fwd" or "scaling_bwd"
checkpoints: list[Any] = []  # recipes of what the library's checkpoint was called for
copies: list[bool] = []  # whether a product saved a rounded copy of its weight
writes: list[bool] = []  # gradients that layers wrote by themselves: whether they overwrote what was there
_delayed: dict[str, list[tuple[DelayedState, Any, Any]]] = {"scaling_fwd": [], "scaling_bwd": []}
answers = dict.fromkeys(("fp8", "fp8_block_scaling"), (True, ""))
answers |= dict.fromkeys(("mxfp8", "nvfp4"), (False, "Device compute capability 10.0 or higher required."))


class autocast:  # noqa: N801 - the library's name
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
    ) -> None:
        assert recipe is not None, "a default would ask the device"
        self._options = enabled, recipe, amax_reduction_group

    def __enter__(self) -> autocast:
        self._before = state.enabled, state.recipe, state.group, state.is_first
        state.enabled, state.recipe, state.group = self._options
        if state.depth == 0:
            state.is_first = True
        state.depth += 1
        return self

    def __exit__(self, *_: Any) -> None:
        state.enabled, state.recipe, state.group, state.is_first = self._before
        state.depth -= 1
        if self._options[0] and state.depth == 0 and torch.is_grad_enabled():
            _update("scaling_fwd")


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    before = state.quantizes, state.quantizing_recipe, state.keeps_initial
    state.quantizes, state.quantizing_recipe, state.keeps_initial = enabled, recipe, preserve_high_precision_init_val
    try:
        yield
    finally:
        state.quantizes, state.quantizing_recipe, state.keeps_initial = before


def _update(key: str) -> None:
    """The maximum over the ranks of a group moves into the histories, and scales follow from these."""
    for delayed, recipe, group in _delayed[key]:
        row = delayed.amax_history[0].clone()
        if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(row, dist.ReduceOp.MAX, group=group)
        delayed.amax_history[0] = row
        most = delayed.amax_history.amax(0)
        delayed.scale.copy_(torch.where(most > 0, LARGEST[key] / most, delayed.scale))
        delayed.amax_history.copy_(delayed.amax_history.roll(-1, 0))
        delayed.amax_history[0] = 0
    updates.append(key)


class DelayedState:
    def __init__(self, recipe: DelayedScaling, count: int) -> None:
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(recipe.amax_history_len, count)


# -- modules -----------------------------------------------------------------------------------------------------------


def _in_library(kind: type) -> type:
    kind.__module__ = "transformer_engine.pytorch.module"
    return kind


@_in_library
class TransformerEngineBaseModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}
        self.fp8_meta_tensors_initialized = False
        self.primary_weights_in_fp8, self._keeps_initial = state.quantizes, state.keeps_initial
        self.init_methods: dict[str, Any] = {}
        if self.primary_weights_in_fp8:
            self.fp8_meta.update(num_gemms=1, recipe=state.quantizing_recipe)
            self.init_fp8_meta_tensors(state.quantizing_recipe)

    @property
    def is_fsdp2(self) -> bool:
        if not hasattr(self, "_is_fsdp2"):
            self._is_fsdp2 = False
        return self._is_fsdp2

    def need_backward_dw(self) -> bool:
        return False

    def reset_parameters(self, defer_init: bool = False) -> None:
        if not defer_init:
            for name, parameter in list(self.named_parameters(recurse=False)):
                with torch.no_grad():
                    self.init_methods.get(name, lambda value: nn.init.normal_(value, std=0.023))(parameter)
                made: Any = nn.Parameter(parameter)
                if self.primary_weights_in_fp8 and parameter.dim() == 2:
                    made = self._quantized(parameter)
                if parameter.dim() == 2:  # also of a layer that no ranks divide
                    made.tensor_model_parallel, made.partition_stride = True, 1
                    made.partition_dim = int(self.parallel_mode == "row")
                self._parameters[name] = made

    def _quantized(self, parameter: nn.Parameter) -> Any:
        recipe = self.fp8_meta["recipe"]
        kind = Float8Quantizer if recipe.delayed() else Float8CurrentScalingQuantizer
        made = kind(self.fp8_meta["scaling_fwd"], 1)(parameter)
        if self._keeps_initial:
            kept = [parameter.detach().cpu()]
            made.get_high_precision_init_val = lambda: kept[0] if kept else None
            made.clear_high_precision_init_val = kept.clear
        return made

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        for key, count in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            if not (self.fp8_meta_tensors_initialized and isinstance(self.fp8_meta.get(key), DelayedState)):
                made = (
                    DelayedState(recipe, count * self.fp8_meta["num_gemms"]) if recipe.delayed() else SimpleNamespace()
                )
                self.fp8_meta[key] = made
        self.fp8_meta_tensors_initialized = True

    def prepare_forward(self, x: Tensor) -> Any:
        recipe = state.recipe if state.enabled else None
        calls.append(Call(self, recipe, state.group, torch.is_grad_enabled(), x.dtype))
        if recipe is None:
            return None
        if self.fp8_meta.get("recipe") != recipe or not self.fp8_meta_tensors_initialized:
            self.fp8_meta.update(num_gemms=1, recipe=recipe)
            self.init_fp8_meta_tensors(recipe)
        if recipe.delayed() and "buffer_index_and_autocast_key" not in self.fp8_meta:
            self.fp8_meta["buffer_index_and_autocast_key"] = True
            for key in ("scaling_fwd", "scaling_bwd"):
                _delayed[key].append((self.fp8_meta[key], recipe, state.group))
        return recipe

    def get_extra_state(self) -> Tensor:
        if not isinstance(self.fp8_meta.get("scaling_fwd"), DelayedState):
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps("code that runs")), dtype=torch.uint8)

    def set_extra_state(self, extra: Tensor) -> None:
        if extra.numel():
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")


@_in_library
class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        init_method: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
    ) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        if init_method is not None:
            self.init_methods["weight"] = init_method
        self.tp_size, self.parallel_mode = tp_size, parallel_mode
        in_features //= tp_size if parallel_mode == "row" else 1
        out_features //= tp_size if parallel_mode == "column" else 1
        self.in_features, self.out_features, self.name = in_features, out_features, name
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))
        else:
            self.bias = torch.empty(0)
        self.use_bias = self.apply_bias = bias
        self.return_bias = False
        self.reset_parameters(defer_init=device == "meta")

    def forward(self, inp: Tensor) -> Any:
        out = self._product(inp)
        return (out, self.bias.to(out.dtype)) if self.return_bias else out

    def _product(self, inp: Tensor) -> Tensor:
        recipe = self.prepare_forward(inp)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else inp.dtype
        x = inp.to(dtype)
        bias = self.bias.to(dtype) if self.apply_bias else None
        with torch.autocast("cpu", enabled=False):
            if recipe is None:
                return F.linear(x, _values(self.weight).to(dtype), bias)
            for tensor in (x, self.weight):
                if tensor.shape[:-1].numel() % 8 or tensor.shape[-1] % 16:
                    raise ValueError(
                        "FP8 execution requires the product of all dimensions except the last to be divisible by 8"
                    )
            is_first = state.is_first and torch.is_grad_enabled()
            if is_first:
                state.is_first = False
            product = _Product.apply(x, self.weight, self, recipe, is_first)
            return product if bias is None else product + bias


@_in_library
class LayerNormLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, normalization: str = "LayerNorm", **options: Any
    ) -> None:
        assert normalization == "RMSNorm"
        super().__init__(in_features, out_features, **options)
        self.eps = eps
        self.init_methods["layer_norm_weight"] = nn.init.ones_
        self.layer_norm_weight = nn.Parameter(
            torch.ones(in_features, dtype=self.weight.dtype, device=self.weight.device)
        )

    def forward(self, inp: Tensor) -> Any:
        weight = self.layer_norm_weight
        return super().forward(F.rms_norm(inp.float(), weight.shape, weight.float(), self.eps).to(inp.dtype))


def _values(weight: Any) -> Tensor:
    return weight.dequantize() if isinstance(weight, Float8Tensor) else weight


class _Product(torch.autograd.Function):
    """Saves the rounded weight, unless it is the parameter itself or the layer rounds again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, layer: Linear, recipe: Any, is_first: bool) -> Tensor:
        ctx.layer, ctx.recipe, ctx.is_first = layer, recipe, is_first
        x = _rounded(x, "scaling_fwd", 0, layer.fp8_meta, recipe)
        rounded = _Product.rounded_weight(ctx, weight, x.dtype)
        ctx.keeps = not (isinstance(weight, Float8Tensor) or layer.is_fsdp2)
        ctx.forgets_memory = isinstance(layer, LayerNormLinear) and layer.is_fsdp2  # as version 2.20 does
        ctx.save_for_backward(x, rounded if ctx.keeps else weight)
        copies.append(ctx.keeps)
        ctx.fused = layer.fuse_wgrad_accumulation and weight.requires_grad
        if ctx.fused:
            assert hasattr(weight, "__fsdp_param__")
            ctx.origin = weakref.ref(weight)
            ctx.overwrites, ctx.memory = weight.overwrite_main_grad, weight.get_main_grad
        return F.linear(x, rounded)

    @staticmethod
    def rounded_weight(ctx: Any, weight: Any, dtype: torch.dtype) -> Tensor:
        if isinstance(weight, Float8Tensor):
            return weight.dequantize().to(dtype)
        return _rounded(weight.detach().to(dtype), "scaling_fwd", 1, ctx.layer.fp8_meta, ctx.recipe)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        if not ctx.keeps:
            weight = _Product.rounded_weight(ctx, weight, x.dtype)
        grad = _rounded(grad, "scaling_bwd", 0, ctx.layer.fp8_meta, ctx.recipe)
        to_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.is_first:
            _update("scaling_bwd")
        if ctx.fused:
            assert not hasattr(ctx.origin(), "grad_added_to_main_grad")
            memory = None if ctx.forgets_memory else ctx.memory()
            ctx.origin().main_grad = memory
            memory.copy_(to_weight) if ctx.overwrites else memory.add_(to_weight)
            to_weight = None
            writes.append(ctx.overwrites)
        return grad @ weight, to_weight, None, None, None


def _rounded(tensor: Tensor, key: str, index: int, meta: dict[str, Any], recipe: Any) -> Tensor:
    amax = tensor.detach().abs().amax().float()
    scale = LARGEST[key] / amax.clamp(min=1e-12)
    if recipe.delayed():
        scale = _delayed_scale(amax, key, index, meta[key])
    scaled = (tensor.float() * scale).clamp(-LARGEST[key], LARGEST[key])
    return (scaled.to(ROUNDED[key]).float() * (1 / scale)).to(tensor.dtype)


def _delayed_scale(amax: Tensor, key: str, index: int, delayed: DelayedState) -> Tensor:
    """Inside the library's checkpoint the scale is kept, and used again with nothing noted."""
    if key == "scaling_fwd" and state.kept_scales is not None and state.computes_again:
        return state.kept_scales.pop(0)
    delayed.amax_history[0, index] = torch.maximum(delayed.amax_history[0, index], amax)
    scale = delayed.scale[index].clone()
    if key == "scaling_fwd" and state.kept_scales is not None:
        state.kept_scales.append(scale)
    return scale


def checkpoint(function: Any, *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Enters the recipe again, and not the group; numbers saved tensors; keeps arguments as they are."""
    assert not use_reentrant
    assert state.enabled, "versions up to 2.18 fail otherwise"
    recipe, scales, random, recomputed = state.recipe, [], torch.get_rng_state(), []
    cast = {"enabled": torch.is_autocast_enabled("cpu"), "dtype": torch.get_autocast_dtype("cpu")}
    count = iter(range(10**6))
    checkpoints.append(recipe)

    @contextmanager
    def keeping(again: bool) -> Iterator[None]:
        state.kept_scales, state.computes_again = scales, again
        try:
            yield
        finally:
            state.kept_scales, state.computes_again = (
                None,
                False,
            )  # also where one ran inside another, as in the library

    def pack(tensor: Tensor) -> Tensor:
        recomputed.append(tensor.detach())
        return tensor.detach()

    def unpack(index: int) -> Tensor:
        if not recomputed:
            before = torch.get_rng_state()
            torch.set_rng_state(random)
            again = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            inside = autocast(enabled=True, recipe=recipe), torch.autocast("cpu", **cast)
            with again, keeping(True), torch.enable_grad(), inside[0], inside[1]:
                function(*args, **kwargs)
            torch.set_rng_state(before)
        tensor, recomputed[index] = recomputed[index], None
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: next(count), unpack), keeping(False):
        return function(*args, **kwargs)


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return state.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return state.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        return state.group


@_in_library
class BasicOperation(nn.Module):
    def num_quantizers(self, mode: str) -> int:
        return 0

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, extra: Tensor) -> None:
        assert not extra.numel()


@_in_library
class BasicLinear(BasicOperation):
    _accumulate_into_main_grad = False

    def num_quantizers(self, mode: str) -> int:
        return {"forward": 2, "backward": 1}[mode]


class _Norm(BasicOperation):
    def __init__(
        self,
        normalized_shape: Any,
        *,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))

    def _dtype(self) -> torch.dtype:
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else self.weight.dtype


@_in_library
class LayerNorm(_Norm):
    def __init__(self, normalized_shape: Any, **options: Any) -> None:
        super().__init__(normalized_shape, **options)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        dtype = self._dtype()
        x, weight, bias = (tensor.to(dtype).float() for tensor in (x, self.weight, self.bias))
        return F.layer_norm(x, weight.shape, weight, bias, self.eps).to(dtype)


@_in_library
class RMSNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        dtype = self._dtype()
        x, weight = (tensor.to(dtype).float() for tensor in (x, self.weight))
        return F.rms_norm(x, weight.shape, weight, self.eps).to(dtype)


# -- in place of the library -------------------------------------------------------------------------------------------


def _question(name: str) -> Any:
    return lambda return_reason=False: answers[name] if return_reason else answers[name][0]


pytorch = SimpleNamespace(
    autocast=autocast,
    checkpoint=checkpoint,
    quantized_model_init=quantized_model_init,
    Linear=Linear,
    LayerNormLinear=LayerNormLinear,
    LayerNorm=LayerNorm,
    RMSNorm=RMSNorm,
    **{f"is_{name}_available": _question(name) for name in answers},
)
quantization = SimpleNamespace(FP8GlobalStateManager=FP8GlobalStateManager)
recipes = SimpleNamespace(
    Recipe=Recipe,
    DelayedScaling=DelayedScaling,
    Float8CurrentScaling=Float8CurrentScaling,
    Float8BlockScaling=Float8BlockScaling,
    MXFP8BlockScaling=MXFP8BlockScaling,
    NVFP4BlockScaling=NVFP4BlockScaling,
)


@contextmanager
def installed() -> Iterator[None]:
    """Inside, this is the library, with nothing left of an earlier use."""
    real = library.load
    found = {
        "pytorch": pytorch,
        "pytorch.quantization": quantization,
        "common.recipe": recipes,
        "pytorch.tensor.utils": tensor_utils,
    }
    library.load = te_codec.load = found.__getitem__  # type: ignore[assignment]
    forget()
    try:
        yield
    finally:
        library.load = te_codec.load = real
        forget()


def forget() -> None:
    """As in a new process."""
    vars(state).update(vars(_Global()))
    for part in (calls, updates, checkpoints, copies, writes, *_delayed.values()):
        part.clear()
