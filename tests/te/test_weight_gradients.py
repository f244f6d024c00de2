"""Layers that add gradients of their weight to memory by themselves: the same numbers as through autograd, to the bit.

The layer obeys Transformer Engine's contract. Every buffer is full of NaN when its memory comes, so a cell that nobody wrote shows.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import EngineStateError, MixedPrecisionPolicy, fully_shard, no_sync, sharded_parameters
from lightning_mfsdp.te import fuse_weight_gradients, weight_gradients
from tests.engine.internals import gradient_memory, owner_of
from tests.engine.test_direct import poisoned
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES
from tests.helpers.hidden import Hidden
from tests.helpers.pairwise import in_turn

DIM, ROWS = 12, 4


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fused, ctx.origin = fused, weakref.ref(weight)
        if fused and weight.requires_grad:
            assert hasattr(weight, "__fsdp_param__")
            ctx.overwrites = getattr(weight, "overwrite_main_grad", False)
            ctx.memory = weight.get_main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        to_weight = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        if ctx.fused and to_weight is not None:
            memory = ctx.memory()
            ctx.origin().main_grad = memory
            if ctx.overwrites:
                memory.copy_(to_weight)
            else:
                memory.add_(to_weight)
            unwanted = hasattr(ctx.origin(), "grad_added_to_main_grad")
            to_weight = torch.full_like(to_weight, torch.nan) if unwanted else None
        return grad @ weight, to_weight, None


class FusedLinear(nn.Module):
    """Has several weights, all of which it uses, if `parts` says so."""

    def __init__(self, fused: bool, parts: int = 1) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fused
        for part in range(parts):
            weight = nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)
            weight.grad_added_to_main_grad = False  # some code sets it by itself
            setattr(self, f"weight{part}", weight)
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        for part in range(self.parts):
            x = _Product.apply(x, getattr(self, f"weight{part}"), self.fuse_wgrad_accumulation)
        return x + self.bias


class Net(nn.Module):
    """What is called how often is told per test: `calls[i]` times layer `i`."""

    def __init__(self, fused: bool, *, calls=(1, 1, 1), tied=False, recompute: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FusedLinear(fused, parts) for parts in (1, 2, 1))
        self.calls, self.recompute = calls, recompute
        if tied:
            self.layers[2].weight0 = self.layers[0].weight0

    def forward(self, x: Tensor) -> Tensor:
        for layer, calls in zip(self.layers, self.calls, strict=True):
            for _ in range(calls):
                kept = self.recompute is None
                x = x + torch.tanh(layer(x) if kept else checkpoint(layer, x, use_reentrant=self.recompute))
        return x


@contextmanager
def watched() -> Iterator[Counter]:
    """How often layers got memory of the buffer (`True`: to overwrite), and how often memory beside it."""
    seen: Counter = Counter()

    def memory(weight: Tensor, *, overwrites: bool) -> tuple[Tensor, bool]:
        found = gradient_memory(weight, overwrites=overwrites)
        seen["beside" if found[1] else overwrites] += 1
        if found[1]:
            found[0].fill_(torch.nan)
        return found

    with mock.patch.object(weight_gradients, "gradient_memory", memory):
        yield seen


def full_weights(model: nn.Module) -> list[nn.Parameter]:
    owners = [owner_of(parameter) for parameter in model.parameters()]
    return [owner[1].full for owner in owners if owner is not None]


def gradients(fused, rank, world, *, sharding, waits=(), steps=2, policy=None, frozen=(), calls=(1, 1, 1), **options):
    """Gradients after each microbatch that communicates, and what layers were given."""
    torch.manual_seed(0)
    model = Net(fused, calls=calls, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    policy = policy or MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, sharding=sharding, policy=policy)
    fully_shard(model, sharding=sharding, policy=policy)
    if fused:
        assert fuse_weight_gradients(model) == ["layers.0", "layers.1", "layers.2"]
    found, seen = [], []
    for step in range(steps):
        with poisoned(), watched() as counts:
            for micro, held in enumerate((*waits, False)):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                x = torch.randn(ROWS, DIM, generator=generator).requires_grad_()
                with no_sync(model) if held else nullcontext():
                    model(x).square().mean().backward()
                assert not any("main_grad" in vars(weight) for weight in full_weights(model)), "it would stay alive"
        seen.append(counts)
        for view in sharded_parameters(model):
            found.append((f"{step} {view.name}", None if view.grad is None else view.grad.clone()))
            view.dtensor.grad = None
    return found, seen


def same_as_through_autograd(rank, world, **options) -> list[Counter]:
    plain, _ = gradients(False, rank, world, **options)
    fused, seen = gradients(True, rank, world, **options)
    for (name, expected), (_, grad) in zip(plain, fused, strict=True):
        same = grad is None and expected is None if expected is None or grad is None else torch.equal(grad, expected)
        assert same, (name, options)
    return seen


def first_products_overwrite(rank, world):
    for sharding in in_turn(0, STRATEGIES):
        for waits in ((), (False,)):
            for seen in same_as_through_autograd(rank, world, sharding=sharding, waits=waits):
                if world == 1 and waits:  # the first microbatch's gradient is there already, in the same memory
                    continue
                assert seen == Counter({True: 4 * (1 + len(waits))}), (sharding, waits)


def later_products_add(rank, world):
    """Nothing is overwritten the first time it would be wrong, and from then on layers add."""
    for sharding in in_turn(1, STRATEGIES):
        first, second = same_as_through_autograd(rank, world, sharding=sharding, waits=(True, True))
        if world > 1:
            assert first["beside"] == 4, "the second microbatch finds the first one's"
            assert second == Counter({False: 12})
        first, second = same_as_through_autograd(rank, world, sharding=sharding, calls=(2, 1, 1))
        assert (first["beside"], first[True]) == (1, 4)
        assert second == Counter({False: 2, True: 3})
        for seen in same_as_through_autograd(rank, world, sharding=sharding, tied=True):
            assert seen == Counter({False: 2, True: 2}), "a weight of two layers is never overwritten"


def recomputed_frozen_and_unused_weights(rank, world):
    for sharding, recompute in product(STRATEGIES[1:], (False, True)):
        same_as_through_autograd(rank, world, sharding=sharding, recompute=recompute)
    for sharding in in_turn(2, STRATEGIES):
        same_as_through_autograd(rank, world, sharding=sharding, frozen=("layers.0.weight0", "layers.1.weight1"))
    for sharding in STRATEGIES[:3]:
        same_as_through_autograd(rank, world, sharding=sharding, calls=(1, rank, 1))  # on one rank alone


def buckets_of_another_dtype(rank, world):
    for wire, main in product((torch.bfloat16, torch.float32), repeat=2):
        policy = MixedPrecisionPolicy(grad_comm_dtype=wire, main_grads_dtype=main)
        same_as_through_autograd(rank, world, sharding="optim_grads_params", policy=policy)
    same_as_through_autograd(rank, world, sharding="optim", policy=MixedPrecisionPolicy(grad_reduce=3.0))


def weights_of_nobody(rank, world):
    """Layers with ignored weights leave gradients to autograd, unless somebody brought memory for them."""
    model = Net(True)
    ignored, brought = model.layers[0], model.layers[1]
    for name, weight in brought.named_parameters():
        if name != "bias":
            weight.main_grad = torch.zeros(DIM, DIM)  # type: ignore[attr-defined]
    fully_shard(model, ignored_parameters=[*ignored.parameters(), *brought.parameters()])
    assert fuse_weight_gradients(model) == ["layers.2"]
    assert [layer.fuse_wgrad_accumulation for layer in model.layers] == [False, True, True]
    brought.fuse_wgrad_accumulation = False  # its own memory is its own affair
    model(torch.randn(ROWS, DIM)).square().mean().backward()
    assert ignored.weight0.grad is not None


def gradients_that_nobody_wants_are_thrown_away(rank, world):
    model = fully_shard(FusedLinear(True))
    fuse_weight_gradients(model)
    x = torch.randn(ROWS, DIM).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    assert grad.shape == x.shape
    owned = [view for view in sharded_parameters(model) if view.main.numel()]
    assert all(view.grad is None for view in owned), "as without gradients"
    model(x).sum().backward()
    assert all(view.grad.any() for view in owned)


class HidesItsResult(nn.Module):
    """One weight, and no gradient of it or of what was computed with it tells anybody that a backward runs."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fused
        self.weight0 = nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(_Product.apply(x, self.weight0, self.fuse_wgrad_accumulation))


