"""Fixed slots: planned from one step, at the same addresses ever after, and never a reason for another result or an error."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import combinations, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_mfsdp.engine import MixedPrecisionPolicy, fully_shard, no_sync
from lightning_mfsdp.engine.core.storage import color
from tests.engine.internals import unit_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import (
    DIM,
    STRATEGIES,
    Chain,
    adamw,
    assert_same_weights,
    context,
    inputs,
    loss_of,
    sharded_chain,
    train,
)
from tests.helpers.nights import NIGHT, thinned
from tests.helpers.pairwise import in_turn

# -- coloring -------------------------------------------------------------------------------------------------------------------------


@st.composite
def holdings(draw) -> tuple[list[int], list[list[list[float]]]]:
    """Clients that take and give back memory at distinct times; some still hold it at the end."""
    count = draw(st.integers(1, 9))
    sizes = [draw(st.integers(1, 5)) * 512 for _ in range(count)]
    owners = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=40)) + list(range(count))
    intervals: list[list[list[float]]] = [[] for _ in range(count)]
    for time, owner in enumerate(owners):
        mine = intervals[owner]
        if mine and mine[-1][1] == float("inf"):
            mine[-1][1] = time
        else:
            mine.append([time, float("inf")])
    return sizes, intervals


def conflicts_of(intervals: list[list[list[float]]]) -> list[set[int]]:
    """Who holds memory at the same time as whom."""
    return [
        {
            other
            for other, theirs in enumerate(intervals)
            if other != index and any(a[0] < b[1] and b[0] < a[1] for a in mine for b in theirs)
        }
        for index, mine in enumerate(intervals)
    ]


def held_at(intervals: list[list[float]], time: float) -> bool:
    return any(start <= time < stop for start, stop in intervals)


@settings(max_examples=300, deadline=None)
@given(holdings())
def test_coloring_gives_every_client_one_slot_and_never_two_holders_at_once(case):
    sizes, intervals = case
    slots = color(sizes, conflicts_of(intervals))
    assert sorted(index for members in slots for index in members) == list(range(len(sizes)))
    times = range(60)
    for members in slots:
        for one, other in combinations(members, 2):
            assert not any(held_at(intervals[one], t) and held_at(intervals[other], t) for t in times)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4))
def test_coloring_of_a_chain_of_equal_clients_needs_only_as_many_slots_as_are_held_at_once(count, overlap):
    forward = [[index, index + overlap - 0.5] for index in range(count)]
    backward = [[1000 - index, 1000 - index + overlap - 0.5] for index in range(count)]
    intervals = [list(pair) for pair in zip(forward, backward, strict=True)]
    slots = color([512] * count, conflicts_of(intervals))
    assert len(slots) == min(count, overlap)


@settings(max_examples=200, deadline=None)
@given(holdings())
def test_coloring_wastes_nothing_on_the_largest_client_of_a_slot(case):
    sizes, intervals = case
    for members in color(sizes, conflicts_of(intervals)):
        assert sizes[members[0]] == max(sizes[index] for index in members)


# -- addresses -------------------------------------------------------------------------------------------------------------------------


def addresses(model: nn.Module) -> dict[str, list[int]]:
    """Where a step puts full weights, read in forward and in backward."""
    seen: dict[str, list[int]] = {}
    originals = [name for name, layer in model.named_modules() if unit_of(layer)]

    def look(name: str, module: nn.Module) -> None:
        seen.setdefault(name, []).extend(parameter.data_ptr() for parameter in module.parameters(recurse=False))

    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, *_, name=name: look(name, m), prepend=True)
        for name in originals
    ]
    handles += [
        model.get_submodule(name).register_full_backward_hook(lambda m, *_, name=name: look(f"{name} backward", m))
        for name in originals
        if name
    ]
    loss_of(model, inputs(50).requires_grad_()).backward()
    for handle in handles:
        handle.remove()
    return seen


def addresses_never_change_after_the_first_step(rank, world):
    for sharding in in_turn(0, STRATEGIES):
        model = sharded_chain(sharding=sharding)
        optimizer = adamw(model)
        train(model, optimizer, [0], rank)
        pool = context(model).lane.pool
        fixed = pool.fixed_bytes
        if world > 1 and sharding == "optim_grads_params":
            assert fixed > 0, "one training step is enough for the plan"
        expected = addresses(model)
        for step in range(1, 4):
            optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, [step], rank)
            with torch.no_grad():
                model(inputs(step, rank))
            assert addresses(model) == expected, f"{sharding} step {step}"
            assert pool.fixed_bytes == fixed
            assert pool.allocated_bytes == fixed, "all gathered weights are in fixed slots"


def slots_are_there_before_hooks_of_gradients_run(rank, world):
    """Hooks step optimizers, whose state is to find the memory that the first step no longer needs."""
    model, seen = sharded_chain(), []
    pool = context(model).lane.pool
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(pool.fixed_bytes))
    loss_of(model, inputs(0, rank)).backward()
    assert seen == [pool.fixed_bytes] * len(list(model.parameters()))
    assert pool.fixed_bytes > 0


def neighbors_share_few_slots(rank, world):
    model = sharded_chain(layers=9)
    optimizer = adamw(model)
    train(model, optimizer, range(3), rank)
    seen = addresses(model)
    weights = {seen[f"layers.{index}"][0] for index in range(9)}
    assert len(weights) == 2, weights


# -- whatever comes, the result is that of dynamic storage -------------------------------------------------------------------------------


def step_with(model, optimizer, rank, *, before=None, forward=loss_of, microbatches=1) -> list[torch.Tensor]:
    losses = []
    for micro in range(microbatches):
        last = micro == microbatches - 1
        with nullcontext() if last else no_sync(model):
            loss = forward(model, inputs(20 + micro, rank))
            if before is not None:
                before(model)
            loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def validate(model: Chain) -> None:
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(inputs(9))
    model.train()


def skipping(*skipped: int):
    def forward(model: Chain, x: torch.Tensor) -> torch.Tensor:
        called, model.wrap = model.wrap, lambda layer, x: x if layer in [model.layers[i] for i in skipped] else layer(x)
        loss = loss_of(model, x)
        model.wrap = called
        return loss

    return forward


def in_order(*order: int):
    def forward(model: Chain, x: torch.Tensor) -> torch.Tensor:
        for index in order:
            x = x + torch.tanh(model.layers[index](x))
        return x.square().mean()

    return forward


def parallel_layers(model: Chain, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.stack([layer(x) for layer in model.layers]).tanh().sum(0).square().mean()


def twice(model: Chain, x: torch.Tensor) -> torch.Tensor:
    return loss_of(model, x) + loss_of(model, 2 * x)


def retained(model: Chain, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    return loss


DISTURBANCES = {
    "validation between steps": lambda m, o, r: (validate(m), step_with(m, o, r))[1],
    "validation between forward and backward": lambda m, o, r: step_with(m, o, r, before=validate),
    "three microbatches": lambda m, o, r: step_with(m, o, r, microbatches=3),
    "first layer skipped": lambda m, o, r: step_with(m, o, r, forward=skipping(0)),
    "middle layer skipped": lambda m, o, r: step_with(m, o, r, forward=skipping(2)),
    "two layers skipped": lambda m, o, r: step_with(m, o, r, forward=skipping(1, 2)),
    "last layer skipped": lambda m, o, r: step_with(m, o, r, forward=skipping(3)),
    "layers in another order": lambda m, o, r: step_with(m, o, r, forward=in_order(2, 0, 3, 1)),
    "a layer used three times": lambda m, o, r: step_with(m, o, r, forward=in_order(0, 2, 0, 1, 2, 0, 3)),
    "layers side by side": lambda m, o, r: step_with(m, o, r, forward=parallel_layers),
    "second forward before backward": lambda m, o, r: step_with(m, o, r, forward=twice),
    "forward thrown away": lambda m, o, r: (loss_of(m, inputs(8, r)), step_with(m, o, r))[1],
    "graph retained": lambda m, o, r: step_with(m, o, r, forward=retained),
}


# Where weights stay gathered until a step, slots are taken once.
SHARDINGS = ("optim_grads", "optim_grads_params") if NIGHT else ("optim_grads_params",)


def disturbed(storage, sharding, disturbance, rank, world):
    model = sharded_chain(storage=storage, sharding=sharding)
    optimizer = adamw(model)
    losses = train(model, optimizer, range(2), rank)
    for _ in range(2 if NIGHT else 1):
        losses += disturbance(model, optimizer, rank)
        losses += train(model, optimizer, [4], rank)
    # Disturbed from the very first step, before anything is planned.
    early = sharded_chain(storage=storage, sharding=sharding)
    optimizer = adamw(early)
    losses += disturbance(early, optimizer, rank)
    losses += train(early, optimizer, range(2), rank)
    return model, early, torch.stack(losses)


def make_disturbance_case(name: str):
    def case(rank, world):
        for sharding in SHARDINGS:
            model, early, losses = disturbed("pooled", sharding, DISTURBANCES[name], rank, world)
            expected, expected_early, expected_losses = disturbed("dynamic", sharding, DISTURBANCES[name], rank, world)
            assert torch.equal(losses, expected_losses), (sharding, losses, expected_losses)
            assert_same_weights(model, expected, sharding)
            assert_same_weights(early, expected_early, sharding)

    case.__name__ = case.__qualname__ = name.replace(" ", "_")
    return case


DISTURBED = tuple(make_disturbance_case(name) for name in DISTURBANCES)
globals().update({case.__name__: case for case in DISTURBED})  # spawned processes find them by name


def pooled_equals_dynamic_bit_for_bit(rank, world):
    policies = (None, MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16))
    for sharding, policy in thinned(product(in_turn(1, STRATEGIES), policies), 3):
        runs = []
        for storage in ("pooled", "dynamic"):
            model = sharded_chain(storage=storage, sharding=sharding, policy=policy)
            runs.append((model, train(model, adamw(model), range(5), rank)))
        assert torch.equal(torch.stack(runs[0][1]), torch.stack(runs[1][1])), sharding
        assert_same_weights(runs[0][0], runs[1][0], sharding)


def dynamic_storage_holds_nothing_between_steps(rank, world):
    model = sharded_chain(storage="dynamic")
    optimizer = adamw(model)
    for step in range(3):
        train(model, optimizer, [step], rank)
        assert context(model).lane.pool.allocated_bytes == 0
        assert context(model).lane.pool.fixed_bytes == 0


class Kept(nn.Module):
    """A layer; some keep what it made, so that its weight stays where it is until a step."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.layer, self.keeps = nn.Linear(DIM, DIM), keeps
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.keeps:
            self.kept[:] = [x]
        return torch.tanh(x)


