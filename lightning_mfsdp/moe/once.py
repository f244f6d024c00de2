"""Backwards without a derivative of their own, which raise an error instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["differentiable_once"]


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of an autograd function whose results, under `create_graph=True`, raise when they are differentiated again."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        tensors = [result for result in results if isinstance(result, Tensor)]
        if not tensors:
            return results
        anchor = tensors[0].new_empty(0).requires_grad_()
        marked = iter(_Refusal.apply(anchor, *tensors))
        return tuple(next(marked) if isinstance(result, Tensor) else result for result in results)

    return wrapped


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "experts: gradients of gradients (create_graph=True) were requested, and the experts' backward has none of its own; leave them "
            "out of the penalty, or compute it with nn.Linear layers in their place"
        )
