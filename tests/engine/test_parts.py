"""Arithmetic on parameters that are parts along a tensor axis is that on whole plain tensors; what cannot be right is refused."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_mfsdp.base.part import mark_summed
from lightning_mfsdp.engine import (
    EngineStateError,
    GradientWatch,
    MixedPrecisionPolicy,
    ShardingError,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    lerp_,
    sharded_parameters,
    units,
    unshard,
    unshard_model,
)
from lightning_mfsdp.moe import GroupedExperts, expert_parallel
from lightning_mfsdp.optim import Muon
from tests.engine.cases import Problems
from tests.engine.int8_codec import Int8Codec, LateInt8Linear
from tests.engine.parts import (
    ANYHOW,
    DIVISIONS,
    FEW,
    OTHERWISE,
    SHAPES,
    SHARDINGS,
    Net,
    attempt,
    compare,
    lying,
    on_this_rank,
    own_part,
    sharded,
    two_axes,
    values,
    whole,
)
from tests.engine.test_sharded_arithmetic import REDUCTIONS
from tests.engine.worlds import by_world, check
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, pairwise

# What is computed of one parameter. Some are not for every shape.
ALONE: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda t: t,
    "* 2": lambda t: t * 2,
    "2 - t": lambda t: 2 - t,
    "clone": Tensor.clone,
    "detach": Tensor.detach,
    "half": Tensor.half,
    "to": lambda t: t.to(torch.float64),
    "> 0": lambda t: t > 0,
    "zeros_like": torch.zeros_like,
    "full_like": lambda t: torch.full_like(t, 3.0, dtype=torch.float64),
    "new_zeros": lambda t: t.new_zeros(3),
    "new_ones of its shape": lambda t: t.new_ones(t.shape),
    "clamp": lambda t: t.clamp(-0.5, 0.5),
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "masked_fill": lambda t: t.masked_fill(t > 0, 1.0),
    "lerp": lambda t: t.lerp(t * 2, 0.25),
    "addcmul": lambda t: torch.addcmul(t, t, t + 1, value=0.5),
    "minus its mean": lambda t: t - t.mean(),
    "minus means of dim 0": lambda t: t - t.mean(0),
    "by norms of the last dim": lambda t: t / t.norm(dim=-1, keepdim=True),
    "by norms of dim 0": lambda t: t / t.norm(dim=0, keepdim=True),
    "plus sums of the last dim": lambda t: t + t.sum(-1, keepdim=True),
    "sum of squares": lambda t: t.square().sum(),
    "norm of order -1": lambda t: t.norm(-1),
    "softmax": lambda t: t.softmax(-1),
    "cumsum": lambda t: t.cumsum(0),
    "sort": lambda t: t.sort(dim=0).values,
    "topk": lambda t: t.topk(2, dim=0).values,
    "mT": lambda t: t.mT,
    "[1]": lambda t: t[1] * 2,
    "[..., 1:3]": lambda t: t[..., 1:3] * 2,
    "[mask]": lambda t: t[t > 0],
    "index_select": lambda t: t.index_select(0, torch.tensor([1, 0])),
    "view": lambda t: t.view(-1) + 1,
    "reshape": lambda t: t.reshape(2, -1) + 1,
    "split": lambda t: [one + 1 for one in t.split(1)],
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, t]),
    "diff": lambda t: t.diff(dim=-1),
    "matmul": lambda t: t.flatten(1) @ torch.ones(t[0].numel(), 3),
    "matmul with itself": lambda t: t.mT @ t,
    "svd": torch.linalg.svdvals,
    "foreach_add": lambda t: torch._foreach_add([t, t], [t * 2, t], alpha=0.5),
    "foreach_norm": lambda t: torch._foreach_norm([t, t * 2], 1.0),
    "foreach_max": lambda t: torch._foreach_max([t, t * 2]),
    "equal": lambda t: [torch.equal(t, t.clone()), torch.equal(t, t * 2), torch.equal(t, torch.zeros(2))],
    "allclose": lambda t: [torch.allclose(t, t * (1 + 1e-7)), torch.allclose(t, t + 1)],
    "deepcopy": lambda t: copy.deepcopy(t.detach()) + 1,
    "sizes": lambda t: [t.numel(), t.dim(), t.nbytes, t.stride(), t.is_contiguous()],
    "numbers": lambda t: [t.sum().item() > 0, bool((t < 1e9).all())],
    "isfinite": lambda t: torch.isfinite(t).all(),
    "get_total_norm": lambda t: nn.utils.get_total_norm([t.detach(), t.detach()], 2.0),
    "parameters_to_vector": lambda t: nn.utils.parameters_to_vector([t]),
    **{f"norm of dim {dim}": lambda t, dim=dim: t.norm(dim=dim) for dim in (0, 1, (0, 1))},
    **{f"sum of dims {dims}": lambda t, dims=dims: t.sum(dims) for dims in ((0, 1), (1, 2), 1)},
    **REDUCTIONS,
}


def arithmetic_with_one(rank: int, world: int) -> None:
    problems, mesh, plain = Problems(), two_axes(), values()
    models = {sharding: sharded(mesh, sharding=sharding) for sharding in FEW}
    with torch.no_grad():
        for sharding, name, label in thinned(product(FEW, SHAPES, ALONE), 5):
            of_one(problems, sharding, name, label, models[sharding].get_parameter(name), plain[name])
    problems.finish()


def of_one(problems: Problems, what: str, name: str, label: str, parameter: Tensor, plain: Tensor) -> None:
    compute = ALONE[label]
    try:
        expected = compute(plain.clone())
    except (RuntimeError, IndexError, TypeError):
        return  # not for this shape
    case = f"{what} {name} {label}"
    compare(problems, attempt(problems, case, lambda: compute(parameter)), expected, case, 1e-5)


# From a parameter and another operand, of any of the kinds below.
RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda t, o: t + o,
    "from the other": lambda t, o: o - t,
    "where": lambda t, o: torch.where(o > 0, t, o),
    "maximum": torch.maximum,
    "lerp": lambda t, o: torch.lerp(t, o.expand_as(t), 0.25),
    "foreach": lambda t, o: torch._foreach_add([t, t], [o, t], alpha=2.0),
    "foreach addcmul": lambda t, o: torch._foreach_addcmul([t, t], [o, t], [t, o], 0.5),
    "isclose": torch.isclose,
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda t, o: t.mul_(o),
    "add_": lambda t, o: t.add_(o, alpha=0.5),
    "copy_": lambda t, o: t.copy_(o),
    "addcmul_": lambda t, o: t.addcmul_(o, o, value=0.5),
    "out": lambda t, o: torch.sub(t, o, out=t),
    "masked_fill_": lambda t, o: t.masked_fill_(o > 0, 0.5),
    "where out": lambda t, o: torch.where(o > 0, t, o, out=t),
    "foreach": lambda t, o: torch._foreach_mul_([t], [o]),
    "data": lambda t, o: t.data.sub_(o),
    "data =": lambda t, o: setattr(t, "data", t.data * 0.5 + o),
    "[...] =": lambda t, o: t.__setitem__(..., o),
}
OPERANDS: dict[str, Callable[[torch.Size], tuple[int, ...]]] = {
    "of its shape": lambda shape: (*shape,),
    "number": lambda shape: (),
    "last dim": lambda shape: (*shape[-1:],),
    "column": lambda shape: (*shape[:-1], *(1 for _ in shape[-1:])),
    "row": lambda shape: (*(1 for _ in shape[:1]), *shape[1:]),
}
THE_OTHER = "parameter of another model"


def partners(names: Any, labels: Any) -> Iterator[tuple[str, Net, Net, list[tuple[str, str, str]]]]:
    """Models that lie in each way beside others that do, and a third of the pairs of a name, a label and a kind of operand."""
    mesh, turned = two_axes(), two_axes("tensor", "data")
    rows = pairwise(FEW, DIVISIONS, DIVISIONS, ("no_shard", "optim"), (mesh, turned), together=1)
    cases = pairwise(names, labels, (*OPERANDS, THE_OTHER))
    for number, (mine, target, source, theirs, other_mesh) in enumerate(rows):
        what = f"{target} {mine}, {source} {theirs}{' on a turned mesh' if other_mesh is turned else ''}"
        made = sharded(mesh, 1, DIVISIONS[target], sharding=mine)
        yield what, made, sharded(other_mesh, 2, DIVISIONS[source], sharding=theirs), cases[number % 3 :: 3]


def operand(kind: str, name: str, other: Net) -> tuple[Tensor, Tensor]:
    """One to meet a parameter, and the same, plain."""
    if kind == THE_OTHER:
        return other.get_parameter(name), values(2)[name]
    made = torch.randn(OPERANDS[kind](values()[name].shape), generator=torch.Generator().manual_seed(3))
    return made, made


@torch.no_grad()
def arithmetic_with_others(rank: int, world: int) -> None:
    problems = Problems()
    for what, model, other, cases in partners(SHAPES, RESULTS):
        for name, label, kind in cases:
            case = f"{what}: {name} {label} {kind}"
            one, same = operand(kind, name, other)
            found = attempt(problems, case, lambda n=name, c=RESULTS[label], m=model, o=one: c(m.get_parameter(n), o))
            compare(problems, found, RESULTS[label](values()[name], same), case)
    problems.finish()


@torch.no_grad()
def writes_with_others(rank: int, world: int) -> None:
    problems = Problems()
    for what, model, other, cases in partners(SHAPES, WRITES):
        plain, x = Net(), torch.ones(())
        for name, label, kind in cases:
            parameter, expected = model.get_parameter(name), plain.get_parameter(name)
            case = f"{what}: {name} {label} {kind}"
            one, same = operand(kind, name, other)
            attempt(problems, case, lambda w=WRITES[label], p=parameter, o=one: w(p, o))
            WRITES[label](expected, same)
            compare(problems, parameter, expected, case)
            compare(problems, other.get_parameter(name), values(2)[name], f"{case}: the source")
            for written in (parameter, expected):
                written.copy_(values()[name] * 0.5)
        problems.close(model(x), on_this_rank(model, plain, x), f"{what}: forward sees it")
    problems.finish()


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 100),
    "normal_": lambda t: t.detach().normal_(1.0, 2.0),
    "bernoulli_": lambda t: t.detach().bernoulli_(0.5),
    "noise": lambda t: t.detach() + 0.1 * torch.randn_like(t.detach() * 2),
    "trunc_normal_": nn.init.trunc_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "dirac_": nn.init.dirac_,
    "sparse_": lambda t: nn.init.sparse_(t, 0.5),
    "orthogonal_": lambda t: nn.init.orthogonal_(t.data) if t.dim() == 2 else t,
}


def draws_and_initializations(rank: int, world: int) -> None:
    problems, mesh = Problems(), two_axes()
    for sharding in FEW:
        model, plain = sharded(mesh, sharding=sharding), Net()
        for name, (label, draw) in thinned(product(SHAPES, DRAWS.items()), 4):
            case, parameter = f"{sharding} {name} {label}", model.get_parameter(name)
            torch.manual_seed(5)
            try:
                expected = draw(plain.get_parameter(name))
            except ValueError:
                continue  # not for this shape
            torch.manual_seed(5)
            compare(problems, attempt(problems, case, lambda d=draw, p=parameter: d(p)), expected, case)
        for name, parameter in model.named_parameters():
            compare(problems, parameter, plain.get_parameter(name), f"{sharding} {name}: the parameter")
    problems.finish()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "[0]": lambda t: t[0],
    "[1:]": lambda t: t[1:],
    "[..., 1:3]": lambda t: t[..., 1:3],
    "view(-1)": lambda t: t.view(-1)[2:5],
    "mT": lambda t: t.mT,
    "chunk": lambda t: t.chunk(2, dim=-1)[1],
    "detach()[1:]": lambda t: t.detach()[1:],
    "diagonal": lambda t: t.diagonal(),
}


def views_and_writes_to_them(rank: int, world: int) -> None:
    problems, mesh, x = Problems(), two_axes(), torch.tensor(0.5)
    for sharding in FEW:
        model, plain = sharded(mesh, sharding=sharding), Net()
        for one in (model, plain):
            one(x).backward()
        matrices = [name for name, (shape, _, _) in SHAPES.items() if len(shape) > 1]
        for name, (label, view), kind in thinned(product(matrices, VIEWS.items(), ("data", "grad")), 3):
            shown = [getattr(one.get_parameter(name), kind) for one in (model, plain)]
            for one in shown:
                kept = view(one)
                kept.mul_(0.5)
                one.add_(1.0)
                kept[:1].fill_(3.0)
                torch.clamp(kept, max=2.5, out=kept)
            compare(problems, *shown, f"{sharding} {name}.{kind} {label}")
    problems.finish()


def gradients_are_read_set_and_scaled(rank: int, world: int) -> None:
    problems, mesh, x = Problems(), two_axes(), torch.tensor(0.5)
    for sharding in in_turn(1, SHARDINGS):
        model, plain = sharded(mesh, sharding=sharding), Net()
        other, other_plain = sharded(mesh, 2, OTHERWISE, sharding="optim_grads_params"), Net(2)
        for one in (model, plain, other, other_plain):
            one(x).backward()
        for name, parameter in model.named_parameters():
            case, expected = f"{sharding} {name}.grad", plain.get_parameter(name)
            theirs, theirs_plain = other.get_parameter(name), other_plain.get_parameter(name)
            compare(problems, parameter.grad, expected.grad, case)
            compare(problems, copy.deepcopy(parameter.grad), expected.grad, f"{case} copied")
            compare(problems, parameter.grad.detach().clone().double(), expected.grad.double(), f"{case} cloned")
            with torch.no_grad():
                for one in (parameter, expected):
                    one.grad.mul_(0.5)
                    one.grad /= one.grad.norm()
                    one.grad = one.grad * 2 + one
                compare(problems, parameter.grad, expected.grad, f"{case} scaled")
                made = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                parameter.grad = made
                compare(problems, parameter.grad, made, f"{case} = whole")
                parameter.grad = theirs.grad
                compare(problems, parameter.grad, theirs_plain.grad, f"{case} = the other's")
                parameter.grad = theirs.detach().clone()
                compare(problems, parameter.grad, theirs_plain.detach(), f"{case} = the other's weight")
                parameter.grad.data = made
                compare(problems, parameter.grad, made, f"{case}.data =")
                parameter.grad.zero_()
                problems.expect(not whole(parameter.grad).any(), f"{case} zeroed")
    problems.finish()


def weights_move_between_models_that_lie_otherwise(rank: int, world: int) -> None:
    problems, mesh, x = Problems(), two_axes(), torch.tensor(0.3)
    for target, mine, source, theirs in pairwise(ANYHOW, FEW, ANYHOW, FEW, together=1):
        case = f"{target} {mine} from {source} {theirs}"
        model, other = lying(mesh, target, mine), lying(mesh, source, theirs, 2)
        attempt(problems, f"lerp_ {case}", lambda m=model, o=other: lerp_(m, o, 0.25))
        expected = {name: value.lerp(values(2)[name], 0.25) for name, value in values().items()}
        compare(problems, dict(model.named_parameters()), expected, f"lerp_ {case}")
        attempt(problems, f"load_state_dict {case}", lambda m=model, o=other: m.load_state_dict(o.state_dict()))
        compare(problems, dict(model.named_parameters()), values(2), f"load_state_dict {case}")
        if target is not None:
            problems.close(model(x), on_this_rank(model, Net(2), x), f"{case}: forward sees it")
    problems.finish()


def whole_weights_are_shown_and_written_back(rank: int, world: int) -> None:
    problems, mesh = Problems(), two_axes()
    for sharding in in_turn(0, SHARDINGS):
        model = nn.Sequential(OrderedDict(one=Net(1, mesh), two=Net(2, mesh, OTHERWISE)))
        fully_shard(model, mesh, sharding=sharding)
        for shown in (model, model.two):
            with unshard(shown, writeback=True):
                compare(problems, dict(model.two.named_parameters()), values(2), f"{sharding} shown")
                for parameter in model.two.parameters():
                    with torch.no_grad():
                        parameter.mul_(2.0)
                        parameter.view(-1)[-1] = 7.0
            for name, parameter in model.two.named_parameters():
                expected = values(2)[name] * 2
                expected.view(-1)[-1] = 7.0
                compare(problems, parameter, expected, f"{sharding} {name} written back")
                with torch.no_grad():
                    parameter.copy_(values(2)[name])
        compare(problems, dict(model.one.named_parameters()), values(1), f"{sharding} the other")
    problems.finish()


def conversions_show_whole_shapes(rank: int, world: int) -> None:
    problems, mesh = Problems(), two_axes()
    for sharding in in_turn(2, SHARDINGS):
        model = sharded(mesh, sharding=sharding)
        for convert in (nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16), nn.Module.cpu):
            expected = dict(convert(Net()).named_parameters())
            compare(problems, dict(convert(model).named_parameters()), expected, f"{sharding} converted")
            model.float()
            model.load_state_dict(values())
        compare(problems, dict(model.named_parameters()), values(), f"{sharding} converted back")
        with pytest.raises(
            ShardingError, match='has rows, of which ranks along the axis "tensor" compute with different'
        ):
            unshard_model(model)
    problems.finish()


def reports_are_about_whole_parameters(rank: int, world: int) -> None:
    mesh = two_axes()
    count = sum(value.numel() for value in values().values())
    for sharding in in_turn(1, SHARDINGS):
        model = sharded(mesh, sharding=sharding)
        assert sum(view.num_parameters for view in units(model)) == count
        assert sum(parameter.numel() for parameter in model.parameters()) == count
        for view in sharded_parameters(model):
            value, seen = values()[view.name], torch.zeros_like(values()[view.name])
            assert view.shape == view.dtensor.shape == value.shape
            assert torch.equal(view.main, view.piece.of(value))
            assert len(view.rows) == (len(view.main) if view.main.dim() else 1)
            for box in view.piece.boxes:
                box.in_whole(seen).add_(1.0)
            dist.all_reduce(seen)
            assert seen.unique().numel() == 1, "each number is on equally many ranks"
        watch = GradientWatch(model)
        model(torch.tensor(math.nan if rank == 2 else 1.0)).backward()
        found = watch.check()
        assert found is not None
        assert {one.name for one in found.parameters} == set(values())
        assert {(one.first_rank, one.last_rank) for one in found.parameters} == {(2, 2)}


class Experts(nn.Module):
    """Weights of several experts, each of which is divided over the tensor axis: gate and up packed, and down."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(1)
        shapes = {"up": ((4, 8, 3), 1, (4, 4)), "down": ((4, 3, 4), 2, (4,)), "router": ((4, 3), 0, ())}
        for name, (shape, dim, sections) in shapes.items():
            value = torch.randn(shape, generator=numbers)
            if mesh is not None:
                value = value.chunk(2)[mesh["expert"].get_local_rank()].clone()
            is_part = mesh is not None and sections
            self.register_parameter(
                name, own_part(value, dim, sections, mesh) if is_part else nn.Parameter(value.clone())
            )

    def forward(self, x: Tensor) -> Tensor:
        return sum((x * parameter.square().sum() for parameter in self.parameters()), x.new_zeros(()))


