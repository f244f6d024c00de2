"""The first step in which sequences are divided is watched: what mixes tokens without the other ranks' would be wrong without an error."""

from __future__ import annotations

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


@contextmanager
def watched_step(parallel: ContextParallel) -> Iterator[None]:
    """Around a step: refuse functions that mix tokens of this rank's parts alone, and training without attention of whole sequences.

    Raises:
        ShardingError: Names the function.
    """
    before = parallel.attention_calls
    with _Watch(parallel):
        yield
    if torch.is_grad_enabled() and parallel.attention_calls == before:
        raise ShardingError(
            f"context={parallel.size}: the step ended without attention of whole sequences, so tokens saw only those of their own rank's "
            "part. Use lightning_mfsdp.context_parallel.context_attention in modules of your own (attention of transformers' models is "
            "found by itself), and leave context out for models without attention"
        )


class _Watch(TorchFunctionMode):
    def __init__(self, parallel: ContextParallel) -> None:
        super().__init__()
        self._parallel = parallel

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        cure = _MIXES_TOKENS.get(function)
        if cure is not None and not self._parallel.is_attending and self._parallel.cut is not None:
            shapes = [list(one.shape) for one in args if isinstance(one, Tensor)]
            raise ShardingError(
                f"context={self._parallel.size}: the model calls {function.__name__} with tensors of shapes {shapes[:3]}, and a rank "
                f"has only a part of every sequence, so it would not see the other tokens. {cure}"
            )
        return function(*args, **(kwargs or {}))
