"""MFSDPPrecision: what the Trainer calls around forward, backward and step, and how it clips. Dtypes are those of `options/dtypes.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_mfsdp._lightning_api import (
    FabricPrecision,
    GradClipAlgorithmType,
    LightningModule,
    MisconfigurationException,
    Precision,
)
from lightning_mfsdp.engine import MixedPrecisionPolicy, clip_grad_value_
from lightning_mfsdp.engine.internals import clip_finite_, gradient_places
from lightning_mfsdp.options.dtypes import (
    ShardedPrecision,
    translate,
)
from lightning_mfsdp.options.loss_scaling import DistributedGradScaler, unscales_by_itself

__all__ = ["DistributedGradScaler", "MFSDPPrecision", "translate_precision"]


class MFSDPPrecision(ShardedPrecision, Precision):
    """Precision of a run under `MFSDPStrategy`. Under other strategies the string works as well, but for "transformer-engine".

    Args:
        precision: One of "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true", "transformer-engine", "fp8". See
            `default_policy` for the dtypes.
        policy: Replaces the dtypes the string stands for; autocast, the model's own dtype and the inputs' still follow the string. Besides
            "32-true" any policy is accepted: without autocast, the policy alone decides.
        scaler: Loss scaler for float16 compute. `None` makes a `DistributedGradScaler` where one is needed. A plain
            `torch.amp.GradScaler` provides the settings for one; any other class must itself make ranks agree on skipping a step.
        recipe: For "transformer-engine", as the following: how tensors are scaled before they are cast to 8 bits. "current", "delayed",
            "block", "mxfp8", "nvfp4", or a recipe of `transformer_engine.common.recipe`.
        replace_layers: Replace `nn.Linear`, `nn.LayerNorm` and `nn.RMSNorm` by Transformer Engine's layers. "auto": only in a model that
            contains none of them.
        keep_high_precision: Also for "fp8": layers that compute in bfloat16: `fnmatch` patterns of module names, with everything inside,
            or "first" and "last" for the first and last block of the largest `ModuleList` or `Sequential`.
        overrides: Other recipes for some layers, by pattern. The first matching pattern counts.
        fp8_weights: Store and all-gather weights in 8 bits, beside float32 main weights.
        keep_transpose_cache: Keep the transpose of FP8 weights until they change: one byte per parameter on every rank.
        fuse_weight_gradients: Replaced linear layers accumulate weight gradients directly in the bucket, in its dtype.
        keep_quantized: Keep 8-bit copies of 16-bit weights from forward to backward: two bytes per parameter of the whole model.

    Raises:
        ValueError: An unknown precision, a policy that contradicts it, a scaler where nothing computes in float16, or options of FP8
            where nothing computes in it.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module for another strategy than `MFSDPStrategy`, which does not call this.

        Raises:
            ValueError: What the options say would have no effect there.
        """
        if self.fp8 is not None or self.policy_is_explicit:
            without_effect, instead = (
                ('"transformer-engine"', "Lightning's TransformerEnginePrecision")
                if self.fp8 is not None
                else ("policy=MixedPrecisionPolicy(...)", "a precision by its name alone")
            )
            raise ValueError(
                f"{type(self).__name__}({self.precision!r}): {without_effect} is about modules that are sharded by this package, and the "
                f'Trainer has another strategy. Use strategy="mfsdp", or {instead}'
            )
        return super().convert_module(self.cast_module(module))

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Take the device from the model, and create the scaler for it."""
        if isinstance(model, LightningModule):
            self.connect_device(model.device.type)
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, then the usual hooks."""
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """The module's backward, in which activations may be recomputed."""
        with self.backward_context():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run closure, clipping and step; with a scaler the step is skipped on all ranks when any gradient overflowed."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "LBFGS calls its closure several times within a step, which loss scaling cannot follow. "
                'Use precision="bf16-mixed" or "32-true", or another optimizer'
            )
        result = closure()
        if result is None and model.automatic_optimization:
            # training_step returned None: there was no backward, so there is nothing to unscale or to step.
            self._after_closure(model, optimizer)
            return result
        # Before _after_closure, which clips: limits are for gradients without the scale.
        if not unscales_by_itself(optimizer):
            self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip one optimizer's gradients by their global norm or by value.

        Raises:
            RuntimeError: A fused optimizer under loss scaling: its gradients are still scaled when they would be clipped.
        """
        if clip_val > 0:
            self.check_clipping(optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def main_params(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        """The parameters whose gradients are clipped: all that the optimizer has."""
        return chain.from_iterable([group["params"] for group in optimizer.param_groups])

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale gradients down to a global norm over all ranks of at most `clip_val`.

        Where the norm is NaN or infinite, gradients are unchanged (`torch.nn.utils.clip_grad_norm_` would make all of them NaN), so
        that a callback still finds the parameters it came from. Decided on the device, without waiting.
        """
        clip_finite_(gradient_places(optimizer, list(self.main_params(optimizer))), float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp every gradient element to `[-clip_val, clip_val]`."""
        clip_grad_value_(self.main_params(optimizer), float(clip_val))


def translate_precision(plugin: FabricPrecision, policy: MixedPrecisionPolicy | None) -> MFSDPPrecision:
    """The precision plugin that Lightning built, as a `MFSDPPrecision`; see `translate` for arguments and errors."""
    return translate(plugin, policy, MFSDPPrecision)
