"""Parts of a model that are sharded otherwise than the rest train as in one process; patterns that mean nothing are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    ShardingError,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    grad_norm,
    lerp_,
    no_sync,
    unshard,
)
from lightning_mfsdp.engine.api.strategies import choose_strategies
from lightning_mfsdp.engine.api.units import fully_shard_units
from lightning_mfsdp.engine.core.gradients import Sync
from tests.engine.cases import Problems
from tests.engine.packed import Adapted
from tests.engine.worlds import by_world, check
from tests.helpers.chain import context
from tests.helpers.nights import thinned
from tests.helpers.pairwise import pairwise

DIM, ROWS = 6, 12
BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


class Block(nn.Module):
    """Two experts in a list, which is never called, and a router. The rows of no weight are a multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, 2)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        shares = self.router(normed).softmax(-1)
        return x + sum(shares[:, [index]] * torch.tanh(expert(normed)) for index, expert in enumerate(self.experts))


class Mixture(nn.Module):
    """Blocks as units; a head and a scale in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def mixture(seed: int = 0) -> Mixture:
    torch.manual_seed(seed)
    return Mixture()


def sharded(sharding: Any, mesh: Any = None, seed: int = 0, **options: Any) -> Mixture:
    model = mixture(seed)
    fully_shard_units(model, list(model.blocks), mesh, sharding=sharding, **options)
    return model


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(number))


# -- which strategy ----------------------------------------------------------------------------------------------------


def chosen(model: nn.Module, sharding: Mapping[str, str | int]) -> dict[str, str]:
    strategies = choose_strategies(model, sharding)
    by_table = strategies.by_table(model)
    return {name: by_table[id(part._parameters)] for name, part in model.named_modules()}


def test_the_first_pattern_counts_that_matches_a_module_or_one_around_it():
    of = chosen(mixture(), {"*.experts": "optim", "blocks.1": 0, "*": "optim_grads"})
    assert of["blocks.0.experts.1"] == of["blocks.1.experts.0"] == of["blocks.1.experts"] == "optim"
    assert of["blocks.1.router"] == of["blocks.1"] == "no_shard"
    assert of["blocks.0.router"] == of["head"] == of[""] == "optim_grads"


def test_what_no_pattern_matches_has_its_weights_sharded_too():
    of = chosen(mixture(), {"*.router": "no_shard"})
    assert of["blocks.0.router"] == "no_shard"
    assert {of[name] for name in ("", "head", "blocks.0", "blocks.0.experts.0")} == {"optim_grads_params"}


@pytest.mark.parametrize(
    ("sharding", "words"),
    [
        (
            {"*.expert": "optim"},
            "sharding: '*.expert' matches no module with parameters in Mixture, which has blocks, blocks.*, blocks.*.norm, "
            "blocks.*.router, blocks.*.experts, blocks.*.experts.*, head",
        ),
        (
            {"*": "optim_grads_params", "*.experts": "optim"},
            "sharding: what '*.experts' matches in Mixture, such as blocks.0.experts, '*' decides about already",
        ),
        (
            {"*.experts": "optim", "*": "zero3"},
            "sharding['*']: expected one of no_shard, optim, optim_grads, optim_grads_params or 0 to 3",
        ),
        ({"*.experts": 4}, "sharding['*.experts']: expected one of"),
        ({}, "sharding={}: expected a strategy, or a mapping"),
        ({3: "optim"}, "sharding={3: 'optim'}: expected a strategy, or a mapping"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(sharding, words):
    with pytest.raises(ShardingError) as raised:
        choose_strategies(mixture(), sharding)
    assert words in str(raised.value)


def test_a_parameter_of_two_modules_has_one_strategy():
    model = mixture()
    model.blocks[1].router.weight = model.blocks[0].router.weight
    with pytest.raises(ShardingError) as raised:
        choose_strategies(model, {"blocks.0": "optim"})
    for part in (
        "blocks.0.router.weight and blocks.1.router.weight are one parameter",
        "'optim'",
        "'optim_grads_params'",
    ):
        assert part in str(raised.value)
    choose_strategies(model, {"*.router": "optim"})


# -- what is trained ---------------------------------------------------------------------------------------------------

MIXED: tuple[dict[str, str | int], ...] = (
    {"*.experts": "optim", "*": "optim_grads_params"},
    {"*.experts": "no_shard", "*": "optim_grads"},
    {"*.router": "no_shard", "*.experts.1": "optim_grads", "blocks.0": "optim"},
    {"*.experts": "optim_grads_params", "*": "no_shard"},
)
WAYS = (
    (1, ""),
    (3, "no_sync"),
    (3, "keep_sharded"),
    (2, "always"),
)  # microbatches, and how all but the last are reduced
OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9),
}


@cache
def trained_alone(micros: int, optimizer_name: str) -> tuple[Mixture, list[Tensor]]:
    """Norms of the gradients before clipping, and the model."""
    model, norms = mixture(), []
    optimizer = OPTIMIZERS[optimizer_name](model)
    for step in range(3):
        for micro in range(micros):
            (model(batch(10 * step + micro)).square().mean() / micros).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def train_as_one_process(
    problems: Problems, rank: int, world: int, row: tuple[Any, ...], mesh: Any, **options: Any
) -> None:
    sharding, (micros, way), optimizer_name, policy = row
    model = sharded(sharding, mesh, seed=rank, policy=policy, **options)  # values are the first rank's
    optimizer = fully_shard_optimizer(OPTIMIZERS[optimizer_name](model))
    expected, expected_norms = trained_alone(micros, optimizer_name)
    tolerance = {"rtol": 0.1, "atol": 0.03} if policy else {"rtol": 1e-4, "atol": 1e-5}
    for step in range(3):
        for micro in range(micros):
            waits = way in ("no_sync", "keep_sharded") and micro < micros - 1
            with no_sync(model, keep_sharded=way == "keep_sharded") if waits else nullcontext():
                (model(batch(10 * step + micro).chunk(world)[rank]).square().mean() / micros).backward()
        case = f"{row} {options} step {step}"
        problems.close(clip_grad_norm_(model, 0.05), expected_norms[step], f"{case}: norm", **tolerance)
        optimizer.step()
        optimizer.zero_grad()
    with unshard(model):
        for name, parameter in model.named_parameters():
            problems.close(
                parameter.detach(), expected.get_parameter(name).detach(), f"{row} {options}: {name}", **tolerance
            )


def models_of_several_strategies_train_as_one_process(rank: int, world: int) -> None:
    problems = Problems()
    for row in thinned(pairwise(MIXED, WAYS, OPTIMIZERS, (None, BF16)), 3):
        train_as_one_process(problems, rank, world, row, None)
    problems.finish()


def so_do_they_on_two_axes(rank: int, world: int) -> None:
    problems = Problems()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    rows = pairwise(
        MIXED,
        WAYS,
        ("AdamW",),
        (None, BF16),
        ("no_shard", "optim"),
        possible=lambda sharding, way, optimizer, policy, outer: (
            outer == "no_shard" or "no_shard" not in sharding.values()
        ),
    )
    for *row, outer in thinned(rows, 3):
        train_as_one_process(problems, rank, world, tuple(row), mesh, outer_sharding=outer)
    problems.finish()


# -- where it lies -----------------------------------------------------------------------------------------------------


def groups_of(model: nn.Module) -> Iterator[tuple[bool, Any]]:
    """Whether a group is of experts, and the group."""
    for group in context(model).groups:
        kinds = {".experts." in f".{entry.name}" for entry in group.entries}
        assert len(kinds) == 1, "no group has parameters of two strategies"
        yield kinds.pop(), group


def weights_of_experts_stay_whole_and_their_optimizer_state_is_sharded(rank: int, world: int) -> None:
    model = sharded(MIXED[0])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    model(batch(rank)).sum().backward()
    optimizer.step()
    for is_expert, group in groups_of(model):
        assert group.weights.is_sharded is not (is_expert or group.spec.whole)
        assert (len(group.main_extent) < len(group.full_extent)) is not group.spec.whole


def each_group_waits_for_what_its_strategy_says(rank: int, world: int) -> None:
    """What strategies keep whole waits unreduced; the rest is reduced over the shard axis each time, if that was asked for."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    for keep_sharded in (False, True):
        model = sharded(MIXED[0], mesh)
        with no_sync(model, keep_sharded=keep_sharded):
            model(batch(rank)).sum().backward()
        for is_expert, group in groups_of(model):
            reached = Sync.NONE if is_expert or group.spec.whole or not keep_sharded else Sync.SHARD
            assert group.gradients.held_back is reached, f"{group.name} {keep_sharded}"
        expected = mixture()
        for other in range(world):
            (expected(batch(other)).sum() / world).backward()
        total = nn.utils.get_total_norm([parameter.grad for parameter in expected.parameters()])
        torch.testing.assert_close(grad_norm(model), total)  # reduces what waits


