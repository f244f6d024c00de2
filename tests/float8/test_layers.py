"""Float8Linear and the choice of layers that become one."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.float8 import Float8Linear, replace_linear_layers
from lightning_mfsdp.float8.casts import cast, largest_magnitude

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Drawn(nn.Linear):
    """Draws its weight in a way of its own."""

    def reset_parameters(self):
        nn.init.constant_(self.weight, 0.5)
        nn.init.zeros_(self.bias)


class Doubling(nn.Linear):
    """Has a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), Drawn(64, 32)) for _ in range(3))
        self.odd = nn.Linear(32, 24)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.doubling = Doubling(32, 32)
        self.head = nn.Linear(32, 48)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.doubling(self.attention(x, x, x)[0]))


def rounded(matrix, dtype=E4M3):
    """What a product reads of a matrix."""
    as_is, _, inverse = cast(matrix, largest_magnitude(matrix), dtype, True, False)
    return as_is.float() * inverse


@pytest.mark.parametrize("tokens", [(16,), (3, 7), (1,)])
def test_a_layer_multiplies_casts_of_input_weight_and_gradient(tokens):
    torch.manual_seed(0)
    layer = Float8Linear(48, 32)
    x = torch.randn(*tokens, 48, requires_grad=True)
    output = layer(x)
    seen, weight = rounded(x.detach().view(-1, 48)), rounded(layer.weight.detach())
    torch.testing.assert_close(output.detach().view(-1, 32), F.linear(seen, weight, layer.bias.detach()))
    gradient = torch.randn(output.shape)
    output.backward(gradient)
    flat = rounded(gradient.view(-1, 32), E5M2)
    torch.testing.assert_close(x.grad.view(-1, 48), flat @ weight)
    torch.testing.assert_close(layer.weight.grad, flat.t() @ seen)
    torch.testing.assert_close(layer.bias.grad, gradient.view(-1, 32).sum(0))


def test_outputs_and_gradients_have_the_dtypes_of_a_linear_layer():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for autocast in (False, True):
            results = []
            for kind in (Float8Linear, nn.Linear):
                layer = kind(32, 16, dtype=dtype)
                x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = layer(x)
                output.float().sum().backward()
                results.append((output.dtype, x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype))
            assert results[0] == results[1]


