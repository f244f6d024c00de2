"""Keeps logits of transformers' causal language models divided over the vocabulary, each rank's part for itself, where a loss allows it.

In a forward of training with labels they stay divided, and the loss is computed from them. What the model returns then is gathered where
it is used (`UnreadLogits`). In any other forward they are gathered, so that evaluation, generation and losses outside of the model see
whole ones.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.base.compat import is_without_memory, without_torch_function
from lightning_mfsdp.base.containers import map_tensors
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.tensor_parallel.exchange import TensorGroup, gathered

__all__ = ["DividedLogits", "UnreadLogits", "divided_cross_entropy"]


def divided_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: TensorGroup,
    *,
    ignore_index: int = -100,
    count: Tensor | float | None = None,
) -> Tensor:
    """Cross-entropy of logits that are divided over a tensor axis.

    Args:
        logits: `[..., V / size]`: of this rank's part of the vocabulary; parts are in the order of ranks.
        targets: `[...]`, int64: token ids of the whole vocabulary, equal on all ranks.
        group: The ranks.
        ignore_index: Targets with this value do not count.
        count: What the sum is divided by; `None`: the number of targets that count.

    Returns:
        0-D, in float32 (float64 for float64), equal on all ranks.
    """
    from lightning_mfsdp.ops import chunked_logprobs  # as in styles.py

    total = -chunked_logprobs(logits, targets, ignore_index=ignore_index, vocab_group=group.group).sum()
    return total / ((targets != ignore_index).sum() if count is None else count)


class UnreadLogits(Tensor):
    """Logits that a model returned beside its loss, of which this rank has a part: the first function that reads them gathers them.

    A training step that looks at the loss alone exchanges nothing. One that computes an accuracy sees the whole vocabulary, and all ranks
    of the axis have to do so then, as with any layer that they compute together.
    """

    _group: TensorGroup
    _whole: Tensor | None

    @classmethod
    def of(cls, part: Tensor, group: TensorGroup) -> UnreadLogits:
        """This rank's part of logits, `[..., V / size]`, as logits that are gathered when they are read. Differentiable."""
        unread = part.as_subclass(cls)
        unread._group, unread._whole = group, None
        return unread

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            if func in _READ_NOTHING:
                return func(*args, **kwargs)
            if func in _CONVERSIONS and isinstance(args[0], cls):
                converted = func(*args, **kwargs)
                if converted.device == args[0].device:
                    return cls.of(converted.as_subclass(Tensor), args[0]._group)
            return func(*map_tensors(_read, args), **map_tensors(_read, kwargs))


# What programs ask of all tensors that a module returns, and what leaves their numbers where they are.
_READ_NOTHING = {
    Tensor.register_hook,
    Tensor.is_floating_point,
    torch.is_floating_point,
    Tensor.as_subclass,
    *(
        getattr(Tensor, name).__get__
        for name in ("requires_grad", "grad_fn", "is_leaf", "dtype", "device", "is_cuda", "_base", "_version")
    ),
    Tensor._is_view,
}
_CONVERSIONS = {Tensor.to, Tensor.detach, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type}


def _read(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, UnreadLogits):
        return tensor
    whole = tensor._whole
    if whole is None or (torch.is_grad_enabled() and tensor.requires_grad and not whole.requires_grad):
        whole = tensor._whole = gathered(tensor.as_subclass(Tensor), tensor._group)
    return whole


class DividedLogits:
    """The head and the loss of one model."""

    def __init__(self, group: TensorGroup, whole_loss: Any) -> None:
        self._group = group
        self._whole_loss = whole_loss
        self._is_divided = False  # the logits of the forward that runs
        self._has_loss = False  # computed by that forward
        self._logits: Tensor | None = None  # from which it was

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model's loss is that of causal language models, so that it can be computed from divided logits."""
        return bool(model.loss_function is importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss)

    def install(self, model: Any) -> list[Any]:
        """Give the model the loss, and find out in each forward whether it is needed. Returns the handles of the hooks."""
        model.loss_function = self.loss
        return [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def after_head(self, logits: Tensor, group: TensorGroup) -> Tensor:
        """What is done to the head's output."""
        return logits if self._is_divided else gathered(logits, group)

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """The loss of transformers' `ForCausalLMLoss`, 0-D, from divided logits if those of this forward are."""
        self._has_loss = True
        if not self._is_divided:
            whole: Tensor = self._whole_loss(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **more,
            )
            return whole
        self._logits = logits
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        count = num_items_in_batch.to(logits.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        targets = targets.to(logits.device).reshape(logits.shape[:-1])
        return divided_cross_entropy(logits, targets, self._group, ignore_index=ignore_index, count=count)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        self._is_divided = model.training and arguments.get("labels") is not None
        self._has_loss = False

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        was_divided, self._is_divided = self._is_divided, False
        logits, self._logits = self._logits, None
        if not was_divided or output is None:  # else the forward failed
            return output
        if not self._has_loss:
            raise ShardingError(
                f"{type(model).__name__} was given labels and did not call its loss_function, so it computed a loss from the logits of this"
                " rank's part of the vocabulary. Leave labels out, or set model.loss_function to a function of your own before the plan is"
                " applied: logits are gathered then."
            )
        if logits is None or is_without_memory(logits):  # no program reads them, and no other class can be made of them
            return output
        return map_tensors(lambda tensor: UnreadLogits.of(tensor, self._group) if tensor is logits else tensor, output)
