"""Weights in bfloat16 with what they lack of float32 in the state: training is that of weights in float32."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_mfsdp.optim import AdamW
from tests.optim.internals import divided, joined


def test_a_number_is_its_weight_and_its_remainder_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x3F808000, 0x3F818000, 0x7F7FFFFF]
    edges += [edge - 2**31 for edge in edges]
    values = torch.cat([patterns, torch.tensor(edges).to(torch.int32)]).view(torch.float32)
    weight, remainder = divided(values)
    finite = weight.isfinite()
    assert torch.equal(finite, values.bfloat16().isfinite()), "as casts do"
    assert torch.equal(joined(weight, remainder)[finite], values[finite])
    assert torch.equal(weight[~finite].isnan(), values[~finite].isnan())
    assert (remainder[~finite] == 0).all()
    distance = (weight.float() - values).abs()[finite]
    nearest = (values.bfloat16().float() - values).abs()[finite]
    assert torch.equal(distance, nearest), "and no other number of bfloat16 is closer"


def test_a_weight_that_was_set_to_zero_or_infinity_stays_so():
    """The remainder of what it was before is of another number."""
    for zero in (0.0, -0.0):
        found = joined(torch.tensor([zero]).bfloat16(), torch.tensor([-5], dtype=torch.int16))
        assert found == 0
    for infinite in (float("inf"), -float("inf")):
        for low in (-5, 5):
            assert joined(torch.tensor([infinite]).bfloat16(), torch.tensor([low], dtype=torch.int16)) == infinite


def test_a_weight_that_was_converted_since_has_no_remainder():
    for dtype in (torch.float16, torch.float32):
        layer = nn.Linear(4, 4).bfloat16()
        optimizer = AdamW(layer.parameters(), store_param_remainders=True, state_dtype="float32")
        layer(torch.ones(2, 4).bfloat16()).sum().backward()
        optimizer.step()
        layer.to(dtype)
        assert all("master_param" not in values for values in optimizer.state_dict()["state"].values())
        before = layer.weight.detach().clone()
        layer(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
        assert (layer.weight - before).abs().max() < 3e-3
        assert "remainder" not in optimizer.state[layer.weight]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit"])
def test_training_is_that_of_weights_in_float32_to_the_bit(state_dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(999, generator=generator).bfloat16()
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    ours = AdamW([narrow], lr=1e-4, state_dtype=state_dtype, store_param_remainders=True)
    reference = AdamW([wide], lr=1e-4, state_dtype=state_dtype)
    alone = nn.Parameter(start.clone())
    without = AdamW([alone], lr=1e-4, state_dtype=state_dtype)
    for _ in range(200):
        gradient = (1 + torch.randn(999, generator=generator)).bfloat16()
        narrow.grad, wide.grad, alone.grad = gradient, gradient.float(), gradient.clone()
        for optimizer in (ours, reference, without):
            optimizer.step()
    found = joined(narrow.detach(), ours.state[narrow]["remainder"])
    assert torch.equal(found, wide)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours.state[narrow][name], reference.state[wide][name])
    assert (alone.float() - wide).abs().mean() > 2 * (narrow.float() - wide).abs().mean(), "which is why"


def test_only_weights_in_bfloat16_have_remainders():
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    optimizer = AdamW(parameters, store_param_remainders=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert ["remainder" in optimizer.state[parameter] for parameter in parameters] == [True, False, False]


def test_a_state_goes_on_to_the_bit_and_says_so_where_remainders_are_left_out():
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(99, generator=generator).bfloat16())
    optimizer = AdamW([parameter], store_param_remainders=True)
    parameter.grad = torch.randn(99, generator=generator).bfloat16()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    again = nn.Parameter(parameter.detach().clone())
    loaded = AdamW([again], store_param_remainders=True)
    loaded.load_state_dict(copy.deepcopy(saved))
    for other in (*copies, loaded):
        ((key, values),) = other.state.items()
        assert values["remainder"].dtype is torch.int16
        assert torch.equal(values["remainder"], optimizer.state[parameter]["remainder"])
        key.grad = parameter.grad.clone()
        other.step()
    optimizer.step()
    assert torch.equal(again, parameter)
    assert torch.equal(loaded.state[again]["remainder"], optimizer.state[parameter]["remainder"])
    for other in (AdamW([nn.Parameter(parameter.float())], store_param_remainders=True), AdamW([again])):
        with pytest.warns(UserWarning, match=r"weights in float32, which are left out.*store_param_remainders=True"):
            other.load_state_dict(copy.deepcopy(saved))
        assert all(not {"remainder", "master_param"} & values.keys() for values in other.state.values())


def test_a_state_dict_has_weights_in_float32_and_survives_another_optimizer():
    """Whose `load_state_dict` casts state to the dtype of the weights."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 99).bfloat16())
    optimizer = AdamW([parameter], store_param_remainders=True)
    parameter.grad = torch.ones(99).bfloat16()
    optimizer.step()
    saved = optimizer.state_dict()["state"][0]
    assert "remainder" not in saved
    assert saved["master_param"].dtype is torch.float32
    assert torch.equal(saved["master_param"], joined(parameter.detach(), optimizer.state[parameter]["remainder"]))
    theirs = torch.optim.AdamW([parameter])
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = AdamW([parameter], store_param_remainders=True)
    again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert again.state[parameter]["remainder"].dtype is torch.int16
    assert not again.state[parameter]["remainder"].any(), "cast to bfloat16 they are the weights"


def test_a_state_without_remainders_begins_with_none():
    parameter = nn.Parameter(torch.ones(5).bfloat16())
    before = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(5).bfloat16()
    before.step()
    optimizer = AdamW([parameter], store_param_remainders=True)
    optimizer.load_state_dict(before.state_dict())
    optimizer.step()
    assert optimizer.state[parameter]["remainder"].any()
