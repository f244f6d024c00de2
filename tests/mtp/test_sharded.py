"""The predictor in a sharded model whose embedding and head it shares: all strategies, tied or not, with and without recompute."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from lightning_mfsdp import (
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    fully_shard_units,
    select_units,
    sharded_parameters,
    units,
    unshard,
)
from lightning_mfsdp.options.unit_selection import join_blocks
from tests.engine.internals import context_of
from tests.engine.worlds import by_world, check
from tests.helpers.nights import NIGHT
from tests.mtp.models import Model, batch, build

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
STEPS = 3


def automatic(model: Model) -> list[Any]:
    """Embedding and head are too small for units of their own, and are the root's."""
    return join_blocks(model, select_units(model, "auto"), "auto")


def one_by_one(model: Model) -> list[Any]:
    """Embedding and head are units, each with the tied weight."""
    return [model.embedding, *model.blocks, *model.predictor.layers, model.head]


def nested(model: Model) -> list[Any]:
    """A unit inside the region that is computed again, and the rest of the region in the root."""
    return [model.embedding, model.head, *(layer.layer for layer in model.predictor.layers)]


def steps(model: Model, optimizer: torch.optim.Optimizer, rank: int, world: int) -> torch.Tensor:
    losses = []
    torch.manual_seed(7 + rank)  # of the dropout
    for step in range(STEPS):
        main, ahead = model(*batch(rank + world * step))
        (main + model.predictor.weighted(ahead)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.cat((main[None], ahead)).detach())
    return torch.stack(losses)


def trained(
    rank: int, world: int, choose: Any, policy: Any = None, sharding: str = "optim_grads_params", **options: Any
):
    model = build(**options)
    fully_shard_units(model, choose(model), sharding=sharding, policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02))
    losses = steps(model, optimizer, rank, world)
    with unshard(model):
        return losses, {name: value.detach().clone() for name, value in model.named_parameters()}, model


def plainly(world: int, **options: Any) -> dict[str, torch.Tensor]:
    """One process that has the batches of all ranks."""
    model = build(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(STEPS):
        sum(model.loss(*batch(rank + world * step)) / world for rank in range(world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


# Tied, shared by depths, units.
KINDS = (
    (True, False, automatic),
    (True, True, automatic),
    (True, False, one_by_one),
    (True, True, one_by_one),
    (True, True, nested),
    (False, True, one_by_one),
)
ON_A_PUSH = [[STRATEGIES[number // 2] if number % 2 else STRATEGIES[-1]] for number in range(len(KINDS))]


def every_strategy_trains_as_one_process_and_recompute_changes_no_bit(rank, world):
    for number, (tied, shared, choose) in enumerate(KINDS):
        options = {"tied": tied, "shared": shared, "depth": 2}
        expected = plainly(world, **options)
        for sharding in STRATEGIES if NIGHT else ON_A_PUSH[number]:
            (losses, weights, _), (again, same, _) = (
                trained(rank, world, choose, sharding=sharding, recompute=recompute, **options)
                for recompute in (False, True)
            )
            case = f"{tied=} {shared=} {sharding} {choose.__name__}"
            assert torch.equal(losses, again), case
            assert weights.keys() == expected.keys(), case
            for name, value in weights.items():
                assert torch.equal(value, same[name]), f"{case}: {name}"
                torch.testing.assert_close(
                    value, expected[name], msg=lambda text, where=f"{case} {name}": f"{where} {text}"
                )


def dropout_and_bfloat16_come_out_the_same_when_computed_again(rank, world):
    rows = product((None, BF16), (False, True)) if NIGHT else ((None, True), (BF16, False))
    for policy, shared in rows:
        options = {"policy": policy, "depth": 2, "shared": shared, "dropout": 0.3}
        found = [trained(rank, world, automatic, recompute=recompute, **options) for recompute in (False, True)]
        assert torch.equal(found[0][0], found[1][0])
        assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def the_tied_weight_has_one_owner_and_each_layer_is_a_unit(rank, world):
    for choose, owner in ((automatic, "Model"), (one_by_one, "embedding")):
        _, _, model = trained(rank, world, choose, depth=2)
        layers = ["predictor.layers.0", "predictor.layers.1"]
        assert [view.name for view in units(model) if view.name.startswith("predictor")] == layers
        assert model.head.weight is model.embedding.weight
        names = [name for name, _ in model.named_parameters()]
        assert not [name for name in names if "predictor" in name and ("embedding.weight" in name or "head" in name)]
        shown = next(view for view in sharded_parameters(model) if view.name == "embedding.weight")
        assert shown.names == ("embedding.weight", "head.weight")
        assert shown.unit == owner
    _, _, single = trained(rank, world, automatic)
    assert "predictor.layers.0" in [view.name for view in units(single)]
    joined = build(depth=2)
    assert join_blocks(joined, select_units(joined, "auto"), 2)[-1] == list(joined.predictor.layers)


def gathers(model: Model, rank: int) -> list[tuple[int, int]]:
    """In forward and in backward, of two steps once the order is known."""
    context, found = context_of(model), []
    for step in range(4):
        before = context.lane.started
        loss = model.loss(*batch(rank + 2 * step))
        between = context.lane.started
        loss.backward()
        found.append((between - before, context.lane.started - between))
    return found[2:]


def a_layer_is_gathered_once_in_forward_and_once_in_backward(rank, world):
    counts = {}
    for recompute, (choose, tied) in product(
        (False, True), ((one_by_one, False), (one_by_one, True), (automatic, True))
    ):
        model = build(tied=tied, recompute=recompute)
        fully_shard_units(model, choose(model))
        counts[recompute, choose.__name__, tied] = gathers(model, rank)
    for recompute in (False, True):
        model = build(recompute=recompute, depth=2)
        fully_shard_units(model, one_by_one(model))
        counts[recompute, "one_by_one", 2] = gathers(model, rank)
    # Forward: the root's norm, embedding, two blocks, the predictor's layer, and the head once for both losses. Backward: the head, which
    # gave its weight back after the first of its two, and all but the embedding. Without a unit of its own the head is the root's.
    for recompute in (False, True):
        assert counts[recompute, "one_by_one", False] == [(6, 4)] * 2, counts
        assert counts[recompute, "one_by_one", True] == [(6, 4)] * 2, counts
        # Two depths: a layer more, and three losses, for all of which the head is gathered once in forward.
        assert counts[recompute, "one_by_one", 2] == [(7, 6)] * 2, counts
        # The predictor's layer is the last unit of the forward, and stays for the backward.
        assert counts[recompute, "automatic", True] == [(4, 2)] * 2, counts


WORLDS = {
    2: (
        every_strategy_trains_as_one_process_and_recompute_changes_no_bit,
        dropout_and_bfloat16_come_out_the_same_when_computed_again,
        the_tied_weight_has_one_owner_and_each_layer_is_a_unit,
        a_layer_is_gathered_once_in_forward_and_once_in_backward,
    )
}


@by_world(WORLDS)
def test_a_predictor_under_fully_shard(world: int, case: Any) -> None:
    check(WORLDS, world, case)
