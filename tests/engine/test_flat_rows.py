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

from lightning_mfsdp.engine import ELEMENTWISE_OPTIMIZERS, MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from lightning_mfsdp.engine.optimizer import shown_state
from tests.engine.cases import device_type
from tests.engine.internals import ShardedTensor
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
    if makes_state_in_a_step(one.optimizer):
        one.optimizer.state.pop(one.parameter(draw.randrange(10)), None)


def clear_state(one: Trained, draw: random.Random) -> None:
    if makes_state_in_a_step(one.optimizer):
        one.optimizer.state.clear()


def makes_state_in_a_step(optimizer: Optimizer) -> bool:
    """Before PyTorch 2.12, Adagrad has its state from the start, and fails in a step without it."""
    return not isinstance(optimizer, torch.optim.Adagrad)


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


@mock.patch.object(shown_state, "STEPS_APART", 1)
@mock.patch.object(shown_state, "MOST_STEPS_APART", 1)
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


class ArrayOf:
    """Memory of another library, over which tensors are made: each has a storage of its own."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        if rows.is_cuda:
            self.__cuda_array_interface__ = rows.__cuda_array_interface__

    def tensor(self) -> Tensor:
        device = self._rows.device
        return torch.as_tensor(self, device=device) if device.type == "cuda" else torch.from_numpy(self._rows.numpy())


def sharded_alike(rows: Tensor, parameter: Any) -> DTensor:
    """A sharded tensor over these rows, distributed as a parameter."""
    return ShardedTensor.over(rows, parameter)


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


def lengths(model: nn.Module) -> tuple[list[int], list[int]]:
    """Elements of the rows of each unit of a chain on this rank, and of each parameter."""
    units = (*model.layers, model.out)
    by_parameter = [[one.to_local().numel() for one in unit.parameters()] for unit in units]
    return [sum(own) for own in by_parameter], [length for own in by_parameter for length in own]


def trained_chain(**options: Any) -> tuple[nn.Module, Optimizer]:
    """After a step, whose gradients were cleared."""
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **options}))
    train_chain(model, optimizer)
    return model, optimizer


def train_chain(model: nn.Module, optimizer: Optimizer, *, without: Tensor | None = None) -> list[int]:
    loss_of(model, inputs(0)).backward()
    if without is not None:
        without.grad = None
    found = stepped(optimizer)
    optimizer.zero_grad()
    return found


@mock.patch.object(shown_state, "STEPS_APART", 2)
def a_unit_is_one_tensor_until_its_parameters_differ(rank: int, world: int) -> None:
    model, optimizer = trained_chain()
    together, apart = lengths(model)
    first_apart = [*apart[:2], *together[1:]]
    assert train_chain(model, optimizer) == together
    bias = model.layers[0].bias
    for number in (2, 5):
        assert float(optimizer.state[bias]["step"]) == number
        found = [train_chain(model, optimizer) for _ in range(3)]
        assert found == [first_apart, first_apart, together], "it joins again, as a program may read it in each step"
    storages = {
        optimizer.state[one]["exp_avg"].to_local().untyped_storage().data_ptr() for one in model.layers[1].parameters()
    }
    assert len(storages) == 1, "moments lie in one memory, so nothing is copied where they join"
    assert train_chain(model, optimizer, without=bias) == first_apart
    assert [train_chain(model, optimizer) for _ in range(6)] == [first_apart] * 6, "numbers differ"
    optimizer.state[bias]["step"].add_(1)
    assert [train_chain(model, optimizer) for _ in range(6)][-1] == together, "and are equal now"


@mock.patch.object(shown_state, "STEPS_APART", 1)
def what_a_program_keeps_of_state_stays_that_of_the_optimizer(rank: int, world: int) -> None:
    model, optimizer = trained_chain()
    apart = lengths(model)[1]
    parameters = list(model.parameters())
    kept = [optimizer.state[one]["step"] for one in parameters]
    assert [train_chain(model, optimizer) for _ in range(4)] == [apart] * 4
    assert [float(number) for number in kept] == [5.0] * len(kept)
    kept[0].zero_()
    assert [float(optimizer.state[one]["step"]) for one in parameters] == [0.0] + [5.0] * (len(kept) - 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments = optimizer.state[parameters[-1]]["exp_avg"]
    train_chain(model, optimizer)
    assert torch.equal(moments.full_tensor(), optimizer.state[parameters[-1]]["exp_avg"].full_tensor())
    del moments
    for one in parameters:
        optimizer.state[one]["log"] = []
    for _ in range(4):
        train_chain(model, optimizer)
    optimizer.state[parameters[-1]]["log"].append(1)
    assert [optimizer.state[one]["log"] for one in parameters] == [[]] * (len(kept) - 1) + [[1]]


@mock.patch.object(shown_state, "STEPS_APART", 1)
def memory_of_state_that_a_program_has_stays_that_of_the_optimizer(rank: int, world: int) -> None:
    """As a storage, or because it is an array's, which may be another library's on a GPU."""
    model, optimizer = trained_chain()
    parameters = list(model.parameters())
    kept = [optimizer.state[one]["step"].untyped_storage() for one in parameters]
    for _ in range(4):
        train_chain(model, optimizer)
    assert [torch.empty(0, device=one.device).set_(one).item() for one in kept] == [5.0] * len(kept)
    del kept
    arrays = [ArrayOf(optimizer.state[one]["exp_avg"].to_local().clone()) for one in parameters]
    for one, array in zip(parameters, arrays, strict=True):
        optimizer.state[one]["exp_avg"] = sharded_alike(array.tensor(), one)
    for _ in range(4):
        train_chain(model, optimizer)
    for one, array in zip(parameters, arrays, strict=True):
        assert torch.equal(array.tensor(), optimizer.state[one]["exp_avg"].to_local())


def state_is_found_by_parameter_after_a_step_that_raised(rank: int, world: int) -> None:
    model, optimizer = trained_chain()
    parameters = list(model.parameters())
    loss_of(model, inputs(1)).backward()
    for look in (
        lambda: [sorted(optimizer.state[one]) for one in parameters],
        lambda: [sorted(optimizer.state.get(one, {})) for one in parameters],
        lambda: [sorted(values) for values in optimizer.state.values()],
        lambda: [sorted(optimizer.state.setdefault(one, {})) for one in parameters if one in optimizer.state],
        lambda: [sorted(values) for values in optimizer.state.copy().values()],
        lambda: [["exp_avg", "exp_avg_sq", "step"]] * len(optimizer.state),
    ):
        with (
            mock.patch("torch.optim.adam.adam", side_effect=torch.OutOfMemoryError),
            pytest.raises(torch.OutOfMemoryError),
        ):
            optimizer.step()
        assert look() == [["exp_avg", "exp_avg_sq", "step"]] * len(parameters)
    with mock.patch("torch.optim.adam.adam", side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert float(optimizer.state.pop(parameters[0])["step"]) == 1
    assert parameters[0] not in optimizer.state
    assert optimizer.state.pop(parameters[0], None) is None
    optimizer.step()
    assert [float(optimizer.state[one]["step"]) for one in parameters] == [1.0] + [2.0] * (len(parameters) - 1)


def a_number_that_cannot_be_copied_loses_nothing(rank: int, world: int) -> None:
    model, optimizer = trained_chain()
    parameters = list(model.parameters())
    with mock.patch.object(Tensor, "clone", side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        _ = optimizer.state[parameters[0]]["step"]
    assert [float(optimizer.state[one]["step"]) for one in parameters] == [1.0] * len(parameters)
    assert all("exp_avg" in optimizer.state[one] for one in parameters)


def state_survives_when_there_is_no_memory_to_join_it(rank: int, world: int) -> None:
    model, optimizer = trained_chain()
    other = trained_chain()
    optimizer.load_state_dict(copy.deepcopy(other[1].state_dict()))
    loss_of(model, inputs(1)).backward()
    with (
        mock.patch.object(torch, "empty_like", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        optimizer.step()
    optimizer.step()
    loss_of(other[0], inputs(1)).backward()
    other[1].step()
    for one, expected in zip(model.parameters(), other[0].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), expected.full_tensor())


def gradients_are_cleared_after_a_step_that_raised(rank: int, world: int) -> None:
    """Also where the next backward is that of an older graph, before which no forward begins."""
    model, optimizer = trained_chain()
    x = inputs(2)
    older = loss_of(model, x)
    loss_of(model, inputs(1)).backward()
    with (
        mock.patch("torch.optim.adam._multi_tensor_adam", side_effect=torch.OutOfMemoryError),
        mock.patch("torch.optim.adam._single_tensor_adam", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        optimizer.step()
    optimizer.zero_grad()
    older.backward()
    found = [one.grad.full_tensor() for one in model.parameters()]
    for one in model.parameters():
        one.grad = None
    loss_of(model, x).backward()
    for one, gradient in zip(model.parameters(), found, strict=True):
        assert torch.equal(one.grad.full_tensor(), gradient)
    optimizer.step()


def entries_may_be_divided_otherwise_between_steps(rank: int, world: int) -> None:
    model, optimizer = trained_chain()
    parameters = list(model.parameters())
    (entry,) = optimizer.param_groups
    del entry["params"][3:]
    optimizer.param_groups.append({**entry, "params": parameters[3:], "lr": 0.0})
    before = [one.full_tensor() for one in parameters]
    train_chain(model, optimizer)
    assert [torch.equal(one.full_tensor(), was) for one, was in zip(parameters, before, strict=True)] == [
        number >= 3 for number in range(len(parameters))
    ]
    entry["params"].append(optimizer.param_groups[1]["params"].pop(0))
    before = parameters[3].full_tensor()
    train_chain(model, optimizer)
    assert not torch.equal(parameters[3].full_tensor(), before)
    optimizer.param_groups.append({**entry, "params": []})
    train_chain(model, optimizer)
    assert [len(one["params"]) for one in optimizer.param_groups] == [4, len(parameters) - 4, 0]


def a_copy_of_a_moment_is_as_long_as_its_rows(rank: int, world: int) -> None:
    model, optimizer = trained_chain()
    for one in model.parameters():
        copied = copy.deepcopy(optimizer.state[one]["exp_avg"]).to_local()
        assert copied.untyped_storage().nbytes() == copied.nbytes


def two_entries_with_parameters_of_a_unit_are_two_tensors(rank: int, world: int) -> None:
    model = sharded_chain()
    groups = [{"params": [one for one in model.parameters() if (one.dim() < 2) is small]} for small in (False, True)]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(groups, lr=0.1))
    assert len(train_chain(model, optimizer)) == len(list(model.parameters()))


def parameters_are_stepped_one_by_one_where_that_is_asked_for_or_rounds_otherwise(rank: int, world: int) -> None:
    """Kernels of the CPU round the last few numbers of a tensor otherwise, in half precision and where they are fused."""
    is_alike = device_type() == "cuda"
    for options, is_together in (({"foreach": False}, False), ({"fused": True}, is_alike)):
        model, optimizer = trained_chain(**options)
        assert train_chain(model, optimizer) == lengths(model)[not is_together], options
    half = sharded_chain(policy=MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16))
    assert next(half.parameters()).dtype == torch.bfloat16
    optimizer = fully_shard_optimizer(torch.optim.AdamW(half.parameters(), lr=0.1))
    assert train_chain(half, optimizer) == lengths(half)[not is_alike]


def what_may_be_recorded_in_a_graph_is_stepped_parameter_by_parameter(rank: int, world: int) -> None:
    """A graph goes on with the state that it was recorded with."""
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.Adadelta(model.parameters()))
    for capturable in (False, True):
        optimizer.param_groups[0]["capturable"] = capturable
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):  # or it is refused on CPU
            found = train_chain(model, optimizer)
        assert found == lengths(model)[capturable]


class Rows(nn.Module):
    """A unit whose last parameters have odd lengths; those before fill what a kernel's vector holds of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in [(37, 24), (8,), (), (3, 8), (301,)])

    def forward(self, x: Tensor) -> Tensor:
        return sum(((one * x).sin() + one.square()).sum() for one in self.all)


