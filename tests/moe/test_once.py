"""The experts' backward has no derivative, and says so in a sentence of its own."""

from __future__ import annotations

import pytest
import torch

from lightning_mfsdp.moe.once import differentiable_once


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, unused):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad, None


def test_a_second_derivative_is_refused_and_the_first_is_as_ever() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    for create_graph in (False, True):
        (grad,) = torch.autograd.grad(_Square.apply(x, None).sum(), x, create_graph=create_graph)
        assert grad.tolist() == [6.0]
        assert grad.requires_grad == create_graph
    with pytest.raises(RuntimeError, match=r"experts: gradients of gradients .*nn\.Linear"):
        grad.sum().backward()
