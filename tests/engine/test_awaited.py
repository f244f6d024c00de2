"""A unit is reduced once in a backward, after the last of its gradients, whatever graphs the backward runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    gather_root,
    no_sync,
    reduce_pending,
    watch_backward,
)
from tests.engine.internals import unit_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, Chain, adamw, assert_same_weights, context, inputs, loss_of, weights
from tests.helpers.hidden import Hidden
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_world, pairwise

WIDE_GRADIENTS = MixedPrecisionPolicy(
    compute_dtype=torch.bfloat16, main_params_dtype=torch.bfloat16, main_grads_dtype=torch.float32
)


class Stem(Chain):
    """A chain behind a layer of the root, so that no input of the root needs a gradient and those of all units do.

    Attributes:
        times: How often each unit runs in a row.
    """

    def __init__(self, layers: int = 4, times: int = 1) -> None:
        super().__init__(layers)
        self.stem = nn.Linear(8, 8)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            for _ in range(self.times):
                x = x + torch.tanh(self.wrap(layer, x))
        return self.out(x)


def again(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def built(together: int = 1, times: int = 1, wrap: Callable[..., Tensor] | None = None, **options) -> Stem:
    """`together` layers in each unit; not sharded where it is 0."""
    torch.manual_seed(0)
    model = Stem(times=times)
    model.wrap = wrap or model.wrap
    if not together:
        return model
    for start in range(0, 4, together):
        members = list(model.layers[start : start + together])
        fully_shard(members[0] if together == 1 else members, **options)
    return fully_shard(model, **options)


def grouped_modules_computed_again_are_reduced_once(rank, world):
    for policy, together in product((None, WIDE_GRADIENTS), (2, 4)):
        model, other = built(together, policy=policy, wrap=again), built(together, policy=policy)
        optimizers = adamw(model), adamw(other)
        for step in range(3):
            for one, optimizer in zip((model, other), optimizers, strict=True):
                before = context(one).reductions.started
                loss_of(one, inputs(step, rank)).backward()
                assert context(one).reductions.started - before == (4 // together + 1 if world > 1 else 0)
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(model, other, (policy, together))


def what_is_computed_again_is_reduced_before_the_backward_ends(rank, world):
    """Waiting to the end would be right as well, and would keep all gradients whole until then."""
    model = built(2, wrap=again)
    for step in range(2):
        seen, before = [], context(model).reductions.started
        x = inputs(step, rank).requires_grad_()
        x.register_hook(lambda _, seen=seen: seen.append(context(model).reductions.started))
        loss_of(model, x).backward()
    assert seen[0] - before >= 2


Program = Callable[[nn.Module, Callable[[int], Tensor]], None]


def retained(model: nn.Module, x: Callable[[int], Tensor]) -> None:
    loss = loss_of(model, x(0))
    loss.backward(retain_graph=True)
    loss.backward()


def in_turn(model: nn.Module, x: Callable[[int], Tensor]) -> None:
    losses = [loss_of(model, x(step)) for step in range(3)]
    for loss in losses:
        loss.backward()


def with_an_evaluation_between(model: nn.Module, x: Callable[[int], Tensor]) -> None:
    losses = [loss_of(model, x(step)) for step in range(3)]
    for loss in losses:
        loss.backward()
        with torch.no_grad():
            model(x(9))


def a_retained_graph_with_a_new_one(model: nn.Module, x: Callable[[int], Tensor]) -> None:
    old = loss_of(model, x(0))
    old.backward(retain_graph=True)
    (old + loss_of(model, x(1))).backward()


def a_kept_loss_with_a_new_one(model: nn.Module, x: Callable[[int], Tensor]) -> None:
    old, other = loss_of(model, x(0)), loss_of(model, x(1))
    other.backward()
    (old + loss_of(model, x(2))).backward()


def one_loss_again_and_again(model: nn.Module, x: Callable[[int], Tensor]) -> None:
    loss = loss_of(model, x(0))
    for step in range(3):
        loss.backward(retain_graph=True)
        with torch.no_grad():
            model(x(step))
    loss.backward()


def two_results(model: nn.Module, x: Callable[[int], Tensor]) -> None:
    """Each call of the root is reached by both backwards, and no graph has to be retained for it."""
    results = [model(x(step)) for step in range(2)]
    for column in range(2):
        sum(result[:, column].square().mean() for result in results).backward(retain_graph=column == 0)


PROGRAMS: tuple[Program, ...] = (
    retained,
    in_turn,
    with_an_evaluation_between,
    a_retained_graph_with_a_new_one,
    a_kept_loss_with_a_new_one,
    one_loss_again_and_again,
    two_results,
)


def expected_gradients(program: Program, world: int, times: int) -> dict[str, Tensor]:
    """Mean over ranks of what one process computes without the engine."""
    found: dict[str, Tensor] = {}
    for rank in range(world):
        plain = built(0, times)
        program(plain, lambda step, rank=rank: inputs(step, rank))
        for name, parameter in plain.named_parameters():
            found[name] = found.get(name, 0) + parameter.grad / world
    return found


UNITS = ((1, None), (2, None), (1, again), (2, again))


def any_graphs_of_units_that_run_twice_are_reduced_once(rank, world):
    def possible(program, times, sharding, units):
        return (world > 1 and times > 1) or (sharding, units[0]) == ("optim_grads_params", 2)

    rows = thinned(pairwise(PROGRAMS, (1, 2), ("no_shard", "optim_grads_params"), UNITS, possible=possible), 3)
    for (program, times), of_program in groupby(rows, key=lambda row: row[:2]):
        expected = expected_gradients(program, world, times)
        for _, _, sharding, (together, wrap) in of_program:
            case = f"{program.__name__} x{times} {sharding} {together} {wrap is again}"
            model = built(together, times, wrap, sharding=sharding)
            schedule = context(model).reductions
            before, backwards = schedule.started, context(model).backward.num_ended
            program(model, lambda step: inputs(step, rank))
            backwards = context(model).backward.num_ended - backwards
            units = 4 // together + 1
            assert schedule.started - before == (backwards * units if world > 1 else 0), case
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, f"{case} {name}"
                torch.testing.assert_close(
                    parameter.grad.full_tensor(),
                    expected[name],
                    rtol=2e-5,
                    atol=1e-6,
                    msg=lambda m, c=case: f"{c}: {m}",
                )
            assert not any(
                group.weights.present
                for unit in context(model).units
                for group in unit.groups
                if world > 1 and sharding == "optim_grads_params"
            )


def _very_old_graph_with_a_new_one(model: nn.Module, x: Callable[[int], Tensor], second) -> None:
    """The first one is older than two other backwards."""
    old = loss_of(model, x(0))
    for step in (1, 2):
        loss_of(model, x(step)).backward()
    second(old + loss_of(model, x(3)))


class RunsInBackward(torch.autograd.Function):
    """Runs a module in its backward, with a backward of its own, and not in its forward."""

    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.module(gradient.new_ones(2, 8)).sum().backward()
        return gradient, None


def a_gradient_that_nobody_can_expect_is_an_error_on_several_ranks(rank, world):
    model, other = built(), built()

    def loss(one: Stem) -> Tensor:
        x = RunsInBackward.apply(inputs(0, rank).requires_grad_(), one.layers[3])
        return loss_of(one, x)

    if world > 1:
        with pytest.raises(EngineStateError, match=rf"layers.3: on rank {rank} a gradient came after"):
            loss(model).backward()
    else:
        loss(model).backward()
    with no_sync(other):
        loss(other).backward()
    reduce_pending(other)
    if world == 1:
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad.to_local(), two.grad.to_local())
    for one in (model, other):
        one.zero_grad()
        loss_of(one, inputs(5, rank)).backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), two.grad.to_local()), "usable afterwards"


def a_very_old_graph_together_with_a_new_one_is_reduced_once(rank, world):
    for policy in (None, WIDE_GRADIENTS):
        model, other = built(policy=policy), built(policy=policy)
        _very_old_graph_with_a_new_one(model, lambda step: inputs(step, rank), Tensor.backward)
        with no_sync(other):
            _very_old_graph_with_a_new_one(other, lambda step: inputs(step, rank), Tensor.backward)
        reduce_pending(other)
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad.to_local(), two.grad.to_local(), rtol=3e-2, atol=1e-2)
        for one in (model, other):
            one.zero_grad()
            loss_of(one, inputs(5, rank)).backward()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad.to_local(), two.grad.to_local()), "usable afterwards"


class Hiding(nn.Linear):
    def forward(self, x: Tensor) -> Hidden:
        return Hidden(super().forward(x))


class Hiders(nn.Module):
    """Units whose results are hidden, `times` times each; the last one by itself, so that nobody else notices a backward."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hiding(8, 8) for _ in range(3))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(self.times):
                x = x + torch.tanh(layer(x).value)
        return x


