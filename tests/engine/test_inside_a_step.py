"""What programs do inside a step, outside of any forward: parameters are written, penalized and looked at as under plain PyTorch.

Every case runs the same program on a plain model with the batches of all ranks and on a sharded one with a rank's own.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    gather_root,
    no_sync,
    refresh_weights,
    unshard,
)
from tests.engine.cases import device_type
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, in_world

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
BFLOAT16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, cast_forward_inputs=False)


class Net(nn.Module):
    """A student with a unit inside, a teacher of the root's, one of a unit's, and parameters that only the step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.block = nn.Linear(6, 6)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.teacher_block = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(6))
        self.temperature = nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor) -> Tensor:
        y = self.block(self.body(x)) * self.scale * self.temperature
        return (y - self.teacher(x) - self.teacher_block(x)).square().mean()


def sharded(sharding: str, policy: MixedPrecisionPolicy | None = None, kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    for name in ("block", "teacher_block"):
        if hasattr(model, name):
            fully_shard(getattr(model, name), sharding=sharding, policy=policy)
    return fully_shard(model, sharding=sharding, policy=policy)


def plain(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(index: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * index + rank))


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-6) -> None:
    difference = (found - expected).abs()
    assert bool((difference <= tolerance * (1 + expected.abs())).all()), f"{what}: off by {difference.max():.2e}"


def momentum(model: Net) -> None:
    with torch.no_grad():
        for teacher, student in zip(model.teacher.parameters(), model.block.parameters(), strict=True):
            teacher.mul_(0.9).add_(whole(student), alpha=0.1)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.body[0].weight.mul_(0.5)
        model.teacher.bias.fill_(0.25)
        model.teacher_block.weight.clamp_(-0.1, 0.1)
        model.body[2].weight[1:3] = 0.5


def through_data(model: Net) -> None:
    model.body[0].weight.data.clamp_(-0.1, 0.1)
    model.teacher.weight.data.copy_(torch.linspace(0, 1, 36).view(6, 6))
    model.block.bias.data.add_(torch.ones(6))
    model.temperature.data.mul_(2.0)


def by_assignment(model: Net) -> None:
    model.teacher.weight.data = torch.linspace(0, 1, 36).view(6, 6)
    model.block.weight.data = model.block.weight.data * 0.5
    model.scale.data = model.scale.data * 0.9 + torch.ones(6) * 0.1


def state_of_another(model: Net) -> None:
    with torch.no_grad():
        for target, source in zip(model.teacher.parameters(), model.body[2].parameters(), strict=False):
            if target.shape == source.shape:
                target.copy_(whole(source))
    model.teacher_block.load_state_dict({"weight": torch.eye(6), "bias": torch.zeros(6)})


WRITES = (momentum, in_place, through_data, by_assignment, state_of_another)


