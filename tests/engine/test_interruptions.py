"""A step that is broken off, passes without gradients in between, and forwards and backwards in unusual numbers."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import count, groupby, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import around_backward, gather_root, no_sync, sharded_parameters, unshard
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.core.context import Context
from tests.engine.internals import unit_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import (
    STRATEGIES,
    Chain,
    adamw,
    assert_same_weights,
    context,
    inputs,
    loss_of,
    plain_chain,
    sharded_chain,
    train,
    weights,
)
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, in_world, pairwise

STORAGES = ("pooled", "dynamic")


class Broken(Exception):  # noqa: N818
    """What the tests raise in the middle of a step."""


class RaisesInBackward(torch.autograd.Function):
    """The first `times` times that a backward comes here."""

    @staticmethod
    def forward(ctx, x: Tensor, times: int) -> Tensor:
        ctx.times = times
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.times -= 1
        if ctx.times >= 0:
            raise Broken
        return grad, None


def breaking(model: Chain, index: int, where: str):
    """A call of a layer that fails before it, inside it, after it, or in its backward."""

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        if layer is not model.layers[index]:
            return layer(x)
        if where == "before":
            raise Broken
        if where == "inside":
            return layer(x[:, :-1])  # a shape that does not fit
        if where == "after":
            layer(x)
            raise Broken
        return RaisesInBackward.apply(layer(x), 1)

    return call


def break_once(model: Chain, index: int, where: str, rank: int, sync=nullcontext) -> None:
    usual, model.wrap = model.wrap, breaking(model, index, where)
    with pytest.raises((Broken, RuntimeError)), sync():
        loss_of(model, inputs(60, rank)).backward()
    model.wrap = usual


def assert_at_rest(model: nn.Module, case: str) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), f"{case}: shows full parameters"
    for name, parameter in model.named_parameters():
        assert parameter.to_local().dtype is torch.float32, name


PLACED = (*product(in_turn(2, STRATEGIES), ["pooled"]), ("optim_grads_params", "dynamic"))
PLACES = ("before", "inside", "after", "backward")


def failed_steps_leave_no_trace(where: str, rank: int, world: int) -> None:
    """Three good steps, a failure, three good steps: as six good steps, to the bit."""
    rows = in_world(world, (1, 2), PLACES, PLACED, ((0, False), (2, True), (3, False)), together=1)
    assert {place for place, *_ in rows} == set(PLACES)
    for (sharding, storage), alike in groupby((row[1:] for row in rows if row[0] == where), key=lambda row: row[0]):
        expected = sharded_chain(sharding=sharding, storage=storage)
        optimizer = adamw(expected)
        losses = train(expected, optimizer, range(6), rank)
        for _, (index, early) in alike:
            case = f"{sharding} {storage} {where} layer {index}"
            model = sharded_chain(sharding=sharding, storage=storage)
            optimizer = adamw(model)
            found = []
            if early:  # before anything is known of the order
                break_once(model, index, where, rank)
                optimizer.zero_grad()
            found += train(model, optimizer, range(3), rank)
            for _ in range(2):
                break_once(model, index, where, rank)
                optimizer.zero_grad()
            found += train(model, optimizer, range(3, 6), rank)
            assert torch.equal(torch.stack(found), torch.stack(losses)), case
            assert_same_weights(model, expected, case)
            assert_at_rest(model, case)


def exception_before_a_unit(rank, world):
    failed_steps_leave_no_trace("before", rank, world)


def exception_inside_a_unit(rank, world):
    failed_steps_leave_no_trace("inside", rank, world)


def exception_after_a_unit(rank, world):
    failed_steps_leave_no_trace("after", rank, world)


def exception_inside_backward(rank, world):
    failed_steps_leave_no_trace("backward", rank, world)


def failed_forward_is_at_rest_at_once(rank, world):
    for where in ("before", "inside", "after"):
        model = sharded_chain(storage="dynamic")
        optimizer = adamw(model)
        for step in range(2):
            break_once(model, 2, where, rank)
            assert_at_rest(model, where)
            if world > 1:
                assert context(model).lane.pool.allocated_bytes == 0, where
            train(model, optimizer, [step], rank)


def an_interrupt_in_a_step_is_at_rest_at_once(rank, world):
    """Of Ctrl-C inside a forward PyTorch tells no hook; the code of a step around it does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for side_doors in ("find", "follow"):
        expected, model = (sharded_chain(storage="dynamic", side_doors=side_doors) for _ in range(2))
        losses = train(expected, adamw(expected), range(4), rank)
        optimizer, found = adamw(model), []
        for step in range(4):
            hook = model.layers[2].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt), gather_root(model):
                loss_of(model, inputs(60, rank))
            hook.remove()
            assert_at_rest(model, side_doors)
            assert compat.saved_tensors_hooks_around() is None
            if world > 1:
                assert context(model).lane.pool.allocated_bytes == 0
            found += train(model, optimizer, [step], rank)
        assert torch.equal(torch.stack(found), torch.stack(losses)), side_doors
        assert_same_weights(model, expected, side_doors)


