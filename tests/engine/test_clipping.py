"""Norms and clipping over shards equal `torch.nn.utils` on one process with the whole model and the whole batch."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as torch_clip_norm
from torch.nn.utils import clip_grad_value_ as torch_clip_value

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    clip_grad_value_,
    fully_shard,
    fully_shard_optimizer,
    grad_norm,
    sharded_parameters,
)
from tests.engine.cases import Problems, device_type, run_cases
from tests.helpers.pairwise import in_turn

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
NORMS = (1.0, 2.0, 3.5, float("inf"))
ROWS = 12


class Uneven(nn.Module):
    """One row, rows fewer than ranks, 0-D, frozen, and rows that do not divide; some ranks own nothing of most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.full((1, 7), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.frozen(x) * self.row))) * self.scale


def pair(rank: int, world: int, mesh=None, **options) -> tuple[nn.Module, nn.Module]:
    """(one process, sharded), both after a backward of the same global batch, with gradients far from small."""
    torch.manual_seed(0)
    reference = Uneven()
    torch.manual_seed(0)
    model = Uneven()
    fully_shard(model.first, mesh, **options)
    fully_shard(model, mesh, **options)
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1)) * 3
    reference(x).square().mean().backward()
    model(x.chunk(world)[rank]).square().mean().backward()
    return reference, model


def compare(problems: Problems, reference: nn.Module, model: nn.Module, what: str) -> None:
    expected = dict(reference.named_parameters())
    for view in sharded_parameters(model):
        grad = expected[view.name].grad
        if grad is not None and view.main.numel():
            rows = grad[view.rows.start : view.rows.stop] if grad.dim() else grad
            problems.close(view.grad, rows, f"{what}: {view.name}", rtol=1e-4)


def whole_module(strategy: str, norm_type: float, rank: int, world: int) -> None:
    problems = Problems()
    for share in (0.3, 3.0):  # clips; does not
        reference, model = pair(rank, world, sharding=strategy)
        limit = float(torch_clip_norm(reference.parameters(), 1e9, norm_type)) * share
        expected = torch_clip_norm(reference.parameters(), limit, norm_type)
        problems.close(grad_norm(model, norm_type), expected, "grad_norm")
        got = clip_grad_norm_(model, limit, norm_type)
        problems.close(got, expected, f"norm before clipping at {share}")
        problems.expect(got.dim() == 0, "the norm is not 0-D")
        compare(problems, reference, model, f"clipped at {share}")
        problems.close(
            grad_norm(model, norm_type), expected.new_tensor(min(limit, float(expected))), "norm after", 1e-4
        )
    problems.finish()


def subsets(strategy: str, rank: int, world: int) -> None:
    """DTensors, an optimizer's local rows, one tensor, a generator; what is not in the subset stays."""
    problems = Problems()
    for names in (["first.weight"], ["first.bias", "scale", "frozen.weight"], ["row"], ["second.weight", "row"]):
        reference, model = pair(rank, world, sharding=strategy)
        chosen = [parameter for name, parameter in reference.named_parameters() if name in names]
        views = [view for view in sharded_parameters(model) if view.name in names]
        expected = torch_clip_norm(chosen, 0.01)
        problems.close(clip_grad_norm_((view.dtensor for view in views), 0.01), expected, f"DTensors {names}")
        compare(problems, reference, model, f"DTensors {names}")
        torch_clip_norm(chosen, 0.001)
        clip_grad_norm_([view.local for view in views], 0.001)
        compare(problems, reference, model, f"local rows {names}")
    reference, model = pair(rank, world, sharding=strategy)
    problems.close(
        clip_grad_norm_(model.second.weight, 0.01), torch_clip_norm(reference.second.weight, 0.01), "one tensor"
    )
    problems.close(grad_norm(model.first), torch_clip_norm(reference.first.parameters(), 1e9), "a unit inside")
    problems.finish()


def named_twice(strategy: str, rank: int, world: int) -> None:
    """A parameter given twice, or by both of its representations, counts once."""
    reference, model = pair(rank, world, sharding=strategy)
    once = grad_norm(model.first.weight)
    view = next(view for view in sharded_parameters(model) if view.name == "first.weight")
    torch.testing.assert_close(grad_norm([view.dtensor, view.local, view.dtensor]), once)
    torch.testing.assert_close(once, reference.first.weight.grad.norm())