def what_a_step_writes_lasts(rank, world):
    """At its beginning and between forward and backward, by every way of writing."""
    for write, sharding in in_world(world, (1, 2, 3), WRITES, STRATEGIES):
        reference, model = plain(), sharded(sharding)
        expected = torch.optim.SGD(reference.parameters(), lr=0.1)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for index in range(3):
            write(reference)
            sum(reference.loss(batch(index, one)) / world for one in range(world)).backward()
            expected.step()
            expected.zero_grad()
            with gather_root(model):
                write(model)
                model.loss(batch(index, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
            found = whole(other)
            assert torch.equal(found, one) if world == 1 else torch.allclose(found, one, atol=1e-6), (
                f"{write.__name__} {sharding} {name}: {(found - one).abs().max():.2e}"
            )


def slow_teachers_move_in_the_main_weights_dtype(rank, world):
    """A momentum of 0.999 is lost in bfloat16."""
    for sharding in in_turn(0, STRATEGIES):
        model = sharded(sharding, BFLOAT16)
        reference = plain()
        for _ in range(20):
            with gather_root(model), torch.no_grad():
                for net in (model, reference):
                    net.teacher.weight.mul_(0.999).add_(torch.full((6, 6), 0.001))
                    net.teacher_block.weight.data.mul_(0.999)
        assert model.teacher.weight.dtype is torch.float32
        assert torch.equal(whole(model.teacher.weight), reference.teacher.weight), sharding
        assert torch.equal(whole(model.teacher_block.weight), reference.teacher_block.weight), sharding
        with gather_root(model), torch.no_grad(), torch.autocast(device_type(), torch.bfloat16, cache_enabled=False):
            seen = model.teacher(torch.eye(6, dtype=torch.bfloat16)) - model.teacher.bias.bfloat16()
        torch.testing.assert_close(seen.float().t(), reference.teacher.weight, atol=1e-2, rtol=1e-2)


class Clamped(nn.Module):
    """Writes to its weight in its own forward, in one of the ways of doing it."""

    how = "data"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data":
            self.weight.data.clamp_(-0.5, 0.5)
        elif self.how == "assigned":
            self.weight.data = self.weight.data.clamp(-0.5, 0.5)
        else:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
        return x @ self.weight


class HasClamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_root, self.block = Clamped(), Clamped()

    def loss(self, x: Tensor) -> Tensor:
        return self.block(self.of_root(x)).square().mean()


def forwards_may_write_to_their_own_weights(rank, world):
    for how, sharding in in_world(world, (1, 2, 3), ("data", "assigned", "in place"), STRATEGIES):
        Clamped.how = how
        reference, model = plain(HasClamped), sharded(sharding, kind=HasClamped)
        expected = torch.optim.SGD(reference.parameters(), lr=5.0)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=5.0))
        for index in range(3):
            reference.loss(torch.cat([batch(index, one) for one in range(world)])).backward()
            with gather_root(model):
                loss = model.loss(batch(index, rank))
            loss.backward()
            for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
                assert torch.allclose(whole(other), one, atol=1e-6), f"{how} {sharding} {name} after forward {index}"
            for one in (expected, optimizer):
                one.step()
                one.zero_grad()
        assert whole(model.block.weight).abs().max() <= 10, "it trains"


def forwards_that_write_in_another_dtype_are_refused_by_name(rank, world):
    Clamped.how = "in place"
    for sharding, name in in_world(world, (1, 2, 3), STRATEGIES, ("of_root", "block")):
        model = sharded(sharding, BFLOAT16, HasClamped)
        with (
            pytest.raises(
                EngineStateError, match=r"wrote to its own parameter .*weight.*bfloat16.*float32.*fp32_modules"
            ),
            gather_root(model),
        ):
            getattr(model, name)(batch(0, rank).bfloat16())
        Clamped.how = "data"  # values that stay in range leave the main weight as it is; others take the new ones
        with gather_root(model):
            getattr(model, name)(batch(0, rank).bfloat16())
        Clamped.how = "in place"
        expected = torch.linspace(-1, 1, 36).view(6, 6)
        found = whole(getattr(model, name).weight)
        assert torch.equal(found, torch.where(expected.bfloat16().abs() > 0.5, expected.clamp(-0.5, 0.5), expected)), (
            name
        )


def penalty(model: Net) -> Tensor:
    return 0.1 * sum(parameter.square().sum() for parameter in model.parameters()) + model.body[2].bias.abs().sum()


def functional(model: Net) -> Tensor:
    x = torch.ones(2, 6)
    return (
        F.linear(x[:, :2], model.block.weight[:, :2]).square().mean() + F.linear(x, model.body[2].weight[:, :6]).mean()
    )


def vector(model: Net) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).norm()