def experts_that_are_divided_too(rank: int, world: int) -> None:
    problems = Problems()
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "expert", "tensor"))
    for sharding in FEW:
        model, plain = fully_shard(Experts(mesh), mesh, sharding=sharding), Experts()
        with torch.no_grad():
            for name, label in thinned(product(dict(plain.named_parameters()), ALONE), 5):
                whole_one = plain.get_parameter(name).detach()
                of_one(problems, f"experts {sharding}", name, label, model.get_parameter(name), whole_one)
        optimizers = fully_shard_optimizer(torch.optim.AdamW(model.parameters())), torch.optim.AdamW(plain.parameters())
        for _ in range(2):
            model(
                torch.tensor(2.0)
            ).backward()  # each of the two ranks along the expert axis counts for half of the data
            plain(torch.tensor(1.0)).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            compare(problems, clip_grad_norm_(model, 0.5), expected, f"{sharding} norm")
            for one in optimizers:
                one.step()
                one.zero_grad()
        compare(problems, dict(model.named_parameters()), dict(plain.named_parameters()), sharding)
        states = [whole(one.state_dict()["state"]) for one in optimizers]
        compare(problems, *states, f"{sharding} state")
        lerp_(model, Experts(), 1.0)
        compare(problems, dict(model.named_parameters()), dict(Experts().named_parameters()), f"{sharding} lerp_")
    problems.finish()


