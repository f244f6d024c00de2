"""A vocabulary in equal parts on 2 and 4 ranks: the results of one rank, from one exchange."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from itertools import product

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mfsdp.ops import chunked_logprobs, linear_cross_entropy, linear_logprobs
from tests.engine.worlds import by_world, check
from tests.ops.reference import LARGE, eager_logits, eager_logprobs, eager_loss, large_logits, problem

T, H, V = 11, 5, 16


class Collectives(TorchDispatchMode):
    """Counts c10d's operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def exactly(**expected):
    with Collectives() as collectives:
        yield
    assert collectives.counts == Counter(expected), collectives.counts


def whole_and_part(rank, world):
    hidden, weight, bias, target = problem(T, H, V)
    ids = slice(rank * V // world, (rank + 1) * V // world)
    part = [hidden.detach().clone(), weight[ids].detach().clone(), bias[ids].detach().clone()]
    return (hidden, weight, bias), [tensor.requires_grad_() for tensor in part], target, ids


def log_probabilities_and_entropies_of_a_linear_layer(rank, world):
    """Targets lie in every part, so for most ranks they lie outside their own."""
    whole, part, target, ids = whole_and_part(rank, world)
    assert {int(t) * world // V for t in target if t >= 0} == set(range(world))
    upstream = torch.randn(2, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for (temperature, softcap), chunk in product(((1.0, None), (0.7, 3.0)), (None, 1, 4)):
        with exactly(allgather_base=1):
            found = torch.stack(
                linear_logprobs(
                    part[0],
                    part[1],
                    target,
                    bias=part[2],
                    temperature=temperature,
                    softcap=softcap,
                    token_chunk=chunk,
                    vocab_group=dist.group.WORLD,
                    return_entropy=True,
                )
            )
        expected = torch.stack(eager_logprobs(eager_logits(*whole, temperature, softcap), target))
        torch.testing.assert_close(found, expected)
        with exactly(allreduce=1):
            to_hidden, to_weight, to_bias = torch.autograd.grad(found, part, upstream)
        wanted = torch.autograd.grad(expected, whole, upstream)
        torch.testing.assert_close((to_hidden, to_weight, to_bias), (wanted[0], wanted[1][ids], wanted[2][ids]))
    every = [torch.empty_like(found) for _ in range(world)]
    dist.all_gather(every, found.detach())
    assert all(torch.equal(found, other) for other in every)


def log_probabilities_of_logits(rank, world):
    whole, _, target, ids = whole_and_part(rank, world)
    logits = eager_logits(*whole, 1.0, None).detach().requires_grad_()
    own = logits.detach()[:, ids].requires_grad_()  # not contiguous
    with exactly(allgather_base=1):
        found = chunked_logprobs(own, target, vocab_group=dist.group.WORLD, return_entropy=True)
    expected = eager_logprobs(logits, target)
    torch.testing.assert_close(found, expected)
    with exactly():
        (grad,) = torch.autograd.grad(found[0].sum() - found[1].square().sum(), own)
    (wanted,) = torch.autograd.grad(expected[0].sum() - expected[1].square().sum(), logits)
    torch.testing.assert_close(grad, wanted[:, ids])


def entropies_of_large_logits(rank, world):
    """In float32 against float64: shares of parts that do not add up to 1, times means, would be wrong by the logits' square."""
    for offset, temperature in LARGE:
        logits, target, rounding = large_logits(offset, temperature)
        ids = slice(rank * 64 // world, (rank + 1) * 64 // world)
        exact, own = logits.detach().double().requires_grad_(), logits.detach()[:, ids].requires_grad_()
        options = {"temperature": temperature, "vocab_group": dist.group.WORLD, "return_entropy": True}
        results = chunked_logprobs(own, target, **options)
        assert (results[1] >= 0).all()
        for found, wanted in zip(results, eager_logprobs(exact / temperature, target), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=4 * rounding)
            (grad,) = torch.autograd.grad(found.sum(), own, retain_graph=True)
            (expected,) = torch.autograd.grad(wanted.sum(), exact, retain_graph=True)
            torch.testing.assert_close(grad.double(), expected[:, ids], rtol=0, atol=4 * rounding / temperature)


def log_probabilities_of_masked_ids(rank, world):
    """A whole part is masked; where all of them are, results are not a number."""
    logits, target, _ = large_logits(0.0, 1.0)
    logits = logits.detach()
    logits[:, : 64 // world] = -torch.inf
    logits[:4] = -torch.inf
    target[:2] = -100
    own = logits[:, rank * 64 // world : (rank + 1) * 64 // world].requires_grad_()
    found = chunked_logprobs(own, target, vocab_group=dist.group.WORLD)
    expected = eager_logprobs(logits, target)[0]
    assert {bool(expected.isnan().any()), bool(expected.isneginf().any())} == {True}
    torch.testing.assert_close(found, expected.where(target >= 0, 0), equal_nan=True)
    (grad,) = torch.autograd.grad(found.sum(), own)
    assert grad.isnan().any(1).nonzero().tolist() == [[2], [3]]


def losses_with_smoothing_over_the_whole_vocabulary(rank, world):
    whole, part, target, ids = whole_and_part(rank, world)
    for reduction in ("mean", "sum", "none"):
        with exactly(allgather_base=1):
            loss = linear_cross_entropy(
                part[0],
                part[1],
                target,
                bias=part[2],
                vocab_group=dist.group.WORLD,
                reduction=reduction,
                label_smoothing=0.1,
                z_loss=0.01,
            )
        expected = eager_loss(eager_logits(*whole, 1.0, None), target, reduction, 0.1, 0.01)
        torch.testing.assert_close(loss, expected)
        grads = torch.autograd.grad(loss.sum(), part)
        wanted = torch.autograd.grad(expected.sum(), whole)
        torch.testing.assert_close(grads, (wanted[0], wanted[1][ids], wanted[2][ids]))


CASES = (
    log_probabilities_and_entropies_of_a_linear_layer,
    log_probabilities_of_logits,
    entropies_of_large_logits,
    log_probabilities_of_masked_ids,
    losses_with_smoothing_over_the_whole_vocabulary,
)
WORLDS = {2: CASES, 4: CASES}


@by_world(WORLDS)
def test_a_split_vocabulary(world, case):
    check(WORLDS, world, case)
