"""Each mistake gets one message: what, where, expected and got, what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    ShardingError,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    gather_root,
    no_sync,
    unshard,
)
from tests.engine.cases import device_type, run_cases


def says(error: type[Exception], *parts: str):
    """The one message has all the parts, whatever their order."""
    return pytest.raises(error, match="".join(f"(?s:(?=.*{part}))" for part in parts))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> dist.DeviceMesh:
    return dist.init_device_mesh(device_type(), shape, mesh_dim_names=names)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_of_several_processes_without_a_process_group_is_told_to_make_one(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with says(ShardingError, "no process group", f"{name}=2", "init_process_group"):
        fully_shard(model())
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("main_params_dtype", torch.int32, "torch.float32"),
        ("grad_comm_dtype", torch.complex64, "or None"),
        ("compute_dtype", "bf16", "torch.float16"),
        ("compute_dtype", torch.float8_e4m3fn, "torch.bfloat16"),
        ("fp32_modules", nn.LayerNorm, r"write \(value,\)"),
        ("fp32_modules", "norm*", r"write \(value,\)"),
        ("grad_reduce", "average", '"mean", "sum"'),
        ("grad_reduce", 0.0, "positive divisor"),
        ("grad_reduce", float("nan"), "positive divisor"),
        ("high_precision_reduce", True, "grad_comm_dtype must be torch.bfloat16 or torch.float16"),
    ],
)
def test_a_policy_field_that_cannot_be_honored_is_named(field, value, expected):
    with says(ShardingError, f"MixedPrecisionPolicy.{field}", expected):
        MixedPrecisionPolicy(**{field: value})


@pytest.mark.parametrize("field", ["main_grads_dtype", "grad_comm_dtype"])
def test_float16_gradients_need_what_scales_the_loss(field):
    for compute in (torch.bfloat16, torch.float32):
        with says(
            ShardingError, f"MixedPrecisionPolicy.{field}: torch.float16 with compute_dtype={compute}", "bfloat16"
        ):
            MixedPrecisionPolicy(**{field: torch.float16, "compute_dtype": compute})
    for compute in (None, torch.float16):
        assert getattr(MixedPrecisionPolicy(**{field: torch.float16, "compute_dtype": compute}), field) is torch.float16


def bad_names(rank: int, world: int) -> None:
    with says(ShardingError, "sharding: expected one of no_shard, optim", "0 to 3", "got 'zero3'"):
        fully_shard(model(), sharding="zero3")
    for wrong in (4, -1, True, 2.0):
        with says(ShardingError, "sharding: expected", f"got {wrong}"):
            fully_shard(model(), sharding=wrong)
    with says(ShardingError, "storage", '"pooled" or "dynamic"', "got 'fast'"):
        fully_shard(model(), storage="fast")
    with says(ShardingError, "reshard_after_forward", 'True, False or "auto"', "got 'never'"):
        fully_shard(model(), reshard_after_forward="never")
    with says(ShardingError, f"symmetric_memory=True on rank {rank}", "needs CUDA and NCCL, got cpu and gloo"):
        fully_shard(model(), symmetric_memory=True)
    mesh = mesh_of((1, world), ("outer", "shard"))
    with says(ShardingError, "outer_sharding", '"no_shard"', '"optim"', "optim_grads"):
        fully_shard(model(), mesh, outer_sharding="optim_grads")
    with says(ShardingError, 'outer_sharding="optim"', 'sharding="no_shard"', "use"):
        fully_shard(model(), mesh, sharding="no_shard", outer_sharding="optim")


def a_refused_module_stays_usable(rank: int, world: int) -> None:
    plain = model()
    with pytest.raises(ShardingError):
        fully_shard(plain, sharding="zero3")
    assert type(plain[0].weight) is nn.Parameter
    fully_shard(plain)(torch.ones(2, 4)).sum().backward()


def mesh_mismatch(rank: int, world: int) -> None:
    with says(ShardingError, "one axis", "two", "3 axes", f"a=1, b=1, c={world}", "pass"):
        fully_shard(model(), mesh_of((1, 1, world), ("a", "b", "c")))
    with says(ShardingError, "outer_sharding='optim'", "outer axis", f"1-D mesh of {world} ranks"):
        fully_shard(model(), outer_sharding="optim")
    with says(ShardingError, "shard", "tp", "outer"):
        fully_shard(model(), mesh_of((1, world), ("shard", "tp")))


def axes_by_name_in_either_order(rank: int, world: int) -> None:
    for shape, names in (((world, 1), ("shard", "outer")), ((1, world), ("outer", "shard")), ((1, world), ("a", "b"))):
        sharded = fully_shard(nn.Linear(4, 2 * world), mesh_of(shape, names))
        placed = [placement.is_shard() for placement in sharded.weight.placements]
        assert placed == [size == world for size in shape], names


def not_on_the_mesh(rank: int, world: int) -> None:
    mesh = dist.DeviceMesh("cpu", [0])
    if rank == 0:
        fully_shard(model(), mesh)
    else:
        with says(ShardingError, "rank 1", "not part of the mesh"):
            fully_shard(model(), mesh)


def double_sharding(rank: int, world: int) -> None:
    sharded = fully_shard(model())
    with says(ShardingError, "Sequential is sharded already", "once"):
        fully_shard(sharded)
    with says(
        ShardingError,
        f"parameter weight of Linear on rank {rank} is sharded already",
        "expected a plain parameter",
        "nested units first",
    ):
        fully_shard(sharded[0])


# -- parameters --------------------------------------------------------------------------------------------------------


def unsupported_dtypes(rank: int, world: int) -> None:
    for parameter, what in (
        (nn.Parameter(torch.ones(3).to(torch.complex32)), "torch.complex32"),
        (nn.Parameter(torch.ones(3).to(torch.float8_e5m2), requires_grad=False), "torch.float8_e5m2"),
    ):
        module = nn.Module()
        module.inner = nn.Module()
        module.inner.odd = parameter
        with says(ShardingError, "parameter inner.odd of Module", what, "ignored_parameters"):
            fully_shard(module)
        fully_shard(module, ignored_parameters=[parameter])
        assert module.inner.odd is parameter
    with says(ShardingError, "parameter 0.weight", "float64", "main_params_dtype=torch.float32", "Pass"):
        fully_shard(model().double())
    whole = MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float64)
    assert fully_shard(model().double(), policy=whole)[0].weight.dtype is torch.float64


def somebody_elses_dtensor(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of((world,), ("dp",))
    with says(ShardingError, "0 of Sequential", "torch.distributed.fsdp.fully_shard", "Leave out the lines"):
        fully_shard(nn.Sequential(torch_fully_shard(nn.Linear(4, 4), mesh=mesh)))
    other = nn.Linear(4, 4)
    other.weight = nn.Parameter(distribute_tensor(other.weight.detach(), mesh, [Shard(0)]))
    with says(ShardingError, "parameter 0.weight of Sequential", "DTensor", "one engine"):
        fully_shard(nn.Sequential(other))


def fp16_without_a_scaler(rank: int, world: int) -> None:
    sharded = fully_shard(model(), policy=MixedPrecisionPolicy(compute_dtype=torch.float16))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    with says(ShardingError, "parameter 0.weight", "float16", "DistributedGradScaler"):
        fully_shard_optimizer(optimizer)
    fully_shard_optimizer(optimizer, grad_scaler=torch.amp.GradScaler("cpu"))


def optimizers_that_cannot(rank: int, world: int) -> None:
    with says(ShardingError, "SGD holds no parameter of a sharded module", "fully_shard"):
        fully_shard_optimizer(torch.optim.SGD(model().parameters(), lr=0.1))
    with says(ShardingError, "LBFGS", "cannot run on shards", "AdamW"):
        fully_shard_optimizer(torch.optim.LBFGS(fully_shard(model()).parameters()))


def values_of_another_kind(rank: int, world: int) -> None:
    sharded = fully_shard(model())[0].weight
    for value in (torch.zeros(3, 5), torch.zeros(3, 4, dtype=torch.float64)):
        with says(EngineStateError, "0.weight", "its own shape", r"\(3, 4\), torch.float32"):
            sharded.data = value
    with says(EngineStateError, "0.weight", "needs a gradient", "torch.no_grad"):
        sharded[0] = 1.0


def shared_across_meshes(rank: int, world: int) -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    fully_shard(tied[0], mesh_of((world,), ("shard",)))
    with says(ShardingError, "parameter weight", "shared with weight", "another mesh", "same mesh"):
        fully_shard(tied[1], mesh_of((1, world), ("outer", "shard")))


def deep_copy(rank: int, world: int) -> None:
    import copy

    with says(EngineStateError, "0.weight", "cannot be deep-copied", "before fully_shard"):
        copy.deepcopy(fully_shard(model()))
    around = nn.ModuleList([fully_shard(model())])
    with unshard(around[0]), says(EngineStateError, "cannot be deep-copied", "load full_state_dict"):
        copy.deepcopy(around)


def a_gradient_of_another_shape(rank: int, world: int) -> None:
    sharded = fully_shard(model())
    with says(EngineStateError, "0.weight", r"shape \(4, 3\)", r"expected \(3, 4\)", "same values on every rank"):
        sharded[0].weight.grad = torch.ones(4, 3)


def not_sharded(rank: int, world: int) -> None:
    plain, uses = model(), {"no_sync": no_sync, "unshard": unshard, "gather_root": gather_root}
    for use in uses.values():
        with says(ShardingError, "Sequential", "fully_shard"), use(plain):
            pass
    two = nn.ModuleList([fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2))])
    with says(ShardingError, "ModuleList", "2 roots", "call fully_shard"), no_sync(two):
        pass


def not_finite(rank: int, world: int) -> None:
    sharded = fully_shard(model())
    (sharded(torch.ones(2, 4)).sum() * float("inf")).backward()
    with says(EngineStateError, "clip_grad_norm_", "norm of order 2.0", "(nan|inf)", "error_if_nonfinite=False"):
        clip_grad_norm_(sharded, 1.0, error_if_nonfinite=True)


# -- ranks that differ -------------------------------------------------------------------------------------------------


def differing(build: Callable[[int], nn.Module], zero: str, one: str, rank: int, world: int) -> None:
    with says(
        ShardingError,
        "do not have the same module",
        "rank 1 of the mesh differs from rank 0",
        zero,
        one,
        "Build the same model",
    ):
        fully_shard(build(rank))


def other_shape(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3 + rank))


def other_dtype(rank: int) -> nn.Module:
    return nn.Linear(4, 4).to(torch.bfloat16 if rank else torch.float32)


def other_frozen(rank: int) -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(rank == 0)


def one_more(rank: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank)))


def other_buffers(rank: int) -> nn.Module:
    """One rank would send them before it learns that the others have none."""
    return nn.Sequential(nn.Linear(4, 4), nn.Identity() if rank else nn.BatchNorm1d(4))


def other_tie(rank: int) -> nn.Module:
    two = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    if rank:
        two[1].weight = two[0].weight
    return two


CASES = {
    "bad names": bad_names,
    "a refused module stays usable": a_refused_module_stays_usable,
    "mesh mismatch": mesh_mismatch,
    "axes by name in either order": axes_by_name_in_either_order,
    "a rank that is not on the mesh": not_on_the_mesh,
    "double sharding": double_sharding,
    "unsupported dtypes": unsupported_dtypes,
    "a DTensor of another engine": somebody_elses_dtensor,
    "float16 without a scaler": fp16_without_a_scaler,
    "optimizers that cannot": optimizers_that_cannot,
    "values of another kind": values_of_another_kind,
    "shared by units on different meshes": shared_across_meshes,
    "deep copy": deep_copy,
    "a gradient of another shape": a_gradient_of_another_shape,
    "functions on a module that is not sharded": not_sharded,
    "a norm that is not finite": not_finite,
    "ranks differ in a shape": partial(differing, other_shape, r"0.weight: \(3, 4\)", r"0.weight: \(4, 4\)"),
    "ranks differ in a dtype": partial(differing, other_dtype, "torch.float32", "torch.bfloat16"),
    "ranks differ in what is frozen": partial(differing, other_frozen, "requires_grad=True", "requires_grad=False"),
    "ranks differ in length": partial(differing, one_more, r"as on rank 0: \[\]", "1.weight"),
    "ranks differ in buffers": partial(differing, other_buffers, "1.weight", r"got on rank 1: \[\]"),
    "ranks differ in what is tied": partial(differing, other_tie, "1.weight", r"got on rank 1: \[\]"),
}


@pytest.fixture(scope="module")
def outcomes():
    return run_cases(CASES, 2)


@pytest.mark.parametrize("case", CASES)
def test_says_what_where_and_what_to_do(outcomes, case):
    assert not outcomes[case], outcomes[case]
