"""Direct weight gradients: the same numbers as through autograd, to the bit on CPU, and only where nobody can tell the difference.

Every buffer is full of NaN when its memory comes, so a cell that nobody wrote shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node
from torch.distributed import init_device_mesh
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    gather_root,
    no_sync,
    sharded_parameters,
)
from lightning_mfsdp.engine.core.buffer import FlatBuffer
from lightning_mfsdp.engine.core.storage import Slot
from tests.engine.cases import device_type
from tests.engine.internals import DirectWrites
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, inputs, loss_of, sharded_chain
from tests.helpers.hidden import Hidden
from tests.helpers.models import batch, build
from tests.helpers.models import loss_of as decoder_loss
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, pairwise

DIRECT = MixedPrecisionPolicy(direct_weight_gradients=True)
USUAL = MixedPrecisionPolicy(direct_weight_gradients=False)
BF16 = {"compute_dtype": torch.bfloat16}


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that comes is full of NaN."""
    materialize = Slot.materialize

    def wait(memory: torch.Tensor) -> None:
        if memory.is_cuda:
            torch.cuda.synchronize()

    def poison(slot: Slot) -> None:
        was_there = slot.is_allocated
        materialize(slot)
        if not was_there:
            wait(slot.memory)  # what reads the memory of before, and what will fill it, may be in any stream
            slot.memory.fill_(0xFF)
            wait(slot.memory)

    empty = FlatBuffer.empty

    def poisoned_empty(*arguments: Any) -> FlatBuffer:
        made = empty(*arguments)
        for segment in made.segments:
            segment.fill_(float("nan"))
            wait(segment)
        return made

    with mock.patch.object(Slot, "materialize", poison), mock.patch.object(FlatBuffer, "empty", poisoned_empty):
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """Which tensors of their layouts layers wrote themselves."""
    written: list[int] = []
    open_memory = DirectWrites.open

    def count(self: DirectWrites, index: int, accumulator: Node) -> tuple[torch.Tensor, bool]:
        written.append(index)
        return open_memory(self, index, accumulator)

    with mock.patch.object(DirectWrites, "open", count):
        yield written


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [view.grad.clone() for view in sharded_parameters(model) if view.grad is not None]


def same(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other), f"{what}: {one} instead of {other}"


def decoder_gradients(rank, world, policy, *, tied, microbatches=1, hold="", mesh=None, **options):
    model = build(tied=tied)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh, policy=policy, **options)
    found = []
    for _ in range(2):  # the second backward adds to what the first left
        for micro in range(microbatches):
            ids, targets = (part.chunk(world)[rank] for part in batch(micro, 4))
            held = hold and micro < microbatches - 1
            with no_sync(model, keep_sharded=hold == "sharded") if held else nullcontext():
                decoder_loss(model, ids, targets).backward()
        found += gradients(model)
    return found


def gradients_are_those_of_autograd_to_the_bit(rank, world):
    with poisoned():
        wires = ({}, {**BF16, "grad_comm_dtype": torch.bfloat16})
        for sharding, tied, dtypes in pairwise(STRATEGIES, (False, True), wires, together=1):
            policies = [replace(policy, **dtypes) for policy in (DIRECT, USUAL)]
            with counted() as written:
                found, expected = (decoder_gradients(rank, world, p, tied=tied, sharding=sharding) for p in policies)
            assert len(written) == 2 * 7, "six layers of blocks and a head, in two backwards"
            same(found, expected, f"{sharding} tied={tied} {dtypes}")


def microbatches_add_up(rank, world):
    """Held back or not; in float32 the order of additions is the same as through autograd."""
    with poisoned():
        for sharding, hold in thinned(product(in_turn(0, STRATEGIES), ("", "local", "sharded")), 2):
            found, expected = (
                decoder_gradients(rank, world, policy, tied=True, microbatches=3, hold=hold, sharding=sharding)
                for policy in (DIRECT, USUAL)
            )
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, msg=f"{sharding} {hold}")