def averages_and_state_dicts_are_those_of_one_strategy(rank: int, world: int) -> None:
    averages, states = [], []
    for sharding in (MIXED[0], "optim_grads_params"):
        model = sharded(sharding)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        average = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(2):
            model(batch(10 * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                lerp_(average, list(model.parameters()), 0.1)
        averages.append([value.full_tensor() for value in average])
        states.append({name: value.full_tensor() for name, value in model.state_dict().items()})
    torch.testing.assert_close(averages[0], averages[1])
    torch.testing.assert_close(states[0], states[1])
    model = sharded(MIXED[0], seed=1)
    model.load_state_dict(states[1])
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), states[1][name]), name


def names_are_those_inside_the_module_that_is_sharded(rank: int, world: int) -> None:
    model = mixture()
    for block in model.blocks:
        fully_shard(block, sharding={"experts": "optim"})
    fully_shard(model, sharding={"head": "no_shard"})
    for is_expert, group in groups_of(model):
        is_head = "head.weight" in [entry.name for entry in group.entries]
        assert group.weights.is_sharded is not (is_expert or is_head or group.spec.whole)
        assert group.placement.main is not (is_head or group.spec.whole)
    with pytest.raises(ShardingError, match=r"'\*.experts' matches no module"):
        fully_shard(Block(), sharding={"*.experts": "optim"})


