"""In place of what differs without a GPU or without values: norms that CUDA computes in one kernel, and masks of causal attention."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mfsdp.base.transformers_models import models_in
from lightning_mfsdp.optim.adamw_rule import step_

__all__ = ["FusedKernels", "attend_without_masks"]

_WITHOUT_MASKS = "mfsdp_sdpa_without_masks"


class FusedKernels(TorchFunctionMode):
    """Inside, `rms_norm` keeps what its CUDA kernel keeps: the input, and a number for each row. AdamW steps without temporary memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.rms_norm or func is torch.rms_norm:
            return _rms_norm(*args, **(kwargs or {}))
        if func is step_:
            return None
        return func(*args, **(kwargs or {}))


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    result: Tensor = _RMSNorm.apply(input, weight, len(normalized_shape))
    return result


class _RMSNorm(torch.autograd.Function):
    """Shapes alone."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = input.shape[:-dims]
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


def attend_without_masks(module: nn.Module) -> None:
    """Have models of transformers inside call causal attention without a mask, as they do where no token is padding.

    They read that from the values of positions, which are not there; with a mask, attention also expands keys and values to all heads.
    """
    for _, model in models_in(module):
        if model.config._attn_implementation != "sdpa":
            continue
        attention = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
        importlib.import_module("transformers.modeling_utils").AttentionInterface.register(_WITHOUT_MASKS, attention)
        masks = importlib.import_module("transformers.masking_utils").AttentionMaskInterface
        masks.register(_WITHOUT_MASKS, _no_mask)
        model.set_attn_implementation(_WITHOUT_MASKS)


def _no_mask(*args: Any, q_length: int = 0, **kwargs: Any) -> None:
    """The mask function; it has the argument that those of transformers 5 have."""