def two_optimizers(strategy: str, rank: int, world: int) -> None:
    """Clip and step one of two optimizers; the other's gradients and weights stay."""
    problems, (reference, model) = Problems(), pair(rank, world, sharding=strategy)

    def split(module: nn.Module) -> list[torch.optim.Optimizer]:
        a = [module.first.weight, module.row, module.scale]
        return [torch.optim.SGD(a, lr=0.5), torch.optim.SGD([module.first.bias, module.second.weight], lr=0.5)]

    ours, theirs = [fully_shard_optimizer(optimizer) for optimizer in split(model)], split(reference)
    expected = torch_clip_norm(theirs[0].param_groups[0]["params"], 0.05)
    problems.close(clip_grad_norm_(ours[0].param_groups[0]["params"], 0.05), expected, "norm")
    compare(problems, reference, model, "after clipping one")
    for optimizers in (ours, theirs):
        optimizers[0].step()
        optimizers[0].zero_grad()
    compare(problems, reference, model, "after one step")
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(2))
    reference(x).square().mean().backward()
    model(x.chunk(world)[rank]).square().mean().backward()
    compare(problems, reference, model, "the next backward adds to what is left and starts anew elsewhere")
    problems.finish()


def values(strategy: str, rank: int, world: int) -> None:
    problems, (reference, model) = Problems(), pair(rank, world, sharding=strategy)
    torch_clip_value(reference.parameters(), 0.02)
    clip_grad_value_(model, 0.02)
    compare(problems, reference, model, "values")
    problems.finish()


def not_finite(strategy: str, rank: int, world: int) -> None:
    """One bad number on one rank is everybody's; without `error_if_nonfinite` the norm says so."""
    for bad in (float("nan"), float("inf")):
        _, model = pair(rank, world, sharding=strategy)
        view = next(view for view in sharded_parameters(model) if view.name == "first.weight")
        if len(view.rows) and view.rows.stop == 11:  # whoever has the last row
            view.grad.view(-1)[-1] = bad
        with pytest.raises(EngineStateError, match=r"norm of order 2\.0 is (nan|inf)"):
            clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        assert not torch.isfinite(clip_grad_norm_(model, 1.0))


def low_precision(strategy: str, rank: int, world: int) -> None:
    """Gradients that the optimizer sees in another dtype than they are accumulated in stay clipped when more is added."""
    policy = MixedPrecisionPolicy(main_params_dtype=None, compute_dtype=None, main_grads_dtype=torch.float64)
    problems, (reference, model) = Problems(), pair(rank, world, sharding=strategy, policy=policy)
    problems.close(clip_grad_norm_(model, 0.05), torch_clip_norm(reference.parameters(), 0.05), "norm", 1e-4)
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(2))
    reference(x).square().mean().backward()
    model(x.chunk(world)[rank]).square().mean().backward()
    compare(problems, reference, model, "added to clipped gradients")
    problems.finish()


def in_double_precision(strategy: str, rank: int, world: int) -> None:
    """Also what is not sharded, a 0-D parameter, counts in float64."""
    policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None)
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for norm_type in NORMS:
        torch.manual_seed(0)
        reference = Uneven().double()
        model = copy.deepcopy(reference)
        fully_shard(model, sharding=strategy, policy=policy)
        reference(x).square().mean().backward()
        model(x.chunk(world)[rank]).square().mean().backward()
        for choose in (lambda module: [module.scale], lambda module: module):
            chosen = choose(reference)
            parameters = chosen if isinstance(chosen, list) else list(chosen.parameters())
            expected = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
            torch.testing.assert_close(grad_norm(choose(model), norm_type), expected, rtol=1e-14, atol=0)


def nothing_there(strategy: str, rank: int, world: int) -> None:
    model = fully_shard(Uneven(), sharding=strategy)
    assert clip_grad_norm_(model, 1.0).item() == 0.0
    clip_grad_value_(model, 1.0)
    assert grad_norm([]).item() == 0.0


