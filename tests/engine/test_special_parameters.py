"""Whatever a parameter is, several ranks train it as one process does on the concatenated batch.

Gradients and weights are compared in each of three SGD steps: SGD, unlike Adam, shows a wrong scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import fully_shard, fully_shard_optimizer, sharded_parameters, unshard
from tests.engine import special_models as models
from tests.engine.cases import Problems, run_cases
from tests.helpers.nights import NIGHT
from tests.helpers.pairwise import in_turn

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ROWS = 12
STEPS = 3


@dataclass(frozen=True)
class Case:
    """`units`: names of modules to shard before the root. `between`: called before each step on both models."""

    build: Callable[[], nn.Module]
    units: Sequence[str] = ()
    between: Callable[[nn.Module, int], None] | None = None
    weight_decay: float = 0.0
    strategies: Sequence[str] = STRATEGIES


def toggle(model: nn.Module, step: int) -> None:
    """Frozen when sharded, trained later; and the other way round, next to parameters that stay as they are."""
    parameters = dict(model.named_parameters())
    for name, when in {
        "second.weight": (1,),
        "second.bias": (1, 2),
        "first.bias": (2,),
        "first.weight": (0, 2),
    }.items():
        parameters[name].requires_grad_(step in when)


CASES = {
    "some parameters frozen": Case(models.frozen, ["first", "second"], weight_decay=0.1),
    "everything frozen but one": Case(models.frozen, weight_decay=0.1),
    "frozen and toggled between steps": Case(models.frozen, ["first", "second"], toggle, weight_decay=0.1),
    "frozen and toggled in one unit": Case(models.frozen, [], toggle, weight_decay=0.1),
    "tied inside a unit": Case(models.TiedInside),
    "tied across units, embedding owns": Case(partial(models.Ids, tied=True), ["embedding", "middle", "head"]),
    "tied across units, head owns": Case(partial(models.Ids, tied=True), ["head", "middle", "embedding"]),
    "tied, head in the root": Case(partial(models.Ids, tied=True), ["embedding", "middle"]),
    "tied, embedding in the root": Case(partial(models.Ids, tied=True), ["head", "middle"]),
    "not used on some ranks in some steps": Case(models.Sometimes),
    "a unit used twice": Case(models.Twice, ["again", "first"]),
    "a parameter used twice": Case(models.Twice),
    "0-D, one row, no rows, many dims": Case(models.OddShapes, ["first"]),
    "nested units": Case(models.NestedUnits, ["block.inner.again", "block.inner", "block"]),
    "units in a ModuleDict": Case(models.Nested, ["outer.inner.first", "outer.inner"]),
    "units without parameters": Case(models.Parameterless, ["activation", "first", "second", "last"]),
    "buffers": Case(models.Buffers, ["second"]),
    "a module under two names": Case(models.SharedModule),
    "a unit under two names": Case(models.SharedModule, ["second"]),
    "flat weights of an LSTM": Case(models.Recurrent),
    "an LSTM as unit": Case(models.Recurrent, ["lstm"]),
    "attention and a parametrization": Case(models.Attention, ["attention"]),
    "attention whose result is written into": Case(models.AttentionInPlace, ["attention"]),
    "convolutions and writing into the input": Case(models.Images, ["conv", "rest"]),
    "a hook of the user reads the weight": Case(models.with_pre_hook, ["first"]),
    "sparse gradients": Case(partial(models.Ids, tied=False, sparse=True), ["embedding"]),
    "sparse and tied": Case(partial(models.Ids, tied=True, sparse=True), ["embedding", "head"]),
    "the root returns an object": Case(models.OpaqueRoot, ["second"]),
    "the only unit returns an object": Case(models.OpaqueRoot),
    **{
        f"a unit returns {kind}": Case(partial(models.returning, kind), ["inner"])
        for kind in ("dict", "dataclass", "namedtuple", "nested tuple", "None", "an object")
    },
}


def value_of(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output.value


def inputs(step: int) -> Tensor:
    return torch.randn(ROWS, models.DIM, generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5, weight_decay=case.weight_decay)


def step_of(model: nn.Module, rows: Tensor) -> None:
    value_of(model(rows)).square().mean().backward()


def like_one_process(name: str, strategy: str, rank: int, world: int) -> None:
    case, problems = CASES[name], Problems()
    torch.manual_seed(7)
    reference = case.build()
    torch.manual_seed(7 + rank)
    model = case.build()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for unit in case.units:
        fully_shard(model.get_submodule(unit), sharding=strategy)
    fully_shard(model, sharding=strategy)
    problems.expect(names == [name for name, _ in model.named_parameters(remove_duplicate=False)], "names changed")
    expected_optimizer, optimizer = optimizer_of(reference, case), fully_shard_optimizer(optimizer_of(model, case))
    for step in range(STEPS):
        if case.between is not None:
            case.between(reference, step)
            case.between(model, step)
        step_of(reference, inputs(step))
        step_of(model, inputs(step).chunk(world)[rank])
        compare_gradients(problems, reference, model, f"step {step}")
        expected_optimizer.step()
        optimizer.step()
        compare_weights(problems, reference, model, f"step {step}")
        expected_optimizer.zero_grad()
        optimizer.zero_grad()
    problems.finish()


def compare_gradients(problems: Problems, reference: nn.Module, model: nn.Module, where: str) -> None:
    expected = dict(reference.named_parameters())
    for view in sharded_parameters(model):
        grad = expected[view.name].grad
        what = f"{where}: gradient of {view.name}"
        if grad is None or view.grad is None:
            problems.expect(grad is view.grad, f"{what}: expected {grad}, got {view.grad}")
            problems.expect(view.dtensor.grad is None, f"{what}: the DTensor has one")
            continue
        grad = grad.to_dense()
        problems.close(view.grad, grad[view.rows.start : view.rows.stop] if grad.dim() else grad, what)


def compare_weights(problems: Problems, reference: nn.Module, model: nn.Module, where: str) -> None:
    with unshard(model):
        full = {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}
    for name, value in reference.named_parameters(remove_duplicate=False):
        problems.close(full[name], value.detach(), f"{where}: weight {name}", rtol=1e-4, atol=1e-5)


RUNS = {
    f"{name} [{strategy}]": partial(like_one_process, name, strategy)
    for number, (name, case) in enumerate(CASES.items())
    for strategy in in_turn(number, case.strategies)
}


@pytest.fixture(scope="module", params=[3] if NIGHT else [2], ids="world {}".format)
def outcomes(request):
    return run_cases(RUNS, request.param)


@pytest.mark.parametrize("case", RUNS)
def test_trains_as_one_process_on_the_concatenated_batch(outcomes, case):
    assert not outcomes[case], outcomes[case]
