"""Watches some steps for what would be wrong without an error where a rank has a part of every sequence.

That is functions that mix tokens, and losses: a mean over this rank's tokens, and sums that are not divided by the tokens of all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.context_parallel.sharing import ContextParallel

__all__ = ["watched_step"]

_ATTENTION = "Use lightning_mfsdp.context_parallel.context_attention in its place"
_WITHOUT = "Leave context out for this model"
_MIXES_TOKENS: dict[Callable[..., Any], str] = {
    F.scaled_dot_product_attention: _ATTENTION,
    F.multi_head_attention_forward: _ATTENTION,
    torch.conv1d: _WITHOUT,
    torch.lstm: _WITHOUT,
    torch.gru: _WITHOUT,
    torch.rnn_tanh: _WITHOUT,
    torch.rnn_relu: _WITHOUT,
}
_LOSSES = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


@contextmanager
def watched_step(parallel: ContextParallel, tokens: int, *, trains: bool) -> Iterator[None]:
    """Around a step: refuse functions that mix tokens of this rank's parts alone, and losses that are not those of whole sequences.

    Args:
        parallel: Its ranks; its notes get what means of losses are over.
        tokens: How many this rank has, in all sequences of the batch.
        trains: It computes a loss, with attention; otherwise metrics.

    Raises:
        ShardingError: Names the function.
    """
    with _Watch(parallel, tokens, trains=trains):
        yield
    notes = parallel.notes
    if trains and not notes.attends:
        raise ShardingError(
            f"context={parallel.size}: the step ended without attention of whole sequences, so tokens saw only those of their own rank's "
            "part. Use lightning_mfsdp.context_parallel.context_attention in modules of your own (attention of transformers' models is "
            "found by itself), and leave context out for models without attention"
        )
    if trains and notes.sums and not notes.is_counted:
        raise ShardingError(
            f"context={parallel.size}: the step computed losses of single tokens or their sum, and not how many targets all ranks have, so "
            "what it divides by is this rank's own. Use lightning_mfsdp.context_parallel.tokens_in_batch(targets) as the divisor"
        )


class _Watch(TorchFunctionMode):
    def __init__(self, parallel: ContextParallel, tokens: int, *, trains: bool) -> None:
        super().__init__()
        self._parallel = parallel
        self._tokens = tokens
        self._trains = trains

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        parallel, keywords = self._parallel, kwargs or {}
        if parallel.cut is not None and not parallel.is_attending:
            cure = _MIXES_TOKENS.get(function)
            if cure is not None:
                shapes = [list(argument.shape) for argument in args if isinstance(argument, Tensor)]
                raise ShardingError(
                    f"context={parallel.size}: the model calls {function.__name__} with tensors of shapes {shapes[:3]}, and a rank "
                    f"has only a part of every sequence, so it would not see the other tokens. {cure}"
                )
            if self._trains and torch.is_grad_enabled() and function in _LOSSES:
                self._note_loss(function.__name__, _LOSSES[function].bind(*args, **keywords).arguments)
        return function(*args, **keywords)

    def _note_loss(self, name: str, arguments: Mapping[str, Any]) -> None:
        target = arguments["target"]
        if target.is_floating_point():  # probabilities of classes
            return
        if target.numel() % self._tokens:
            raise ShardingError(
                f"context={self._parallel.size}: {name} got {target.numel()} targets, and this rank has {self._tokens} tokens. Use "
                "lightning_mfsdp.context_parallel.shift_labels(labels), which keeps the length, instead of slices such as logits[:, :-1] "
                "and labels[:, 1:], whose targets at the borders of parts are lost; leave context out for losses of whole sequences"
            )
        if arguments.get("reduction", "mean") == "mean":
            counted = (target != arguments.get("ignore_index", -100)).sum()
            self._parallel.notes.means.append(counted.reshape(1))
        else:
            self._parallel.notes.sums = True