def what_replaces_a_module_has_its_strategy(rank: int, world: int) -> None:
    def replace(module: nn.Module) -> None:
        """As plans do that divide layers or put others in their place."""
        if isinstance(module, Block):
            module.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 3), nn.Linear(3, DIM)) for _ in range(2))

    model = sharded(MIXED[0], before=replace)
    assert [group.weights.is_sharded for is_expert, group in groups_of(model) if is_expert] == [False, False]
    model = Block()
    packed = Adapted("inside")
    model.experts.append(packed)
    fully_shard_units(model, [packed], sharding={"experts": "optim", "*": "optim_grads_params"})
    assert not any(group.weights.is_sharded for is_expert, group in groups_of(model) if is_expert)


def an_outer_sharding_that_a_part_cannot_have_is_refused(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("outer", "shard"))
    with pytest.raises(ShardingError, match=r'outer_sharding="optim".*sharding="no_shard"'):
        sharded({"*.experts": "no_shard"}, mesh, outer_sharding="optim")


TWO = [
    models_of_several_strategies_train_as_one_process,
    weights_of_experts_stay_whole_and_their_optimizer_state_is_sharded,
    averages_and_state_dicts_are_those_of_one_strategy,
    names_are_those_inside_the_module_that_is_sharded,
    what_replaces_a_module_has_its_strategy,
    an_outer_sharding_that_a_part_cannot_have_is_refused,
]
WORLDS = {2: TWO, 4: [so_do_they_on_two_axes, each_group_waits_for_what_its_strategy_says]}


@by_world(WORLDS)
def test_a_model_of_several_strategies(world, case):
    check(WORLDS, world, case)
