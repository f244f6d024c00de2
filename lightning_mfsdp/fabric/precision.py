"""MFSDPFabricPrecision: what Fabric calls around forward, backward and step. Dtypes are those of `options/dtypes.py`."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mfsdp.engine import is_sharded
from lightning_mfsdp.options.dtypes import ShardedPrecision

__all__ = ["MFSDPFabricPrecision"]


class MFSDPFabricPrecision(ShardedPrecision):
    """Precision of a run under `MFSDPFabricStrategy`.

    Under "*-mixed" inputs are not converted, as under the Trainer, and autocast decides what is computed in which dtype. What a model
    returns has PyTorch's default dtype, as everywhere in Fabric.

    Args:
        precision: As in `MFSDPPrecision`.
        policy: As in `MFSDPPrecision`.
        scaler: As in `MFSDPPrecision`.
        recipe: As in `MFSDPPrecision`.
        replace_layers: As in `MFSDPPrecision`.
        keep_high_precision: As in `MFSDPPrecision`.
        overrides: As in `MFSDPPrecision`.
        fp8_weights: As in `MFSDPPrecision`.
        keep_transpose_cache: As in `MFSDPPrecision`.
        fuse_weight_gradients: As in `MFSDPPrecision`.
        keep_quantized: As in `MFSDPPrecision`.

    Raises:
        ValueError: As in `MFSDPPrecision`.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module for any strategy of Fabric. Fabric calls this under ours as well, where sharded parts are converted by then."""
        if not any(is_sharded(part) for part in module.modules()):
            module = self.cast_module(module)
        return super().convert_module(module)

    def convert_output(self, data: Any) -> Any:
        """Floating-point tensors in the default dtype, unless everything is float32 or the policy decides."""
        if self.precision == "32-true":
            return data
        dtype = torch.get_default_dtype()

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(data, Tensor, convert)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss where float16 gradients could underflow, and run backward."""
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        with self.backward_context():
            super().backward(tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step; with a scaler the step is skipped on all ranks when any gradient overflowed."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Remove the scale before gradients are clipped.

        Raises:
            RuntimeError: A fused optimizer under loss scaling removes it later.
        """
        if self.scaler is not None:
            self.check_clipping(optimizer)
            self.scaler.unscale_(optimizer)