def test_what_is_frozen_gets_no_gradient_and_an_empty_input_a_gradient_of_zeros():
    layer = Float8Linear(32, 16, bias=False).requires_grad_(False)
    x = torch.randn(4, 32, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    layer.requires_grad_(True)
    layer(torch.randn(4, 32)).sum().backward()
    assert layer.weight.grad is not None
    layer.weight.grad = None
    layer(torch.randn(0, 32)).sum().backward()
    assert not layer.weight.grad.any()


# torch makes an object of the class while it traces an autograd function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_layer_computes_the_bits_of_the_layer():
    torch.manual_seed(0)
    model = nn.Sequential(Float8Linear(32, 64), nn.GELU(), Float8Linear(64, 32))
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for tokens in (24, 5, 5, 9):
        x = torch.randn(tokens, 32)
        losses = [called(x).square().mean() for called in (model, compiled)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    for one, other in zip(model.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_in_an_input_or_a_gradient_is_seen_in_every_result(bad):
    layer, x = Float8Linear(32, 16), torch.randn(8, 32)
    x[3, 5] = bad
    assert layer(x).isnan().all()
    gradient = torch.ones(8, 16)
    gradient[2, 1] = bad
    layer(torch.randn(8, 32)).backward(gradient)
    assert layer.weight.grad.isnan().all()


def test_a_backward_under_autocast_computes_the_bits_of_one_outside():
    torch.manual_seed(0)
    layer, x = Float8Linear(64, 32), torch.randn(24, 64)
    gradients = []
    for around in (False, True):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(x).float().square().mean()
            if around:
                loss.backward()
        if not around:
            loss.backward()
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)


def test_a_second_derivative_raises():
    x = torch.randn(4, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(Float8Linear(32, 16)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_checkpointed_layer_computes_the_same_gradients():
    torch.manual_seed(0)
    layer, x = nn.Sequential(Float8Linear(32, 64), nn.GELU(), Float8Linear(64, 32)), torch.randn(24, 32)
    layer(x).square().mean().backward()
    plain = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False).square().mean().backward()
    assert all(torch.equal(one, two.grad) for one, two in zip(plain, layer.parameters(), strict=True))


def test_layers_are_chosen_by_names_sizes_and_forward():
    model = Model()
    before = {name: (id(module), id(getattr(module, "weight", None))) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    chosen = replace_linear_layers(model, keep_high_precision=["head", "blocks.1"], least_size=32)
    assert chosen == ["blocks.0.0", "blocks.0.2", "blocks.2.0", "blocks.2.2"]
    assert [name for name, module in model.named_modules() if isinstance(module, Float8Linear)] == chosen
    assert before == {name: (id(module), id(getattr(module, "weight", None))) for name, module in model.named_modules()}
    assert keys == list(model.state_dict())
    assert isinstance(model.blocks[0][2], Drawn)
    model(torch.randn(2, 16, 32)).sum().backward()


def test_another_choice_takes_back_the_first():
    model = Model()
    kinds = [type(module) for module in model.modules()]
    replace_linear_layers(model, keep_high_precision=["last"], least_size=32)
    assert not isinstance(model.blocks[2][0], Float8Linear)
    assert isinstance(model.head, Float8Linear)
    chosen = replace_linear_layers(model, keep_high_precision=["blocks"], least_size=32)
    assert chosen == ["head"]
    for layer in model.blocks:
        assert [type(part) for part in layer] == [nn.Linear, nn.GELU, Drawn]
    model.head.__class__ = nn.Linear
    assert kinds == [type(module) for module in model.modules()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_high_precision": ["heads"]}, "'heads' matches no linear layer"),
        ({"keep_high_precision": ["*"]}, "none to compute in 8 bits"),
        ({}, "multiples of 16 and at least 1024"),
    ],
)
def test_a_choice_that_cannot_be_meant_raises_and_changes_nothing(options, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        replace_linear_layers(model, **options)
    assert not any(isinstance(module, Float8Linear) for module in model.modules())


def test_a_model_without_blocks_has_no_first_one():
    with pytest.raises(ValueError, match="largest ModuleList or Sequential"):
        replace_linear_layers(nn.Linear(32, 32), keep_high_precision=["first"], least_size=16)


def test_sizes_that_cannot_be_multiplied_are_refused():
    with pytest.raises(ValueError, match=r"Float8Linear\(32, 24\): expected multiples of 16"):
        Float8Linear(32, 24)


def test_a_part_of_a_weight_that_cannot_be_multiplied_is_refused():
    layer = Float8Linear(32, 32)
    layer.weight = nn.Parameter(layer.weight[:24].detach())
    with pytest.raises(ValueError, match=r"shape \[24, 32\]: expected multiples of 16"):
        layer(torch.randn(4, 32))


def test_copies_and_pickles_compute_in_8_bits_as_well():
    model = Model()
    replace_linear_layers(model, keep_high_precision=["head"], least_size=32)
    nn.init.normal_(model.blocks[0][2].weight)
    x = torch.randn(2, 8, 32)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert torch.equal(other(x), model(x))
        other.blocks[0][2].reset_parameters()
        assert (other.blocks[0][2].weight == 0.5).all()
        assert not (model.blocks[0][2].weight == 0.5).any()


def test_pickles_leave_out_what_a_linear_layer_leaves_out():
    class Locked(nn.Linear):
        def __getstate__(self):
            return {name: value for name, value in super().__getstate__().items() if name != "lock"}

    model = nn.Sequential(Locked(32, 32), nn.Linear(32, 32))
    model[0].lock = threading.Lock()
    replace_linear_layers(model, least_size=16)
    for layer in model:
        layer.compile(backend="eager")
        other = copy.deepcopy(layer)
        assert type(other) is type(layer)
        assert torch.equal(other.weight, layer.weight)
        assert other._compiled_call_impl is None


@pytest.mark.parametrize(("to_x", "to_weight"), [(True, True), (True, False), (False, True)])
def test_a_layer_keeps_what_a_linear_layer_keeps_for_backward_and_two_numbers(to_x, to_weight):
    x = torch.randn(64, 32, requires_grad=to_x)
    kept = {}
    for kind in (nn.Linear, Float8Linear):
        layer = kind(32, 48, bias=False).requires_grad_(to_weight)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            output = layer(x)
        kept[kind] = sum(saved)
        output.sum().backward()
        assert (x.grad is not None, layer.weight.grad is not None) == (to_x, to_weight)
        x.grad = None
    assert kept[Float8Linear] == kept[nn.Linear] + 2


def test_dtypes_that_cannot_be_multiplied_are_refused():
    layer = Float8Linear(32, 16)
    for x in (torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"input of torch\.\w+ and a weight of torch\.float32: expected one dtype"):
            layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 32, dtype=torch.float16)).dtype is torch.bfloat16
        with pytest.raises(ValueError, match=r"input of torch\.int64"):
            layer(torch.ones(2, 32, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"weight of torch\.float64"):
            layer.double()(torch.ones(2, 32))


class My(Float8Linear):
    """Built in 8 bits by the user."""


def test_what_cannot_become_what_it_was_is_refused():
    for make in (lambda: My(32, 32), lambda: weight_norm(Float8Linear(32, 32))):
        model = nn.Sequential(make(), nn.Linear(32, 32))
        kind = type(model[0])
        assert replace_linear_layers(model, least_size=16) == ["0", "1"]
        with pytest.raises(
            ValueError, match=r"keep_high_precision: 0 was built as \w+, or was given a parametrization"
        ):
            replace_linear_layers(model, keep_high_precision=["0"], least_size=16)
        assert type(model[0]) is kind


def test_layers_whose_weights_others_read_are_left():
    model = nn.ModuleList(
        [
            nn.Linear(32, 32),
            weight_norm(nn.Linear(32, 32)),
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True),
            nn.LazyLinear(32),
            Doubling(32, 32),
            nn.MultiheadAttention(32, 2),
        ]
    )
    assert replace_linear_layers(model, least_size=16) == ["0"]


def test_a_layer_is_kept_by_any_of_its_names():
    model = Model()
    model.tail = model.blocks[2][0]
    model.compiled = torch.compile(model.blocks[1], backend="eager")
    chosen = replace_linear_layers(model, keep_high_precision=["tail", "compiled.0"], least_size=32)
    assert chosen == ["blocks.0.0", "blocks.0.2", "blocks.1.2", "blocks.2.2", "head"]


@pytest.mark.parametrize("kept", ["head", None, [nn.Linear]])
def test_patterns_are_a_list_of_names(kept):
    with pytest.raises(TypeError, match=r"keep_high_precision=.*: expected a list of names"):
        replace_linear_layers(Model(), keep_high_precision=kept)