def quantized_parts_stay_parts(rank: int, world: int) -> None:
    mesh = two_axes()
    torch.manual_seed(0)
    entire, layer, seen = LateInt8Linear(6, 8), LateInt8Linear(6, 4), []
    layer.weight = own_part(entire.weight.detach(), 0, (8,), mesh)
    layer.weight.register_hook(seen.append)
    fully_shard(layer, mesh, policy=MixedPrecisionPolicy(weight_codecs=(Int8Codec(),)))
    assert torch.equal(layer.weight.full_tensor(), entire.weight)
    layer(torch.ones(2, 6)).sum().backward()
    assert [one.shape for one in seen] == [(4, 6)]
    assert torch.equal(layer.weight.grad.full_tensor(), torch.full((8, 6), 2.0))


class Remade(torch.optim.SGD):
    """Makes DTensors of rows and the placements of its parameters, as torchao's optimizers do.

    Attributes:
        tells_shape: It tells DTensor the shape of the whole.
        computes: It has DTensor compute with them, too.
    """

    tells_shape, computes = True, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            told = {"shape": parameter.shape, "stride": parameter.stride()} if self.tells_shape else {}
            rows = parameter.grad.to_local().clone()
            made = DTensor.from_local(rows, parameter.device_mesh, parameter.placements, run_check=False, **told)
            parameter.sub_(torch.zeros_like(made).fill_(1.0))
            parameter.add_(made * 0.5 if self.computes else made)


