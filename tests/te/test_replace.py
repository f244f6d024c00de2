"""Layers of torch.nn become layers of the library: same parameters, same names, and a refusal by name where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.base.initialize import materialize
from lightning_mfsdp.engine import fully_shard
from lightning_mfsdp.te import Fp8Compute, Fp8Options
from tests.engine.cases import run_cases
from tests.te import fake_engine


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with fake_engine.installed():
        yield


class Drawn(nn.Linear):
    """Draws its weight in a way of its own."""

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, 5.0, 6.0)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Buffered(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(1))


class Stamped(nn.Linear):
    def get_extra_state(self) -> Tensor:
        return torch.zeros(1)


class Block(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.rms = nn.RMSNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = Drawn(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.rms(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def prepare(model: nn.Module, **options: Any) -> Fp8Compute:
    compute = Fp8Compute(Fp8Options(**{"replace_layers": True, **options}))
    compute.prepare(model, None)
    return compute


def engine_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__module__.startswith("transformer_engine")]


def test_the_very_parameters_move_into_new_layers() -> None:
    model = Model().to(torch.bfloat16).eval()
    model.blocks[1].up.bias.requires_grad_(False)
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    prepare(model)
    assert engine_names(model) == [
        *(f"blocks.{index}.{name}" for index in range(3) for name in ("norm", "rms", "up", "down")),
        "head",
    ]
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert model.head.weight is model.embedding.weight
    assert list(model.state_dict()) == keys
    assert not model.blocks[1].up.bias.requires_grad
    assert model.blocks[0].rms.eps == 1e-6
    assert not any(module.training for module in model.modules())
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()}, strict=True)


def test_a_replaced_model_computes_the_same_in_high_precision() -> None:
    torch.manual_seed(0)
    plain, tokens = Model(), torch.arange(16).view(2, 8)
    expected = plain(tokens)
    prepare(plain)
    torch.testing.assert_close(plain(tokens), expected)


def test_each_place_of_a_shared_layer_gets_the_new_one() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16)))
    model[1].append(model[0])
    prepare(model)
    assert model[1][1] is model[0]
    assert engine_names(model) == ["0", "1.0"]


def test_what_the_library_cannot_be_is_left_as_it_is() -> None:
    model = nn.ModuleDict(
        {
            "own forward": Scaled(16, 16),
            "own buffer": Buffered(16, 16),
            "own state": Stamped(16, 16),
            "no eps": nn.RMSNorm(16),
            "no bias": nn.LayerNorm(16, bias=False),
            "no weight": nn.LayerNorm(16, elementwise_affine=False),
            "attention": nn.MultiheadAttention(16, 2),
            "theirs": fake_engine.Linear(16, 16, device="cpu"),
            "plain": nn.Linear(16, 16),
        }
    )
    theirs, keys = model["theirs"], list(model.state_dict())
    prepare(model)
    assert list(model.state_dict()) == keys
    assert engine_names(model) == ["theirs", "plain"]
    assert model["theirs"] is theirs


@pytest.mark.parametrize(("columns", "rows"), [(24, 32), (32, 24)])
def test_sizes_that_cannot_be_multiplied_are_named_and_nothing_is_changed(columns: int, rows: int) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ModuleDict({"odd": nn.Linear(columns, rows)}))
    with pytest.raises(ValueError, match=rf"1\.odd maps {columns} to {rows} features, .*multiples of 16.*=\['1.odd'\]"):
        prepare(model)
    assert engine_names(model) == []
    prepare(model, keep_high_precision=["1.odd"])
    assert engine_names(model) == ["0"]


def test_sizes_follow_the_recipe_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fake_engine.answers, "mxfp8", (True, ""))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    with pytest.raises(ValueError, match=r"1 maps 32 to 16 features, .* multiples of 32"):
        prepare(model, overrides={"1": "mxfp8"})
    prepare(model, overrides={"0": "mxfp8"})


def test_hooks_and_parametrizations_are_refused_by_name() -> None:
    hooked = nn.Sequential(nn.Linear(16, 16))
    hooked[0].register_forward_hook(lambda *_: None)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
    for model in (hooked, normed):
        with pytest.raises(ValueError, match=r"replace_layers: 0 \(.*Linear\) has hooks, a parametrization"):
            prepare(model)


def test_auto_replaces_only_where_the_user_built_nothing() -> None:
    plain, mixed = (
        nn.Sequential(nn.Linear(16, 16)),
        nn.Sequential(fake_engine.Linear(16, 16, device="cpu"), nn.Linear(16, 5)),
    )
    prepare(plain, replace_layers="auto")
    prepare(mixed, replace_layers="auto")
    assert engine_names(plain) == ["0"]
    assert engine_names(mixed) == ["0"]


def test_a_model_that_would_not_compute_in_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no module of Transformer Engine.*replace_layers=True"):
        prepare(nn.Sequential(nn.Linear(16, 16)), replace_layers=False)


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (["first", "last"], ["blocks.1.norm", "blocks.1.rms", "blocks.1.up", "blocks.1.down", "head"]),
        (
            ["blocks.?.norm", "*.rms", "head", "blocks.0"],
            ["blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down"],
        ),
        (["blocks"], ["head"]),
    ],
)
def test_layers_of_choice_stay_in_high_precision(kept: list[str], left: list[str]) -> None:
    model = Model()
    prepare(model, keep_high_precision=kept)
    assert engine_names(model) == left


def test_a_pattern_without_a_layer_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'blokcs\.0' matches no layer that could compute in FP8; those are \['blocks.0.norm'"
    ):
        prepare(Model(), keep_high_precision=["blokcs.0"])
    with pytest.raises(ValueError, match=r"'first' means a block of the model, .* Linear has neither"):
        prepare(fake_engine.Linear(16, 16, device="cpu"), replace_layers=False, keep_high_precision=["first"])


def test_user_built_modules_compute_with_what_was_chosen_for_them() -> None:
    """Overrides wrap calls, also those inside a module of the library, and end with them."""
    model = nn.Sequential(*(fake_engine.Linear(16, 16, device="cpu") for _ in range(3)))
    compute = prepare(model, replace_layers=False, keep_high_precision=["0"], overrides={"2": "block", "0": "delayed"})
    with compute.forward():
        model(torch.ones(8, 16))
        model[1](torch.ones(8, 16))
    assert [getattr(call.recipe, "kind", None) for call in fake_engine.calls] == [None, "current", "block", "current"]
    assert fake_engine.state.depth == 0


def test_delayed_scaling_of_modules_that_cannot_be_saved_is_refused() -> None:
    model = nn.Sequential(fake_engine.BasicLinear())
    with pytest.raises(ValueError, match=r"0 \(BasicLinear\) keeps a history of its own under delayed"):
        prepare(model, recipe="delayed", replace_layers=False)
    prepare(model, recipe="current", replace_layers=False)


def test_meta_layers_are_drawn_as_the_layers_they_replaced() -> None:
    torch.manual_seed(3)
    expected = Model().state_dict()
    with torch.device("meta"):
        model = Model()
    prepare(model)
    torch.manual_seed(3)
    materialize(model, torch.device("cpu"))
    assert engine_names(model)
    assert model.head.weight is model.embedding.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_user_built_modules_have_an_empty_extra_state_that_loads_anywhere() -> None:
    model = nn.Sequential(fake_engine.Linear(16, 16, device="cpu"))
    compute = prepare(model, recipe="delayed", replace_layers=False)
    with compute.forward():
        model(torch.ones(8, 16))
    state = model.state_dict()
    assert state["0._extra_state"].numel() == 0
    fresh = nn.Sequential(fake_engine.Linear(16, 16, device="cpu"))
    fresh.load_state_dict(state, strict=True)
    with_code = {**state, "0._extra_state": torch.ones(3, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="Refusing"):
        fresh.load_state_dict(with_code)
    model.load_state_dict(with_code, strict=True)


def replacing_in_a_sharded_model_is_refused(rank: int, world: int) -> None:
    with fake_engine.installed():
        model = Model()
        fully_shard(model.blocks[0])
        with pytest.raises(ValueError, match=r"replace_layers=True: Model has modules that were given to fully_shard"):
            prepare(model)


def test_replacing_in_a_sharded_model_is_refused() -> None:
    assert run_cases({"sharded": replacing_in_a_sharded_model_is_refused}, 1) == {"sharded": ""}