class Again(nn.Module):
    """Layers of one weight; the first keeps what it made, and the last runs several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), Kept(keeps=True)
        self.last, self.times = Kept(keeps=False), times
        self.last.layer.weight = self.second.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        for _ in range(self.times):
            x = self.last(x)
        return x


def units_that_share_a_weight_which_stayed_have_memory_for_all_they_use(rank, world):
    """Where a weight stays, a later unit that uses it gathers nothing, so a plan could miss that both are needed at once."""
    for storage, times in product(("pooled", "dynamic"), (1, 2, 3)):
        torch.manual_seed(0)
        plain = Again(times)
        model = copy.deepcopy(plain)
        for unit in (model.second, model.last, model):
            fully_shard(unit, storage=storage)
        optimizer, other = adamw(model), torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(3):
            results = []
            for one, steps in ((model, optimizer), (plain, other)):
                one(inputs(step)).square().mean().backward()
                steps.step()
                steps.zero_grad()
                with torch.no_grad():
                    results.append(one(inputs(step)))
            torch.testing.assert_close(*results, msg=f"{storage}, {times}, step {step}")


def two_models_in_one_loop_do_not_meet(rank, world):
    together = [sharded_chain(seed) for seed in (1, 2)]
    optimizers = [adamw(model) for model in together]
    for step in range(4):
        x = inputs(step, rank)
        # One backward through both, the first one's output going into the second, as in distillation or a GAN.
        hidden = together[0].layers[0](x)
        (loss_of(together[0], x) + loss_of(together[1], x + hidden[:, :DIM])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    alone = [sharded_chain(seed, storage="dynamic") for seed in (1, 2)]
    optimizers = [adamw(model) for model in alone]
    for step in range(4):
        x = inputs(step, rank)
        hidden = alone[0].layers[0](x)
        (loss_of(alone[0], x) + loss_of(alone[1], x + hidden[:, :DIM])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(together, alone, strict=True):
        assert_same_weights(one, other)


def a_sharded_model_may_become_part_of_another_after_training(rank, world):
    inner = sharded_chain(1)
    train(inner, adamw(inner), range(3), rank)
    outer = fully_shard(nn.Sequential(nn.Linear(DIM, DIM), inner))
    train(outer, adamw(outer), range(3), rank)
    assert context(outer) is context(inner)
    assert context(outer).lane.pool.fixed_bytes > 0


class Recorded:
    """Stands for a CUDA graph, which writes to fixed slots and sees no new plan."""


def a_held_plan_outlasts_a_step_in_another_order(rank, world):
    model, other = sharded_chain(), sharded_chain(storage="dynamic")
    optimizers = adamw(model), adamw(other)
    for one, optimizer in zip((model, other), optimizers, strict=True):
        train(one, optimizer, range(3), rank)
    pool, recorded = context(model).lane.pool, Recorded()
    pool.hold_plan(recorded)
    slots = list(pool._fixed)
    addresses, sizes = [slot.memory.data_ptr() for slot in slots], [slot.allocated_bytes for slot in slots]
    for held in (True, False):
        for one, optimizer in zip((model, other), optimizers, strict=True):
            step_with(one, optimizer, rank, forward=in_order(0, 2, 1, 3))
            step_with(one, optimizer, rank, forward=in_order(0, 2, 1, 3))
        assert_same_weights(model, other)
        assert pool.is_outdated == held
        if held:
            assert pool._fixed == slots
            assert [slot.memory.data_ptr() for slot in slots] == addresses
            assert [slot.allocated_bytes for slot in slots] == sizes
            del recorded  # whoever goes without a word lets go as well
    assert pool._fixed != slots


WORLDS = {
    1: (addresses_never_change_after_the_first_step,),
    2: (
        addresses_never_change_after_the_first_step,
        neighbors_share_few_slots,
        slots_are_there_before_hooks_of_gradients_run,
        pooled_equals_dynamic_bit_for_bit,
        dynamic_storage_holds_nothing_between_steps,
        units_that_share_a_weight_which_stayed_have_memory_for_all_they_use,
        two_models_in_one_loop_do_not_meet,
        a_sharded_model_may_become_part_of_another_after_training,
        a_held_plan_outlasts_a_step_in_another_order,
        *DISTURBED,
    ),
}


@by_world(WORLDS)
def test_slots(world, case):
    check(WORLDS, world, case)