def units_that_hide_their_tensors_may_be_called_more_than_once(rank, world):
    for times, storage, evaluates in pairwise((1, 2, 3), ("dynamic", "pooled"), (False, True), together=1):
        torch.manual_seed(0)
        plain, model = Hiders(times), Hiders(times)
        model.load_state_dict(plain.state_dict())
        for layer in model.layers:
            fully_shard(layer, storage=storage)
        fully_shard(model, storage=storage)
        optimizer, expected = adamw(model), torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(4):
            for one, stepper in ((model, optimizer), (plain, expected)):
                losses = [loss_of(one, inputs(10 * step + micro)) for micro in range(2)]
                if evaluates:
                    with torch.no_grad():
                        one(inputs(7))
                sum(losses).backward()
                stepper.step()
                stepper.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(inputs(1)), plain(inputs(1)), rtol=1e-4, atol=1e-5)
        if world > 1:
            # The first unit's input needs no gradient, and the root has no parameters: its graph may come again, for all they know.
            kept = context(model).lane.pool.allocated_bytes - context(model).lane.pool.fixed_bytes
            assert kept in (0, unit_of(model.layers[0]).full_bytes)


class HidingStem(Stem):
    """The root, and perhaps its units, hide their results: nobody hears of a backward before it reads the last layer's weight."""

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(super().forward(x))


