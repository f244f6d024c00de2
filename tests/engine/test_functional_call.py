"""`torch.func.functional_call` of a sharded module: it computes with the tensors it is given, as a plain module does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap

from lightning_mfsdp import EngineStateError, around_backward, fully_shard
from tests.engine.cases import Problems
from tests.engine.worlds import by_world, check
from tests.helpers import chain

SHARDINGS = ("no_shard", "optim_grads_params")


class Net(nn.Module):
    """A nested unit, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 8)
        self.last.weight = self.block[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(torch.relu(self.first(x))))


def plain_and_sharded(sharding: str) -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    fully_shard(model.block, sharding=sharding)
    fully_shard(model, sharding=sharding)
    return plain, model


def inputs() -> Tensor:
    return torch.linspace(-1.0, 1.0, 12).view(3, 4)


def others(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() * 0.5 + 0.1 for name, value in module.named_parameters()}


def loss(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, weights, (x,)).square().sum()


def it_computes_with_what_it_is_given_and_gives_that_its_gradients(rank: int, world: int) -> None:
    problems, x = Problems(), inputs()
    for sharding in SHARDINGS:
        plain, model = plain_and_sharded(sharding)
        given = [{name: value.clone().requires_grad_() for name, value in others(plain).items()} for _ in range(2)]
        for module, weights in zip((plain, model), given, strict=True):
            loss(module, weights, x).backward()
        for name, expected in given[0].items():
            problems.close(given[1][name].grad, expected.grad, f"{sharding} {name}")
            problems.expect(model.get_parameter(name).grad is None, f"{sharding} {name} has a gradient")
        problems.close(model(x), plain(x), f"{sharding}: with its own weights afterwards")
    problems.finish()


def gradients_reach_its_own_weights_through_what_is_computed_from_them(rank: int, world: int) -> None:
    problems, x = Problems(), inputs()
    for sharding in SHARDINGS:
        nets = plain_and_sharded(sharding)
        deltas = [torch.full((8, 4), 0.1, requires_grad=True) for _ in nets]
        for module, delta in zip(nets, deltas, strict=True):
            loss(module, {"first.weight": module.first.weight + delta}, x).backward()
        problems.close(deltas[1].grad, deltas[0].grad, f"{sharding} delta")
        for name, expected in nets[0].named_parameters():
            problems.close(nets[1].get_parameter(name).grad.full_tensor(), expected.grad, f"{sharding} {name}")  # type: ignore[union-attr]
    problems.finish()


def a_part_of_the_weights_may_be_given(rank: int, world: int) -> None:
    problems, x = Problems(), inputs()
    for sharding in SHARDINGS:
        nets = plain_and_sharded(sharding)
        for module in nets:
            loss(module, {"first.weight": torch.ones(8, 4)}, x).backward()
        for name, expected in nets[0].named_parameters():
            gradient = nets[1].get_parameter(name).grad
            if expected.grad is None:
                problems.expect(gradient is None, f"{sharding} {name} has a gradient")
            else:
                problems.close(gradient.full_tensor(), expected.grad, f"{sharding} {name}")  # type: ignore[union-attr]
    problems.finish()


def its_own_weights_may_be_given_detached(rank: int, world: int) -> None:
    problems, x = Problems(), inputs()
    for sharding in SHARDINGS:
        plain, model = plain_and_sharded(sharding)
        expected = plain(x)
        problems.close(
            functional_call(model, {n: v.detach() for n, v in model.named_parameters()}, (x,)), expected, n := sharding
        )
        problems.close(functional_call(model, dict(model.named_parameters()), (x,)), expected, n)
    problems.finish()


def transforms_of_torch_func_see_it_as_a_function(rank: int, world: int) -> None:
    problems, x = Problems(), inputs()
    for sharding in SHARDINGS:
        results: list[Any] = []
        for module in plain_and_sharded(sharding):
            weights = others(module) if not results else results[0][2]
            stacked = {name: torch.stack([value, 2 * value]) for name, value in weights.items()}

            def of_sample(weights: dict[str, Tensor], sample: Tensor, module: nn.Module = module) -> Tensor:
                return loss(module, weights, sample[None])

            per_sample = vmap(grad(of_sample), (None, 0))(weights, x)
            ensemble = vmap(lambda own, module=module: functional_call(module, own, (x,)))(stacked)
            results.append((per_sample, ensemble, weights))
        for name, expected in results[0][0].items():
            problems.close(results[1][0][name], expected, f"{sharding} {name}")
        problems.close(results[1][1], results[0][1], f"{sharding} ensemble")
    problems.finish()