def is_refused(problems: Problems, step: Callable[[], Any]) -> bool:
    """Whether a step says that DTensor cannot compute with rows that lie as they do."""
    try:
        step()
    except RuntimeError as error:
        said = ("has other rows than DTensor gives", "has strips of several sections")
        problems.expect(any(one in str(error) for one in said), str(error))
        return True
    return False


def dtensors_of_a_users_own_meet_parts(rank: int, world: int) -> None:
    """Results of DTensor do not know where they lie: they are right, or refused; with zeros_like they are right."""
    problems, mesh = Problems(), two_axes()
    for sharding, tells in thinned(product(in_turn(0, SHARDINGS), (True, False)), 3):
        model, plain = sharded(mesh, sharding=sharding), Net()
        for one in (model, plain):
            one(torch.tensor(0.5)).backward()
        for name, parameter in model.named_parameters():
            grad, what = plain.get_parameter(name).grad, f"{sharding} {name} {tells}"
            optimizer = fully_shard_optimizer(Remade([parameter], lr=0.1))
            if not isinstance(optimizer.param_groups[0]["params"][0], DTensor):
                continue  # whole on every rank, and plain
            optimizer.tells_shape = tells
            # From torch 2.14 on, and in 2.15 for vectors, DTensor asks where rows lie that two axes divide, even for zeros_like.
            asked = name in ("packed_rows", "bias") and sharding != "no_shard"
            if not (asked and is_refused(problems, optimizer.step)):
                _ = asked or attempt(problems, what, optimizer.step)
                compare(problems, parameter, values()[name] - 1 + grad, what)
            optimizer.computes, before = True, whole(parameter).clone()
            if not is_refused(problems, optimizer.step):
                compare(problems, parameter, before - 1 + grad * 0.5, f"{what} computed")
            elif not torch.equal(whole(parameter), before):
                compare(problems, parameter, before - 1, f"{what} refused")
    model = sharded(mesh, sharding="no_shard")
    for name in ("rows", "columns"):
        own = distribute_tensor(values(3)[name], mesh, [Replicate(), Shard(SHAPES[name][1])])
        with torch.no_grad():
            found = model.get_parameter(name) + own
        compare(problems, found, values()[name] + values(3)[name], f"{name} distributed by DTensor")
    problems.finish()