def a_gather_that_fails_leaves_no_memory_behind(rank, world):
    for storage in STORAGES:
        model, expected = sharded_chain(storage=storage), sharded_chain(storage=storage)
        with mock.patch.object(Axis, "gather", side_effect=MemoryError("made up")), pytest.raises(MemoryError):
            loss_of(model, inputs(60, rank))
        assert_at_rest(model, storage)
        assert context(model).lane.pool.allocated_bytes == 0, storage
        found = train(model, adamw(model), range(3), rank)
        assert torch.equal(torch.stack(found), torch.stack(train(expected, adamw(expected), range(3), rank))), storage


def failing(at: int):
    """The gather of this number fails, and those after it work."""
    own, numbers = Axis.gather, count()

    def gather(self, *args, **kwargs):
        if next(numbers) == at:
            raise MemoryError("made up")
        return own(self, *args, **kwargs)

    return mock.patch.object(Axis, "gather", gather)


def result_of(model, where: str, rank: int) -> Tensor:
    with torch.no_grad():
        if where == "a module of the root":
            return model.out(inputs(7, rank))
        if where == "a forward":
            return model(inputs(7, rank))
        with gather_root(model):
            return model.out(model.layers[0](inputs(7, rank)))


def what_a_gather_that_failed_has_left_is_not_read(rank, world):
    """It is gathered again, wherever it failed, and nothing of before is kept in memory for it."""
    for sharding, storage in pairwise(STRATEGIES, STORAGES, together=1):
        for where, at in product(("a step of the root", "a module of the root", "a forward"), range(5)):
            case = f"{sharding} {storage} {where} {at}"
            model, expected = (sharded_chain(sharding=sharding, storage=storage) for _ in range(2))
            for one in (model, expected):
                train(one, adamw(one), range(2), rank)
            with failing(at), suppress(MemoryError):
                result_of(model, where, rank)
            assert not any(unit.uses_weights for unit in context(model).units), case
            assert torch.equal(result_of(model, where, rank), result_of(expected, where, rank)), case
            assert_same_weights(model, expected)


def a_prefetch_that_failed_is_done_again_in_the_same_forward(rank, world):
    for at in range(2, 5):
        model, expected = (sharded_chain() for _ in range(2))
        for one in (model, expected):
            train(one, adamw(one), range(2), rank)

        def again(layer: nn.Module, x: Tensor) -> Tensor:
            try:
                return layer(x)
            except MemoryError:
                return layer(x)

        model.wrap = again
        with failing(at):
            loss = loss_of(model, inputs(3, rank))
        assert torch.equal(loss, loss_of(expected, inputs(3, rank))), at


def evaluation_right_after_a_failed_backward(rank, world):
    for sharding in in_turn(0, STRATEGIES):
        model, expected = sharded_chain(sharding=sharding), sharded_chain(sharding=sharding)
        for one in (model, expected):
            train(one, adamw(one), range(2), rank)
        break_once(model, 1, "backward", rank)
        with torch.no_grad():
            assert torch.equal(model(inputs(1, rank)), expected(inputs(1, rank)))
        break_once(model, 1, "backward", rank)
        assert_same_weights(model, expected)  # through unshard
        break_once(model, 1, "backward", rank)
        model.load_state_dict(model.state_dict())
        assert_at_rest(model, sharding)