def steps_of_flat_rows_are_those_of_each_parameter_alone(rank: int, world: int) -> None:
    """To the bit: what plain PyTorch does to each parameter's rows, in each dtype and of each implementation."""
    dtypes = [torch.float32, torch.float64, *([torch.bfloat16] if device_type() == "cuda" else [])]
    for dtype in dtypes:
        policy = MixedPrecisionPolicy(main_params_dtype=dtype, main_grads_dtype=dtype, compute_dtype=dtype)
        for kind in ELEMENTWISE_OPTIMIZERS:
            for options in implementations(kind, policy):
                torch.manual_seed(0)
                model = fully_shard(Rows().to(dtype), policy=policy)
                optimizer = fully_shard_optimizer(kind(model.parameters(), lr=0.01, **options))
                rows = [one.to_local().detach().clone().requires_grad_() for one in model.parameters()]
                plain = kind(rows, lr=0.01, **options)
                for step in range(4):
                    model(torch.full((), 0.3 * step - 0.5, dtype=dtype)).backward()
                    for own, one in zip(rows, model.parameters(), strict=True):
                        own.grad = one.grad.to_local().clone()
                    plain.step()
                    found = stepped(optimizer)
                    assert len(found) < len(rows), (kind, options, dtype)
                    optimizer.zero_grad()
                for number, (own, one) in enumerate(zip(rows, model.parameters(), strict=True)):
                    assert torch.equal(own, one.to_local()), (kind, options, dtype, number)


