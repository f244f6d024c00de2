"""GradientWatch: who made a gradient NaN or infinite, found before the reduction, without Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import (
    GradientWatch,
    MixedPrecisionPolicy,
    NonFiniteGradients,
    ShardingError,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
)
from tests.engine.internals import context_of
from tests.engine.worlds import by_world, check

WIDTH = 6
NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """Units "first" and "second", a head in the root; the gradient of what leaves a unit can be multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.factors: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        for name in ("first", "second"):
            x = getattr(self, name)(x)
            factor = self.factors.get(name)
            if factor is not None:
                x.register_hook(lambda grad, factor=factor: grad * factor)
        return self.head(x)


def sharded(**options: Any) -> Net:
    torch.manual_seed(1)
    with torch.device("cpu"):  # the same weights for every device
        model = Net().to(options.pop("dtype", torch.float32))
    policy = MixedPrecisionPolicy(**options.pop("policy", {}))
    for unit in (model.first, model.second, model):
        fully_shard(unit, policy=policy, **options)
    return model


def backward(model: Net, factors: dict[str, float] | None = None, size: float = 1.0) -> None:
    """One microbatch; `factors` multiply gradients of what leaves a unit, on this rank."""
    model.factors = factors or {}
    like = next(model.parameters())
    (model(torch.ones(2, WIDTH, dtype=like.dtype, device=like.device)).sum() * size).backward()


def where(found: NonFiniteGradients | None) -> list[tuple[str, str, int, int, int]]:
    assert found is not None
    return [(one.name, one.kind, one.microbatch, one.first_rank, one.last_rank) for one in found.parameters]


def parameters_of(units: str, *rest: Any) -> list[tuple[Any, ...]]:
    return [(f"{unit}.0.{kind}", *rest) for unit in units.split() for kind in ("bias", "weight")]


def on(rank: int, wanted: int, factors: dict[str, float]) -> dict[str, float]:
    return factors if rank == wanted else {}


def names_unit_and_rank_before_ranks_are_mixed(rank: int, world: int) -> None:
    last = world - 1
    for sharding in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        for direct in (False, True):
            model = sharded(sharding=sharding, policy={"direct_weight_gradients": direct})
            watch = GradientWatch(model)
            backward(model)
            assert watch.check() is None
            model.zero_grad()
            backward(model, on(rank, last, {"first": NAN}))
            found = watch.check(step=7)
            assert where(found) == parameters_of("first", "NaN", 0, last, last), (sharding, direct)
            assert str(found).startswith("non-finite gradients in step 7, microbatch 0: 2 parameters")
            model.zero_grad()
            backward(model, on(rank, 0, {"second": INF}))
            found = watch.check()
            # tanh'(x) * inf is infinite, and what is before it gets NaN from a product with zero, or an infinity.
            assert [one[0] for one in where(found)] == [one[0] for one in parameters_of("second first")]
            assert all(one[3:] == (0, 0) for one in where(found))
            watch.close()


def names_all_ranks_from_the_lowest_to_the_highest(rank: int, world: int) -> None:
    model = sharded()
    watch = GradientWatch(model)
    backward(model, {"first": NAN})
    assert where(watch.check()) == parameters_of("first", "NaN", 0, 0, world - 1)


def names_the_first_microbatch_of_a_step_and_begins_anew_after_it(rank: int, world: int) -> None:
    model = sharded()
    watch = GradientWatch(model)
    for _ in range(2):
        with no_sync(model):
            for number in range(3):
                backward(model, on(rank, number - 1, {"first": NAN} if number else {}))
                watch.end_backward()
        backward(model)
        assert where(watch.check()) == parameters_of("first", "NaN", 1, 0, 0)
        model.zero_grad()
    backward(model)
    assert watch.check() is None


def asks_for_one_optimizer_and_then_for_the_other(rank: int, world: int) -> None:
    model = sharded()
    optimizers = [
        fully_shard_optimizer(torch.optim.SGD(unit.parameters(), lr=0.1)) for unit in (model.second, model.first)
    ]
    watch = GradientWatch(model)
    backward(model, on(rank, 0, {"first": NAN}))
    second, first = (watch.check(optimizer.param_groups[0]["params"]) for optimizer in optimizers)
    assert second is None
    assert where(first) == parameters_of("first", "NaN", 0, 0, 0)


def a_sum_that_overflows_is_no_rank_s_own(rank: int, world: int) -> None:
    """Two rows of ones: the head's bias has twice the size on each rank. Float16 ends at 65504, float64 at 1.8e308."""
    double = {"main_params_dtype": None, "main_grads_dtype": torch.float64}
    for dtype, size, policy in (
        (torch.float32, 20000.0, {"grad_comm_dtype": torch.float16}),
        (torch.float64, 0.6e308, double),
    ):
        model = sharded(dtype=dtype, policy={"grad_reduce": "sum", **policy})
        watch = GradientWatch(model)
        backward(model, size=size)
        found = watch.check()
        assert found is not None
        assert found.parameters == (), (dtype, found.parameters)
        assert context_of(model).root().name in found.reduced_only
        assert "finite on every rank before the reduction" in str(found)