# -- refusals ----------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda p: (p * torch.ones(p.shape)).sum(),
    "norm": lambda p: p.norm(),
    "clone": lambda p: (p.clone() * 2.0).sum(),
    "double": lambda p: p.double().square().sum(),
    "row": lambda p: p[:1].sum(),
}


def losses_outside_of_forward_are_refused(rank: int, world: int) -> None:
    """Of a part, and of a parameter whose gradients a hook adds up, however it was copied before."""
    problems, mesh = Problems(), two_axes()
    for sharding in in_turn(1, SHARDINGS):
        model, plain = Net(1, mesh), Net()
        mark_summed(model.whole)
        fully_shard(model, mesh, sharding=sharding)
        for name, label in product([name for name in SHAPES if name != "scale"], LOSSES):
            why = (
                "added up over the tensor axis"
                if name == "whole"
                else 'axis "tensor" ranks compute with different parts'
            )
            parameter, loss = model.get_parameter(name), LOSSES[label]
            with pytest.raises(EngineStateError, match=rf"parameter {name} of unit Net.*{why}.*forward of the module"):
                loss(parameter).backward()
            with torch.no_grad():
                compare(problems, loss(parameter), loss(values()[name]), f"{sharding} {name} {label} without gradients")
        for one in (model, plain):
            one(torch.tensor(0.5)).backward()
            (one.scale.clone() * one.scale * 3.0).backward()
        for name, parameter in model.named_parameters():
            compare(problems, parameter.grad, plain.get_parameter(name).grad, f"{sharding} {name}.grad")
    problems.finish()