def a_backward_that_raised_can_be_done_again(rank, world):
    """Of the same graph, with no forward in between that would tell that the first one is over."""
    expected = reference_gradients(world, [1.0])
    for sharding, storage, index in pairwise(STRATEGIES, STORAGES, (0, 2), together=1):
        case = f"{sharding} {storage} layer {index}"
        model = sharded_chain(sharding=sharding, storage=storage)
        optimizer, layer = adamw(model), model.layers[index]
        model.wrap = lambda one, x, at=layer: RaisesInBackward.apply(one(x), 2) if one is at else one(x)
        loss = loss_of(model, inputs(0, rank))
        for _ in range(2):
            with pytest.raises(Broken):
                loss.backward(retain_graph=True)
            optimizer.zero_grad()
        loss.backward()
        assert_gradients(model, expected, case)
        assert_at_rest(model, case)


BEGINNINGS = ("interrupt", "_show_for_backward", "_begin_reductions")


def a_backward_whose_beginning_raised_can_be_done_again_while_the_error_is_kept(rank, world):
    expected, kept = reference_gradients(world, [1.0]), []
    for sharding, step in thinned(product(in_turn(3, STRATEGIES), BEGINNINGS), 2):
        model = sharded_chain(sharding=sharding)
        loss = loss_of(model, inputs(0, rank))
        with mock.patch.object(Context, step, side_effect=Broken), pytest.raises(Broken) as error:
            loss.backward(retain_graph=True)
        kept.append(error)
        loss.backward()
        assert_gradients(model, expected, f"{sharding} {step}")
        assert_at_rest(model, sharding)


def failure_in_one_microbatch_can_be_dropped_with_the_step(rank, world):
    """Gradients of earlier microbatches held back by no_sync do not leak into the next step."""
    for sharding, keep in thinned(product(in_turn(1, STRATEGIES), (False, True)), 3):
        model, expected = sharded_chain(sharding=sharding), sharded_chain(sharding=sharding)
        optimizer = adamw(model)
        with no_sync(model, keep_sharded=keep):
            loss_of(model, inputs(50, rank)).backward()
        break_once(model, 1, "backward", rank, lambda model=model, keep=keep: no_sync(model, keep_sharded=keep))
        optimizer.zero_grad()
        found = train(model, optimizer, range(3), rank)
        reference = train(expected, adamw(expected), range(3), rank)
        assert torch.equal(torch.stack(found), torch.stack(reference)), f"{sharding} {keep=}"
        assert_same_weights(model, expected, f"{sharding} {keep=}")


def passes_without_gradients_change_nothing(rank, world):
    for sharding, storage, first in pairwise(STRATEGIES, STORAGES, (False, True), together=1):
        expected = sharded_chain(sharding=sharding, storage=storage)
        losses = train(expected, adamw(expected), range(4), rank)
        model = sharded_chain(sharding=sharding, storage=storage)
        optimizer, found = adamw(model), []
        for step in range(4):
            for mode in (torch.inference_mode, torch.no_grad) if first or step else ():
                with mode():
                    output = model(inputs(70, rank))
                    assert not output.requires_grad
                    # One unit alone, as in text generation or feature extraction.
                    model.layers[1](inputs(71, rank))
                assert_at_rest(model, f"{sharding} {storage}")
            found += train(model, optimizer, [step], rank)
        assert torch.equal(torch.stack(found), torch.stack(losses)), f"{sharding} {storage} {first=}"
        assert_same_weights(model, expected, f"{sharding} {storage} {first=}")


def evaluation_sees_the_weights_of_the_last_step(rank, world):
    for sharding in in_turn(2, STRATEGIES):
        model, plain = sharded_chain(sharding=sharding), plain_chain()
        optimizer = adamw(model)
        for step in range(3):
            train(model, optimizer, [step], rank)
            plain.load_state_dict(weights(model))
            for mode in (torch.inference_mode, torch.no_grad, nullcontext):
                with mode():
                    assert torch.equal(model(inputs(80)), plain(inputs(80))), f"{sharding} {mode}"


def reference_gradients(world: int, numbers: list[float]) -> dict[str, Tensor]:
    """Mean over ranks of the sum of `factor * loss` over inputs 0, 1, ... on one process."""
    plain = plain_chain()
    for step, factor in enumerate(numbers):
        for rank in range(world):
            (factor * loss_of(plain, inputs(step, rank)) / world).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor], case: str) -> None:
    for view in sharded_parameters(model):
        rows = expected[view.name][view.rows.start : view.rows.stop]
        if len(view.rows):
            torch.testing.assert_close(
                view.grad, rows, rtol=2e-5, atol=1e-6, msg=lambda m, n=view.name: f"{case} {n}: {m}"
            )


