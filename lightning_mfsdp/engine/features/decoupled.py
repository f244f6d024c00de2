"""Gradients in a dtype of their own, for optimizers with `use_decoupled_grad`: `optim.AdamW` and Transformer Engine's FusedAdam.

What the optimizer sees then is the main gradient itself, in `main_grads_dtype`: nothing is rounded to the dtype of the main weight for the
step, and there is no copy in it. `decoupled_grad` is another name for `.grad`, so clipping, norms and callbacks see the same gradient,
and clearing one clears the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.gradients import gradient_dtype
from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.parameter import Entry

__all__ = ["reads_decoupled_gradients", "show_gradients"]


class _DecoupledRows(nn.Parameter):
    """Local rows; the dtype of their gradient is `grad_dtype`."""

    @property
    def decoupled_grad(self) -> Tensor | None:
        """`.grad`."""
        return self.grad

    @decoupled_grad.setter
    def decoupled_grad(self, value: Tensor | None) -> None:
        self.grad = value


def reads_decoupled_gradients(optimizer: Any) -> bool:
    """Whether an optimizer asks for them."""
    return bool(getattr(optimizer, "use_decoupled_grad", False))


def show_gradients(group: ParameterGroup, held: Sequence[Entry], *, decoupled: bool) -> None:
    """Set the dtype and attribute in which an optimizer reads the gradients of local rows.

    Args:
        group: Its gradients lie together and have one dtype.
        held: What the optimizer holds of it.
        decoupled: In `main_grads_dtype` and as `decoupled_grad` too; otherwise in the dtype of the main weight, as in plain PyTorch.

    Raises:
        ShardingError: The dtype would change for parameters that the optimizer does not hold, or while gradients are unreduced.
    """
    main = group.spec.main_dtype
    dtype = group.policy.sum_dtype(main) if decoupled and main.is_floating_point else main
    if gradient_dtype(group) is not dtype:
        _change_dtype(group, held, dtype)
    for entry in held:
        if isinstance(entry.local, _DecoupledRows) is not decoupled:
            entry.local.__class__ = _DecoupledRows if decoupled else nn.Parameter


def _change_dtype(group: ParameterGroup, held: Sequence[Entry], dtype: torch.dtype) -> None:
    names = {id(entry) for entry in held}
    others = [entry.name for entry in group.entries if entry.full.requires_grad and id(entry) not in names]
    if others:
        raise ShardingError(
            f"fully_shard_optimizer: {held[0].name} is to have a gradient in {dtype}, which lies together with that of {others[0]} (of "
            f"{len(others)}), and another optimizer or none holds that: use_decoupled_grad needs one optimizer for all of {group.name}. "
            "Leave it out, or let main_grads_dtype be the dtype of the main weights"
        )
    if not group.gradients.begin_anew():
        raise ShardingError(
            f"fully_shard_optimizer: {group.name} has gradients that wait for their reduction (no_sync), and the optimizer needs them in "
            f"{dtype} (use_decoupled_grad). Hand the optimizer over before the first backward, or after a step"
        )
    for entry in group.entries:
        grad, entry.local.grad = entry.local.grad, None
        entry.local.grad_dtype = dtype
        entry.local.grad = None if grad is None else grad.to(dtype)
