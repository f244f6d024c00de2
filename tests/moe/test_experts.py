"""GroupedExperts computes what a loop over tokens does, from what it saves and from nothing that was not computed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_mfsdp.moe import GroupedExperts, OrdinarySaver
from tests.moe.reference import gradients, looped, made, routed

ACTIVATIONS = pytest.mark.parametrize("activation", ["swiglu", "gelu"])


@pytest.fixture
def _poisoned() -> Iterator[None]:
    """Memory that nobody wrote holds NaN, and integers far out of range."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def compare(experts: GroupedExperts, activation: str, hidden, index, probabilities) -> None:
    inputs = (hidden, probabilities, experts.weight_in, experts.weight_out)
    output = experts(hidden, index, probabilities)
    expected = looped(hidden, index, probabilities, *experts.stacked_weights(), activation)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(output, *inputs), gradients(expected, *inputs))


@pytest.mark.usefixtures("_poisoned")
@ACTIVATIONS
@pytest.mark.parametrize("flat_weights", [False, True])
def test_experts_equal_a_loop_over_tokens(activation: str, flat_weights: bool) -> None:
    experts = made(activation, flat_weights=flat_weights)
    compare(experts, activation, *routed(9, 2, 5, 6))
    assert experts.live_rows == 18
    assert not experts.over_budget


@ACTIVATIONS
def test_the_written_backward_is_the_derivative(activation: str) -> None:
    experts = made(activation, experts=3, hidden_size=2, intermediate_size=2)
    hidden, index, probabilities = routed(4, 2, 3, 2)

    def call(hidden, probabilities, weight_in, weight_out):
        weights = {"weight_in": weight_in, "weight_out": weight_out}
        return torch.func.functional_call(experts, weights, (hidden, index, probabilities))

    assert torch.autograd.gradcheck(call, (hidden, probabilities, experts.weight_in, experts.weight_out))


@pytest.mark.usefixtures("_poisoned")
def test_choices_of_no_expert_here_and_experts_of_no_choice_leave_no_trace() -> None:
    experts = made()
    hidden, index, probabilities = routed(7, 3, 5, 6)
    index[index == 3] = 4  # nobody asks for expert 3
    index[0], index[2, 1], index[5, 0] = -1, 5, 900
    with torch.no_grad():
        probabilities[0] = float("nan")  # what nobody computes is nobody's
    compare(experts, "swiglu", hidden, index, probabilities)
    assert experts.live_rows == 16
    assert not gradients(experts(hidden, index, probabilities), experts.weight_in)[0][3].any()


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_more_experts_than_the_dtype_of_choices_can_count(dtype: torch.dtype) -> None:
    experts = made(experts=300)
    hidden, index, probabilities = routed(7, 2, 120, 6)
    if dtype.is_signed:
        index[0, 0] = -1
    compare(experts, "swiglu", hidden, index.to(dtype), probabilities)


def test_the_same_expert_twice_and_more_choices_than_experts() -> None:
    experts = made(experts=2)
    hidden, _, _ = routed(7, 2, 2, 6)
    index = torch.arange(35).view(7, 5) % 3 % 2
    probabilities = torch.rand(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compare(experts, "swiglu", hidden, index, probabilities)
    index.fill_(1)
    compare(experts, "swiglu", hidden, index, probabilities)


def test_tokens_that_chose_nobody_get_zeros_whatever_the_weights_hold() -> None:
    experts = made()
    with torch.no_grad():
        experts.weight_in.fill_(float("inf"))
    hidden, index, probabilities = routed(7, 2, 5, 6)
    inputs = (hidden, probabilities, experts.weight_in, experts.weight_out)
    for chosen in (index.fill_(-1), index[:, :0]):
        output = experts(hidden, chosen, probabilities[:, : chosen.shape[1]])
        assert not output.any()
        assert not any(one.any() for one in gradients(output, *inputs))


@pytest.mark.usefixtures("_poisoned")
def test_a_buffer_that_is_too_short_is_flagged_and_the_rest_is_right() -> None:
    experts = made(capacity_factor=1.0, over_capacity="drop")
    hidden, index, probabilities = routed(9, 2, 5, 6)
    inputs = (hidden, probabilities, experts.weight_in, experts.weight_out)
    output = experts.compute(hidden, index, probabilities, average_rows=11)
    # The last of the rows sorted by expert are left out.
    kept = index.flatten().sort(stable=True).indices[:11]
    shortened = torch.full_like(index.flatten(), -1).scatter(0, kept, index.flatten()[kept]).view_as(index)
    expected = looped(hidden, shortened, probabilities, *experts.stacked_weights(), "swiglu")
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(output, *inputs), gradients(expected, *inputs))
    assert experts.over_budget
    assert experts.live_rows == 11
    assert experts.capacity == 16
    experts(hidden, index, probabilities)
    assert experts.over_budget, "it stays until it is cleared"
    experts.over_budget.zero_()
    experts(hidden, index, probabilities)
    assert not experts.over_budget


