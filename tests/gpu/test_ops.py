"""Log-probabilities and losses on one GPU: Triton against its PyTorch reference, and memory that does not grow with the logits."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_mfsdp.ops import chunked_logprobs, linear, linear_cross_entropy, linear_logprobs
from lightning_mfsdp.ops.choice import math_for
from lightning_mfsdp.ops.tiles import LSE, NUMBERS, TOTAL, Shaping, TorchMath
from tests.helpers.distributed import needs_gpus
from tests.ops.reference import eager_logits, eager_logprobs, eager_loss, problem

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

SHAPINGS = (Shaping(), Shaping(temperature=0.7), Shaping(temperature=1.3, softcap=5.0))
COLUMNS = (1, 5, 1000, 4096, 4097, 32_003)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_compute_what_their_reference_computes(dtype: torch.dtype) -> None:
    """In poisoned memory, from rows with gaps between them, for targets inside and outside the tile."""
    pytest.importorskip("triton")
    generator = torch.Generator("cuda").manual_seed(0)
    for columns, shaping, first_id in product(COLUMNS, SHAPINGS, (0, 17)):
        rows = 7
        memory = poisoned(rows, columns + 3, dtype=dtype)
        logits = memory[:, :columns]
        logits.copy_(4 * torch.randn(rows, columns, device="cuda", generator=generator))
        if columns > 1:
            logits[3, -1] = -torch.inf
        target = torch.randint(first_id, first_id + columns, (rows,), device="cuda", generator=generator)
        target[0], target[1] = -100, first_id + columns
        kernels, reference = math_for(logits), TorchMath()
        assert type(kernels) is not TorchMath
        found, expected = (poisoned(NUMBERS, rows, dtype=torch.float32) for _ in range(2))
        kernels.statistics(logits, target, shaping, first_id, out=found)
        reference.statistics(logits, target, shaping, first_id, out=expected)
        case = f"{columns} columns, {shaping}, first {first_id}"
        for number, absolute in ((slice(0, TOTAL), 2e-4), (slice(TOTAL, NUMBERS), 1e-5 * columns)):  # sums cancel out
            torch.testing.assert_close(
                found[number],
                expected[number],
                rtol=2e-5,
                atol=absolute,
                msg=lambda text, case=case: f"{case}: {text}",
            )
        factors = torch.randn(rows, NUMBERS, device="cuda", generator=generator).t()
        grad, wanted = (poisoned(rows, columns, dtype=dtype) for _ in range(2))
        reference.gradient(logits, target, expected[LSE], factors, shaping, first_id, out=wanted)
        kernels.gradient(logits, target, expected[LSE], factors, shaping, first_id, out=grad)
        kernels.gradient(logits, target, expected[LSE], factors, shaping, first_id, out=logits)
        assert torch.equal(logits, grad), case
        torch.testing.assert_close(grad, wanted, atol=1e-5, rtol=1.6e-2 if dtype is torch.bfloat16 else 2e-3)
        assert memory[:, columns:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_results_and_gradients_are_as_good_as_those_of_plain_pytorch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64: the error is at most that of eager PyTorch in the same dtype, and a little. Both kinds of tiles."""
    monkeypatch.setattr(linear, "_TILE_BYTES", 1 << 20)
    for tokens, vocab, softcap in ((700, 5003, None), (3001, 517, 30.0)):
        hidden, weight, bias, target = problem(tokens, 64, vocab, dtype=dtype, device="cuda")
        with torch.no_grad():
            weight.mul_(0.2)
        inputs = (hidden, weight, bias)
        exact_inputs = [each.detach().double().requires_grad_() for each in inputs]

        def objective(logprobs: Tensor, entropy: Tensor) -> Tensor:
            return logprobs.sum() - 0.3 * entropy.square().sum()

        def gradients(results: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
            return [*results, *torch.autograd.grad(objective(*results), inputs)]

        ours = linear_logprobs(hidden, weight, target, bias=bias, temperature=0.9, softcap=softcap, return_entropy=True)
        found = gradients(ours, inputs)
        eager = gradients(eager_logprobs(eager_logits(*inputs, 0.9, softcap).float(), target), inputs)
        exact = gradients(eager_logprobs(eager_logits(*exact_inputs, 0.9, softcap), target), exact_inputs)
        for index, (one, other, truth) in enumerate(zip(found, eager, exact, strict=True)):
            error, allowed = ((each.double() - truth).norm() / truth.norm() for each in (one, other))
            assert error < 1.5 * allowed + 1e-5, (index, error, allowed)


def test_losses_computed_in_forward_are_right_twice() -> None:
    inputs = problem(3000, 64, 5003, dtype=torch.bfloat16, device="cuda")
    hidden, weight, bias, target = inputs
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, token_chunk=512, label_smoothing=0.1, z_loss=1e-3)
    exact_inputs = [each.detach().double().requires_grad_() for each in inputs[:3]]
    expected = eager_loss(eager_logits(*exact_inputs, 1.0, None), target, "mean", 0.1, 1e-3)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-3, atol=0)
    wanted = torch.autograd.grad(expected, exact_inputs)
    for _ in range(2):
        found = torch.autograd.grad(loss, inputs[:3], retain_graph=True)
        for one, truth in zip(found, wanted, strict=True):
            assert (one.double() - truth).norm() < 0.02 * truth.norm()


