"""Parameters on the meta device get the values that building the model for real would have given, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import ShardingError, fully_shard, fully_shard_units, unshard
from tests.engine.cases import Problems, run_cases
from tests.helpers.models import Decoder


class Composite(nn.Module):
    """Own parameters and children, initialized at the end of the constructor as `torch.nn` does it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.own = nn.Parameter(torch.empty(3, 4))
        self.outer = nn.Linear(4, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.own)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x * self.own.sum(0)) + self.inner(x).sum()


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"deep": Scale()})

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Custom(nn.Module):
    """Cannot initialize itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("places", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.places


class Initializing(nn.Module):
    """Initializes its parts, as Hugging Face models do; some of them by themselves first."""

    def __init__(self, *, whole: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"deep": Custom()})
        self.whole = whole
        self.post_init()

    def post_init(self) -> None:
        self.apply(self._init_weights)

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 0.5)
            nn.init.zeros_(part.bias)
        elif isinstance(part, Custom):
            nn.init.ones_(part.weight)
            if self.whole:
                part.places.copy_(torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["deep"](self.linear(x))


class MadeAnew(nn.Linear):
    """Its reset makes new objects of its parameters, as modules of Transformer Engine do."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for key, parameter in list(self.named_parameters(recurse=False)):
            self._parameters[key] = nn.Parameter(parameter)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = MadeAnew(4, 4)
        self.second = MadeAnew(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def stand_in() -> nn.Module:
    """A model whose linear layer was replaced by another kind, which resets itself as the layer did."""
    model = Initializing()
    other = Scale()
    other._parameters = model.linear._parameters
    other.reset_parameters = model.linear.reset_parameters
    model.linear = other
    return model


class OtherInitializer(nn.Module):
    """A method of that name that is none for parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def _init_weights(self) -> None:
        raise AssertionError("not to be called")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "decoder": (Decoder, ("blocks.2", "blocks.0", "embedding", "blocks.1", "head")),
    "tied decoder": (partial(Decoder, tied=True), ("head", "blocks.1", "embedding", "blocks.0")),
    "own parameters next to children": (Composite, ("inner", "outer")),
    "buffers": (WithBuffers, ("linear",)),
    "initialized by the model around": (Initializing, ("linear", "inner.deep")),
    "an initializer without arguments": (OtherInitializer, ("linear",)),
    "new objects made by a reset": (Tied, ()),
    "in another module's place": (stand_in, ("linear",)),
    "lstm": (partial(nn.LSTM, 3, 4, num_layers=2), ()),
}


def root_only(model: nn.Module, units: tuple[str, ...]) -> None:
    fully_shard(model)


def through_units(model: nn.Module, units: tuple[str, ...]) -> None:
    fully_shard_units(model, [model.get_submodule(name) for name in units])


def same_values(name: str, shard: Callable[..., None], rank: int, world: int) -> None:
    problems, (build, units) = Problems(), MODELS[name]
    torch.manual_seed(3)
    expected = build().state_dict()
    with torch.device("meta"):
        model = build()
    tied = {key for key, value in model.named_parameters(remove_duplicate=False)} - dict(
        model.named_parameters()
    ).keys()
    torch.manual_seed(3 + rank)  # rank 0 wins
    shard(model, units)
    problems.expect(not any(value.is_meta for value in model.state_dict().values()), "something stayed on meta")
    with unshard(model):
        for key, value in model.state_dict().items():
            problems.expect(torch.equal(value, expected[key]), f"{key}: expected {expected[key]}, got {value}")
    left = {key for key, value in model.named_parameters(remove_duplicate=False)} - dict(
        model.named_parameters()
    ).keys()
    problems.expect(tied == left, f"tied names: expected {tied}, got {left}")
    problems.finish()


def the_model_runs(name: str, example: Callable[[], Tensor], rank: int, world: int) -> None:
    torch.manual_seed(3)
    expected = MODELS[name][0]()
    with torch.device("meta"):
        model = MODELS[name][0]()
    torch.manual_seed(3)
    fully_shard(model)
    outputs = [module(example()) for module in (model, expected)]
    got, wanted = (output[0] if isinstance(output, tuple) else output for output in outputs)
    torch.testing.assert_close(got, wanted)


def made_anew_stays_frozen(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = Tied()
    fully_shard(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"first.bias"}, frozen


def no_reset_is_an_error(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = NoReset()
    with pytest.raises(
        ShardingError, match=r"inner\.deep \(Scale\) has weight on the meta device and no reset_parameters"
    ):
        fully_shard(model)


def what_the_initializer_leaves_out_is_an_error(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = Initializing(whole=False)
    with pytest.raises(
        ShardingError, match=r"inner\.deep \(Custom\) has places on the meta device.*nor does the _init"
    ):
        fully_shard(model)


def ignored_stays_on_meta(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    fully_shard(model, ignored_parameters=list(model[1].parameters()))
    assert model[1].weight.is_meta
    assert not model[0].weight.is_meta


def own_values_of_rank_0_win(rank: int, world: int) -> None:
    """Built for real with a seed per rank: parameters, also frozen ones, and buffers become rank 0's."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(9, 40), nn.BatchNorm1d(40))
    model[0].bias.requires_grad_(False)
    model[1].running_mean.normal_()
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(9, 40), nn.BatchNorm1d(40))
    expected[1].running_mean.normal_()
    fully_shard(model)
    with unshard(model):
        for key, value in model.state_dict().items():
            assert torch.equal(value, expected.state_dict()[key]), key


CASES = {
    **{f"{name}, root only": partial(same_values, name, root_only) for name in MODELS},
    **{f"{name}, in units": partial(same_values, name, through_units) for name in MODELS},
    "lstm runs": partial(the_model_runs, "lstm", partial(torch.ones, 5, 2, 3)),
    "composite runs": partial(the_model_runs, "own parameters next to children", partial(torch.ones, 5, 4)),
    "frozen parameters made anew stay frozen": made_anew_stays_frozen,
    "a module that cannot initialize itself is named": no_reset_is_an_error,
    "what an initializer leaves out is named": what_the_initializer_leaves_out_is_an_error,
    "ignored parameters stay as they are": ignored_stays_on_meta,
    "real values of rank 0 win": own_values_of_rank_0_win,
}


@pytest.fixture(scope="module", params=[1, 2], ids=["world 1", "world 2"])
def outcomes(request):
    return run_cases(CASES, request.param)


@pytest.mark.parametrize("case", CASES)
def test_meta_parameters_get_the_values_of_real_construction(outcomes, case):
    assert not outcomes[case], outcomes[case]
