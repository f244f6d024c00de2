"""Operators whose results are kept: those that draw random numbers, and names that can never match."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from lightning_mfsdp.recompute import Recompute, apply_recompute
from lightning_mfsdp.recompute.operators import keeping
from tests.recompute.counting import Counting
from tests.recompute.models import Layer, Stack, build, equal, steps


@torch.library.custom_op("mfsdp_recompute_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws, and does not say so: operators of other libraries are not marked."""
    return torch.rand_like(x)


class Draws(Layer):
    """Draws by an operator that may be kept, and by dropout after it, and by another one between."""

    def forward(self, x: Tensor, factor: float = 1.0, *, mask: Tensor) -> Tensor:
        gate = torch.bernoulli(torch.full_like(x, 0.5)) + noise(x.detach())
        x = nn.functional.dropout(x * gate, 0.2)
        return super().forward(x + torch.bernoulli(torch.full_like(x, 0.5)) * x, factor, mask=mask)


def drawing_layers() -> Stack:
    model = build()
    model.layers = nn.ModuleList(Draws() for _ in range(3))
    return model


@pytest.mark.parametrize(
    "save_ops",
    [
        ["aten.bernoulli"],
        ["mfsdp_recompute_tests.noise"],
        ["matmul", "aten.bernoulli", "mfsdp_recompute_tests.noise"],
    ],
)
def test_draws_after_a_kept_draw_are_those_of_the_forward(save_ops) -> None:
    """What is kept draws once, and dropout after it gets the numbers it had; so does all that comes after the backward."""
    found, states = [], []
    for config in (Recompute(method="none"), Recompute(method="selective", save_ops=save_ops)):
        model = drawing_layers()
        apply_recompute(model, config)
        found.append(steps(model, 2))
        states.append(torch.get_rng_state())
    assert equal(*found)
    assert torch.equal(*states)
    operators = {
        "aten.bernoulli": torch.ops.aten.bernoulli.default,
        "mfsdp_recompute_tests.noise": torch.ops.mfsdp_recompute_tests.noise.default,
    }
    for name, operator in operators.items():
        with Counting(operator) as counting:
            steps(model, 1)
        calls = 3 * (2 if name == "aten.bernoulli" else 1)
        assert counting.count == calls * (1 if name in save_ops else 2), name


def test_operators_of_operators_are_not_kept() -> None:
    """Such as flex attention, which has no overloads."""
    for operator in (torch.ops.higher_order.flex_attention, torch.ops.higher_order.cond):
        assert keeping(["matmul"])(None, operator) == CheckpointPolicy.PREFER_RECOMPUTE
