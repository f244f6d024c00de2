"""Elementwise optimizers step rows of neighbors as one tensor, and nothing that a program does shows it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.engine import ELEMENTWISE_OPTIMIZERS, fully_shard, fully_shard_optimizer
from tests.engine.worlds import by_world, check
from tests.helpers.chain import DOUBLE, inputs, loss_of, sharded_chain
from tests.helpers.nights import NIGHT

OPTIONS: dict[type[Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [{}, {"momentum": 0.9, "nesterov": True}],
    torch.optim.Adam: [{"amsgrad": True}],
    torch.optim.AdamW: [{"weight_decay": 0.1}, {"foreach": True}, {"fused": True}],
}


class Layer(nn.Module):
    """A unit whose parameters are used one by one: rows of some lie on one rank alone, and one has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(6, 4), (5,), (1,), (), (3, 2, 2)]
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return x + sum((self.all[index] * (1 + x.mean())).sin().sum() for index in used)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, used: list[list[int]]) -> Tensor:
        for layer, indices in zip(self.layers, used, strict=True):
            x = layer(x, indices)
        return x


class Trained:
    """A model and its optimizer, plain or sharded, and what a program has kept of the state."""

    def __init__(self, make: Callable[[Any], Optimizer], *, sharded: bool) -> None:
        torch.manual_seed(0)
        self.model = Layers().double()
        if sharded:
            for layer in self.model.layers:
                fully_shard(layer, policy=DOUBLE)
            fully_shard(self.model, policy=DOUBLE)
        self.sharded, self.make = sharded, make
        self.kept: list[Any] = []
        self.begin()

    def begin(self) -> None:
        parameters = list(self.model.parameters())
        few = {id(one) for one in parameters[::4]}
        groups = [{"params": [one for one in parameters if (id(one) in few) is is_few]} for is_few in (False, True)]
        optimizer = self.make(groups)
        self.optimizer = fully_shard_optimizer(optimizer) if self.sharded else optimizer

    def parameter(self, number: int) -> Any:
        return list(self.model.parameters())[number]

    def seen(self) -> list[Any]:
        """All that a program can see, whole."""
        parameters = list(self.model.parameters())
        numbers = {id(one): number for number, one in enumerate(parameters)}
        state = {numbers[id(key)]: values for key, values in self.optimizer.state.items()}
        return [
            [whole(one.detach()) for one in parameters],
            [None if one.grad is None else whole(one.grad) for one in parameters],
            [
                {name: whole(value) for name, value in state[number].items()}
                for number in sorted(state)
                if len(state[number])
            ],
            [{name: whole(value) for name, value in values.items()} for values in self.kept],
        ]


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone() if isinstance(value, Tensor) else value


def backward(one: Trained, draw: random.Random) -> None:
    used = [[index for index in range(5) if draw.random() < 0.9] for _ in range(2)]
    if draw.random() < 0.6:
        used = [list(range(5))] * 2
    one.model(torch.full((2,), draw.random(), dtype=torch.float64), used).sum().backward()


def step(one: Trained, draw: random.Random) -> None:
    one.optimizer.step()
    one.optimizer.zero_grad(set_to_none=draw.random() < 0.7)


def train(one: Trained, draw: random.Random) -> None:
    backward(one, draw)
    step(one, draw)


def keep(one: Trained, draw: random.Random) -> None:
    one.kept.append(one.optimizer.state[one.parameter(draw.randrange(10))])


def write_to_state(one: Trained, draw: random.Random) -> None:
    values = one.optimizer.state[one.parameter(draw.randrange(10))]
    for name in sorted(values):
        if isinstance(values[name], Tensor) and draw.random() < 0.5:
            values[name].mul_(2.0)


def replace_state(one: Trained, draw: random.Random) -> None:
    values = one.optimizer.state[one.parameter(draw.randrange(10))]
    for name in sorted(values):
        if isinstance(values[name], Tensor) and draw.random() < 0.5:
            values[name] = values[name] * 3.0


def remove_state(one: Trained, draw: random.Random) -> None:
    one.optimizer.state.pop(one.parameter(draw.randrange(10)), None)


def clear_state(one: Trained, draw: random.Random) -> None:
    one.optimizer.state.clear()


def copy_state(one: Trained, draw: random.Random) -> None:
    first, second = (one.parameter(5 * layer + draw.choice([0, 1])) for layer in range(2))
    if first.shape == second.shape and len(one.optimizer.state[first]):
        one.optimizer.state[second] = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in one.optimizer.state[first].items()
        }


def save_and_load(one: Trained, draw: random.Random) -> None:
    saved = copy.deepcopy(one.optimizer.state_dict())
    if any(not values for values in saved["state"].values()):
        return  # Adagrad refuses it
    if draw.random() < 0.5:
        train(one, draw)
    if draw.random() < 0.5:
        one.begin()
    one.optimizer.load_state_dict(saved)


def look(one: Trained, draw: random.Random) -> None:
    """State dictionaries are made often, and change nothing."""
    one.optimizer.state_dict()
    repr(one.optimizer.state)


def replace_gradient(one: Trained, draw: random.Random) -> None:
    parameter = one.parameter(draw.randrange(10))
    if draw.random() < 0.7:
        backward(one, draw)
    if parameter.grad is not None:
        parameter.grad = parameter.grad * 2.0


def scale_gradients(one: Trained, draw: random.Random) -> None:
    for parameter in one.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def clear_gradient(one: Trained, draw: random.Random) -> None:
    one.parameter(draw.randrange(10)).grad = None


