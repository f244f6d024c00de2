"""Log-probabilities and entropies: equal to plain PyTorch in values and gradients, whatever the tiles, and nothing saved is written to."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mfsdp.ops import chunked_logprobs, linear, linear_logprobs, tiles
from tests.helpers.nights import NIGHT
from tests.ops.reference import IGNORED, LARGE, eager_logits, eager_logprobs, large_logits, problem

T, H, V = 11, 5, 13
CHUNKS = (1, 4, T, 100)
SHAPINGS = ((1.0, None), (0.7, 3.0))


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Automatic tiles of a few numbers, and the reference a row at a time."""
    monkeypatch.setattr(linear, "_TILE_BYTES", 8 * 3 * T)
    monkeypatch.setattr(linear, "_TILE_SHARE", 1 << 30)
    monkeypatch.setattr(linear, "_ALIGNMENT", 1)
    monkeypatch.setattr(tiles, "_BLOCK_NUMEL", 1)


def assert_same_gradients(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    torch.testing.assert_close(results, expected)
    upstream = [torch.randn_like(each) for each in expected]
    torch.testing.assert_close(
        torch.autograd.grad(results, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_gradients_of_both_results_are_right_in_every_direction(chunk: int) -> None:
    tokens = T if chunk > 1 or NIGHT else 4
    hidden, weight, bias, target = problem(tokens, H, V)
    for temperature, softcap in SHAPINGS if chunk > 1 or NIGHT else SHAPINGS[1:]:
        options = {"temperature": temperature, "softcap": softcap, "token_chunk": chunk, "return_entropy": True}
        assert torch.autograd.gradcheck(
            lambda *inputs, options=options: linear_logprobs(*inputs[:2], target, bias=inputs[2], **options),
            (hidden, weight, bias),
        )
        logits = eager_logits(hidden, weight, bias, 1.0, None).detach().requires_grad_()
        assert torch.autograd.gradcheck(lambda x, options=options: chunked_logprobs(x, target, **options), (logits,))


@pytest.mark.parametrize(("tokens", "vocab"), [(T, V), (V, T)], ids=["vocabulary in parts", "tokens in parts"])
def test_automatic_tiles_give_what_one_tile_gives(tokens: int, vocab: int, tiny_tiles: None) -> None:
    hidden, weight, bias, target = problem(tokens, H, vocab)
    tiling = linear.Tiling.for_gradients(hidden, weight, None)
    assert (tiling.tokens < tokens) != (tiling.vocabulary < vocab)
    for (temperature, softcap), with_bias in product(SHAPINGS, (False, True)):
        inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
        results = linear_logprobs(
            hidden,
            weight,
            target,
            bias=bias if with_bias else None,
            temperature=temperature,
            softcap=softcap,
            return_entropy=True,
        )
        logits = eager_logits(hidden, weight, bias if with_bias else None, temperature, softcap)
        assert_same_gradients(results, eager_logprobs(logits, target), inputs)


def test_logits_of_a_batch_without_its_last_column_are_not_copied(tiny_tiles: None) -> None:
    whole = torch.randn(3, 5, V, dtype=torch.float64, requires_grad=True)
    target = torch.randint(V, (3, 4))
    target[1, 1] = IGNORED
    logits = whole[:, :-1]
    for chunk in (None, 1, 3):
        results = chunked_logprobs(logits, target, token_chunk=chunk, return_entropy=True)
        assert_same_gradients(results, eager_logprobs(logits, target), [whole])
    columns_apart = whole.transpose(1, 2)
    target = torch.randint(5, (3, V))
    assert_same_gradients(
        (chunked_logprobs(columns_apart, target),), eager_logprobs(columns_apart, target)[:1], [whole]
    )


def test_the_seeds_bug_entropy_and_log_probability_share_logits_and_neither_overwrites_them() -> None:
    """A backward that leaves its gradient in the saved logits fails the other's version check, or falsifies its gradient."""
    logits = torch.randn(2, 6, V, dtype=torch.float64, requires_grad=True)
    target = torch.randint(V, (2, 6))

    def another_consumer(computed: Tensor) -> Tensor:
        return (
            computed.softmax(-1).log().square().mean() + computed.square().mean()
        )  # both save it, or a function of it

    found = []
    for chunk in (1, 5, 100):
        computed = logits * 1.0  # as a model's output: not a leaf, and saved by everybody
        before = computed._version
        logprobs, entropy = chunked_logprobs(computed, target, token_chunk=chunk, return_entropy=True)
        loss = logprobs.mean() - 0.1 * entropy.mean() + another_consumer(computed)
        found.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
        assert torch.equal(torch.autograd.grad(loss, logits)[0], found[-1])
        assert computed._version == before
    logprobs, entropy = eager_logprobs(logits, target)
    expected = torch.autograd.grad(logprobs.mean() - 0.1 * entropy.mean() + another_consumer(logits), logits)[0]
    for grad in found:
        torch.testing.assert_close(grad, expected)


def test_inputs_stay_as_they_are_and_a_kept_graph_gives_the_same_again() -> None:
    hidden, weight, bias, target = problem(T, H, V, dtype=torch.float32)
    inputs = [hidden, weight, bias]
    versions = [each._version for each in (*inputs, target)]
    results = linear_logprobs(hidden, weight, target, bias=bias, token_chunk=3, return_entropy=True)
    total = results[0].sum() + results[1].square().sum()
    first, second = (torch.autograd.grad(total, inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert [each._version for each in (*inputs, target)] == versions
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("chunk", [None, 4])
def test_ignored_tokens_have_no_gradient_and_keep_the_graph(chunk: int | None) -> None:
    hidden, weight, bias, target = problem(T, H, V)
    logprobs, entropy = linear_logprobs(hidden, weight, target, bias=bias, token_chunk=chunk, return_entropy=True)
    (to_hidden,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)
    ignored = target == IGNORED
    assert not logprobs[ignored].any()
    assert not entropy[ignored].any()
    assert torch.equal((to_hidden == 0).all(1), ignored)
    everywhere = torch.full_like(target, IGNORED)
    results = linear_logprobs(hidden, weight, everywhere, bias=bias, token_chunk=chunk, return_entropy=True)
    assert not torch.stack(results).any()
    grads = torch.autograd.grad(results[0].sum() + results[1].sum(), (hidden, weight, bias))
    assert [tuple(grad.shape) for grad in grads] == [(T, H), (V, H), (V,)]
    assert not any(grad.any() for grad in grads)


def test_an_entropy_that_is_only_looked_at_has_no_gradient() -> None:
    hidden, weight, _, target = problem(T, H, V)
    logprobs, entropy = linear_logprobs(hidden, weight, target, return_entropy=True, entropy_requires_grad=False)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, eager_logprobs(hidden @ weight.T, target)[1].detach())


def test_no_tokens_at_all_give_gradients_of_zero() -> None:
    hidden, weight, _, target = problem(0, H, V)
    grads = torch.autograd.grad(linear_logprobs(hidden, weight, target).sum(), (hidden, weight))
    assert grads[0].shape == (0, H)
    assert torch.equal(grads[1], torch.zeros(V, H))


def test_leading_dims_of_hidden_states_are_those_of_the_results() -> None:
    hidden, weight, _, target = problem(12, H, V)
    flat = linear_logprobs(hidden, weight, target)
    assert torch.equal(linear_logprobs(hidden.view(3, 4, H), weight, target.view(3, 4)), flat.view(3, 4))


class Sizes(TorchDispatchMode):
    """Elements of the largest tensors that operations make or write, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, Tensor):
                self.largest[result.dtype] = max(self.largest.get(result.dtype, 0), result.numel())
        return results


def test_there_are_never_more_logits_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocab, chunk = 64, 96, 8
    monkeypatch.setattr(tiles, "_BLOCK_NUMEL", chunk * vocab)
    hidden, weight, bias, target = problem(tokens, 4, vocab, dtype=torch.bfloat16)
    with Sizes() as sizes:
        results = linear_logprobs(hidden, weight, target, bias=bias, token_chunk=chunk, return_entropy=True)
        torch.stack(results).sum().backward()
    assert sizes.largest[torch.bfloat16] == chunk * vocab
    assert sizes.largest[torch.float32] == chunk * vocab
    assert sizes.largest[torch.int64] <= tokens  # no one-hot
    logits = F.linear(hidden, weight).detach().requires_grad_()
    with Sizes() as sizes:
        torch.stack(chunked_logprobs(logits, target, return_entropy=True)).sum().backward()
    assert sizes.largest[torch.bfloat16] == tokens * vocab  # the gradient, in the logits' dtype
    assert sizes.largest[torch.float32] == chunk * vocab


def test_sums_over_tiles_are_float32(tiny_tiles: None) -> None:
    """Each of 1,024 tiles adds one half; in bfloat16 the sum would never pass 128."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1024, dtype=torch.int64)
    linear_logprobs(hidden, weight, target, token_chunk=1).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    assert weight.grad.tolist() == [[512.0], [-512.0]]


def test_masked_token_ids_have_no_probability_and_no_gradient() -> None:
    """A bias of minus infinity, as for rows that only pad the vocabulary: 0 * log 0 is 0."""
    hidden, weight, _, _ = problem(T, H, V)
    bias = torch.zeros(V, dtype=torch.float64)
    bias[-2:] = -torch.inf
    target = torch.randint(V - 2, (T,))
    results = linear_logprobs(hidden, weight, target, bias=bias, return_entropy=True)
    expected = eager_logprobs(hidden @ weight[:-2].T, target)
    assert_same_gradients(results, expected, [hidden, weight])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_masked_target_has_a_probability_of_zero_and_the_gradient_of_plain_pytorch(dtype: torch.dtype) -> None:
    hidden, weight, _, target = problem(T, H, V, dtype=dtype)
    bias = torch.zeros(V, dtype=dtype)
    bias[-2:] = -torch.inf
    target[1] = V - 1
    results, grads = [], []
    for logprobs in (
        linear_logprobs(hidden, weight, target, bias=bias, temperature=0.7, token_chunk=4),
        eager_logprobs(eager_logits(hidden, weight, bias, 0.7, None), target)[0],
    ):
        results.append(logprobs)
        grads.append(torch.autograd.grad(logprobs.sum(), (hidden, weight)))
    assert results[0][1] == -torch.inf
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_rows_without_any_probability_are_not_a_number_but_where_they_are_ignored() -> None:
    logits = torch.randn(4, V)
    logits[1:3] = -torch.inf
    logits.requires_grad_()
    target = torch.tensor([0, 1, IGNORED, 3])
    for result in chunked_logprobs(logits, target, return_entropy=True):
        assert result.isnan().tolist() == [False, True, False, False]
        assert result[2] == 0
        (grad,) = torch.autograd.grad(result.sum(), logits, retain_graph=True)
        assert grad.isnan().all(1).tolist() == grad.isnan().any(1).tolist() == [False, True, False, False]
        assert not grad[2].any()


def test_what_is_not_a_number_is_not_hidden() -> None:
    hidden, weight, _, target = problem(T, H, V)
    with torch.no_grad():
        hidden[1, 0] = torch.nan
    logprobs, entropy = linear_logprobs(hidden, weight, target, token_chunk=2, return_entropy=True)
    assert logprobs.isnan().nonzero().tolist() == entropy.isnan().nonzero().tolist() == [[1]]


@pytest.mark.parametrize(("offset", "temperature"), LARGE)
def test_entropies_of_large_logits_are_wrong_by_a_rounding_of_them_and_never_negative(
    offset: float, temperature: float
) -> None:
    """Against float64. Probabilities that do not add up to 1, times logits, would be wrong by the logits' square."""
    logits, target, rounding = large_logits(offset, temperature)
    exact = logits.detach().double().requires_grad_()
    results = chunked_logprobs(logits, target, temperature=temperature, return_entropy=True)
    expected = eager_logprobs(exact / temperature, target)
    assert (results[1] >= 0).all()
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2 * rounding)
        grads = [
            torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each, x in ((found, logits), (wanted, exact))
        ]
        torch.testing.assert_close(grads[0].double(), grads[1], rtol=0, atol=2 * rounding / temperature)


def test_gradients_of_entropies_at_a_low_temperature_are_nearly_as_good_as_those_of_plain_pytorch() -> None:
    hidden, weight, _, target = problem(64, 32, 500, dtype=torch.float32)
    results, errors = [], []
    for dtype in (torch.float64, torch.float32):
        inputs = [each.detach().to(dtype).requires_grad_() for each in (hidden, 1.5 * weight)]
        entropy = eager_logprobs(inputs[0] @ inputs[1].T / 0.1, target)[1]
        results.append(torch.autograd.grad(entropy.sum(), inputs))
    entropy = linear_logprobs(*inputs, target, temperature=0.1, return_entropy=True)[1]
    results.append(torch.autograd.grad(entropy.sum(), inputs))
    for grads in results[1:]:
        errors.append([float((f - e).norm() / e.norm()) for f, e in zip(grads, results[0], strict=True)])
    for eager, own in zip(*errors, strict=True):
        assert own < 5 * eager < 1e-3, errors


def test_autocast_computes_in_its_dtype_and_saves_the_parameter_and_not_a_copy() -> None:
    hidden, weight, bias, target = problem(T, H, V, dtype=torch.float32)
    saved: list[Tensor] = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        logprobs = linear_logprobs(hidden, weight, target, bias=bias)
        expected, _ = eager_logprobs(F.linear(hidden, weight, bias).float(), target)
    torch.testing.assert_close(logprobs, expected)
    assert logprobs.dtype is torch.float32
    assert any(x.data_ptr() == weight.data_ptr() and x.dtype is torch.float32 for x in saved)
    results = torch.autograd.grad(logprobs.sum(), (hidden, weight, bias))
    assert {grad.dtype for grad in results} == {torch.float32}
    torch.testing.assert_close(
        results, torch.autograd.grad(expected.sum(), (hidden, weight, bias)), rtol=0.05, atol=0.05
    )


def test_frozen_weights_cost_no_gradient() -> None:
    hidden, weight, bias, target = problem(T, H, V, dtype=torch.float32)
    frozen = weight.detach()
    with Sizes() as sizes:
        linear_logprobs(hidden, frozen, target, token_chunk=1).sum().backward()
    assert sizes.largest[torch.float32] == max(T * H, V * H)  # the latter: a view of the weight, transposed
    assert hidden.grad is not None
    linear_logprobs(hidden.detach(), frozen, target, bias=bias).sum().backward()
    assert bias.grad is not None


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # PyTorch's, where it goes on compiling
def test_a_compiled_caller_gets_the_same() -> None:
    hidden, weight, _, target = problem(T, H, V)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs, entropy = linear_logprobs(hidden * 2, weight, target, token_chunk=4, return_entropy=True)
        return (logprobs + entropy).square().sum()

    compiled = torch.compile(loss, backend="aot_eager")
    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(compiled(hidden, weight), (hidden, weight)), expected)