def a_layer_may_be_the_first_to_notice_a_backward(rank, world):
    """Also of one after gradients that were held back and cleared."""
    for sharding, clears in product(in_turn(3, STRATEGIES), (False, True)):
        found = []
        for fused in (False, True):
            torch.manual_seed(0)
            model = fully_shard(HidesItsResult(fused), sharding=sharding)
            assert fuse_weight_gradients(model) == ([""] if fused else [])
            with poisoned():
                for held in (True, True, False):
                    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(rank))
                    with no_sync(model) if held else nullcontext():
                        model(x).value.square().mean().backward()
                    if held and clears:
                        model.zero_grad()
            found.append(model.weight0.grad.full_tensor())
        assert torch.equal(*found), (sharding, clears)


WORLDS = {
    1: [first_products_overwrite, later_products_add, buckets_of_another_dtype],
    2: [
        a_layer_may_be_the_first_to_notice_a_backward,
        first_products_overwrite,
        later_products_add,
        recomputed_frozen_and_unused_weights,
        buckets_of_another_dtype,
        weights_of_nobody,
        gradients_that_nobody_wants_are_thrown_away,
    ],
}


@by_world(WORLDS)
def test_layers_that_write_gradients_themselves(world, case):
    check(WORLDS, world, case)


def test_a_weight_of_no_sharded_module_is_refused():
    with pytest.raises(EngineStateError, match=r"gradient of a weight of shape \(2, 3\), which no sharded module has"):
        gradient_memory(nn.Parameter(torch.zeros(2, 3)), overwrites=True)
