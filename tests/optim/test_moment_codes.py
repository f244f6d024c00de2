"""Moments in 8 bits: what codes stand for, that they are right on the mean, and what a state dict shows of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.optim import AdamW
from tests.optim.internals import decoded, encoded, encoded_at_random

MOMENTS = ("exp_avg", "exp_avg_sq")
EVERY_PAIR = (
    torch.arange(-127, 128).to(torch.int8).repeat(256),
    torch.arange(256).to(torch.uint8).repeat_interleave(255),
)


def at_random(mean: Tensor, variance: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    return encoded_at_random(mean, variance.sqrt(), bits)


def random_bits(numel: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(0)).to(torch.int32)


def test_roots_are_in_order_and_cover_what_gradients_are():
    _, variance = decoded(torch.zeros(256, dtype=torch.int8), torch.arange(256).to(torch.uint8))
    roots = variance.double().sqrt()
    assert roots[0] == 0
    assert roots[1] == 2**-32
    assert roots[255] == pytest.approx(2**10 * 8 / 6)
    ratios = roots[2:] / roots[1:-1]
    assert ratios.min() == pytest.approx(12 / 11)
    assert ratios.max() == pytest.approx(7 / 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_have_the_codes_that_they_were_decoded_from(dtype):
    mean, variance = EVERY_PAIR
    found = encoded(*(moment.to(dtype) for moment in decoded(mean, variance)))
    expected = torch.where(variance == 0, 0, mean).to(torch.int8)  # a share of nothing is nothing
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], variance)


def test_what_lies_between_two_codes_gets_one_of_both_and_is_right_on_the_mean():
    count, given = 200_000, torch.tensor([[0.3, 1.7], [-2e-6, 3e-11], [5.0, 0.05], [0.0, 1e-20], [-1e-9, 4e-17]])
    for mean, variance in given:
        bits = random_bits(count)
        codes = at_random(mean.expand(count).contiguous(), variance.expand(count).contiguous(), bits)
        means, variances = (moment.double() for moment in decoded(*codes))
        assert len(codes[1].unique()) <= 2
        assert len(codes[0].unique()) <= 2
        exact = variance.double().sqrt()
        power = 0.5 if exact > 2**-32 else 1  # between the least root and nothing the root itself is right
        roots, wanted = variances.sqrt() ** power, float(exact**power)
        assert abs(float(roots.mean()) - wanted) <= 5 * float(roots.std()) / count**0.5 + 2e-4 * wanted
        shares = torch.where(variances > 0, means / variances.sqrt(), mean.double() / variance.double().sqrt())
        wanted = float(mean.double() / variance.double().sqrt())
        assert abs(float(shares.mean()) - wanted) <= 5 * float(shares.std()) / count**0.5 + 1e-5 * abs(wanted)


def test_a_code_stays_where_nothing_is_to_be_rounded_whatever_the_bits_are():
    mean, variance = EVERY_PAIR
    for bits in (0, -1, 0x7FFFFFFF):
        found = at_random(*decoded(mean, variance), torch.full(mean.shape, bits, dtype=torch.int32))
        assert torch.equal(found[0], torch.where(variance == 0, 0, mean).to(torch.int8))
        assert torch.equal(found[1], variance)


def test_a_moment_that_is_too_large_keeps_its_share_of_the_root():
    mean, variance = torch.tensor([1e6, -1e5]), torch.tensor([1e12, 1e12])
    found = decoded(*encoded(mean, variance))
    assert torch.allclose(found[0] / found[1].sqrt(), mean / variance.sqrt(), rtol=0.1)
    assert found[1].sqrt().eq(found[1][0].sqrt()).all()


def test_a_weight_shows_what_is_not_a_number_and_codes_stay_codes():
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter], state_dtype="8bit")
    parameter.grad = torch.tensor([float("nan"), float("inf"), 1.0, 0.0])
    optimizer.step()
    assert parameter.isnan().tolist() == [True, True, False, False]
    assert all(value.isfinite().all() for value in decoded(*(optimizer.state[parameter][name] for name in MOMENTS)))


@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_steps_are_as_long_as_with_exact_moments(beta2):
    """With 0.999 a step changes the second moment by a hundredth of the distance to the next code, so codes walk around it."""
    count, generator = 20_000, torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.linspace(-1, 1, count))
    optimizer = AdamW([parameter], betas=(0.9, beta2), state_dtype="8bit")
    means, variances, lengths, errors = torch.zeros(count), torch.zeros(count), [], []
    for step in range(1500):
        parameter.grad = 0.1 * torch.randn(count, generator=generator)
        optimizer.step()
        means.mul_(0.9).add_(parameter.grad, alpha=0.1)
        variances.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        if step % 50 == 0 and step > 1000:
            mean, variance = decoded(*(optimizer.state[parameter][name] for name in MOMENTS))
            exact, found = means / variances.sqrt(), mean / variance.sqrt()
            lengths.append(float((found * exact).sum() / exact.square().sum()))
            errors.append(float(((found - exact).square().mean() / exact.square().mean()).sqrt()))
    assert sum(lengths) / len(lengths) == pytest.approx(1, abs=0.01)
    assert sum(errors) / len(errors) < 0.25


def test_the_first_step_is_that_of_moments_in_float32_to_the_bit():
    narrow, wide = (nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2))
    for parameter, dtype in ((narrow, "8bit"), (wide, "float32")):
        parameter.grad = torch.linspace(3, -2, 64)
        AdamW([parameter], state_dtype=dtype).step()
    assert torch.equal(narrow, wide)


def stepped(dtype: torch.dtype = torch.float32, count: int = 500) -> tuple[nn.Parameter, AdamW]:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(count, generator=generator).to(dtype))
    optimizer = AdamW([parameter], state_dtype="8bit")
    for _ in range(3):
        parameter.grad = (1e-5 * torch.randn(count, generator=generator)).to(dtype)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_dict_has_values_and_loads_as_the_same_codes(dtype):
    parameter, optimizer = stepped(dtype)
    codes = optimizer.state[parameter]
    assert [codes[name].dtype for name in MOMENTS] == [torch.int8, torch.uint8]
    saved = optimizer.state_dict()
    assert [saved["state"][0][name].dtype for name in MOMENTS] == [torch.bfloat16] * 2
    for name, value in zip(MOMENTS, decoded(*(codes[name] for name in MOMENTS)), strict=True):
        assert torch.equal(saved["state"][0][name], value.bfloat16())
        assert codes[name].dtype is not torch.bfloat16, "the optimizer keeps its codes"
    again = AdamW([nn.Parameter(parameter.detach().clone())], state_dtype="8bit")
    again.load_state_dict(copy.deepcopy(saved))
    ((_, loaded),) = again.state.items()
    assert all(torch.equal(loaded[name], codes[name]) for name in MOMENTS)
    for other in (AdamW([parameter]), torch.optim.AdamW([parameter])):
        other.load_state_dict(copy.deepcopy(saved))
        assert torch.allclose(
            other.state[parameter]["exp_avg"].float(), saved["state"][0]["exp_avg"].float(), atol=1e-7
        )


def test_copies_have_codes():
    parameter, optimizer = stepped()
    other = copy.deepcopy(optimizer)
    ((_, values),) = other.state.items()
    assert all(torch.equal(values[name], optimizer.state[parameter][name]) for name in MOMENTS)
    assert other.state_dict()["state"][0]["exp_avg"].dtype is torch.bfloat16


def test_codes_are_decoded_for_an_optimizer_of_another_dtype():
    """As a program has them that takes `state` itself."""
    parameter, optimizer = stepped()
    wide = AdamW([parameter], state_dtype="float32")
    state = optimizer.state_dict()
    state["state"][0] = dict(optimizer.state[parameter])
    wide.load_state_dict(state)
    expected = decoded(*(optimizer.state[parameter][name] for name in MOMENTS))
    for name, value in zip(MOMENTS, expected, strict=True):
        assert torch.allclose(wide.state[parameter][name], value, rtol=2**-8)
