"""Logits of transformers' causal language models, of which each rank has those of its part of the vocabulary.

In a forward of training with labels they stay divided, and the loss is computed from them. In any other forward they are gathered, so that
evaluation, generation and losses outside of the model see whole ones.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.tensor_parallel.exchange import TensorGroup, gathered

__all__ = ["DividedLogits", "divided_cross_entropy"]


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


class DividedLogits:
    """The head and the loss of one model."""

    def __init__(self, group: TensorGroup, whole_loss: Any) -> None:
        self._group = group
        self._whole_loss = whole_loss
        self._is_divided = False  # the logits of the forward that runs
        self._has_loss = False  # computed by that forward

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
        """As transformers' `ForCausalLMLoss`."""
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
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        count = num_items_in_batch.to(logits.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        targets = targets.to(logits.device).reshape(logits.shape[:-1])
        return divided_cross_entropy(logits, targets, self._group, ignore_index=ignore_index, count=count)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        self._is_divided = model.training and given.get("labels") is not None
        self._has_loss = False

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        was_divided, self._is_divided = self._is_divided, False
        if was_divided and not self._has_loss and output is not None:  # else the forward failed
            raise ShardingError(
                f"{type(model).__name__} was given labels and did not call its loss_function, so it computed a loss from the logits of this"
                " rank's part of the vocabulary. Leave labels out, or set model.loss_function to a function of your own before the plan is"
                " applied: logits are gathered then."
            )
