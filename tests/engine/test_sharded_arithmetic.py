"""Arithmetic on sharded tensors gives what it gives on whole ones: between models sharded differently, over rows, and at random."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_mfsdp.engine import EngineStateError, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from tests.engine.cases import Problems, device_type
from tests.engine.worlds import by_world, check, in_turns
from tests.helpers.chain import inputs, loss_of, sharded_chain
from tests.helpers.nights import thinned

# What elementwise operations make of a teacher's parameter `t` and a student's `s`, in place and out of place.
WRITES = {
    "mul_ add_": lambda t, s: t.mul_(0.9).add_(s, alpha=0.1),
    "lerp_": lambda t, s: t.lerp_(s, 0.3),
    "copy_": lambda t, s: t.copy_(s),
    "data.copy_": lambda t, s: t.data.copy_(s.data),
    "addcmul_": lambda t, s: t.addcmul_(s, s, value=0.5),
    "sub_ of a product": lambda t, s: t.sub_(s * 2),
    "data =": lambda t, s: setattr(t, "data", t.data * 0.9 + s.data * 0.1),
    "data = from the other": lambda t, s: setattr(t, "data", s.data * 0.1 + t.data * 0.9),
    "out": lambda t, s: torch.add(t, s, out=t),
}
RESULTS = {
    "add": lambda t, s: t + s,
    "where": lambda t, s: torch.where(s > 0, t, s),
    "maximum": torch.maximum,
    "from the other": lambda t, s: s - t,
    "foreach": lambda t, s: torch._foreach_add([t, t], [s, t], alpha=2.0)[0],
}
FOREACH = {
    "_foreach_lerp_": lambda t, s: torch._foreach_lerp_(t, s, 0.3),
    "_foreach_mul_ add_": lambda t, s: (torch._foreach_mul_(t, 0.9), torch._foreach_add_(t, s, alpha=0.1)),
    "_foreach_copy_": torch._foreach_copy_,
    "_foreach_addcmul_": lambda t, s: torch._foreach_addcmul_(t, s, s, [0.5] * len(t)),
    "_foreach_mul_ by a number": lambda t, s: torch._foreach_mul_(t, torch.tensor(0.5)),
}


class Net(nn.Module):
    """Two layers whose rows no number of ranks divides; the scalar and the odd shapes belong to the root."""

    def __init__(self, seed: int, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.randn(()))
        self.table = nn.Parameter(torch.randn(3, 2, 2))
        if extra:
            self.predictor = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale * self.table.sum()


def sharded(seed: int, extra: bool = False, units: bool = True, **options) -> Net:
    net = Net(seed, extra)
    if units:
        fully_shard(net.first, **options)
    return fully_shard(net, **options)


def pairs(teacher: nn.Module, student: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    students = dict(student.named_parameters())
    return {name: (parameter, students[name]) for name, parameter in teacher.named_parameters()}


def compare(problems: Problems, number: int, what: str, make_teacher, make_student) -> None:
    """All operations, between two models that lie differently, against the same on whole tensors.

    On a push a third of them: three numbers in a row have all.
    """
    with torch.no_grad():
        for label in in_part(WRITES, number):
            write = WRITES[label]
            teacher, student, plain = make_teacher(), make_student(), pairs(Net(1), Net(2))
            kept = {name: s.full_tensor() for name, (_, s) in pairs(teacher, student).items()}
            for name, (t, s) in pairs(teacher, student).items():
                write(t, s)
                write(*plain[name])
                problems.close(t.full_tensor(), plain[name][0].detach(), f"{what} {label} {name}", atol=0)
                problems.close(s.full_tensor(), kept[name], f"{what} {label} {name}: the source", rtol=0, atol=0)
            ones = torch.ones(2, 5)
            problems.close(teacher(ones), plain_net(plain)(ones), f"{what} {label}: forward sees it")
        teacher, student, plain = make_teacher(), make_student(), pairs(Net(1), Net(2))
        for label in in_part(RESULTS, number):
            compute = RESULTS[label]
            for name, (t, s) in pairs(teacher, student).items():
                result, expected = compute(t, s), compute(*plain[name])
                problems.close(result.full_tensor(), expected, f"{what} {label} {name}", atol=0)
        for label in in_part(FOREACH, number):
            write = FOREACH[label]
            teacher, student, plain = make_teacher(), make_student(), pairs(Net(1), Net(2))
            for found in (pairs(teacher, student), plain):
                write([t for t, _ in found.values()], [s for _, s in found.values()])
            for name, (t, _) in pairs(teacher, student).items():
                problems.close(t.full_tensor(), plain[name][0].detach(), f"{what} {label} {name}", atol=0)


def in_part(operations: dict, number: int) -> list[str]:
    """Every third name from this one on; at night all."""
    names = list(operations)
    return thinned(names[number:] + names[:number], 3)


def plain_net(plain: dict[str, tuple[Tensor, Tensor]]) -> Net:
    net = Net(1)
    for name, (value, _) in plain.items():
        net.get_parameter(name).data = value.data
    return net


def models_sharded_differently_meet(rank, world):
    problems = Problems()
    rows = (
        ("units and none, one more root parameter", {"units": False}, {"extra": True}),
        ("whole and sharded", {"sharding": "no_shard"}, {"sharding": "optim_grads_params", "extra": True}),
        ("sharded and whole", {"sharding": "optim"}, {"sharding": "no_shard", "extra": True}),
    )
    for number, (label, teacher, student) in enumerate(rows):
        compare(problems, number, label, lambda t=teacher: sharded(1, **t), lambda s=student: sharded(2, **s))
    problems.finish()


def models_on_different_meshes_meet(rank, world):
    problems = Problems()
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    turned = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("shard", "outer"))
    rows = (
        ("HFSDP and one axis", {"mesh": mesh, "outer_sharding": "optim"}, {"extra": True}),
        ("HFSDP and HFSDP", *({"mesh": turned, "outer_sharding": "optim", "extra": extra} for extra in (True, False))),
        ("HSDP and HFSDP", {"mesh": mesh}, {"mesh": mesh, "outer_sharding": "optim", "extra": True}),
    )
    for number, (label, teacher, student) in enumerate(rows):
        student = student | {"extra": True}
        teacher.pop("extra", None)
        compare(problems, number, label, lambda t=teacher: sharded(1, **t), lambda s=student: sharded(2, **s))
    problems.finish()


def operands_that_are_repeated_meet_the_right_rows(rank, world):
    """Rows against a vector, a column or a row, a number of the whole: what broadcasts along the first dim is fetched whole."""
    problems = Problems()
    torch.manual_seed(0)
    values = {
        "a": torch.randn(7, 7),
        "b": torch.randn(7),
        "c": torch.randn(7, 1),
        "d": torch.randn(1, 7),
        "e": torch.randn(5, 1, 7),
    }
    model = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in values.items()})
    fully_shard(model)
    with torch.no_grad():
        for label, compute in {
            "a b": lambda a, b, c, d, e: a * b,
            "b a": lambda a, b, c, d, e: b - a,
            "a c": lambda a, b, c, d, e: a / c,
            "c d": lambda a, b, c, d, e: c * d,
            "e b": lambda a, b, c, d, e: e + b,
            "e a": lambda a, b, c, d, e: e * a,
            "centered": lambda a, b, c, d, e: a - a.mean(0),
            "scaled rows": lambda a, b, c, d, e: a / a.norm(dim=1, keepdim=True),
            "scaled columns": lambda a, b, c, d, e: a / a.norm(dim=0, keepdim=True),
            "row sums": lambda a, b, c, d, e: (e.sum(dim=(1, 2)) + 1).square().sum(),
        }.items():
            problems.close(compute(**dict(model.items())).full_tensor(), compute(**values), label)
        model["a"].mul_(model["b"])
        problems.close(model["a"].full_tensor(), values["a"] * values["b"], "in place")
        assert torch.equal(model["a"] * 2, model["a"] + model["a"])
        assert not torch.equal(model["a"], model["b"])
    problems.finish()


REDUCTIONS = {
    **{
        name: getattr(Tensor, name)
        for name in ("sum", "mean", "max", "min", "amax", "amin", "std", "var", "norm", "argmax", "median")
    },
    **{f"norm {p}": lambda t, p=p: t.norm(p) for p in (0, 1, 3, math.inf, -math.inf)},
    **{
        f"{name} 0": lambda t, name=name: getattr(t, name)(0)
        for name in ("sum", "mean", "amax", "amin", "std", "argmin", "norm")
    },
    **{
        f"{name} -1": lambda t, name=name: getattr(t, name)(-1)
        for name in ("sum", "mean", "amax", "amin", "std", "argmax", "logsumexp")
    },
    "norm dim=1": lambda t: t.norm(dim=1),
    "vector_norm": lambda t: torch.linalg.vector_norm(t, math.inf, dim=(0, 1), keepdim=True),
    "mean of both": lambda t: t.mean((0, 1), keepdim=True),
    "max dim=1": lambda t: t.max(dim=1)[0] * 2 + t.max(dim=1)[1],
    "max dim=0": lambda t: t.max(dim=0).values + t.min(dim=0).indices,
    "aminmax": lambda t: t.aminmax().max,
    "in float64": lambda t: t.mean(dtype=torch.float64),
    "count": lambda t: (t > 0).sum() + t.count_nonzero() + (t > 0).all(1).sum(),
    "sum of booleans": lambda t: (t > 0).sum(),
    "sum of integers": lambda t: ((t > 0).int() * 2**30).sum(0),
    "any all": lambda t: (t > 1).any(0, keepdim=True) & (t > -1).all(),
}


def reductions_are_those_of_the_whole_tensor(rank, world):
    problems = Problems()
    torch.manual_seed(0)
    values = {"uneven": torch.randn(7, 5), "on one rank": torch.randn(1, 3), "wide": torch.randn(2, 9)}
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.ParameterDict({name: nn.Parameter(value.to(dtype)) for name, value in values.items()})
        fully_shard(model)
        for name, parameter in model.items():
            expected = values[name].to(dtype if parameter.dtype == dtype else torch.float32)
            expected = expected.to(dtype).to(parameter.dtype)
            for label, look in REDUCTIONS.items():
                if name == "on one rank" and label in ("std 0",):
                    continue  # of one number
                with torch.no_grad():
                    found, wanted = look(parameter).full_tensor(), look(expected)
                problems.close(found, wanted, f"{dtype} {name} {label}")
                problems.expect(found.dtype == wanted.dtype, f"{name} {label}: {found.dtype}, expected {wanted.dtype}")
                if not wanted.dim():
                    problems.close(torch.tensor(look(parameter).item()), wanted.cpu(), f"{name} {label}: item()")
    problems.finish()


def half_precision_is_summed_in_float32(rank, world):
    values = torch.full((64, 3), 0.1).bfloat16()
    values[0] = 100
    model = nn.ParameterDict({"w": nn.Parameter(values.clone())})
    fully_shard(model, policy=MixedPrecisionPolicy(main_params_dtype=None))
    assert model["w"].dtype is torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model["w"].mean().full_tensor(), values.mean())
        assert torch.equal(model["w"].sum(0).full_tensor(), values.float().sum(0).bfloat16())


def a_nan_on_one_rank_is_the_extreme_on_all(rank, world):
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(7, 2))})
    fully_shard(model)
    with torch.no_grad():
        model["w"].data = torch.ones(7, 2).index_fill(0, torch.tensor([6]), math.nan)
        for look in (Tensor.max, Tensor.amin, lambda t: t.norm(math.inf), lambda t: t.norm(-math.inf), Tensor.norm):
            assert look(model["w"]).isnan().item()
        found = model["w"].amax(1).full_tensor()
    assert found.isnan().tolist() == [False] * 6 + [True]


def gradients_reduce_as_weights_do(rank, world):
    problems = Problems()
    plain, model = Net(1), sharded(1)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    for net in (plain, model):
        net(x).square().mean().backward()
    for name, parameter in plain.named_parameters():
        grad, expected = model.get_parameter(name).grad, parameter.grad
        for label, look in REDUCTIONS.items():
            if expected.dim() == 2 and (label, name) != ("std 0", "second.weight"):
                problems.close(look(grad).full_tensor(), look(expected), f"{name}.grad {label}", atol=1e-6)
        for label, look in {"norm": Tensor.norm, "mean": Tensor.mean, "inf": lambda g: g.norm(math.inf)}.items():
            problems.close(look(grad).full_tensor(), look(expected), f"{name}.grad {label}")
        norms = torch._foreach_norm([p.grad for p in model.parameters()], math.inf)
        expected_norms = torch._foreach_norm([p.grad for p in plain.parameters()], math.inf)
        for norm, wanted in zip(norms, expected_norms, strict=True):
            problems.close(norm.full_tensor(), wanted, "_foreach_norm")
    for norm_type in (2.0, math.inf):
        found = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
        problems.close(found, nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type), "total")
    problems.finish()


def random_numbers_are_those_of_one_process_with_the_same_seed(rank, world):
    for options in ({}, {"sharding": "no_shard"}):
        plain, model = Net(1), sharded(1, **options)
        for label, draw in {
            "randn_like": torch.randn_like,
            "rand_like": lambda t: torch.rand_like(t, dtype=torch.float64),
            "randint_like": lambda t: torch.randint_like(t, 100),
            "normal_": lambda t: t.detach().normal_(1.0, 2.0),
            "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t) if t.dim() > 1 else t,
            "of a gradient": lambda t: t.detach() + 0.1 * torch.randn_like(t.detach() * 2),
        }.items():
            for name, parameter in plain.named_parameters():
                with torch.no_grad():
                    torch.manual_seed(7)
                    found = draw(model.get_parameter(name))
                    after = torch.rand(1)
                    torch.manual_seed(7)
                    expected = draw(parameter)
                    assert torch.equal(found.full_tensor(), expected), f"{label} {name}"
                    assert found.dtype == expected.dtype
                    assert torch.equal(after, torch.rand(1)), "the generator stands where it stands on one process"
    torch.manual_seed(rank)
    with torch.no_grad():
        noise = torch.randn_like(model.first.weight).full_tensor()
    assert len(noise.unique()) == noise.numel()


def data_takes_whole_and_sharded_values(rank, world):
    for options in ({}, {"sharding": "no_shard"}, {"sharding": "optim"}):
        model, x = sharded(1, **options), torch.ones(2, 5)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        model(x).sum().backward()
        optimizer.step()
        parameter = model.first.weight
        model.first.weight.data = torch.full((7, 5), 0.5)
        assert model.first.weight is parameter
        assert torch.equal(parameter.full_tensor(), torch.full((7, 5), 0.5))
        parameter.data = parameter.data
        parameter.data = parameter.data.clone() * 2
        parameter.grad.data = torch.full((7, 5), 3.0)
        assert torch.equal(parameter.grad.full_tensor(), torch.full((7, 5), 3.0))
        plain = Net(1)
        plain.first.weight.data = torch.ones(7, 5)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))


def data_of_another_kind_is_refused(rank, world):
    model, other = sharded(1), sharded(2, extra=True)
    weight = model.first.weight
    for value, got in (
        (torch.zeros(7, 4), r"got \(7, 4\) torch\.float32"),
        (torch.zeros(7, 5, dtype=torch.float64), r"torch\.float64"),
        (torch.zeros(7, 5, device="meta"), "on meta"),
    ):
        with pytest.raises(EngineStateError, match=rf"weight of unit first.*own shape \(7, 5\), torch\.float32.*{got}"):
            weight.data = value
    for same_memory in (other.first.weight.data, other.state_dict()["first.weight"], other.first.weight.detach()):
        with pytest.raises(EngineStateError, match=r"weight of unit first.*would make both one memory.*copy_"):
            weight.data = same_memory


def a_model_takes_over_the_state_of_one_sharded_differently(rank, world):
    teacher, student = sharded(1, units=False), sharded(2, extra=True)
    missing = teacher.load_state_dict(student.state_dict(), strict=False)
    assert missing.unexpected_keys == ["predictor.weight", "predictor.bias"]
    for t, s in pairs(teacher, student).values():
        assert torch.equal(t.full_tensor(), s.full_tensor())


def a_norm_is_printed_as_a_number(rank, world):
    """As in logs: f"{norm:.3f}"."""
    model = sharded_chain()
    loss_of(model, inputs(0, rank)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert f"{norm:.3f}" == f"{norm.item():.3f}"
    assert f"{norm}" == f"{norm.item()}"


def transforms_of_sharded_rows_are_refused(rank, world):
    """Below them each rank would compute with its own rows, and show the result as one of equal shards."""
    if torch.__version__.startswith("2.11"):  # whose DTensor does not ask its subclasses
        return
    model = sharded(1)
    weight = model.first.weight
    for transform in (
        torch.vmap(torch.linalg.vector_norm),
        torch.vmap(torch.linalg.vector_norm, in_dims=1),
        torch.func.grad(torch.linalg.vector_norm),
        torch.func.jacrev(lambda values: (values * values).sum()),
    ):
        with pytest.raises(
            EngineStateError, match=r"parameter weight of unit first.*Pass parameter.detach\(\).full_tensor\(\)"
        ):
            transform(weight)
        assert transform(weight.detach().full_tensor()).isfinite().all()


CASES = (
    transforms_of_sharded_rows_are_refused,
    a_norm_is_printed_as_a_number,
    a_model_takes_over_the_state_of_one_sharded_differently,
    a_nan_on_one_rank_is_the_extreme_on_all,
    data_of_another_kind_is_refused,
    data_takes_whole_and_sharded_values,
    gradients_reduce_as_weights_do,
    half_precision_is_summed_in_float32,
    models_sharded_differently_meet,
    operands_that_are_repeated_meet_the_right_rows,
    random_numbers_are_those_of_one_process_with_the_same_seed,
    reductions_are_those_of_the_whole_tensor,
)
WORLDS = {1: CASES, **in_turns((2, 3), CASES), 4: (models_on_different_meshes_meet,)}


@by_world(WORLDS)
def test_arithmetic(world, case):
    check(WORLDS, world, case)
