"""Operators whose results are kept: those that draw random numbers, and names that can never match."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from lightning_mfsdp.recompute import Recompute, apply_recompute, recomputed
from lightning_mfsdp.recompute.operators import _KINDS, _registered, check_registered, keeping
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten.mmm", "there is no operator 'aten.mmm'"),
        ("nosuch.thing", "there is no operator 'nosuch.thing'"),
        ("aten.name", "there is no operator 'aten.name'"),
        ("aten.linear", "'aten.linear' is made of other operators and never runs itself.*give 'matmul'"),
        ("aten.scaled_dot_product_attention", "is made of other operators and never runs itself.*give 'attention'"),
        ("aten.layer_norm", "'aten.layer_norm' is made of other operators.*give those, as a profile of the forward"),
        ("aten.relu_", "'aten.relu_' writes into memory that it is given"),
    ],
)
def test_names_that_would_keep_nothing_are_refused(name, message) -> None:
    """When they are applied, for libraries register their operators when they are imported."""
    model = build()
    config = Recompute(method="selective", save_ops=["matmul", name])
    with pytest.raises(ValueError, match=message):
        apply_recompute(model, config)
    assert recomputed(model) == []


def test_no_operator_of_a_kind_is_refused_by_itself() -> None:
    """Those that this version of PyTorch has; the common ones are in all."""
    named = {name for names in _KINDS.values() for name in names}
    known = [name for name in sorted(named) if _registered(name)]
    assert {"aten.mm", "aten.addmm", "aten._scaled_dot_product_flash_attention"} <= set(known)
    check_registered([*known, "mfsdp_recompute_tests.noise", "aten.tanh", "aten.silu"])
