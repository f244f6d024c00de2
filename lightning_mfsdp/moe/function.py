"""The experts' MLP as one autograd function that saves two tensors: the expert input and the first projection.

x           hidden rows, sorted by expert                            gathered again in backward
projected   x times the first weights of each row's expert       read where the saver keeps it
scaled      activation(projected) * probability                      recomputed in backward
output      the sum of each token's rows of scaled times the second weights

The input is saved in its original form, T rows instead of one for each choice, which are K times as many. If those are fewer, because
most choices are other ranks', x is saved instead. See docs/design/moe.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.moe.activations import Activation
from lightning_mfsdp.moe.once import differentiable_once
from lightning_mfsdp.moe.products import expert_products, outer_products, warn_where_it_waits
from lightning_mfsdp.moe.row_plan import RowPlan, combined, gathered
from lightning_mfsdp.moe.saving import ActivationSaver, OrdinarySaver, PagedRows, lent, save_to_lend

__all__ = ["experts_mlp", "no_choices"]


def experts_mlp(
    hidden: Tensor,
    probabilities: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    *,
    plan: RowPlan,
    activation: Activation,
    saver: ActivationSaver,
) -> Tensor:
    """The experts' outputs, summed for each token.

    Args:
        hidden: `[T, H]`.
        probabilities: `[T, K]`, any floating-point dtype.
        weight_in: `[E, width * I, H]`, dtype of `hidden`.
        weight_out: `[E, H, I]`, the same dtype.
        plan: Of the choices.
        activation: Between the two projections.
        saver: Keeps activations for the backward, if there will be one.

    Returns:
        `[T, H]`.
    """
    warn_where_it_waits(hidden, weight_in, weight_out)
    inputs = (hidden, probabilities, weight_in, weight_out)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        saver = OrdinarySaver()
    return _apply(*inputs, plan, activation, saver)


def no_choices(hidden: Tensor, *others: Tensor) -> Tensor:
    """The output for tokens that chose no expert: zeros, `[T, H]`.

    All arguments still enter the graph, with none of their elements: gradients are zero and not missing.
    """
    nothing: Tensor = sum((tensor[:0].sum() for tensor in (hidden, *others)), start=hidden.new_zeros(()))
    return torch.zeros_like(hidden) + nothing.to(hidden.dtype)


class _ExpertsMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        probabilities: Tensor,
        weight_in: Tensor,
        weight_out: Tensor,
        plan: RowPlan,
        activation: Activation,
        saver: ActivationSaver,
    ) -> Tensor:
        x = gathered(hidden, plan.token, plan.live)
        of_rows = probabilities.reshape(-1).index_select(0, plan.choice)
        projected = expert_products(x, weight_in.transpose(1, 2), plan.ends)
        scaled = activation.forward(projected, of_rows, plan.live)
        output = combined(expert_products(scaled, weight_out.transpose(1, 2), plan.ends), plan.position)
        ctx.activation, ctx.saver, ctx.probability_dtype = activation, saver, probabilities.dtype
        needs_x, ctx.gathers_again = ctx.needs_input_grad[2], len(hidden) <= plan.rows
        ctx.saves_x = needs_x and not ctx.gathers_again
        kept = (
            saver.save(ctx, (x, projected), plan.live)  # products read x, and only as a whole
            if ctx.saves_x
            else save_to_lend(saver, ctx, (projected,), plan.live)
        )
        ctx.save_for_backward(
            *(weight_in, weight_out, of_rows, plan.token, plan.position, plan.ends, plan.live),
            hidden if needs_x and ctx.gathers_again else None,
            *kept,
        )
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight_in, weight_out, of_rows, token, position, ends, live, hidden, *kept = ctx.saved_tensors
        needs_hidden, needs_probabilities, needs_in, needs_out, *_ = ctx.needs_input_grad
        grad_rows = gathered(grad.to(weight_out.dtype), token, live)
        grad_scaled = expert_products(grad_rows, weight_out, ends)
        with _saved(ctx, kept) as (x, projected):
            scaled, grad_projected, grad_of_rows = ctx.activation.backward(projected, of_rows, grad_scaled, live)
        del projected, grad_scaled
        to_out = outer_products(grad_rows, scaled, ends) if needs_out else None
        del grad_rows, scaled
        to_in = to_hidden = to_probabilities = None
        if needs_in:
            x = gathered(hidden, token, live) if x is None else x
            to_in = outer_products(grad_projected, x, ends)
            del x
        if needs_hidden:
            to_hidden = combined(expert_products(grad_projected, weight_in, ends), position)
        if needs_probabilities:
            has_row = position < live
            to_probabilities = torch.where(has_row, grad_of_rows[position], 0).to(ctx.probability_dtype)
        return to_hidden, to_probabilities, to_in, to_out, None, None, None


@contextmanager
def _saved(ctx: Any, kept: Sequence[Tensor]) -> Iterator[tuple[Tensor | None, Tensor | PagedRows]]:
    """The input, if it was saved, and the first projection. Valid inside the context only, except for the input."""
    if ctx.saves_x:
        x, projected = ctx.saver.load(ctx, kept)
        yield x, projected
        return
    with lent(ctx.saver, ctx, kept) as (projected,):
        yield None, projected


# Compilers do not trace it: savers are Python, and kernels are compiled already.
_apply: Callable[..., Tensor] = torch.compiler.disable(_ExpertsMLP.apply)