def retained(model: nn.Module, x: Tensor) -> None:
    loss = model(x).value.square().mean()
    loss.backward(retain_graph=True)
    model(x)  # without a backward
    loss.backward()


def after_its_inputs(model: nn.Module, x: Tensor) -> None:
    loss = model(x.requires_grad_()).value.square().mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    with torch.no_grad():
        model(x)
    loss.backward()


def interleaved(model: nn.Module, x: Tensor) -> None:
    losses = [model(x * factor).value.square().mean() for factor in (1, 2)]
    for loss in losses:
        loss.backward()


class HidingStemAlone(Hiders):
    """Hides its result as its units do; its own layer comes first, so that a backward reads a unit's weight before anybody hears of it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.stem = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(super().forward(self.stem(x)))


class HidersAlone(Hiders):
    """A root without parameters of its own."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(super().forward(x))


def units_inside_a_root_that_hears_nothing_keep_their_weights_for_a_retained_graph(rank, world):
    for kind, storage in product((HidingStemAlone, HidersAlone), ("dynamic", "pooled")):
        torch.manual_seed(0)
        plain, model = kind(), kind()
        model.load_state_dict(plain.state_dict())
        for layer in model.layers:
            fully_shard(layer, storage=storage)
        fully_shard(model, storage=storage)
        for one in (plain, model):
            loss = one(inputs(0)).value.square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def a_root_that_hides_its_result_has_its_weights_in_every_backward(rank, world):
    for hides_all, backwards in product((False, True), (retained, after_its_inputs, interleaved)):
        torch.manual_seed(0)
        plain, model = HidingStem(), HidingStem()
        model.load_state_dict(plain.state_dict())
        if hides_all:
            for one in (plain, model):
                one.wrap = lambda layer, x: layer(x).value
                for layer in one.layers:
                    layer.__class__ = Hiding
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer, expected = adamw(model), torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(3):
            for one, stepper in ((model, optimizer), (plain, expected)):
                backwards(one, inputs(step))
                stepper.step()
                stepper.zero_grad()
        for name, value in weights(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


def weights_used_outside_of_forwards_are_awaited_in_later_backwards(rank, world):
    """Penalties that were computed before the forward, so that their gradients come last."""

    def loss(model: nn.Module, step: int) -> Tensor:
        penalty = sum(layer.weight.square().sum() for layer in model.layers)
        return penalty + loss_of(model, inputs(step))

    plain, model = built(0), built()
    for one in (plain, model):
        first = loss(one, 0)
        first.backward(retain_graph=True)
        first.backward()
        together = [loss(one, step) for step in (1, 2)]
        for each in together:
            each.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


class Tied(Stem):
    """The first layer's weight is that of the stem, which belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight = self.stem.weight

    def step(self, x: Tensor) -> Tensor:
        return loss_of(super().forward, x)  # no hook of the root runs


def a_weight_tied_to_the_root_is_awaited_where_no_forward_of_the_root_runs(rank, world):
    torch.manual_seed(0)
    plain, model = Tied(), Tied()
    model.load_state_dict(plain.state_dict())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for one in (plain, model):
        sharded = one is model
        for steps in ((0,), (1, 2), (3,)):
            with gather_root(one) if sharded else nullcontext():
                losses = [one.step(inputs(step)) for step in steps]
            for loss in losses:
                if sharded:
                    watch_backward(one, loss)
                loss.backward(retain_graph=True)
            losses[0].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


class Enabling(nn.Module):
    """Runs with gradients whatever its caller does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.inner(x)


def under_no_grad(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.enabling(x)


READS = {
    "module": lambda model, x: model.stem(x),
    "forward": lambda model, x: model.stem.forward(x),
    "functional": lambda model, x: F.linear(x, model.stem.weight, model.stem.bias),
    "module, reentrant": lambda model, x: checkpoint(model.stem, x, use_reentrant=True),
    "forward, reentrant": lambda model, x: checkpoint(model.stem.forward, x, use_reentrant=True),
    "functional, reentrant": lambda model, x: checkpoint(
        lambda x: F.linear(x, model.stem.weight, model.stem.bias), x, use_reentrant=True
    ),
    "functional, computed again": lambda model, x: checkpoint(
        lambda x: F.linear(x, model.stem.weight, model.stem.bias), x, use_reentrant=False
    ),
    "module that enables gradients": under_no_grad,
}


class InSteps(nn.Module):
    """The root's layer comes first, and may share the weight of the first unit; all other layers are units."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        if tied:
            self.layers[0].weight = self.stem.weight
        self.enabling = Enabling(self.stem)


def a_step_may_go_back_several_times(rank, world):
    """However it reads weights of the root, tied ones too, and more often than is remembered; with a sharded optimizer or without."""
    for (name, read), tied, stepped in in_world(world, (1, 2), READS.items(), (True, False), (True, False), together=1):
        torch.manual_seed(0)
        plain, model = InSteps(tied=tied), InSteps(tied=tied)
        model.load_state_dict(plain.state_dict())
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        if stepped:
            fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for one in (plain, model):
            sharded = one is model
            for backwards in (1, 4):
                with gather_root(one) if sharded else nullcontext():
                    for index in range(backwards):
                        x = read(one, inputs(index).requires_grad_())
                        for layer in one.layers:
                            x = x + torch.tanh(layer(x))
                        loss = x.square().mean()
                        if sharded:
                            watch_backward(one, loss)
                        loss.backward()
        for key, parameter in model.named_parameters():
            found, expected, case = parameter.grad.full_tensor(), plain.get_parameter(key).grad, (name, tied, stepped)
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, case=case: f"{case}: {text}"
            )


class OfOwnLayer(InSteps):
    """Its forward leaves out its first layer, which a step calls before it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.enabling(x)


def a_step_may_call_the_root_with_what_its_own_layer_gave(rank, world):
    """`self(self.pre(x))`; a checkpoint recomputes the layer after the backward of the root's call, and leaves gradients of the root."""
    for name, read in READS.items():
        torch.manual_seed(0)
        plain, model = OfOwnLayer(tied=False), OfOwnLayer(tied=False)
        model.load_state_dict(plain.state_dict())
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        for one in (plain, model):
            with gather_root(one) if one is model else nullcontext():
                loss = one(read(one, inputs(0).requires_grad_())).square().mean()
                if one is model:
                    watch_backward(one, loss)
            loss.backward()
        for key, parameter in model.named_parameters():
            found, expected = parameter.grad.full_tensor(), plain.get_parameter(key).grad
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


class Recomputing(nn.Module):
    """A part of its own forward is checkpointed, which no hook of a module sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return again(lambda x: torch.tanh(self.inner(x)), x)


def _own_checkpoint_twice(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[0](layers[3](layers[3](x)))


def _nested_and_direct(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return again(lambda x: again(layers[0], layers[1](x)), layers[0](x))


def _weight_by_itself(layers: nn.ModuleList, x: Tensor) -> Tensor:
    def used(x: Tensor) -> Tensor:
        return again(lambda x: F.linear(x, layers[1].weight), x)

    return used(layers[2](layers[1](layers[0](used(x)))))


INSIDE = {
    "a checkpoint in a unit's own forward, called twice": _own_checkpoint_twice,
    "checkpoints in checkpoints, and a direct call": _nested_and_direct,
    "a weight used by itself in checkpoints": _weight_by_itself,
}


class Inside(nn.Module):
    """Three plain layers and one with a checkpoint of its own."""

    def __init__(self, program: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*(nn.Linear(8, 8) for _ in range(3)), Recomputing()])
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layers, x)


def backwards_inside_the_backward_are_waited_for(rank, world):
    for name, program in INSIDE.items():
        torch.manual_seed(0)
        plain, model = Inside(program), Inside(program)
        model.load_state_dict(plain.state_dict())
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        for step in range(3):
            for one in (plain, model):
                (one(inputs(step).requires_grad_()) + one(inputs(step, 1).requires_grad_())).square().mean().backward()
        for key, parameter in model.named_parameters():
            expected = plain.get_parameter(key).grad
            assert (parameter.grad is None) == (expected is None), (name, key)
            if expected is not None:
                torch.testing.assert_close(
                    parameter.grad.full_tensor(),
                    expected,
                    rtol=1e-4,
                    atol=1e-5,
                    msg=lambda text, name=name: f"{name}: {text}",
                )


class HidesFirst(nn.Module):
    """Its first layer hides its result; the last one is also trained alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Opaque(), nn.Linear(8, 8)])

    def forward(self, x: Tensor, *, alone: bool = False) -> Tensor:
        return self.layers[1](x) if alone else self.layers[0](x).value