def hybrid_meshes_too(rank, world):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    for outer, hold in thinned(product(("no_shard", "optim"), ("", "sharded")), 3):
        options = {"tied": False, "microbatches": 2, "hold": hold, "mesh": mesh, "outer_sharding": outer}
        with poisoned():
            found, expected = (decoder_gradients(rank, world, policy, **options) for policy in (DIRECT, USUAL))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def microbatches_are_added_without_rounding(rank, world):
    """1 + 64 / 512 in float32 under bfloat16 weights: each product is exact, and so is each sum."""
    policy = replace(DIRECT, main_params_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(4, 4, bias=False).bfloat16(), policy=policy)
    for micro in range(65):
        with no_sync(model) if micro < 64 else nullcontext():
            (model(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * (1.0 if micro == 0 else 2.0**-9)).backward()
    for found in gradients(model):
        assert found.eq(1.125).all(), found


def a_layer_that_runs_twice_adds(rank, world):
    def run(policy):
        model = sharded_chain(policy=policy)
        model.wrap = lambda layer, x: layer(layer(x).relu())
        loss_of(model, inputs(0, rank)).backward()
        return gradients(model)

    with poisoned():
        for one, other in zip(run(DIRECT), run(USUAL), strict=True):
            torch.testing.assert_close(one, other)


def recomputed_layers_write_once(rank, world):
    def run(policy, reentrant):
        model = sharded_chain(policy=policy)
        model.wrap = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)
        loss_of(model, inputs(0, rank).requires_grad_()).backward()
        return gradients(model)

    for reentrant in (False, True):
        with poisoned(), counted() as written:
            same(run(DIRECT, reentrant), run(USUAL, reentrant), f"reentrant={reentrant}")
        assert len(written) == 5, written