@pytest.mark.usefixtures("_poisoned")
def test_rows_beyond_the_capacity_get_a_larger_buffer_unless_they_may_be_dropped() -> None:
    experts = made(capacity_factor=1.1)
    hidden, index, probabilities = routed(9, 2, 5, 6)
    inputs = (hidden, probabilities, experts.weight_in, experts.weight_out)
    message = r"18 rows where capacity_factor=1.1 has room for 13, .* capacity_factor=1.64 would have been enough"
    with pytest.warns(UserWarning, match=message):
        output = experts.compute(hidden, index, probabilities, average_rows=11)
    expected = looped(hidden, index, probabilities, *experts.stacked_weights(), "swiglu")
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(output, *inputs), gradients(expected, *inputs))
    assert not experts.over_budget
    assert experts.live_rows == 18
    experts.compute(hidden, index, probabilities, average_rows=11)  # it is said once; a warning would be an error
    enough = made(capacity_factor=1.64)
    torch.testing.assert_close(enough.compute(hidden, index, probabilities, average_rows=11).shape, output.shape)


class Recorder(OrdinarySaver):
    """Keeps activations itself, and notes what it was given."""

    def __init__(self) -> None:
        self.calls = []

    def save(self, ctx, tensors, live_rows):
        self.calls.append(SimpleNamespace(shapes=[tuple(one.shape) for one in tensors], live=int(live_rows)))
        ctx.recorded = [one.clone() for one in tensors]
        return ()

    def load(self, ctx, kept):
        assert not kept
        for one in ctx.recorded:
            one[self.calls[-1].live :] = float("nan")  # nothing may depend on it
        return ctx.recorded