class WithoutElements(nn.Module):
    """Several parameters, between them one without elements that may be used."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ParameterList(torch.randn(3, 2) for _ in range(4))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.after = nn.ParameterList(torch.randn(3, 2) for _ in range(5))

    def forward(self, x: Tensor, uses_nothing: bool = True) -> Tensor:
        for parameter in (*self.before, *self.after):
            x = torch.tanh(x + parameter)
        return x.square().sum() + (self.nothing.sum() if uses_nothing else 0)


def beside_nothing(rank: int, world: int) -> None:
    """A gradient without elements counts as in plain PyTorch: norms are the same to the bit."""
    for seed in range(10):
        torch.manual_seed(seed)
        reference = WithoutElements()
        model = copy.deepcopy(reference)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(fully_shard(model).parameters()))
        x = torch.randn(3, 2)
        for norm_type in (1.0, 2.0, float("inf")):
            reference(x).backward()
            model(x).backward()
            assert model.nothing.grad.shape == (0, 3)
            gradients = [p.grad for p in reference.parameters() if p.grad.numel()]
            limit = 0.7 * float(torch.nn.utils.get_total_norm(gradients, norm_type))
            expected = (
                torch_clip_norm(reference.parameters(), limit, norm_type)
                if norm_type != float("inf")
                else torch.nn.utils.get_total_norm(gradients, norm_type)  # which plain PyTorch refuses of an empty one
            )
            assert torch.equal(clip_grad_norm_(model, limit, norm_type), expected)
        optimizer.zero_grad()
        model(x, uses_nothing=False).backward()
        assert model.nothing.grad is None
        model(x).backward()
        model.zero_grad()
        assert model.nothing.grad is None


def on_a_2d_mesh(strategy: str, outer: str, rank: int, world: int) -> None:
    problems = Problems()
    mesh = dist.init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("outer", "shard"))
    for norm_type in NORMS:
        reference, model = pair(rank, world, mesh, sharding=strategy, outer_sharding=outer)
        expected = torch_clip_norm(reference.parameters(), 0.05, norm_type)
        problems.close(clip_grad_norm_(model, 0.05, norm_type), expected, f"norm {norm_type}")
        compare(problems, reference, model, f"norm {norm_type}")
        limit = float(reference.first.weight.grad.abs().max()) / 3
        torch_clip_value(reference.parameters(), limit)
        clip_grad_value_(model, limit)
        compare(problems, reference, model, f"values {norm_type}")
    problems.finish()


BY_STRATEGY = {
    "a subset of parameters": subsets,
    "a parameter given twice": named_twice,
    "one of two optimizers": two_optimizers,
    "by value": values,
    "not finite": not_finite,
    "gradients in another dtype than weights": low_precision,
    "float64": in_double_precision,
    "no gradient yet": nothing_there,
}
ONE_AXIS = {
    **{
        f"norm {norm} [{name}]": partial(whole_module, name, norm)
        for number, norm in enumerate(NORMS)
        for name in in_turn(number, STRATEGIES)
    },
    **{
        f"{title} [{name}]": partial(case, name)
        for number, (title, case) in enumerate(BY_STRATEGY.items())
        for name in in_turn(number, STRATEGIES)
    },
}
TWO_AXES = {
    f"{strategy}, outer {outer}": partial(on_a_2d_mesh, strategy, outer)
    for strategy, outer in product(in_turn(0, STRATEGIES), ("no_shard", "optim"))
    if (strategy, outer) != ("no_shard", "optim")
}


@pytest.fixture(scope="module")
def one_axis():
    return run_cases(ONE_AXIS, 3)


@pytest.fixture(scope="module")
def two_axes():
    return run_cases(TWO_AXES, 4)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("-inf"), float("nan")])
def test_norms_that_are_none_are_refused(norm_type):
    with pytest.raises(ValueError, match=r"norm_type=.*expected a positive number or inf"):
        clip_grad_norm_([torch.zeros(1, requires_grad=True)], 1.0, norm_type)


@pytest.mark.parametrize("case", ONE_AXIS)
def test_clips_as_one_process_does(one_axis, case):
    assert not one_axis[case], one_axis[case]


def test_one_process_clips_to_the_bit_beside_a_parameter_without_elements():
    problems = run_cases({"beside nothing": beside_nothing}, 1)["beside nothing"]
    assert not problems, problems


@pytest.mark.parametrize("case", TWO_AXES)
def test_clips_as_one_process_does_on_two_by_two(two_axes, case):
    assert not two_axes[case], two_axes[case]