def held_back(model: Chain, sync: str):
    return nullcontext() if sync == "always" else no_sync(model, keep_sharded=sync == "keep_sharded")


def forwards_then_backwards(model, rank, order, sync) -> None:
    """All forwards first, then their backwards in `order`; only the last one synchronizes."""
    losses = [loss_of(model, inputs(step, rank)) for step in range(len(order))]
    for index in order[:-1]:
        with held_back(model, sync):
            losses[index].backward()
    losses[order[-1]].backward()


def any_number_of_forwards_and_backwards(rank, world):
    """Every way to bring two or three losses to one gradient gives the same sum, whatever ran before."""

    def joint(model: Chain, sync: str) -> None:
        sum(loss_of(model, inputs(step, rank)) for step in range(3)).backward()

    def one_after_the_other(model: Chain, sync: str) -> None:
        for step in range(3):
            with held_back(model, sync) if step < 2 else nullcontext():
                loss_of(model, inputs(step, rank)).backward()

    def retained(model: Chain, sync: str) -> None:
        for step in range(3):
            loss = loss_of(model, inputs(step, rank)) / 3
            for _ in range(2):
                with held_back(model, sync):
                    loss.backward(retain_graph=True)
            with held_back(model, sync) if step < 2 else nullcontext():
                loss.backward()

    def lost_in_between(model: Chain, sync: str) -> None:
        for step in range(3):
            kept = loss_of(model, inputs(90, rank))
            loss = loss_of(model, inputs(step, rank))
            loss_of(model, inputs(91, rank))
            with held_back(model, sync) if step < 2 else nullcontext():
                loss.backward()
            del kept

    ways = {
        "joint": joint,
        "one after the other": one_after_the_other,
        "retained graphs": retained,
        "forwards without backward": lost_in_between,
        "backwards in order": lambda model, sync: forwards_then_backwards(model, rank, (0, 1, 2), sync),
        "backwards in reverse": lambda model, sync: forwards_then_backwards(model, rank, (2, 1, 0), sync),
        "backwards mixed": lambda model, sync: forwards_then_backwards(model, rank, (1, 2, 0), sync),
    }
    expected = reference_gradients(world, [1.0, 1.0, 1.0])
    rows = in_world(
        world,
        (1, 2),
        in_turn(1, STRATEGIES),
        ("always", "no_sync", "keep_sharded"),
        ways.items(),
        (False, True),
        possible=lambda sharding, sync, way, warm: sync == "no_sync" or not warm,
    )
    for sharding, sync, (name, way), warm in thinned(rows, 2):
        model = sharded_chain(sharding=sharding)
        if warm:  # the plan and the order are those of ordinary steps
            fresh = plain_chain().state_dict()
            train(model, adamw(model), range(2), rank)
            restore(model, fresh)
        way(model, sync)
        assert_gradients(model, expected, f"{sharding} {sync} {name} {warm=}")
        model.zero_grad()
        way(model, sync)  # what one has left behind would be in the next
        assert_gradients(model, expected, f"{sharding} {sync} {name} {warm=} again")


def restore(model: Chain, values: dict[str, Tensor]) -> None:
    """Write plain full values back into a sharded model."""
    for view in sharded_parameters(model):
        with torch.no_grad():
            view.dtensor.to_local().copy_(values[view.name][view.rows.start : view.rows.stop])
    model.load_state_dict(model.state_dict())


