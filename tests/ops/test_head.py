"""LinearLossHead under fully_shard: gathered once in forward and once in backward, right in both, tied or not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, unshard
from lightning_mfsdp.ops import LinearLossHead, linear_logprobs
from tests.engine.internals import context_of
from tests.engine.test_collective_counts import Dispatched
from tests.engine.worlds import by_world, check
from tests.helpers.pairwise import pairwise
from tests.ops.reference import IGNORED, eager_logprobs

VOCAB, DIM = 19, 6


class Model(nn.Module):
    """Embedding, one layer, and two heads, so that the first is given back before its backward."""

    def __init__(self, tied: bool, output: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.body = nn.Linear(DIM, DIM)
        self.head = LinearLossHead(DIM, VOCAB, bias=not tied, token_chunk=4)
        self.last = LinearLossHead(DIM, VOCAB, temperature=0.5)
        self.output = output
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(self.embedding(ids)).tanh()
        first = self.head(hidden, target, self.output)
        if self.output == "logprobs_and_entropy":
            first = -(first[0].mean() + 0.1 * first[1].mean())
        return first + self.last(hidden, target)

    def units(self) -> list[nn.Module]:
        return [self.embedding, self.body, self.head, self.last]


def eager(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """The same by plain PyTorch."""
    hidden = model.body(model.embedding(ids)).tanh()
    logits = nn.functional.linear(hidden, model.head.weight, model.head.bias)
    if model.output == "logprobs_and_entropy":
        logprobs, entropy = eager_logprobs(logits, target)
        first = -(logprobs.mean() + 0.1 * entropy.mean())
    else:
        first = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    last = nn.functional.linear(hidden, model.last.weight) / 0.5
    return first + nn.functional.cross_entropy(last.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("output", ["loss", "logprobs"])
def test_sums_are_in_the_dtype_that_the_head_was_given(output: str) -> None:
    """256 and 1 are 256 in bfloat16."""
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16)
    target = torch.zeros(1024, dtype=torch.int64)
    for dtype, expected in ((None, 512.0), (torch.bfloat16, 128.0)):
        head = LinearLossHead(1, 2, token_chunk=1, sum_dtype=dtype, reduction="sum", dtype=torch.bfloat16)
        nn.init.zeros_(head.weight)
        head(hidden, target, output).sum().backward()
        assert head.weight.grad.abs().flatten().tolist() == [expected, expected]


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids, target = torch.randint(VOCAB, (2, 2, 5), generator=generator)
    target[0, 1] = IGNORED
    return ids, target


def build(tied: bool, output: str) -> Model:
    torch.manual_seed(0)
    return Model(tied, output)


def heads_are_gathered_once_in_forward_and_once_in_backward(rank, world):
    for tied, output, storage in pairwise((False, True), ("loss", "logprobs_and_entropy"), ("pooled", "dynamic")):
        model = build(tied, output)
        for unit in (*model.units(), model):
            fully_shard(unit, storage=storage)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
        counts, context = [], context_of(model)
        for step in range(3):
            gathers = context.lane.started
            with Dispatched() as dispatched:
                loss = model(*batch(rank + world * step))
            in_forward, calls = context.lane.started - gathers, dispatched.calls.total()
            reductions = context.reductions.started
            with Dispatched() as dispatched:
                loss.backward()
            in_backward = context.lane.started - gathers - in_forward
            counts.append(
                (in_forward, calls, in_backward, dispatched.calls.total() - (context.reductions.started - reductions))
            )
            optimizer.step()
            optimizer.zero_grad()
        # Forward: embedding (with the tied weight), body, head, last. Backward: head and body; `last` never left, a lookup needs no
        # weight, and the ranks ask each other which parameters were used. A tied head needs the embedding's group, which it gathers, and it
        # has no parameter of its own.
        assert counts[1:] == [(4, 4, 2, 3)] * 2, (tied, output, storage, counts)
        plain = build(tied, output)
        reference = torch.optim.SGD(plain.parameters(), lr=0.3)
        for step in range(3):
            sum(eager(plain, *batch(other + world * step)) / world for other in range(world)).backward()
            reference.step()
            reference.zero_grad()
        with unshard(model):
            for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
                case = f"{name} {tied} {output} {storage}"
                torch.testing.assert_close(found, expected, msg=lambda text, case=case: f"{case}: {text}")


def a_head_computes_in_the_dtype_of_its_unit(rank, world):
    model = build(False, "loss")
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    for unit in (*model.units(), model):
        fully_shard(unit, policy=policy)
    seen = []
    model.head.register_forward_pre_hook(lambda head, args: seen.append((args[0].dtype, head.weight.dtype)))
    loss = model(*batch(rank))
    loss.backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, eager(build(False, "loss"), *batch(rank)), rtol=0.02, atol=0.02)


def a_sharded_weight_outside_its_unit_is_refused(rank, world):
    model = build(False, "loss")
    for unit in (*model.units(), model):
        fully_shard(unit)
    hidden, target = torch.randn(3, DIM), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="the weight is sharded, and this rank has only some of its rows"):
        linear_logprobs(hidden, model.head.weight, target)
    with unshard(model):
        linear_logprobs(hidden, model.head.weight, target)
    dist.barrier()


WORLDS = {
    2: (
        heads_are_gathered_once_in_forward_and_once_in_backward,
        a_head_computes_in_the_dtype_of_its_unit,
        a_sharded_weight_outside_its_unit_is_refused,
    )
}


@by_world(WORLDS)
def test_a_head_under_fully_shard(world, case):
    check(WORLDS, world, case)


def test_a_head_without_targets_gives_the_logits_that_its_probabilities_are_of():
    head = LinearLossHead(DIM, VOCAB, bias=True, temperature=0.5, softcap=2.0)
    hidden, target = torch.randn(2, 5, DIM), torch.randint(VOCAB, (2, 5))
    logprobs, entropy = head(hidden, target, "logprobs_and_entropy")
    torch.testing.assert_close((logprobs, entropy), eager_logprobs(head(hidden), target))
    assert torch.equal(head(hidden, target, "logprobs"), logprobs)
    torch.testing.assert_close(head(hidden, target), -logprobs.mean())
