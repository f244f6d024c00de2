"""Cross-entropy of a linear layer: equal to plain PyTorch, with gradients that are computed in forward and can still be asked for twice."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.ops import linear, linear_cross_entropy, linear_logprobs, tiles
from tests.ops.reference import IGNORED, eager_logits, eager_loss, problem
from tests.ops.test_logprobs import Sizes

T, H, V = 11, 5, 13


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
def test_losses_and_gradients_are_those_of_plain_pytorch(reduction: str, chunk: int | None) -> None:
    hidden, weight, bias, target = problem(T, H, V)
    for (temperature, softcap), (smoothing, z_loss) in product(
        ((1.0, None), (0.7, 3.0)), ((0.0, 0.0), (0.1, 0.0), (0.1, 0.01))
    ):
        loss = linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            token_chunk=chunk,
            reduction=reduction,
            label_smoothing=smoothing,
            z_loss=z_loss,
        )
        logits = eager_logits(hidden, weight, bias, temperature, softcap)
        expected = eager_loss(logits, target, reduction, smoothing, z_loss)
        torch.testing.assert_close(loss, expected)
        upstream = torch.randn_like(expected)
        inputs = (hidden, weight, bias)
        torch.testing.assert_close(
            torch.autograd.grad(loss, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
        )


class Costs(Sizes):
    """Also multiplications in products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default):
            left, right = args[-2:]
            self.multiplications += left.numel() * right.shape[1]
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("tokens", "ids", "sum_dtype", "products"),
    [
        (256, 64, None, 3),
        (64, 256, None, 4),
        (256, 64, torch.bfloat16, 3),
        (64, 256, torch.bfloat16, 3),
    ],
)
def test_the_sum_over_tiles_is_that_of_the_smaller_side(
    tokens: int, ids: int, sum_dtype: torch.dtype | None, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer tokens than token ids logits are made twice, and no sum is as large as the weight. In bfloat16 that is the gradient."""
    width, tile = 32, 1024
    monkeypatch.setattr(linear, "_TILE_BYTES", 2 * tile)
    monkeypatch.setattr(linear, "_TILE_SHARE", 1000)
    monkeypatch.setattr(linear, "_ALIGNMENT", 1)
    monkeypatch.setattr(tiles, "_BLOCK_NUMEL", 1)
    hidden, weight, _, target = problem(tokens, width, ids, dtype=torch.bfloat16)
    with Costs() as costs:
        linear_cross_entropy(hidden, weight, target, sum_dtype=sum_dtype).backward()
    assert costs.multiplications == products * tokens * width * ids
    assert costs.largest[torch.bfloat16] == 256 * width, "a gradient"
    assert costs.largest[torch.float32] == (64 * width if sum_dtype is None else 4 * tokens), "the sum, or statistics"
    logits = (hidden @ weight.T).double()
    factors = torch.autograd.grad(eager_loss(logits, target, "mean", 0, 0), logits)[0]
    for found, expected in ((weight.grad, factors.T @ hidden.double()), (hidden.grad, factors @ weight.double())):
        torch.testing.assert_close(found.double(), expected, rtol=0.02 if sum_dtype is None else 0.1, atol=0.002)


@pytest.mark.parametrize("tokens", [T, 2 * V])
def test_a_second_backward_computes_again_what_the_first_has_taken(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_TILE_BYTES", 8 * T)
    monkeypatch.setattr(linear, "_ALIGNMENT", 1)
    inputs = problem(tokens, H, V)
    loss = linear_cross_entropy(inputs[0], inputs[1], inputs[3], bias=inputs[2], z_loss=0.01)
    versions = [each._version for each in inputs]
    first = torch.autograd.grad(loss, inputs[:3], torch.tensor(3.0), retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, inputs[:3], torch.tensor(-1.0), retain_graph=True)
    for one, copy, other in zip(first, kept, second, strict=True):
        assert torch.equal(one, copy)  # nobody wrote to what was handed out
        torch.testing.assert_close(one, -3 * other)
    assert [each._version for each in inputs] == versions


def test_the_mean_over_nothing_is_zero_and_keeps_the_graph() -> None:
    hidden, weight, _, target = problem(T, H, V)
    for reduction in ("mean", "sum"):
        loss = linear_cross_entropy(hidden, weight, torch.full_like(target, IGNORED), reduction=reduction)
        assert loss == 0
        assert not any(grad.any() for grad in torch.autograd.grad(loss, (hidden, weight)))


def test_without_gradients_nothing_but_the_loss_is_computed() -> None:
    hidden, weight, _, target = problem(T, H, V)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, eager_loss(hidden @ weight.T, target, "mean", 0, 0).detach())
    assert torch.equal(linear_cross_entropy(hidden.detach(), weight.detach(), target), loss)


def test_low_precision_weights_get_sums_of_float32_rounded_once() -> None:
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1024, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, target, token_chunk=1, reduction="sum").backward()
    assert weight.grad is not None
    assert weight.grad.is_contiguous()
    assert weight.grad.tolist() == [[-512.0], [512.0]]


def test_sums_are_in_bfloat16_where_that_is_asked_for() -> None:
    """Which shows by what is lost: 256 and 1 are 256. So in both ways, by logits made once and made again."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1024, dtype=torch.int64)
    options: dict[str, Any] = {"token_chunk": 1, "sum_dtype": torch.bfloat16}
    losses = (
        linear_cross_entropy(hidden, weight, target, reduction="sum", **options),
        linear_cross_entropy(hidden, weight, target, reduction="none", **options).sum(),
        -linear_logprobs(hidden, weight, target, **options).sum(),
    )
    for loss in losses:
        assert torch.autograd.grad(loss, weight)[0].tolist() == [[-128.0], [128.0]]


def test_sums_to_hidden_states_are_in_bfloat16_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token and a tile for each token id: 1 / 1024 is lost once the sum is 1 / 4."""
    monkeypatch.setattr(linear, "_TILE_BYTES", 2)
    monkeypatch.setattr(linear, "_TILE_SHARE", 1 << 20)
    monkeypatch.setattr(linear, "_ALIGNMENT", 1)
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(1024, 1, dtype=torch.bfloat16).index_fill(0, torch.tensor(0), 0)
    target = torch.zeros(1, dtype=torch.int64)
    for dtype, expected in ((None, 1.0), (torch.bfloat16, 0.25)):
        for function, sign in ((partial(linear_cross_entropy, reduction="none"), 1), (linear_logprobs, -1)):
            (grad,) = torch.autograd.grad(function(hidden, weight, target, sum_dtype=dtype), hidden)
            assert grad.item() == sign * expected


def test_without_gradients_nothing_is_said_of_sums() -> None:
    hidden, weight, _, target = problem(T, H, V, dtype=torch.float32)
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, target, sum_dtype=torch.bfloat16)
        assert torch.equal(found, linear_cross_entropy(hidden, weight, target))


def test_gradients_to_weights_in_float32_are_scaled_in_float32() -> None:
    """After the sum became as wide. That the scale itself is not rounded shows on CUDA only: tests/gpu/test_ops.py."""
    hidden, weight, _, target = problem(7 * 64, 8, 11, dtype=torch.bfloat16)
    target.fill_(3)
    wide = weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (None, torch.bfloat16):
            sums, means = (
                torch.autograd.grad(
                    linear_cross_entropy(hidden, wide, target, token_chunk=128, sum_dtype=dtype, reduction=reduction),
                    (hidden, wide),
                )
                for reduction in ("sum", "mean")
            )
            assert [grad.dtype for grad in means] == [torch.bfloat16, torch.float32]
            for total, mean in zip(sums, means, strict=True):
                assert torch.equal(mean, (total.float() * torch.tensor(1 / len(target))).to(mean.dtype))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("masked", [[3], range(V)], ids=["one", "all"])
def test_losses_and_gradients_of_masked_targets_are_those_of_plain_pytorch(reduction: str, masked: list[int]) -> None:
    """Infinite, and not a number where every token id is masked."""
    hidden, weight, _, target = problem(T, H, V)
    target[1] = 3
    bias = torch.zeros(V, dtype=torch.float64).index_fill(0, torch.tensor(masked), -torch.inf)
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, reduction=reduction)
    expected = eager_loss(eager_logits(hidden, weight, bias, 1.0, None), target, reduction, 0, 0)
    assert not expected.isfinite().all()
    torch.testing.assert_close(loss, expected, equal_nan=True)
    (grad,), (wanted,) = (torch.autograd.grad(each.sum(), hidden) for each in (loss, expected))
    ignored = target == IGNORED  # where all is masked plain PyTorch has no numbers for them either
    torch.testing.assert_close(grad[~ignored], wanted[~ignored], equal_nan=True)
    assert not grad[ignored].any()


@pytest.mark.parametrize("chunk", [None, 1024])
def test_sums_in_float16_do_not_overflow_before_they_are_divided_by_the_number_of_tokens(chunk: int | None) -> None:
    """The sum over tokens is larger than 65,504, in one tile and in one of two; their mean is not."""
    hidden, weight, _, target = problem(2048, 4, 8, dtype=torch.float16)
    with torch.no_grad():
        hidden.add_(200)
        weight.mul_(0.001)
        target.fill_(3)
    inputs = (hidden, weight)
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, token_chunk=chunk), inputs)
    assert [grad.dtype for grad in found] == [torch.float16] * 2
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = torch.autograd.grad(eager_loss(exact[0] @ exact[1].T, target, "mean", 0, 0), exact)
    assert float(expected[1].abs().max()) * 1024 > torch.finfo(torch.float16).max
    for grad, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=5e-3, atol=1e-6)


def test_a_large_gradient_is_narrowed_in_its_own_memory_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_NARROWING_NUMEL", 7)  # parts that end inside rows
    hidden, weight, _, target = problem(64, 6, 9, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, target, token_chunk=16)
    (to_weight,) = torch.autograd.grad(loss, weight)
    logits = (hidden @ weight.T).double()
    factors = torch.autograd.grad(eager_loss(logits, target, "mean", 0, 0), logits)[0]
    exact = factors.T @ hidden.double()
    torch.testing.assert_close(to_weight.double(), exact, rtol=0.02, atol=0.002)


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_may_be_recomputed(reentrant: bool) -> None:
    hidden, weight, _, target = problem(T, H, V)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.tanh(), weight, target, token_chunk=4)

    inputs = (hidden, weight)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    checkpoint(loss, *inputs, use_reentrant=reentrant).backward()
    assert torch.equal(hidden.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])