def test_exactly_the_input_and_the_first_projection_are_saved_the_latter_where_the_saver_says() -> None:
    experts = made()
    hidden, index, probabilities = routed(9, 2, 5, 6)
    inputs = (hidden, probabilities, experts.weight_in, experts.weight_out)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = experts(hidden, index, probabilities)
    expected = gradients(output, *inputs)
    assert activations(packed) == [(9, 6), (32, 16)]

    experts.saver = recorder = Recorder()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        packed.clear()
        output = experts(hidden, index, probabilities)
    found = gradients(output, *inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert [vars(call) for call in recorder.calls] == [{"shapes": [(32, 16)], "live": 18}]
    assert activations(packed) == [(9, 6)]
    with torch.no_grad():
        experts(hidden, index, probabilities)
    experts.requires_grad_(False)(hidden.detach(), index, probabilities.detach())
    assert len(recorder.calls) == 1, "nothing is saved where there will be no backward"


def activations(packed: list[torch.Tensor]) -> list[tuple[int, ...]]:
    """Shapes of what was saved, without weights, probabilities and the plan."""
    return [tuple(one.shape) for one in packed if one.dim() == 2 and one.is_floating_point()]


def test_the_rows_are_saved_where_they_are_fewer_than_the_tokens() -> None:
    """Nearly all tokens belong to experts of others."""
    experts = made(capacity_factor=1.0)
    experts.saver = recorder = Recorder()
    hidden, index, probabilities = routed(40, 2, 5, 6)
    index = torch.where(torch.arange(40)[:, None] % 8 == 0, index, -1)
    inputs = (hidden, probabilities, experts.weight_in, experts.weight_out)
    packed: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        output = experts.compute(hidden, index, probabilities, average_rows=10)
    assert [vars(call) for call in recorder.calls] == [{"shapes": [(16, 6), (16, 16)], "live": 10}]
    assert activations(packed) == []
    found = gradients(output, *inputs)
    expected = gradients(looped(hidden, index, probabilities, *experts.stacked_weights(), "swiglu"), *inputs)
    torch.testing.assert_close(found, expected)


def test_the_input_is_not_saved_for_weights_that_need_no_gradient() -> None:
    experts = made()
    experts.weight_in.requires_grad_(False)
    packed: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        experts(*routed(9, 2, 5, 6)).sum().backward()
    assert activations(packed) == [(32, 16)]
    experts = made(capacity_factor=1.0, over_capacity="drop")
    experts.weight_in.requires_grad_(False)
    experts.saver = recorder = Recorder()
    experts.compute(*routed(40, 2, 5, 6), average_rows=10).sum().backward()
    assert [call.shapes for call in recorder.calls] == [[(16, 16)]], "nor rows, where they are fewer"
    assert experts.weight_out.grad is not None


def test_only_the_gradients_that_are_wanted_are_computed() -> None:
    experts = made()
    hidden, index, probabilities = routed(9, 2, 5, 6)
    experts.weight_in.requires_grad_(False)
    (expected,) = gradients(looped(hidden, index, probabilities, *experts.stacked_weights(), "swiglu"), hidden)
    experts(hidden, index, probabilities).sum().backward()
    assert experts.weight_in.grad is None
    experts.requires_grad_(False)
    (found,) = gradients(experts(hidden, index, probabilities.detach()), hidden)
    torch.testing.assert_close(found, expected)


def test_no_tokens_give_no_rows_and_zero_gradients() -> None:
    experts = made()
    experts(*routed(9, 2, 5, 6))
    output = experts(torch.zeros(0, 6, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    output.sum().backward()
    assert output.shape == (0, 6)
    assert (experts.live_rows, experts.capacity) == (0, 0)
    tokens = torch.ones(3, 6, dtype=torch.float64)
    assert not experts(tokens, torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0)).any(), "a sum over no expert"
    assert experts.weight_in.grad is not None
    assert not experts.weight_in.grad.any()


def test_autocast_decides_the_dtype_of_products_and_gradients_keep_their_own() -> None:
    experts = made(dtype=torch.float32)
    hidden, index, probabilities = routed(9, 2, 5, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = experts(hidden, index, probabilities)
    assert output.dtype is torch.bfloat16
    expected = experts(hidden, index, probabilities)
    torch.testing.assert_close(output.float(), expected, rtol=3e-2, atol=3e-2)
    for found in gradients(output, hidden, probabilities, experts.weight_in, experts.weight_out):
        assert found.dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected a positive whole number, got 0"),
        ({"hidden_size": 2.0}, "hidden_size: expected a positive whole number, got 2.0"),
        ({"capacity_factor": "2"}, "capacity_factor: expected a number of at least 1, .* got '2'"),
        ({"capacity_factor": 0.5}, "capacity_factor: expected a number of at least 1, .* got 0.5"),
        ({"capacity_factor": float("inf")}, "capacity_factor: expected a number of at least 1, .* got inf"),
        ({"over_capacity": "clip"}, 'over_capacity: expected "grow" or "drop", got \'clip\''),
        ({"activation": "relu"}, "activation: expected one of swiglu, gelu, got 'relu'"),
    ],
)
def test_sizes_are_checked_where_they_are_given(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedExperts(**{"num_experts": 2, "hidden_size": 4, "intermediate_size": 4, **options})


def test_inputs_that_do_not_fit_are_refused() -> None:
    experts = made()
    hidden, index, probabilities = routed(9, 2, 5, 6)
    with pytest.raises(ValueError, match=r"expected tokens of shape \[T, 6\], got \(1, 9, 6\)"):
        experts(hidden[None], index, probabilities)
    with pytest.raises(ValueError, match=r"expected integers of shape \[9, K\], got \(8, 2\)"):
        experts(hidden, index[1:], probabilities)
    for wrong in (torch.bool, torch.complex64, torch.float32):
        with pytest.raises(ValueError, match=r"expected integers of shape \[9, K\], got \(9, 2\) of torch"):
            experts(hidden, index.to(wrong), probabilities)
    with pytest.raises(ValueError, match=r"the shape of expert_index, \(9, 2\), and floating-point .* got \(9, 1\) of"):
        experts(hidden, index, probabilities[:, :1])
    with pytest.raises(ValueError, match=r"and floating-point numbers, got \(9, 2\) of torch.int64"):
        experts(hidden, index, index)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_a_compiled_block_calls_its_experts_as_they_are() -> None:
    experts = made()
    hidden, index, probabilities = routed(9, 2, 5, 6)
    inputs = (hidden, probabilities, experts.weight_in, experts.weight_out)

    def block(hidden, probabilities):
        return torch.tanh(experts(2 * hidden, index, probabilities))

    compiled = torch.compile(block, backend="eager")
    torch.testing.assert_close(compiled(hidden, probabilities), block(hidden, probabilities))
    torch.testing.assert_close(
        gradients(compiled(hidden, probabilities), *inputs), gradients(block(hidden, probabilities), *inputs)
    )