def models_that_do_not_fit_their_mesh_are_refused(rank: int, world: int) -> None:
    mesh, alone = two_axes(), init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    with pytest.raises(
        ShardingError, match=r"parameter rows of Net is part \d of 2 of a larger one, and the mesh has 1"
    ):
        fully_shard(Net(1, mesh), alone)
    replaced = Net(1, mesh)
    replaced.columns.data = values()["columns"]
    with pytest.raises(
        ShardingError, match=r"columns of Net has shape \(6, 6\), and is marked as one of 2 parts of dim 1"
    ):
        fully_shard(replaced, mesh)
    differing = Net(1, mesh, SHAPES if rank < 2 else SHAPES | {"packed_rows": ((6, 6), 0, (4, 2))})
    with pytest.raises(ShardingError, match=r"packed_rows: \(3, 6\) of sections \(2, 4\) of dim 0.*got on rank"):
        fully_shard(differing, mesh)
    for nested, around in ((mesh, alone), (alone, mesh), (mesh, two_axes("tensor", "data"))):
        model = nn.Sequential(OrderedDict(inside=nn.Linear(2, 2), outside=nn.Linear(2, 2)))
        fully_shard(model.inside, nested)
        with pytest.raises(ShardingError, match=r"unit inside was given a mesh with ranks .* along a tensor axis"):
            fully_shard(model, around)
    experts = GroupedExperts(num_experts=2, hidden_size=4, intermediate_size=4)
    experts.weight_out = own_part(experts.weight_out.detach(), 1, (4,), mesh)
    with pytest.raises(ShardingError, match=r"weight_out is divided over a tensor axis already.*before the plan"):
        expert_parallel(experts, init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert")))


def optimizers_that_need_whole_tensors_are_refused(rank: int, world: int) -> None:
    mesh = two_axes()
    for sharding in in_turn(0, SHARDINGS):
        model = sharded(mesh, sharding=sharding)
        for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon):
            with pytest.raises(ShardingError, match=rf"{kind.__name__} needs whole.*without a tensor axis"):
                fully_shard_optimizer(kind([model.rows, model.whole]))
        model(torch.tensor(0.5)).backward()
        for name in ("rows", "packed_rows", "columns"):
            optimizer = fully_shard_optimizer(Muon([model.whole, model.get_parameter(name)]))
            with pytest.raises(
                ShardingError, match=rf"Muon.step: parameter {name} of shape .* is one of 2 parts of a mat"
            ):
                optimizer.step()
        plain = Net()
        plain(torch.tensor(0.5)).backward()
        model.load_state_dict(values())
        for one in (model, plain):
            others = [one.get_parameter(name) for name in SHAPES if name != "whole"]
            optimizer = Muon([{"params": [one.whole]}, {"params": others, "use_muon": False}])
            (optimizer if one is plain else fully_shard_optimizer(optimizer)).step()
        problems = Problems()
        compare(problems, dict(model.named_parameters()), dict(plain.named_parameters()), sharding, 1e-5)
        problems.finish()


