"""Hooks that a program registers on its model and optimizer: on parts that are sharded later, or on sharded ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzzing.description import Description

FACTOR = 0.5  # of gradients: exact in every dtype, and the same whether ranks are averaged before or after
DECAY = 0.97  # of weights after a step


def put_hooks(case: Description, model: Any) -> None:
    """Of the root's first layer and of the first block."""
    kind, block = case.model.hooks, model.blocks[0]
    weights = [layer.weight for layer in (model.inputs, block.linear) if layer.weight.requires_grad]
    if kind == "parameter":
        for weight in weights:
            weight.register_hook(lambda gradient: gradient * FACTOR)
    elif kind == "accumulated":
        for weight in weights:
            weight.register_post_accumulate_grad_hook(_scale_gradient)
    elif kind == "forward":
        block.register_forward_hook(lambda _module, _args, result: _scaled(result))
    elif kind == "before forward":
        block.register_forward_pre_hook(lambda _module, args: (args[0] * FACTOR, *args[1:]))
    elif kind == "backward":
        inner = block if block.spec.result == "" else block.linear
        inner.register_full_backward_hook(_scale_inputs)


def put_step_hooks(case: Description, optimizer: torch.optim.Optimizer) -> None:
    """Around its step."""
    if case.model.hooks == "before step":
        optimizer.register_step_pre_hook(lambda stepped, _args, _kwargs: _scale_gradients(stepped))
    elif case.model.hooks == "after step":
        optimizer.register_step_post_hook(lambda stepped, _args, _kwargs: _decay(stepped))


def _scaled(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result * FACTOR
    return (
        {**result, "value": result["value"] * FACTOR}
        if isinstance(result, dict)
        else type(result)(result.value * FACTOR)
    )


def _scale_inputs(_module: nn.Module, of_inputs: tuple[Tensor | None, ...], _of_results: Any) -> Any:
    return tuple(None if gradient is None else gradient * FACTOR for gradient in of_inputs)


def _scale_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(FACTOR)


def _scale_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(FACTOR)


@torch.no_grad()
def _decay(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(DECAY)