def parameters_of_another_module_are_refused_with_what_to_pass(rank: int, world: int) -> None:
    for sharding in SHARDINGS:
        plain, model = plain_and_sharded(sharding)
        with pytest.raises(EngineStateError, match=r"was replaced after fully_shard.*pass their detach"):
            functional_call(model, dict(plain.named_parameters()), (inputs(),))
        torch.testing.assert_close(model(inputs()), plain(inputs()))


def a_backward_outside_of_vmap_gathers_the_weights_that_are_read_inside(rank: int, world: int) -> None:
    problems, x = Problems(), inputs()
    for sharding in SHARDINGS:
        plain, model = plain_and_sharded(sharding)
        for _ in range(2):  # gradients add up
            plain(x).square().sum().backward()
            vmap(model)(x).square().sum().backward()
        for name, expected in plain.named_parameters():
            problems.close(model.get_parameter(name).grad.full_tensor(), expected.grad, f"{sharding} {name}")  # type: ignore[union-attr]
    problems.finish()


def sharded_weights_inside_a_transform_are_refused_with_what_to_pass(rank: int, world: int) -> None:
    x = inputs()
    for sharding in SHARDINGS:
        plain, model = plain_and_sharded(sharding)
        of_weights = grad(lambda weights, module=model: loss(module, weights, x))
        for weights in (dict(model.named_parameters()), {n: p.detach() for n, p in model.named_parameters()}):
            with pytest.raises(
                EngineStateError, match=r"inside a transform of torch.func.*detach\(\)\.full_tensor\(\)"
            ):
                of_weights(weights)
        # What the message says works, and the model goes on.
        whole = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[operator]
        expected = grad(lambda weights, module=plain: loss(module, weights, x))(dict(plain.named_parameters()))
        torch.testing.assert_close(of_weights(whole), {name: value.detach() for name, value in expected.items()})
        torch.testing.assert_close(model(x), plain(x))


def a_gradient_of_a_gradient_that_reads_resharded_weights_names_them_and_a_sharding_that_works(
    rank: int, world: int
) -> None:
    """With whichever error PyTorch has: it looks at versions in some of these, and in others not."""
    x = chain.inputs(1)
    programs = {
        "grad": lambda net: grad(lambda rows: net(rows).square().sum())(x),
        "vmap grad": lambda net: vmap(grad(lambda row: net(row).square().sum()))(x),
        "grad grad": lambda net: grad(lambda a: grad(lambda b: net(b).square().sum())(a).square().sum())(x),
        "jacrev": lambda net: jacrev(net)(x[0]),
        "hessian": lambda net: hessian(lambda row: net(row).sum())(x[0]),
        "vjp": lambda net: vjp(net, x)[1](torch.ones(3, 3))[0],
    }
    problems, plain = Problems(), chain.plain_chain()
    for name, program in programs.items():
        model, other = chain.sharded_chain(sharding="optim_grads_params"), chain.sharded_chain(sharding="optim_grads")
        with (
            pytest.raises(
                EngineStateError, match=r'^layers\.\d.*: a backward read its weight .*sharding="optim_grads"'
            ),
            around_backward(model),
        ):
            program(model).square().sum().backward()
        problems.close(model(x), plain(x), f"{name}: afterwards")
        plain.zero_grad()
        for net in (plain, other):
            program(net).square().sum().backward()
        for key, expected in plain.named_parameters():
            if expected.grad is not None:
                problems.close(other.get_parameter(key).grad.full_tensor(), expected.grad, f"{name} {key}")  # type: ignore[union-attr]
    problems.finish()


CASES = (
    a_backward_outside_of_vmap_gathers_the_weights_that_are_read_inside,
    sharded_weights_inside_a_transform_are_refused_with_what_to_pass,
    it_computes_with_what_it_is_given_and_gives_that_its_gradients,
    gradients_reach_its_own_weights_through_what_is_computed_from_them,
    a_part_of_the_weights_may_be_given,
    its_own_weights_may_be_given_detached,
    transforms_of_torch_func_see_it_as_a_function,
    parameters_of_another_module_are_refused_with_what_to_pass,
)
WORLDS = {
    1: CASES,
    2: (*CASES, a_gradient_of_a_gradient_that_reads_resharded_weights_names_them_and_a_sharding_that_works),
}


@by_world(WORLDS)
def test_functional_call(world: int, case: Any) -> None:
    check(WORLDS, world, case)
