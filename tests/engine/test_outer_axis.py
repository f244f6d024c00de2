"""Reductions over two axes: the sums are those of one axis after the other to the bit, whatever waits, is added to, or breaks off.

Which streams they are on, and what waits for what, is in test_streams.py; the same sums with NCCL in tests/gpu/test_outer_axis.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.engine import MixedPrecisionPolicy, no_sync, reduce_pending
from tests.engine.worlds import by_world, check
from tests.helpers.chain import (
    STRATEGIES,
    Chain,
    adamw,
    assert_same_weights,
    context,
    inputs,
    loss_of,
    plain_chain,
    sharded_chain,
    train,
)
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, pairwise

OUTER, SHARD = 2, 2
FACTOR = 1 / (OUTER * SHARD)
WIRE = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)

# How microbatches are reduced, one after the other.
ALL, HELD, SHARDED = "all", "held back", "kept sharded"
PROGRAMS = (
    (ALL,),
    (ALL, ALL),
    (HELD, ALL),
    (SHARDED, SHARDED, ALL),
    (ALL, SHARDED, ALL),
    (HELD, SHARDED, ALL),
    (ALL, HELD, SHARDED),
)


def mesh() -> Any:
    return dist.init_device_mesh("cpu", (OUTER, SHARD), mesh_dim_names=("outer", "shard"))


# -- what the sums are, with plain tensors -------------------------------------------------------------------------------


def over_shard(gradients: list[Tensor], wire: torch.dtype) -> list[Tensor]:
    """Sums over each shard axis, by place along the outer axis."""
    scaled = [gradient.to(wire) * FACTOR for gradient in gradients]
    return [scaled[SHARD * place] + scaled[SHARD * place + 1] for place in range(OUTER)]


def over_outer(sums: list[Tensor]) -> Tensor:
    return sums[0] + sums[1]


def expected(
    micros: list[list[Tensor]], program: tuple[str, ...], wire: torch.dtype, *, shards_gradients: bool
) -> Tensor:
    """The gradient of one parameter.

    Args:
        micros: Of each microbatch, those of each rank.
        program: How they are reduced.
        wire: Dtype of communication.
        shards_gradients: Otherwise what is kept sharded is held back as it is.
    """
    total: Tensor | None = None
    unreduced: list[Tensor] | None = None
    kept: list[Tensor] | None = None
    for gradients, how in zip(micros, program, strict=True):
        if how == HELD or (how == SHARDED and not shards_gradients):
            assert kept is None, "no program of these"
            unreduced = gradients if unreduced is None else [a + b for a, b in zip(unreduced, gradients, strict=True)]
            continue
        if unreduced is not None:
            gradients, unreduced = [a + b for a, b in zip(unreduced, gradients, strict=True)], None
        sums = over_shard(gradients, wire)
        if how == SHARDED or kept is not None:
            sums = [one.float() for one in sums] if kept is None else [a + b for a, b in zip(kept, sums, strict=True)]
        if how == SHARDED:
            kept = sums
            continue
        kept, reduced = None, over_outer([one.to(wire) for one in sums]).float()
        total = reduced if total is None else total + reduced
    waits = unreduced if unreduced is not None else kept
    if waits is not None:  # reduced when it is asked for
        sums = over_shard(waits, wire) if unreduced is not None else [one.to(wire) for one in waits]
        reduced = over_outer(sums).float()
        total = reduced if total is None else total + reduced
    assert total is not None
    return total


def gradients_of(rank: int, micro: int) -> list[Tensor]:
    """Of one rank and microbatch."""
    model = plain_chain()
    loss_of(model, inputs(micro, rank)).backward()
    return [parameter.grad for parameter in model.parameters()]


def within(model: nn.Module, how: str) -> AbstractContextManager[Any]:
    return nullcontext() if how == ALL else no_sync(model, keep_sharded=how == SHARDED)


# -- cases -------------------------------------------------------------------------------------------------------------


def sums_are_those_of_one_axis_after_the_other_to_the_bit(rank: int, world: int) -> None:
    possible: Callable[..., bool] = lambda sharding, outer, *_: (sharding, outer) != ("no_shard", "optim")  # noqa: E731
    rows = thinned(pairwise(STRATEGIES, ("no_shard", "optim"), PROGRAMS, (None, WIRE), possible=possible), 3)
    alone = {(micro, other): gradients_of(other, micro) for micro in range(3) for other in range(world)}
    for sharding, outer, program, policy in rows:
        model = sharded_chain(mesh=mesh(), sharding=sharding, outer_sharding=outer, policy=policy)
        for again in range(2):  # also once slots are planned
            for micro, how in enumerate(program):
                with within(model, how):
                    loss_of(model, inputs(micro, rank)).backward()
            wire = torch.float32 if policy is None else torch.bfloat16
            for index, (name, parameter) in enumerate(model.named_parameters()):
                micros = [[alone[micro, other][index] for other in range(world)] for micro in range(len(program))]
                wanted = expected(micros, program, wire, shards_gradients=sharding in STRATEGIES[2:])
                assert torch.equal(parameter.grad.full_tensor(), wanted), (
                    sharding,
                    outer,
                    program,
                    policy,
                    again,
                    name,
                )
            model.zero_grad()


def what_waits_for_the_outer_axis_is_reduced_without_a_backward(rank: int, world: int) -> None:
    for outer in ("no_shard", "optim"):
        model = sharded_chain(mesh=mesh(), outer_sharding=outer)
        other = sharded_chain(mesh=mesh(), outer_sharding=outer)
        with no_sync(model, keep_sharded=True):
            loss_of(model, inputs(0, rank)).backward()
        reduce_pending(model)
        loss_of(other, inputs(0, rank)).backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())
        assert not context(model).reductions._over_outer


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise InterruptedError


def failing(model: Chain, index: int, layer: nn.Module, x: Tensor) -> Tensor:
    return Fails.apply(layer(x)) if layer is model.layers[index] else layer(x)


def nothing_is_left_of_a_backward_that_broke_off(rank: int, world: int) -> None:
    """Units behind the one that fails are under way over either axis."""
    for sharding in in_turn(0, STRATEGIES):
        model, other = sharded_chain(mesh=mesh(), sharding=sharding), sharded_chain(mesh=mesh(), sharding=sharding)
        optimizers = [adamw(model), adamw(other)]
        usual = model.wrap
        for index in thinned(range(len(model.layers)), 2):
            for broken, optimizer in zip((True, False), optimizers, strict=True):
                trained = model if broken else other
                if broken:
                    model.wrap = partial(failing, model, index)
                    with pytest.raises(InterruptedError):
                        loss_of(model, inputs(50, rank)).backward()
                    model.wrap = usual
                    optimizer.zero_grad()
                train(trained, optimizer, [index], rank)
            assert not context(model).reductions._over_outer
        assert_same_weights(model, other, sharding)


def no_more_than_two_units_are_under_way_over_the_outer_axis(rank: int, world: int) -> None:
    for sharding in in_turn(1, STRATEGIES):
        model = sharded_chain(mesh=mesh(), layers=6, sharding=sharding)
        reductions, seen = context(model).reductions, []
        reductions.watches.append(lambda unit, r=reductions, s=seen: s.append(len(r._over_outer)))
        for micro in range(2):
            loss_of(model, inputs(micro, rank)).backward()
        assert max(seen) == 2
        assert not reductions._over_outer


def a_backward_in_inference_mode_is_added_to_in_the_next_microbatch(rank: int, world: int) -> None:
    for outer_sharding, policy in pairwise(("no_shard", "optim"), (MixedPrecisionPolicy(), WIRE), together=1):
        found = []
        for mode in (nullcontext, torch.inference_mode):
            model = sharded_chain(mesh=mesh(), outer_sharding=outer_sharding, policy=policy)
            loss = loss_of(model, inputs(0, rank))
            with no_sync(model, keep_sharded=True), mode():
                loss.backward()
            loss_of(model, inputs(1, rank)).backward()
            found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        assert all(map(torch.equal, *found)), (outer_sharding, policy)


CASES = (
    sums_are_those_of_one_axis_after_the_other_to_the_bit,
    what_waits_for_the_outer_axis_is_reduced_without_a_backward,
    nothing_is_left_of_a_backward_that_broke_off,
    no_more_than_two_units_are_under_way_over_the_outer_axis,
    a_backward_in_inference_mode_is_added_to_in_the_next_microbatch,
)
WORLDS = {OUTER * SHARD: CASES}


@by_world(WORLDS)
def test_reductions_over_two_axes(world, case):
    check(WORLDS, world, case)