def a_look_at_whole_weights_disturbs_no_forward(rank, world):
    """A forward inside `unshard`, with and without a backward after it; and `unshard` while a unit shows its full parameters."""
    for sharding in in_turn(3, STRATEGIES):
        model, other = sharded_chain(sharding=sharding), sharded_chain(sharding=sharding)
        optimizer = adamw(model)
        train(model, optimizer, range(2), rank)
        train(other, adamw(other), range(2), rank)
        with unshard(model):
            loss_of(model, inputs(2, rank))
            loss = loss_of(model, inputs(3, rank))
        assert all(type(one) is not nn.Parameter for layer in model.layers[:-1] for one in layer.parameters())
        loss.backward()
        loss_of(other, inputs(3, rank)).backward()
        expected = {view.name: view.dtensor.grad.full_tensor() for view in sharded_parameters(other)}
        assert_gradients(model, expected, f"{sharding} inside unshard")
        model.zero_grad()
        train(model, optimizer, [4], rank)
        full = model.out.weight
        with torch.no_grad(), gather_root(model):
            shown = model.out.weight
            with unshard(model, writeback=True):
                assert model.out.weight is not shown
                model.out.weight.fill_(2.0)
            assert model.out.weight is shown
            assert torch.equal(shown, torch.full_like(shown, 2.0))
        model.zero_grad()
        assert model.out.weight is full
        train(model, optimizer, [5], rank)


def part_of_the_ranks_may_skip_units(rank, world):
    """Units without a gradient on some ranks count as zero there; a step broken off before does not disturb that."""
    model, plain = sharded_chain(sharding="optim_grads"), plain_chain()
    break_once(model, 1, "backward", rank)
    model.zero_grad()

    def partial(one: Chain, who: int, x: Tensor) -> Tensor:
        one.wrap = lambda layer, y: y if layer is one.layers[who % 4] else layer(y)
        return loss_of(one, x)

    partial(model, rank, inputs(0, rank)).backward()
    for other in range(world):
        (partial(plain, other, inputs(0, other)) / world).backward()
    assert_gradients(model, {name: p.grad for name, p in plain.named_parameters()}, "skipped on a rank")
    assert not any(unit_of(layer).uses_weights for layer in model.layers)
    dist.barrier()


def a_graph_of_long_ago_comes_after_a_backward_that_ended_its_unit(rank, world):
    """Which units were done in a backward, one that raised included, says nothing about the next one."""
    for sharding, raises in thinned(product(in_turn(4, STRATEGIES), (False, True)), 3):
        found = []
        for sharded in (False, True):
            model = sharded_chain(layers=3, sharding=sharding) if sharded else plain_chain(layers=3)
            first, second, third = model.layers
            loss_of(model, inputs(0).requires_grad_()).backward()  # the third is reduced first
            old = third(inputs(1).requires_grad_()).square().mean()
            for step in range(2, 4):
                second(inputs(step).requires_grad_()).sum().backward()
            loss = third(RaisesInBackward.apply(first(inputs(4).requires_grad_()), int(raises))).sum()
            with pytest.raises(Broken) if raises else nullcontext(), around_backward(model):
                loss.backward()
            model.zero_grad()
            (second(inputs(5).requires_grad_()).square().mean() + old).backward()
            grads = [parameter.grad for parameter in model.layers[1:].parameters()]
            found.append([grad.full_tensor() if sharded else grad for grad in grads])
        for expected, grad in zip(*found, strict=True):
            torch.testing.assert_close(grad, expected, msg=lambda m, c=(sharding, raises): f"{c}: {m}")


CASES = (
    exception_before_a_unit,
    exception_inside_a_unit,
    exception_after_a_unit,
    exception_inside_backward,
    failed_forward_is_at_rest_at_once,
    an_interrupt_in_a_step_is_at_rest_at_once,
    evaluation_right_after_a_failed_backward,
    a_backward_that_raised_can_be_done_again,
    a_backward_whose_beginning_raised_can_be_done_again_while_the_error_is_kept,
    failure_in_one_microbatch_can_be_dropped_with_the_step,
    passes_without_gradients_change_nothing,
    evaluation_sees_the_weights_of_the_last_step,
    any_number_of_forwards_and_backwards,
    a_look_at_whole_weights_disturbs_no_forward,
    a_graph_of_long_ago_comes_after_a_backward_that_ended_its_unit,
)
BETWEEN_RANKS = (
    a_gather_that_fails_leaves_no_memory_behind,
    what_a_gather_that_failed_has_left_is_not_read,
    a_prefetch_that_failed_is_done_again_in_the_same_forward,
    part_of_the_ranks_may_skip_units,
)
WORLDS = {1: thinned(CASES, 3), 2: (*CASES, *BETWEEN_RANKS)}


@by_world(WORLDS)
def test_interruptions(world, case):
    check(WORLDS, world, case)