def freeze(one: Trained, draw: random.Random) -> None:
    parameter = one.parameter(draw.randrange(10))
    parameter.requires_grad_(not parameter.requires_grad)


def change_options(one: Trained, draw: random.Random) -> None:
    one.optimizer.param_groups[draw.randrange(2)]["lr"] *= 0.5


def write_to_weights(one: Trained, draw: random.Random) -> None:
    with torch.no_grad():
        one.parameter(draw.randrange(10)).mul_(0.5)


def fail(one: Trained, draw: random.Random) -> None:
    """The closure of a step raises."""

    def closure() -> float:
        raise RuntimeError("the closure")

    with pytest.raises(RuntimeError, match="the closure"):
        one.optimizer.step(closure)


ACTIONS = [
    train,
    train,
    train,
    backward,
    step,
    keep,
    write_to_state,
    replace_state,
    remove_state,
    clear_state,
    copy_state,
    save_and_load,
    look,
    replace_gradient,
    scale_gradients,
    clear_gradient,
    freeze,
    change_options,
    write_to_weights,
    fail,
]


def makers() -> list[Callable[[Any], Optimizer]]:
    return [
        lambda groups, kind=kind, options=options: kind(groups, lr=0.01, **options)
        for kind in ELEMENTWISE_OPTIMIZERS
        for options in OPTIONS.get(kind, [{}])
    ]


def assert_same(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found.to(expected.dtype), expected), (what, found, expected)
    elif isinstance(expected, (list, dict)):
        assert len(found) == len(expected), (what, found, expected)
        for one in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same(found[one], expected[one], what)
    else:
        assert found == expected, what


def drawn_programs_see_what_plain_pytorch_shows(rank: int, world: int) -> None:
    for number, make in enumerate(makers() * (8 if NIGHT else 1)):
        plain, sharded = (Trained(make, sharded=is_sharded) for is_sharded in (False, True))
        draw, done = random.Random(1000 * world + number), ["train"]
        for one in (plain, sharded):
            train(one, random.Random(number))
        for _ in range(14):
            action, seed = draw.choice(ACTIONS), draw.random()
            done.append(action.__name__)
            for one in (plain, sharded):
                action(one, random.Random(seed))
            if draw.random() < 0.3:
                assert_same(sharded.seen(), plain.seen(), f"{number}: {done}")
        assert_same(sharded.seen(), plain.seen(), f"{number}: {done}")


def stepped(optimizer: Optimizer) -> list[int]:
    """Take a step; returns the numbers of elements of each tensor that the optimizer's own code has looked at."""
    found: list[int] = []
    own = optimizer._init_group

    def noted(group: Any, *lists: Any) -> Any:
        found.extend(one.numel() for one in group["params"])
        return own(group, *lists)

    with mock.patch.object(optimizer, "_init_group", noted):
        optimizer.step()
    return found


def a_unit_is_one_tensor_until_its_parameters_differ(rank: int, world: int) -> None:
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    own = [sum(one.to_local().numel() for one in unit.parameters()) for unit in (*model.layers, model.out)]

    def step(*, without: Tensor | None = None) -> list[int]:
        loss_of(model, inputs(0)).backward()
        if without is not None:
            without.grad = None
        found = stepped(optimizer)
        optimizer.zero_grad()
        return found

    assert step() == own
    bias = model.layers[0].bias
    assert float(optimizer.state[bias]["step"]) == 1
    assert step() == own, "numbers that were read are equal still, and join again"
    storages = {
        optimizer.state[one]["exp_avg"].to_local().untyped_storage().data_ptr() for one in model.layers[1].parameters()
    }
    assert len(storages) == 1, "moments lie in one memory, so nothing is copied where they join"
    parts = [one.to_local().numel() for one in model.layers[0].parameters()]
    assert step(without=bias) == parts + own[1:]
    assert step() == parts + own[1:], "numbers differ from now on"
    optimizer.state[bias]["step"].add_(1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert step() == own, "what is loaded is looked at anew"


def two_groups_of_a_unit_are_two_tensors(rank: int, world: int) -> None:
    model = sharded_chain()
    groups = [{"params": [one for one in model.parameters() if (one.dim() < 2) is small]} for small in (False, True)]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(groups, lr=0.1))
    loss_of(model, inputs(0)).backward()
    assert len(stepped(optimizer)) == len(list(model.parameters()))


def what_may_be_recorded_in_a_graph_is_stepped_parameter_by_parameter(rank: int, world: int) -> None:
    """A graph goes on with the state that it was recorded with."""
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.Adadelta(model.parameters(), foreach=False))
    for capturable in (False, True):
        optimizer.param_groups[0]["capturable"] = capturable
        loss_of(model, inputs(0)).backward()
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):  # or it is refused on CPU
            found = stepped(optimizer)
        optimizer.zero_grad()
        assert (len(found) == len(list(model.parameters()))) is capturable


CASES = [
    drawn_programs_see_what_plain_pytorch_shows,
    a_unit_is_one_tensor_until_its_parameters_differ,
    two_groups_of_a_unit_are_two_tensors,
    what_may_be_recorded_in_a_graph_is_stepped_parameter_by_parameter,
]
WORLDS = {1: CASES, 2: CASES}


@by_world(WORLDS)
def test_flat_rows(world: int, case: Any) -> None:
    check(WORLDS, world, case)