def implementations(kind: type[Optimizer], policy: MixedPrecisionPolicy) -> list[dict[str, Any]]:
    """Of a rule, on this device: those of many tensors at once, and fused ones of GPUs."""
    has_fused = kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    fused = [{"fused": True}] if has_fused and device_type() == "cuda" and kind is not torch.optim.Adagrad else []
    return [*({**one, "foreach": True} for one in OPTIONS.get(kind, [{}]) if "fused" not in one), *fused]


CASES = [
    steps_of_flat_rows_are_those_of_each_parameter_alone,
    drawn_programs_see_what_plain_pytorch_shows,
    a_unit_is_one_tensor_until_its_parameters_differ,
    what_a_program_keeps_of_state_stays_that_of_the_optimizer,
    memory_of_state_that_a_program_has_stays_that_of_the_optimizer,
    state_is_found_by_parameter_after_a_step_that_raised,
    a_number_that_cannot_be_copied_loses_nothing,
    state_survives_when_there_is_no_memory_to_join_it,
    gradients_are_cleared_after_a_step_that_raised,
    entries_may_be_divided_otherwise_between_steps,
    a_copy_of_a_moment_is_as_long_as_its_rows,
    two_entries_with_parameters_of_a_unit_are_two_tensors,
    parameters_are_stepped_one_by_one_where_that_is_asked_for_or_rounds_otherwise,
    what_may_be_recorded_in_a_graph_is_stepped_parameter_by_parameter,
]
WORLDS = {1: CASES, 2: CASES}


@by_world(WORLDS)
def test_flat_rows(world: int, case: Any) -> None:
    check(WORLDS, world, case)