def losses_of_parameters_have_gradients(rank, world):
    """Computed from parameters directly: before the forwards and after them, of the root's and of a unit's."""
    for extra, sharding, policy, first in in_world(
        world, (1, 2, 3), (penalty, functional, vector), STRATEGIES, (None, BFLOAT16), (True, False), together=1
    ):
        reference, model = plain(), sharded(sharding, policy)
        with (
            gather_root(model),
            torch.autocast(device_type(), torch.bfloat16, enabled=policy is not None, cache_enabled=False),
        ):
            before = extra(model) if first else 0.0
            loss = model.loss(batch(0, rank))
            (before + loss if first else loss + extra(model)).backward()
            gradients = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        with torch.autocast(device_type(), torch.bfloat16, enabled=policy is not None, cache_enabled=False):
            losses = [reference.loss(batch(0, one)) for one in range(world)]
            (extra(reference) + sum(losses) / world).backward()
        tolerance = 1e-6 if policy is None else 3e-2
        for name, one in reference.named_parameters():
            if one.requires_grad:
                found = whole(gradients[name])
                close(found, one.grad, f"{extra.__name__} {sharding} {name}", tolerance)
        looked = penalty(model).detach()  # outside of any step, and never differentiated
        torch.testing.assert_close(looked, penalty(reference).detach())


def modules_of_the_root_run_by_themselves(rank, world):
    """Outside of a step, as `generate` in a hook does; with gradients, too."""
    for sharding in in_turn(1, STRATEGIES):
        reference, model = plain(), sharded(sharding)
        x = batch(0, rank)
        with torch.no_grad():
            torch.testing.assert_close(model.body(x), reference.body(x))
            torch.testing.assert_close(model.body[0](x), reference.body[0](x))
        model.body(x).square().mean().backward()
        sum(reference.body(batch(0, one)).square().mean() / world for one in range(world)).backward()
        for one, other in zip(model.body.parameters(), reference.body.parameters(), strict=True):
            torch.testing.assert_close(whole(one.grad), other.grad)
            assert isinstance(one, DTensor), "sharded again"


def a_graph_is_out_of_date_if_it_saved_what_was_written_unsharded_and_only_then(rank, world):
    for sharding in STRATEGIES:
        for name in ("bias", "weight"):
            torch.manual_seed(0)
            model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), sharding=sharding)
            loss = model(torch.ones(2, 3)).sum()
            with unshard(model[1], writeback=True), torch.no_grad():
                getattr(model[1], name).add_(1.0)
            with (
                nullcontext()
                if name == "bias"
                else pytest.raises(RuntimeError, match="modified by an inplace operation")
            ):
                loss.backward()
            model(torch.ones(2, 3)).sum().backward()


def parts_of_a_unit_are_unsharded(rank, world):
    """Also where the unit around them owns what they have, which stays sharded elsewhere."""
    for sharding in in_turn(2, STRATEGIES):
        reference, model = plain(), sharded(sharding)
        with unshard(model.body, writeback=True):
            for one, other in zip(model.body.parameters(), reference.body.parameters(), strict=True):
                assert not isinstance(one, DTensor)
                assert torch.equal(one, other)
            assert isinstance(model.scale, DTensor)
            assert isinstance(model.block.weight, DTensor)
            with torch.no_grad():
                model.body[0].bias.fill_(3.0)
        assert bool((whole(model.body[0].bias) == 3.0).all())
        with unshard(model):
            assert not any(isinstance(one, DTensor) for one in model.parameters())


def after_a_forward_without_backward_parameters_are_sharded(rank, world):
    for sharding in in_turn(3, STRATEGIES):
        model = sharded(sharding)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with gather_root(model):
            model.loss(batch(0, rank)).backward()
        with gather_root(model):
            model.loss(batch(0, rank))
        optimizer.step()
        assert all(isinstance(one, DTensor) for one in model.parameters()), sharding
        model.zero_grad()
        assert all(one.grad is None for one in model.parameters()), sharding
        refresh_weights(model)


