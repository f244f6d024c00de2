"""`lerp_` moves weights as on one process, with one exchange for all rows that lie elsewhere and none where models are sharded alike."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import MixedPrecisionPolicy, ShardingError, fully_shard, lerp_
from tests.engine.cases import Problems, device_type
from tests.engine.test_sharded_arithmetic import Net, sharded
from tests.engine.worlds import by_world, check, in_turns
from tests.helpers.chain import weights


def moved(weight: float, times: int = 1) -> Net:
    """The teacher on one process."""
    teacher, student = Net(1), Net(2)
    with torch.no_grad():
        for _ in range(times):
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.lerp_(s, weight)
    return teacher


def close(problems: Problems, teacher: nn.Module, expected: Net, what: str) -> None:
    found = (
        weights(teacher)
        if any(hasattr(p, "full_tensor") for p in teacher.parameters())
        else dict(teacher.named_parameters())
    )
    for name, parameter in expected.named_parameters():
        problems.close(found[name].detach(), parameter.detach(), f"{what} {name}", rtol=0, atol=0)
    with torch.no_grad():
        problems.close(teacher(torch.ones(2, 5)), expected(torch.ones(2, 5)), f"{what}: forward")


class Collectives:
    """What is called inside."""

    def __enter__(self) -> Collectives:
        self.calls: list[str] = []
        self.received = 0  # elements, in exchanges of rows
        self._patches = [
            mock.patch.object(place, name, self._counting(name, getattr(place, name)))
            for place, names in (
                (dist, ("all_to_all_single", "all_reduce")),
                (compat, ("all_gather_flat", "foreach_lerp_")),
            )
            for name in names
        ]
        for patch in self._patches:
            patch.start()
        return self

    def _counting(self, name, original):
        def call(*args, **kwargs):
            self.calls.append(name)
            self.received += args[0].numel() if name == "all_to_all_single" else 0
            return original(*args, **kwargs)

        return call

    def __exit__(self, *_) -> None:
        for patch in self._patches:
            patch.stop()


def models_sharded_alike_communicate_nothing(rank, world):
    problems = Problems()
    for options in ({}, {"sharding": "no_shard"}, {"sharding": "optim"}, {"units": False}):
        teacher, student = sharded(1, **options), sharded(2, **options)
        with Collectives() as seen:
            lerp_(teacher, student, 0.25)
        problems.expect(seen.calls == ["foreach_lerp_"], f"{options}: {seen.calls}")
        close(problems, teacher, moved(0.25), str(options))
    problems.finish()


def models_sharded_differently_need_one_exchange(rank, world):
    """Also a rank without any rows takes part."""
    problems = Problems()
    for what, teacher, student, exchanges in (
        ("units", {"units": False}, {"extra": True}, 1),
        ("one more root parameter", {}, {"extra": True}, 1),
        ("whole teacher", {"sharding": "no_shard"}, {"extra": True}, 1),
        ("whole student", {}, {"sharding": "no_shard", "extra": True}, 0),
    ):
        target, source = sharded(1, **teacher), sharded(2, **student)
        for _ in range(2):
            with Collectives() as seen:
                lerp_(target, source, 0.25)
            found = [name for name in seen.calls if name != "foreach_lerp_"]
            problems.expect(found == ["all_to_all_single"] * (exchanges if world > 1 else 0), f"{what}: {found}")
        close(problems, target, moved(0.25, times=2), what)
    problems.finish()


def rows_that_lie_elsewhere_travel_once(rank, world):
    """A rank receives as many numbers as it has of the teacher's parameter, or none where both lie alike."""
    problems = Problems()
    teacher, student = sharded(1, units=False), sharded(2, extra=True)
    for name, target in teacher.named_parameters():
        with Collectives() as seen:
            lerp_([target], [student.get_parameter(name)], 0.25)
        own = target.to_local().numel()
        problems.expect(seen.received in (0, own), f"{name}: {seen.received} numbers came for {own}")
    problems.finish()


def models_on_two_axes_and_on_one(rank, world):
    problems = Problems()
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    hfsdp, hsdp = {"mesh": mesh, "outer_sharding": "optim"}, {"mesh": mesh}
    for what, teacher, student in (
        ("HFSDP", hfsdp, {**hfsdp, "extra": True}),
        ("HSDP", hsdp, {**hsdp, "extra": True}),
        ("HFSDP from one axis", hfsdp, {"extra": True}),
        ("HSDP from HFSDP", hsdp, {**hfsdp, "extra": True}),
        ("one axis from HFSDP", {}, {**hfsdp, "extra": True}),
    ):
        teacher_net = sharded(1, **teacher)
        lerp_(teacher_net, sharded(2, **student), 0.25)
        close(problems, teacher_net, moved(0.25), what)
    problems.finish()


def sharded_and_plain_models_meet(rank, world):
    problems = Problems()
    plain = Net(1)
    lerp_(plain, sharded(2), 0.25)
    close(problems, plain, moved(0.25), "plain teacher")
    teacher = sharded(1)
    lerp_(teacher, Net(2), 0.25)
    close(problems, teacher, moved(0.25), "plain student")
    teacher, student = sharded(1), sharded(2, extra=True)
    lerp_([teacher.first.weight], list(student.first.parameters())[:1], 1.0)
    with torch.no_grad():
        problems.close(teacher.first.weight.full_tensor(), Net(2).first.weight, "lists")
        problems.close(teacher.first.bias.full_tensor(), Net(1).first.bias, "lists: the rest")
    problems.finish()


def a_small_weight_moves_a_float32_teacher_of_a_bfloat16_student(rank, world):
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    teacher = sharded(1, policy=policy).requires_grad_(False)
    student = sharded(2, extra=True, policy=policy)
    for _ in range(3):
        lerp_(teacher, student, 1e-4)
    problems, found = Problems(), weights(teacher)
    for name, parameter in moved(1e-4, times=3).named_parameters():
        problems.close(found[name], parameter.detach(), name, rtol=0, atol=0)
    problems.finish()
    low = fully_shard(Net(1).bfloat16(), policy=MixedPrecisionPolicy(main_params_dtype=None))
    lerp_(low, student, 1.0)
    assert all(
        torch.equal(value, found.bfloat16())
        for value, found in zip(weights(low).values(), Net(2).state_dict().values(), strict=True)
    )


def what_does_not_correspond_is_named(rank, world):
    teacher, student = sharded(1), sharded(2, extra=True)
    with pytest.raises(ShardingError, match=r"sources \(Net\) have no parameters predictor\.weight, predictor\.bias"):
        lerp_(student, teacher, 0.1)
    with pytest.raises(ShardingError, match="as many sources as targets, got 8 and 6"):
        lerp_(teacher, student.parameters(), 0.1)
    with pytest.raises(ShardingError, match=r"number 0: expected a source of the target's shape \(7, 5\), got \(7,\)"):
        lerp_([teacher.first.weight], [student.first.bias], 0.1)
    for weight in (float("nan"), True, torch.tensor(0.1)):
        with pytest.raises(ShardingError, match="weight: expected a finite number"):
            lerp_(teacher, student, weight)


CASES = (
    a_small_weight_moves_a_float32_teacher_of_a_bfloat16_student,
    models_sharded_alike_communicate_nothing,
    models_sharded_differently_need_one_exchange,
    rows_that_lie_elsewhere_travel_once,
    sharded_and_plain_models_meet,
    what_does_not_correspond_is_named,
)
WORLDS = {1: CASES, **in_turns((2, 3), CASES), 4: (models_on_two_axes_and_on_one,)}


@by_world(WORLDS)
def test_lerp(world, case):
    check(WORLDS, world, case)