def says_whether_the_loss_was_finite_already(rank: int, world: int) -> None:
    model = sharded()
    watch = GradientWatch(model)
    for size, factors, expected in (
        (NAN, {}, "the loss was NaN before its backward, on rank {last} in microbatch 1"),
        (INF, {}, "the loss was Inf before its backward, on rank {last} in microbatch 1"),
        (1.0, {"first": NAN}, "every loss was finite before its backward"),
    ):
        for microbatch in range(2):
            is_bad = microbatch == 1 and rank == world - 1
            like = next(model.parameters())
            model.factors = factors if is_bad else {}
            loss = model(torch.ones(2, WIDTH, device=like.device)).sum() * (size if is_bad else 1.0)
            watch.note_loss(loss)
            loss.backward()
            watch.end_backward()
        found = watch.check()
        assert found is not None
        assert str(found).splitlines()[1].strip() == expected.format(last=world - 1)
        assert {parameter.microbatch for parameter in found.parameters} == {1}
        model.zero_grad()
    watch.note_loss(torch.tensor(NAN, device=like.device))
    backward(model)
    assert watch.check() is None, "the gradients decide whether there is anything to report"
    model.zero_grad()
    backward(model, {"first": NAN})
    found = watch.check()
    assert found is not None
    assert found.loss is None, "that of an earlier step is forgotten"


def what_the_user_cleared_is_no_finding(rank: int, world: int) -> None:
    model = sharded()
    watch = GradientWatch(model)
    backward(model, {"first": NAN})
    model.zero_grad()
    backward(model)
    assert watch.check() is None


def answers_come_late_and_in_order(rank: int, world: int) -> None:
    model = sharded()
    watch = GradientWatch(model)
    for step, unit in enumerate(("first", "none", "first")):
        backward(model, on(rank, world - 1, {unit: NAN}))
        watch.submit(step=step)
        model.zero_grad()
    assert [found.step for found in watch.arrived(wait=True)] == [0, 2]
    assert watch.arrived(wait=True) == []


def large_numbers_of_float64_are_finite(rank: int, world: int) -> None:
    model = sharded(dtype=torch.float64, policy={"main_params_dtype": None, "main_grads_dtype": torch.float64})
    watch = GradientWatch(model)
    backward(model, size=1e300)
    assert watch.check() is None


def parameters_that_are_not_sharded_are_watched_too(rank: int, world: int) -> None:
    torch.manual_seed(1)
    model = Net()
    fully_shard(model, ignored_parameters=list(model.first.parameters()))
    watch = GradientWatch(model)
    backward(model, on(rank, 0, {"first": NAN}))
    found = watch.check()
    assert where(found) == parameters_of("first", "NaN", 0, 0, 0)
    assert found is not None
    assert found.parameters[0].unit == "(ignored_parameters)"


def nobody_looks_without_a_watch_or_after_close(rank: int, world: int) -> None:
    model = sharded()
    first, second = GradientWatch(model), GradientWatch(model)
    first.close()
    backward(model, {"first": NAN})
    assert first.check() is not None  # of the reduced gradients
    assert where(second.check()) == parameters_of("first", "NaN", 0, 0, world - 1)
    second.close()
    assert context_of(model).reductions.watches == []


def training_is_to_the_bit_as_without(rank: int, world: int) -> None:
    results = []
    for watched in (False, True):
        model = sharded()
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        watch = GradientWatch(model) if watched else None
        for _ in range(3):
            backward(model)
            if watch is not None:
                assert watch.check() is None
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.full_tensor() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def modules_that_are_not_roots_are_refused(rank: int, world: int) -> None:
    with pytest.raises(ShardingError, match="which is not sharded"):
        GradientWatch(nn.Linear(2, 2))
    with pytest.raises(ShardingError, match="which is inside another one"):
        GradientWatch(sharded().first)


ALONE: list[Callable[[int, int], None]] = [
    names_unit_and_rank_before_ranks_are_mixed,
    asks_for_one_optimizer_and_then_for_the_other,
    large_numbers_of_float64_are_finite,
    says_whether_the_loss_was_finite_already,
    what_the_user_cleared_is_no_finding,
    training_is_to_the_bit_as_without,
    modules_that_are_not_roots_are_refused,
]
TOGETHER: list[Callable[[int, int], None]] = [
    names_unit_and_rank_before_ranks_are_mixed,
    names_all_ranks_from_the_lowest_to_the_highest,
    names_the_first_microbatch_of_a_step_and_begins_anew_after_it,
    asks_for_one_optimizer_and_then_for_the_other,
    a_sum_that_overflows_is_no_rank_s_own,
    says_whether_the_loss_was_finite_already,
    answers_come_late_and_in_order,
    parameters_that_are_not_sharded_are_watched_too,
    nobody_looks_without_a_watch_or_after_close,
    training_is_to_the_bit_as_without,
]
WORLDS = {1: ALONE, 2: TOGETHER}


@by_world(WORLDS)
def test_gradient_watch(world: int, case: Any) -> None:
    check(WORLDS, world, case)