class Opaque(nn.Module):
    """Returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(self.inner(self.inner(x)))


def a_hidden_result_waits_while_other_units_go_back(rank, world):
    torch.manual_seed(0)
    plain, model = HidesFirst(), HidesFirst()
    model.load_state_dict(plain.state_dict())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for step in range(3):
        for one in (plain, model):
            kept = one(inputs(step).requires_grad_()).square().mean()
            one(inputs(step, 1), alone=True).square().mean().backward()
            kept.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(key).grad, rtol=1e-4, atol=1e-5)
    fully_shard_optimizer(torch.optim.SGD(model.parameters())).step()
    assert not any(unit.calls.hidden or unit.uses_weights for unit in context(model).units)


class Around(nn.Module):
    """A sharded model becomes part of a larger one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def gradients_held_back_stay_when_the_module_around_is_sharded(rank, world):
    expected = {}
    for one in range(world):
        plain = Around(built(0))
        plain.head.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})
        loss_of(plain.inner, inputs(0, one)).backward()
        loss_of(plain, inputs(1, one)).backward()
        for name, parameter in plain.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad / world
    for sharding, keeps in in_world(world, (1, 2), STRATEGIES, (False, True)):
        model = Around(built(2, sharding=sharding))
        with no_sync(model.inner, keep_sharded=keeps):
            loss_of(model.inner, inputs(0, rank)).backward()
        model.head.load_state_dict({"weight": torch.eye(3), "bias": torch.zeros(3)})
        fully_shard(model, sharding=sharding)
        loss_of(model, inputs(1, rank)).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad.full_tensor(), expected[name], rtol=2e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


COMMON = (
    grouped_modules_computed_again_are_reduced_once,
    any_graphs_of_units_that_run_twice_are_reduced_once,
    a_gradient_that_nobody_can_expect_is_an_error_on_several_ranks,
    a_very_old_graph_together_with_a_new_one_is_reduced_once,
    backwards_inside_the_backward_are_waited_for,
    a_hidden_result_waits_while_other_units_go_back,
    a_step_may_call_the_root_with_what_its_own_layer_gave,
    units_that_hide_their_tensors_may_be_called_more_than_once,
    gradients_held_back_stay_when_the_module_around_is_sharded,
    a_root_that_hides_its_result_has_its_weights_in_every_backward,
    units_inside_a_root_that_hears_nothing_keep_their_weights_for_a_retained_graph,
    weights_used_outside_of_forwards_are_awaited_in_later_backwards,
    a_weight_tied_to_the_root_is_awaited_where_no_forward_of_the_root_runs,
    a_step_may_go_back_several_times,
)
WORLDS = {1: thinned(COMMON, 3), 2: (*COMMON, what_is_computed_again_is_reduced_before_the_backward_ends)}


@by_world(WORLDS)
def test_awaited(world, case):
    check(WORLDS, world, case)