class Hiding(nn.Module):
    """A square layer whose result the engine cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden(self.inner(x))


def layers_computed_again_choose_as_before(rank, world):
    """What is computed again has to save what was saved before, or weights are read transposed: for square ones nobody would notice."""
    for hides, storage in ((False, "pooled"), (True, "dynamic")):
        found = []
        for policy in (USUAL, DIRECT):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), *(Hiding() if hides else nn.Linear(8, 8) for _ in range(3)))
            for layer in model[1:]:
                fully_shard(layer, policy=policy, storage=storage)
            fully_shard(model, policy=policy, storage=storage)
            call = (lambda layer, x: layer(x).value.tanh()) if hides else (lambda layer, x: layer(x).tanh())
            for step in range(3):
                with gather_root(model):
                    x = model[0](inputs(step, rank))
                    for layer in model[1:]:
                        x = x + checkpoint(call, layer, x, use_reentrant=False)
                loss = x.square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                for parameter in model.parameters():
                    full = parameter._unsharded()
                    assert not full._post_accumulate_grad_hooks, "hooks stay on weights"
            found.append(gradients(model))
        same(*found, f"{hides=}")


def a_backward_that_fails_leaves_nothing(rank, world):
    def run(policy, *, fails):
        model = sharded_chain(policy=policy)
        if fails:
            x = inputs(7, rank).requires_grad_()
            x.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, x).backward()
        loss_of(model, inputs(0, rank)).backward()
        return gradients(model)

    with poisoned():
        same(run(DIRECT, fails=True), run(USUAL, fails=True), "after a failure")


def autocast_computes_alike(rank, world):
    """On GPUs layers write sums of products as they are, and autograd rounds them to the dtype of the weight."""

    def run(policy):
        model = sharded_chain(policy=policy)
        with torch.autocast(device_type(), torch.bfloat16):
            loss = loss_of(model, inputs(0, rank))
        loss.backward()
        return gradients(model)

    with counted() as written:
        found = run(replace(DIRECT, **BF16))
        assert len(written) == 5
        expected = run(replace(USUAL, **BF16))
        if device_type() == "cuda":
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-10)
        else:
            same(found, expected, "bfloat16")
        same(run(DIRECT), run(USUAL), "weights of another dtype than autocast's")
    assert len(written) == 5, "which autocast has to cast"


def what_autograd_must_do_itself_it_does(rank, world):
    """Nothing is written by layers, and the gradients are there."""

    class Odd(nn.Module):
        def __init__(self, use):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.use = nn.Linear(32, 32), use

        def forward(self, x):
            return self.use(self.layer, x)

    def penalty(layer, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        return slope

    def of_the_weight(layer, x):
        (grad,) = torch.autograd.grad(layer(x).tanh().sum(), layer.weight)
        return F.linear(x, layer.weight) + grad.sum()

    def per_sample(layer, x):
        return torch.vmap(layer)(x)

    compiled = torch.compile(lambda layer, x: layer(x).tanh(), backend="aot_eager", fullgraph=True)
    for name, use in {"penalty": penalty, "weight": of_the_weight, "vmap": per_sample, "compiled": compiled}.items():
        found = []
        for policy in (DIRECT, USUAL):
            model = fully_shard(Odd(use), policy=policy, sharding="optim_grads")
            with counted() as written:
                model(inputs(0, rank, dim=32)).square().sum().backward()
            assert not written or name == "penalty", name
            found.append(gradients(model))
        same(found[0], found[1], name)


def hooks_on_a_weight_see_its_gradient(rank, world):
    seen = []
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda grad: seen.append(grad.shape))
    model = fully_shard(layer, policy=DIRECT)
    with counted() as written:
        model(inputs(0, rank, dim=4)).sum().backward()
    assert seen == [(4, 4)]
    assert not written


def a_gradient_of_inputs_alone_leaves_weights_alone(rank, world):
    model = sharded_chain(policy=DIRECT, sharding="optim_grads")
    x = inputs(0, rank).requires_grad_()
    with counted() as written:
        torch.autograd.grad(loss_of(model, x), x)
    assert not written
    with poisoned():
        loss_of(model, inputs(0, rank)).backward()
    expected = sharded_chain(policy=USUAL, sharding="optim_grads")
    loss_of(expected, inputs(0, rank)).backward()
    same(gradients(model), gradients(expected), "afterwards")


def frozen_weights_get_none(rank, world):
    model = sharded_chain(policy=DIRECT)
    model.layers[1].weight.requires_grad_(False)
    with counted() as written:
        loss_of(model, inputs(0, rank)).backward()
    assert len(written) == 4
    assert sharded_parameters(model.layers[1])[0].grad is None


def one_rank_has_no_bucket_to_write_to(rank, world):
    model = sharded_chain(policy=DIRECT)
    with counted() as written:
        loss_of(model, inputs(0)).backward()
    assert not written
    assert len(gradients(model)) == 10


def a_backward_that_nobody_noticed_writes_nothing(rank, world):
    """Layers of the root, called without its forward: their gradients wait in `.grad` for the next backward."""

    def run(policy):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), policy=policy)
        for micro in range(3):
            with gather_root(model), no_sync(model) if micro == 1 else nullcontext():
                loss = model[1](model[0](inputs(micro, rank, dim=64))).square().mean()
                loss.backward()
        model(inputs(3, rank, dim=64)).sum().backward()
        return gradients(model)

    with poisoned():
        for one, other in zip(run(DIRECT), run(USUAL), strict=True):
            torch.testing.assert_close(one, other)


def float64_stays_out_of_autocast(rank, world):
    policy = MixedPrecisionPolicy(
        main_params_dtype=torch.float64, main_grads_dtype=torch.float64, direct_weight_gradients=True
    )
    model = fully_shard(nn.Linear(8, 8).double(), policy=policy)
    with torch.autocast(device_type(), torch.bfloat16):
        assert model(inputs(0, rank).double()).dtype is torch.float64


def parametrized_layers_are_left_alone(rank, world):
    for wrap in (parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal):
        for policy in (None, DIRECT):
            model = fully_shard(nn.Sequential(wrap(nn.Linear(8, 8)), nn.Linear(8, 8)), policy=policy)
            loss_of(model, inputs(0, rank)).backward()
            assert gradients(model) or rank


def only_plain_layers_change(rank, world):
    class Own(nn.Linear):
        def reset_parameters(self):
            nn.init.ones_(self.weight)

    class Other(nn.Linear):
        def forward(self, input):
            return super().forward(input).relu()

    for policy, kind, changed in (
        (DIRECT, nn.Linear, True),
        (DIRECT, Own, True),
        (DIRECT, Other, False),
        (USUAL, nn.Linear, False),
    ):
        model = fully_shard(kind(4, 4), policy=policy)
        assert ("forward" in vars(model)) is changed
    model = fully_shard(nn.Linear(4096, 2048))
    assert ("forward" in vars(model)) is (device_type() == "cuda"), '"auto" leaves the CPU alone'


WORLDS = {
    1: [one_rank_has_no_bucket_to_write_to],
    2: [
        gradients_are_those_of_autograd_to_the_bit,
        microbatches_add_up,
        microbatches_are_added_without_rounding,
        a_layer_that_runs_twice_adds,
        recomputed_layers_write_once,
        layers_computed_again_choose_as_before,
        a_backward_that_fails_leaves_nothing,
        autocast_computes_alike,
        what_autograd_must_do_itself_it_does,
        hooks_on_a_weight_see_its_gradient,
        a_gradient_of_inputs_alone_leaves_weights_alone,
        frozen_weights_get_none,
        only_plain_layers_change,
        a_backward_that_nobody_noticed_writes_nothing,
        float64_stays_out_of_autocast,
        parametrized_layers_are_left_alone,
    ],
    4: [hybrid_meshes_too],
}


@by_world(WORLDS)
def test_direct(world, case):
    check(WORLDS, world, case)


def test_other_values_are_refused():
    with pytest.raises(ShardingError, match='direct_weight_gradients: expected True, False or "auto"'):
        MixedPrecisionPolicy(direct_weight_gradients="yes")