def writes_that_would_be_lost_are_refused(rank: int, world: int) -> None:
    mesh = two_axes()
    options = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    for sharding in SHARDINGS:
        model, other = sharded(mesh, sharding=sharding), sharded(mesh, 2, OTHERWISE, sharding=sharding)
        for momentum, match in (
            (other.columns, "columns of unit Net.*would write to both"),
            (torch.ones(6, 6), r"full_tensor\(\)"),
        ):
            with torch.no_grad(), pytest.raises(EngineStateError, match=match):
                torch._fused_sgd_([model.columns], [model.columns * 2], [momentum], is_first_step=False, **options)
    ignored = Net(1, mesh)
    with pytest.raises(ShardingError, match="columns of Net is among ignored_parameters and a part of a larger one"):
        fully_shard(ignored, mesh, ignored_parameters=[ignored.columns])


CASES = (
    arithmetic_with_one,
    arithmetic_with_others,
    conversions_show_whole_shapes,
    draws_and_initializations,
    dtensors_of_a_users_own_meet_parts,
    experts_that_are_divided_too,
    gradients_are_read_set_and_scaled,
    losses_outside_of_forward_are_refused,
    models_that_do_not_fit_their_mesh_are_refused,
    optimizers_that_need_whole_tensors_are_refused,
    quantized_parts_stay_parts,
    reports_are_about_whole_parameters,
    views_and_writes_to_them,
    weights_move_between_models_that_lie_otherwise,
    whole_weights_are_shown_and_written_back,
    writes_that_would_be_lost_are_refused,
    writes_with_others,
)
WORLDS = {4: CASES}


@by_world(WORLDS)
def test_parts(world: int, case: Any) -> None:
    check(WORLDS, world, case)