@pytest.mark.parametrize("sum_dtype", [None, torch.bfloat16], ids=str)
def test_the_mean_of_an_odd_number_of_tokens_is_scaled_in_float32(sum_dtype: torch.dtype | None) -> None:
    """Rounded to bfloat16 1 / 2989 is off by 0.2 %, and so would all gradients be."""
    tokens = 2989
    hidden, weight, _, target = problem(tokens, 64, 517, dtype=torch.bfloat16, device="cuda")
    target.fill_(3)
    sums, means = (
        torch.autograd.grad(
            linear_cross_entropy(hidden, weight, target, token_chunk=512, sum_dtype=sum_dtype, reduction=reduction),
            (hidden, weight),
        )
        for reduction in ("sum", "mean")
    )
    for total, mean in zip(sums, means, strict=True):
        ratio = float((mean.double() * total.double()).sum() / total.double().square().sum())
        assert abs(ratio * tokens - 1) < 5e-4


def test_a_batch_of_logits_is_read_where_it_lies() -> None:
    whole = torch.randn(4, 65, 4099, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(4099, (4, 64), device="cuda")
    logits = whole[:, :-1] * 1
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = chunked_logprobs(logits, target, return_entropy=True)
    assert torch.cuda.max_memory_allocated() - before < logits.numel() * 2 / 20
    torch.testing.assert_close(results, eager_logprobs(logits.float(), target), rtol=1e-4, atol=1e-4)
    version = logits._version
    (found,) = torch.autograd.grad(results[0].sum() + results[1].sum(), whole)
    assert logits._version == version
    (expected,) = torch.autograd.grad(sum(x.sum() for x in eager_logprobs(whole[:, :-1].float(), target)), whole)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)


def test_a_target_outside_the_vocabulary_gives_no_number() -> None:
    hidden, weight, _, target = problem(8, 64, 128, dtype=torch.bfloat16, device="cuda")
    target[3] = 128
    assert linear_logprobs(hidden, weight, target).isnan().nonzero().tolist() == [[3]]


def peak(call, *inputs: Tensor) -> int:
    """Bytes above what the inputs take, in forward and backward, the gradients among them."""
    for each in inputs:
        each.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call().backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("tokens", "vocab"), [(32_768, 32_000), (8192, 128_256)])
def test_memory_is_that_of_gradients_one_sum_and_one_tile(tokens: int, vocab: int) -> None:
    width = 1024
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width, device="cuda")).bfloat16().requires_grad_()
    target = torch.randint(vocab, (tokens,), device="cuda")
    gradients = 2 * width * (tokens + vocab)
    tile = max(64 << 20, gradients // 4) * 1.1
    for_tokens = 64 * tokens  # a few numbers each
    linear_cross_entropy(hidden[:128], weight, target[:128]).backward()  # workspaces of the libraries
    # The sum in float32 takes the place of its result, so it counts twice the bytes of a bf16 gradient once.
    in_backward = gradients + 2 * width * min(tokens, vocab) + tile + for_tokens
    in_forward = gradients + 2 * width * vocab + tile + for_tokens
    with_entropy = peak(
        lambda: sum(x.sum() for x in linear_logprobs(hidden, weight, target, return_entropy=True)), hidden, weight
    )
    loss = peak(lambda: linear_cross_entropy(hidden, weight, target), hidden, weight)
    narrow = peak(lambda: linear_cross_entropy(hidden, weight, target, sum_dtype=torch.bfloat16), hidden, weight)
    assert with_entropy < in_backward
    assert loss < in_forward
    assert narrow < gradients + tile + for_tokens
    assert max(with_entropy, loss) < 0.35 * tokens * vocab * 2  # of the logits alone, in bf16