def cleared_at(clear, sharding, policy, rank, world, bad):
    """Three microbatches, the last one of which communicates; after the first something is done to the gradients."""
    found = []
    for kind in (plain, lambda: sharded(sharding, policy)):
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        is_plain = kind is plain
        if not is_plain:
            fully_shard_optimizer(optimizer)
        for index in range(3):
            factor = math.nan if index == 0 and bad else 1.0
            with nullcontext() if is_plain or index == 2 else no_sync(model):
                if is_plain:
                    sum(model.loss(batch(index, one) * factor) / world for one in range(world)).backward()
                else:
                    with gather_root(model):
                        model.loss(batch(index, rank) * factor).backward()
            if index == 0:
                clear(model, optimizer)
        optimizer.step()
        found.append({name: whole(one) for name, one in model.named_parameters()})
    for name, expected in found[0].items():
        close(found[1][name], expected, f"{clear} {sharding} {name}")


def clear_where_not_finite(model: nn.Module, _: object) -> None:
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    assert grads
    if not all(bool(grad.isfinite().all()) for grad in grads):
        model.zero_grad()


def one_is_cleared(model: nn.Module, _: object) -> None:
    model.body[0].weight.grad = None


def all_are_doubled(model: nn.Module, _: object) -> None:
    for one in model.parameters():
        if one.grad is not None:
            one.grad.mul_(2)


def all_are_clipped(model: nn.Module, _: object) -> None:
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01


def gradients_held_back_are_cleared_and_edited_as_others(rank, world):
    after_a_bad_one = (
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        clear_where_not_finite,
    )
    after_a_good_one = (one_is_cleared, all_are_doubled, all_are_clipped, lambda model, optimizer: None)
    ways = [*((clear, True) for clear in after_a_bad_one), *((clear, False) for clear in after_a_good_one)]
    for sharding, (clear, bad) in in_world(world, (1, 2, 3), STRATEGIES, ways):
        cleared_at(clear, sharding, None, rank, world, bad=bad)


def set_whole(model: nn.Module) -> None:
    for one in model.parameters():
        if one.grad is not None:
            one.grad = torch.ones(one.shape)


def set_like(model: nn.Module) -> None:
    for one in model.parameters():
        if one.grad is not None:
            one.grad = torch.zeros_like(one.data) + one.grad * 0.5


def through_its_data(model: nn.Module) -> None:
    for one in model.parameters():
        if one.grad is not None:
            one.grad.data.clamp_(-0.01, 0.01)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def by_norm(model: nn.Module) -> None:
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.01, norm)


def gradients_are_there_inside_of_a_step(rank, world):
    """After the backward, before the step has ended: of the root's parameters as of a unit's."""
    for edit, sharding in in_world(
        world, (1, 2, 3), (set_whole, set_like, through_its_data, by_value, by_norm), STRATEGIES
    ):
        reference, model = plain(), sharded(sharding)
        expected = torch.optim.SGD(reference.parameters(), lr=0.1)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for index in range(2):
            with gather_root(model):
                for half in range(2):
                    for one in (optimizer, expected):
                        one.zero_grad()
                    model.loss(batch(2 * index + half, rank)).backward()
                    sum(reference.loss(batch(2 * index + half, one)) / world for one in range(world)).backward()
                    for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
                        assert (one.grad is None) == (other.grad is None), name
                    for net in (model, reference):
                        edit(net)
                    for one in (optimizer, expected):
                        one.step()
        for (name, one), other in zip(reference.named_parameters(), model.parameters(), strict=True):
            close(whole(other), one.detach(), f"{edit.__name__} {sharding} {name}")


CASES = (
    what_a_step_writes_lasts,
    slow_teachers_move_in_the_main_weights_dtype,
    forwards_may_write_to_their_own_weights,
    forwards_that_write_in_another_dtype_are_refused_by_name,
    losses_of_parameters_have_gradients,
    modules_of_the_root_run_by_themselves,
    a_graph_is_out_of_date_if_it_saved_what_was_written_unsharded_and_only_then,
    parts_of_a_unit_are_unsharded,
    after_a_forward_without_backward_parameters_are_sharded,
    gradients_held_back_are_cleared_and_edited_as_others,
    gradients_are_there_inside_of_a_step,
)
WORLDS = {1: thinned(CASES, 3), 2: CASES, **at_night({3: CASES})}


@by_world(WORLDS)
def test_inside_a_step(world, case):
    check(WORLDS, world, case)
