"""What a program does with `optimizer.param_groups` is what it does without sharding: they hold what the module shows, except in a step."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp import MFSDPPrecision
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine import ShardingError, fully_shard, fully_shard_optimizer, grad_norm, sharded_parameters
from lightning_mfsdp.optim import Muon
from tests.checkpoint.internals import full_optimizer_state
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.chain import DOUBLE, STRATEGIES, double_chain, inputs, loss_of, plain_chain, sharded_chain, weights
from tests.helpers.nights import thinned
from tests.helpers.optimizer_state import state_of_rows
from tests.helpers.pairwise import in_turn, in_world, pairwise

STEPS = 3

Program = Callable[[torch.optim.Optimizer], Any]


def held(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# -- what programs do ----------------------------------------------------------------------------------------------------


def clip_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    return whole(torch.nn.utils.clip_grad_norm_(held(optimizer), 0.05))


def clip_value(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_value_(held(optimizer), 0.01)


def norm_of_gradients(optimizer: torch.optim.Optimizer) -> Tensor:
    return whole(torch.nn.utils.get_total_norm([one.grad for one in held(optimizer)]))


def mean_of_weights(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.stack([whole(one.detach().mean()) for one in held(optimizer)])


def scale_by_the_norm_of_weights(optimizer: torch.optim.Optimizer) -> None:
    for one in held(optimizer):
        one.grad.mul_(0.5 / (1 + one.detach().norm()))


def replace_gradients(optimizer: torch.optim.Optimizer) -> None:
    for one in held(optimizer):
        one.grad = one.grad * 0.25


def decay_through_data(optimizer: torch.optim.Optimizer) -> None:
    for one in held(optimizer):
        one.data.mul_(0.9)


def assign_data(optimizer: torch.optim.Optimizer) -> None:
    for one in held(optimizer):
        one.data = one.data * 0.9


@torch.no_grad()
def decay_in_place(optimizer: torch.optim.Optimizer) -> None:
    for one in held(optimizer):
        one.lerp_(torch.zeros_like(one), 0.1)


def clear_every_other(optimizer: torch.optim.Optimizer) -> None:
    for one in held(optimizer)[::2]:
        one.grad = None


def views_see_zeros(optimizer: torch.optim.Optimizer) -> Tensor:
    views = [one.grad[:2] for one in held(optimizer)]
    optimizer.zero_grad(set_to_none=False)
    return torch.stack([whole(view).abs().sum() for view in views])


def state_of(optimizer: torch.optim.Optimizer, name: str) -> list[Any]:
    """Looking for it makes an entry where there is none yet."""
    return [optimizer.state[one][name] for one in held(optimizer) if name in optimizer.state[one]]


def products_of_gradients_and_state(optimizer: torch.optim.Optimizer) -> Tensor:
    found = [state_of(optimizer, name) for name in ("momentum_buffer", "exp_avg")]
    sums = [(one.grad * value).sum() for values in found for one, value in zip(held(optimizer), values, strict=False)]
    return torch.stack([whole(one) for one in sums]) if sums else torch.zeros(())


def reset_state(optimizer: torch.optim.Optimizer) -> None:
    for one in held(optimizer):
        for name, value in optimizer.state[one].items():
            if value is not None and value.dim():
                optimizer.state[one][name] = torch.full_like(one, 0.25)


def halve_state_in_place(optimizer: torch.optim.Optimizer) -> None:
    for name in ("momentum_buffer", "exp_avg"):
        torch._foreach_mul_(state_of(optimizer, name) or [torch.zeros(1)], 0.5)


def decay_by_keys_of_state(optimizer: torch.optim.Optimizer) -> int:
    for one in list(optimizer.state):
        one.data.mul_(0.9)
    numbers = {id(one): number for number, one in enumerate(held(optimizer))}
    return sum(numbers[id(one)] for one in optimizer.state)


PROGRAMS: tuple[Program, ...] = (
    products_of_gradients_and_state,
    reset_state,
    halve_state_in_place,
    decay_by_keys_of_state,
    clip_norm,
    clip_value,
    norm_of_gradients,
    mean_of_weights,
    scale_by_the_norm_of_weights,
    replace_gradients,
    decay_through_data,
    assign_data,
    decay_in_place,
    clear_every_other,
    views_see_zeros,
)


# -- where they do it ----------------------------------------------------------------------------------------------------


def before_a_step(optimizer: torch.optim.Optimizer, program: Callable[[], None], evaluate: Callable[[], Any]) -> None:
    evaluate()
    program()
    optimizer.step()


def in_a_closure(optimizer: torch.optim.Optimizer, program: Callable[[], None], evaluate: Callable[[], Any]) -> None:
    def closure() -> Any:
        loss = evaluate()
        program()
        return loss

    optimizer.step(closure)


def in_a_hook_before_a_step(
    optimizer: torch.optim.Optimizer, program: Callable[[], None], evaluate: Callable[[], Any]
) -> None:
    """Registered anew for each step, after all others."""
    evaluate()
    handle = optimizer.register_step_pre_hook(lambda *_: program())
    optimizer.step()
    handle.remove()


def in_a_hook_after_a_step(
    optimizer: torch.optim.Optimizer, program: Callable[[], None], evaluate: Callable[[], Any]
) -> None:
    evaluate()
    handle = optimizer.register_step_post_hook(lambda *_: program())
    optimizer.step()
    handle.remove()


def after_its_state_was_read_and_loaded(
    optimizer: torch.optim.Optimizer, program: Callable[[], None], evaluate: Callable[[], Any]
) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    before_a_step(optimizer, program, evaluate)


def after_a_load_that_was_refused(
    optimizer: torch.optim.Optimizer, program: Callable[[], None], evaluate: Callable[[], Any]
) -> None:
    with contextlib.suppress(ValueError):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    before_a_step(optimizer, program, evaluate)


PLACES = (
    before_a_step,
    in_a_closure,
    in_a_hook_before_a_step,
    in_a_hook_after_a_step,
    after_its_state_was_read_and_loaded,
    after_a_load_that_was_refused,
)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


def outcome(
    model: nn.Module, optimizer: torch.optim.Optimizer, place: Callable[..., None], program: Program, ranks: list[int]
) -> list[Any]:
    """What a program returned in each step."""
    seen: list[Any] = []

    for step in range(STEPS):

        def evaluate(step: int = step) -> Tensor:
            loss = torch.stack([loss_of(model, inputs(step, rank).double()) for rank in ranks]).mean()
            loss.backward()
            return loss

        place(optimizer, lambda: seen.append(program(optimizer)), evaluate)
        optimizer.zero_grad()
        assert all(one.grad is None for one in model.parameters())
    return seen


def possible(place: Callable[..., None], program: Program, *_: object) -> bool:
    return not (
        place is in_a_hook_after_a_step and program is clear_every_other
    )  # SGD then has one step less of momentum


def programs_over_param_groups_see_whole_parameters_and_gradients(rank, world):
    rows = in_world(world, (2, 3), PLACES, PROGRAMS, STRATEGIES, OPTIMIZERS, possible=possible, together=1)
    for place, program, sharding, kind in rows:
        case = f"{place.__name__} {program.__name__} {sharding} {kind}"
        plain, model = double_chain(plain_chain), double_chain(sharded_chain, sharding=sharding, policy=DOUBLE)
        expected = outcome(plain, OPTIMIZERS[kind](plain.parameters()), place, program, list(range(world)))
        optimizer = fully_shard_optimizer(OPTIMIZERS[kind](model.parameters()))
        found = outcome(model, optimizer, place, program, [rank])
        for one, other in zip(found, expected, strict=True):
            assert (
                one == other if not isinstance(one, Tensor) else torch.allclose(one, other, rtol=1e-10, atol=1e-13)
            ), case
        for name, value in weights(model).items():
            assert torch.allclose(value, plain.get_parameter(name).detach(), rtol=1e-10, atol=1e-13), (case, name)
        assert_shown(model, optimizer)


def a_plain_grad_scaler_decides_alike_on_all_ranks(rank, world):
    """An overflow on one rank: all of them leave the step out, and scale less from then on; clipping follows `unscale_`."""
    for sharding, fused in thinned(product(in_turn(0, STRATEGIES), (False, True)), 3):
        found: list[Any] = []
        for make, ranks in ((partial(sharded_chain, sharding=sharding), [rank]), (plain_chain, list(range(world)))):
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
            if len(ranks) == 1:
                fully_shard_optimizer(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(STEPS):
                losses = [loss_of(model, inputs(step, one)) for one in ranks]
                if step == 1 and 0 in ranks:
                    losses[0] = losses[0] * float("inf")
                scaler.scale(torch.stack(losses).mean()).backward()
                scaler.unscale_(optimizer)
                clip_norm(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == 512.0, (sharding, fused)
            found.append(weights(model) if len(ranks) == 1 else dict(model.named_parameters()))
        for name, value in found[0].items():
            assert torch.allclose(value, found[1][name], rtol=1e-4, atol=1e-6), (sharding, fused, name)


def state_that_a_program_puts_in_is_that_of_rows(rank, world):
    """By a parameter that the module shows, with tensors made from it; before the first step, between two, and after it was cleared."""
    found = []
    for model, ranks in ((sharded_chain(), [rank]), (plain_chain(), list(range(world)))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if len(ranks) == 1:
            fully_shard_optimizer(optimizer)
        for step in range(4):
            if step in (0, 2):
                optimizer.state.clear()
                for parameter in model.parameters():
                    optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, 0.1)}
            elif step == 3:
                for parameter in model.parameters():
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            optimizer.load_state_dict(optimizer.state_dict())
            torch.stack([loss_of(model, inputs(step, one)) for one in ranks]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model) if len(ranks) == 1 else dict(model.named_parameters()))
        assert len(optimizer.state) == len(list(model.parameters()))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], rtol=1e-4, atol=1e-6), name


def assert_shown(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`param_groups` and `state` hold what the module shows, with state as DTensors."""
    shown = {id(one) for one in model.parameters()}
    assert {id(one) for one in held(optimizer)} == shown
    assert {id(one) for one in optimizer.state} <= shown
    values = [value for values in optimizer.state.values() for value in values.values()]
    assert values
    assert all(isinstance(value, DTensor) == (value.dim() > 0) for value in values if isinstance(value, Tensor))


def an_optimizer_of_ours_steps_rows_and_shows_what_the_module_shows(rank, world):
    model = sharded_chain()
    matrices = [one for one in model.parameters() if one.dim() == 2]
    others = [one for one in model.parameters() if one.dim() != 2]
    optimizer = fully_shard_optimizer(Muon([{"params": matrices}, {"params": others, "use_muon": False}]))
    for step in range(2):
        loss_of(model, inputs(step, rank)).backward()
        norm = whole(torch.nn.utils.clip_grad_norm_(held(optimizer), 0.1))
        of_module = whole(torch.nn.utils.get_total_norm([one.grad for one in model.parameters()]))
        assert norm > 0.1
        assert torch.allclose(of_module, torch.tensor(0.1))
        optimizer.step()
        optimizer.zero_grad()
    assert_shown(model, optimizer)


def a_step_that_raised_and_new_parameters_leave_them_as_they_are_between_steps(rank, world):
    """As soon as the next step has begun, or its state was asked for."""
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.layers[0].parameters(), lr=0.1, momentum=0.9))
    loss_of(model, inputs(0, rank)).backward()
    optimizer.step()

    def fails() -> None:
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        optimizer.step(fails)
    assert_shown(model.layers[0], optimizer)
    option = optimizer.param_groups[0].pop("momentum")
    with contextlib.suppress(KeyError):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = option
    optimizer.state_dict()
    assert_shown(model.layers[0], optimizer)
    optimizer.add_param_group({"params": list(model.layers[1].parameters())})
    assert len(optimizer.state_dict()["param_groups"]) == 2
    optimizer.step()
    assert [id(one) for one in held(optimizer)] == [id(one) for one in model.layers[:2].parameters()]


def groups_may_be_changed_in_a_hook_before_a_step(rank, world):
    """As long as the optimizer's own code has not begun."""

    def adds(optimizer: Any, model: nn.Module) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model.layers[2].parameters()), "lr": 0.5})

    def removes(optimizer: Any, model: nn.Module) -> None:
        optimizer.param_groups[0]["params"] = held(optimizer)[1:3]

    def replaces(optimizer: Any, model: nn.Module) -> None:
        optimizer.param_groups[0]["params"] = (*model.layers[2].parameters(), *model.layers[0].parameters())

    for change, sharding in pairwise((adds, removes, replaces), STRATEGIES, together=1):
        found = []
        for make, ranks in ((partial(sharded_chain, sharding=sharding), [rank]), (plain_chain, list(range(world)))):
            model = make()
            optimizer = torch.optim.SGD(model.layers[:2].parameters(), lr=0.1, momentum=0.9)
            if len(ranks) == 1:
                fully_shard_optimizer(optimizer)
            optimizer.register_step_pre_hook(lambda given, *_, change=change, model=model: change(given, model))
            for step in range(STEPS):
                torch.stack([loss_of(model, inputs(step, one)) for one in ranks]).mean().backward()
                optimizer.step()
                model.zero_grad()
            found.append(weights(model) if len(ranks) == 1 else dict(model.named_parameters()))
        for name, value in found[0].items():
            assert torch.allclose(value, found[1][name], rtol=1e-4, atol=1e-6), (change.__name__, sharding, name)


def state_stays_where_it_is_when_an_optimizer_is_taken_over_again(rank, world):
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.layers[0].parameters(), lr=0.1, momentum=0.9))
    for number in range(1, 3):
        loss_of(model, inputs(0, rank)).backward()
        optimizer.step()
        kept = [optimizer.state[one]["momentum_buffer"] for one in model.layers[0].parameters()]
        fully_shard_optimizer(optimizer)
        optimizer.add_param_group({"params": list(model.layers[number].parameters())})
        optimizer.step()
        now = [optimizer.state[one]["momentum_buffer"] for one in model.layers[0].parameters()]
        assert [one.to_local().data_ptr() for one in now] == [one.to_local().data_ptr() for one in kept]


def whole_tensors_put_into_state_are_sharded_on_all_ranks_alike(rank, world):
    """Also where a rank has all rows of a parameter: in `state_dict()` at once, in `state` after the next step; and so are plain rows."""
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    shapes = [parameter.shape for parameter in model.parameters()]
    for makes in (lambda one: torch.full(one.shape, 0.5), lambda one: torch.full_like(one.to_local(), 0.5)):
        for looks in (
            lambda: optimizer.state_dict()["state"],
            lambda: full_optimizer_state(optimizer, keep=True)["state"],
            None,
        ):
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = makes(parameter)
            if looks is not None:
                found = [whole(looks()[number]["momentum_buffer"]) for number in range(len(shapes))]
                assert [one.shape for one in found] == shapes
                assert all(one.eq(0.5).all() for one in found)
                assert_shown(model, optimizer)
            loss_of(model, inputs(0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert_shown(model, optimizer)
            assert sum(whole(optimizer.state[one]["momentum_buffer"].norm()) for one in model.parameters()) > 0


def an_optimizer_whose_own_code_raised_is_freed(rank, world):
    gc.collect()
    gc.disable()
    try:
        model = sharded_chain()
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loss_of(model, inputs(0, rank)).backward()
        optimizer.step()
        watched = [weakref.ref(value) for values in state_of_rows(optimizer).values() for value in values.values()]
        del optimizer.param_groups[0]["momentum"]
        with contextlib.suppress(KeyError):
            optimizer.step()
        del optimizer
        assert all(reference() is None for reference in watched)
        loss_of(model, inputs(0, rank)).backward()
    finally:
        gc.enable()


def an_optimizer_that_was_refused_holds_what_the_module_shows(rank, world):
    model = sharded_chain(offload="optimizer")
    optimizer = torch.optim.AdamW(model.parameters(), differentiable=True)
    with pytest.raises(ShardingError, match="differentiable"):
        fully_shard_optimizer(optimizer)
    assert [id(one) for one in held(optimizer)] == [id(one) for one in model.parameters()]


def state_under_keys_that_are_no_parameters_stays(rank, world):
    model, own = sharded_chain(), nn.Parameter(torch.ones(3))
    optimizer = fully_shard_optimizer(torch.optim.SGD([own, *model.parameters()], lr=0.1, momentum=0.9))
    mine: dict[str, Any] = {"losses": [0.5]}
    optimizer.state["seen"], optimizer.state["mine"] = 3, mine
    for _ in range(2):
        (loss_of(model, inputs(0, rank)) + own.square().sum()).backward()
        optimizer.step()
        assert optimizer.state["seen"] == 3
        assert optimizer.state["mine"] is mine
        kept = optimizer.state[own]
    assert optimizer.state[own] is kept
    assert optimizer.state_dict()["state"]["mine"] == mine


def state_that_is_cleared_or_moved_frees_its_memory(rank, world):
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for clears in (True, False):
        loss_of(model, inputs(0, rank)).backward()
        optimizer.step()
        watched = [weakref.ref(value) for values in state_of_rows(optimizer).values() for value in values.values()]
        if clears:
            optimizer.state.clear()
        else:
            for values in optimizer.state.values():
                values.update({name: value.clone() for name, value in values.items()})
        assert all(reference() is None for reference in watched)


def a_step_whose_closure_was_taken_away_works_on_dtensors_and_says_so(rank, world):
    model, plain = sharded_chain(), plain_chain()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda given, args, kwargs: (args[:1], {}))
    for step in range(2):
        loss_of(model, inputs(step)).backward()
        loss_of(plain, inputs(step)).backward()
        with pytest.warns(UserWarning, match="AdamW.step did not call the closure"):
            optimizer.step()
        reference.step()
    for name, value in weights(model).items():
        assert torch.allclose(value, plain.get_parameter(name), rtol=1e-4, atol=1e-6), name
    assert_shown(model, optimizer)


def own_code_that_raised_leaves_them_as_they_are_when_a_forward_begins(rank, world):
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loss_of(model, inputs(0, rank)).backward()
    optimizer.step()
    option = optimizer.param_groups[0].pop("momentum")
    with contextlib.suppress(KeyError):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = option
    assert not isinstance(held(optimizer)[0], DTensor)
    loss_of(model, inputs(1, rank)).backward()
    assert_shown(model, optimizer)
    optimizer.step()
    assert_shown(model, optimizer)


def parameters_that_are_no_part_of_a_sharded_module_stay(rank, world):
    model, own = sharded_chain(), nn.Parameter(torch.ones(3))
    optimizer = fully_shard_optimizer(torch.optim.SGD([own, *model.parameters()], lr=0.1, momentum=0.9))
    (loss_of(model, inputs(0)) + own.square().sum()).backward()
    optimizer.step()
    assert held(optimizer)[0] is own
    assert torch.equal(own.detach(), torch.full((3,), 0.8))
    assert held(optimizer)[1:] == list(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    assert own in optimizer.state
    assert len(optimizer.state) == 1 + len(sharded_parameters(model))


def failing_steps() -> Any:
    return mock.patch("torch.optim.sgd.sgd", side_effect=RuntimeError("out of memory"))


def clear_look_and_restore(optimizer: torch.optim.Optimizer) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    optimizer.state_dict()
    optimizer.load_state_dict(saved)


def clear_step_and_restore(optimizer: torch.optim.Optimizer) -> None:
    saved, gradients = {key: dict(values) for key, values in optimizer.state.items()}, [p.grad for p in held(optimizer)]
    optimizer.state.clear()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.state.update(saved)
    for parameter, gradient in zip(held(optimizer), gradients, strict=True):
        parameter.grad = gradient


def raise_and_put_the_table_back(optimizer: torch.optim.Optimizer) -> None:
    before = optimizer.state
    with failing_steps(), pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.state = before


def raise_and_restore_copies(optimizer: torch.optim.Optimizer) -> None:
    copies = {key: dict(values) for key, values in optimizer.state.items()}
    with failing_steps(), pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.state = defaultdict(dict, copies)
    optimizer.state_dict()
    assert all(copies.values())


def put_in_what_cannot_be_taken_over(optimizer: torch.optim.Optimizer) -> None:
    key, values = next(iter(optimizer.state.items()))
    optimizer.state[key] = None
    with pytest.raises(AttributeError):
        optimizer.step()
    optimizer.state[key] = values


def state_survives_what_programs_do_with_it(rank, world):
    def trained(between: Program) -> dict[str, Tensor]:
        model = sharded_chain()
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(4):
            loss_of(model, inputs(step, rank)).backward()
            if step == 2:
                between(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    expected = trained(lambda optimizer: None)
    for between in (
        clear_look_and_restore,
        clear_step_and_restore,
        raise_and_put_the_table_back,
        raise_and_restore_copies,
        put_in_what_cannot_be_taken_over,
    ):
        for name, value in trained(between).items():
            assert torch.equal(value, expected[name]), between.__name__


def state_that_is_cleared_after_a_step_that_raised_stays_cleared(rank, world):
    model, own = sharded_chain(), nn.Parameter(torch.ones(3))
    optimizer = fully_shard_optimizer(torch.optim.SGD([own, *model.parameters()], lr=0.1, momentum=0.9))
    for _ in range(2):
        (loss_of(model, inputs(0, rank)) + own.square().sum()).backward()
        optimizer.step()
    with failing_steps(), pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.state.clear()
    assert optimizer.state_dict()["state"] == {}


def clipping_knows_what_became_of_parameters(rank, world):
    """Where gradients are is looked up once, and again where it is no longer true."""
    models = [sharded_chain(), plain_chain(seed=1)]
    optimizer = fully_shard_optimizer(
        torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)
    )
    precision = MFSDPPrecision("32-true")

    def norm_after_clipping() -> float:
        sum(loss_of(model, inputs(0)) for model in models).backward()
        precision.clip_grad_by_norm(optimizer, 0.01)
        return float(grad_norm([parameter for model in models for parameter in model.parameters()]))

    assert norm_after_clipping() == pytest.approx(0.01, rel=1e-3)
    fully_shard(models[1])
    assert norm_after_clipping() == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(EngineStateError, match="pass it to fully_shard_optimizer"):
        optimizer.zero_grad()  # it holds what the second model had before it was sharded
    optimizer.param_groups[0]["params"] = list(models[0].parameters())
    optimizer.zero_grad()
    removed = [weakref.ref(one) for one in models[1].parameters()]
    del models[1]
    optimizer.step()
    gc.collect()
    assert all(one() is None for one in removed)


def what_wraps_an_optimizer_is_clipped(rank, world):
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, inputs(0, rank)).backward()
    wrapper: Any = SimpleNamespace(param_groups=optimizer.param_groups)
    MFSDPPrecision("32-true").clip_grad_by_norm(wrapper, 0.01)
    assert float(grad_norm(model)) == pytest.approx(0.01, rel=1e-3)


def what_is_shown_of_state_is_a_view_of_the_optimizers_own_table(rank: int, world: int) -> None:
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    def step() -> None:
        loss_of(model, inputs(0, rank)).backward()
        optimizer.step()

    step()
    first, second = list(model.parameters())[:2]
    values = optimizer.state[first]
    before = float(values["step"])
    assert [one is other for one, other in zip(optimizer.state, model.parameters(), strict=True)] == [True] * len(
        optimizer.state
    )
    values["exp_avg"] = torch.full(first.shape, 3.0)  # whole, on every rank
    assert torch.equal(optimizer.state[first]["exp_avg"].full_tensor(), torch.full(first.shape, 3.0))
    optimizer.state[first]["exp_avg"].zero_()
    assert not values["exp_avg"].full_tensor().any()
    step()
    assert float(values["step"]) == before + 1  # it shows what the step has written since

    given = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}
    expected = copy.deepcopy(given)
    optimizer.state[first] = given
    assert torch.equal(optimizer.state[first]["exp_avg"].full_tensor(), expected["exp_avg"])
    assert all(
        torch.equal(given[name], expected[name]) for name in ("exp_avg", "exp_avg_sq")
    )  # the program's own stays
    optimizer.state = apply_to_collection(optimizer.state, Tensor, torch.clone)  # as Lightning moves state
    step()
    assert float(optimizer.state[first]["step"]) == before + 2

    lacking = object()
    assert lacking not in optimizer.state
    assert optimizer.state.get(lacking) is None
    assert optimizer.state.pop(lacking, 5) == 5
    assert optimizer.state.setdefault(lacking, {"one": 1}) == {"one": 1}
    with pytest.raises(KeyError):
        optimizer.state.pop(object())
    assert optimizer.state.pop(lacking) == {"one": 1}
    assert lacking not in optimizer.state
    assert optimizer.state[lacking] == {}  # as any optimizer's
    del optimizer.state[lacking]

    step()
    taken = dict(optimizer.state.pop(second))
    assert second not in optimizer.state
    assert "exp_avg" in taken
    assert "exp_avg" in repr(optimizer.state)
    step()
    assert float(optimizer.state[second]["step"]) == 1  # it begins again
    assert isinstance(copy.copy(optimizer.state), defaultdict)


def references_to_state_from_after_a_load_are_the_optimizers(rank: int, world: int) -> None:
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(2):
        loss_of(model, inputs(0, rank)).backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    first, state = next(model.parameters()), optimizer.state
    values = state[first]
    values["exp_avg"].zero_()
    values["exp_avg_sq"] = torch.ones(first.shape)
    optimizer.step()
    assert float(values["step"]) == 3
    assert torch.equal(optimizer.state[first]["exp_avg_sq"].full_tensor(), values["exp_avg_sq"].full_tensor())
    expected = 0.1 * first.grad.full_tensor()
    torch.testing.assert_close(state[first]["exp_avg"].full_tensor(), expected)


def state_is_shown_and_saved_where_the_module_is_gone(rank: int, world: int) -> None:
    model = sharded_chain()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    loss_of(model, inputs(0, rank)).backward()
    optimizer.step()
    before = {
        number: values["exp_avg"].to_local().clone() for number, values in optimizer.state_dict()["state"].items()
    }
    shapes = [one.shape for one in model.parameters()]
    del model
    gc.collect()
    found = optimizer.state_dict()["state"]
    assert [values["exp_avg"].shape for values in found.values()] == shapes
    assert all(torch.equal(values["exp_avg"].to_local(), before[number]) for number, values in found.items())
    assert [isinstance(key, DTensor) for key in optimizer.state] == [True] * len(shapes)


WORLDS = {
    1: (programs_over_param_groups_see_whole_parameters_and_gradients,),
    2: (
        programs_over_param_groups_see_whole_parameters_and_gradients,
        an_optimizer_of_ours_steps_rows_and_shows_what_the_module_shows,
        a_step_that_raised_and_new_parameters_leave_them_as_they_are_between_steps,
        parameters_that_are_no_part_of_a_sharded_module_stay,
        a_plain_grad_scaler_decides_alike_on_all_ranks,
        state_that_a_program_puts_in_is_that_of_rows,
        groups_may_be_changed_in_a_hook_before_a_step,
        state_stays_where_it_is_when_an_optimizer_is_taken_over_again,
        state_that_is_cleared_or_moved_frees_its_memory,
        state_under_keys_that_are_no_parameters_stays,
        an_optimizer_that_was_refused_holds_what_the_module_shows,
        whole_tensors_put_into_state_are_sharded_on_all_ranks_alike,
        an_optimizer_whose_own_code_raised_is_freed,
        a_step_whose_closure_was_taken_away_works_on_dtensors_and_says_so,
        own_code_that_raised_leaves_them_as_they_are_when_a_forward_begins,
        state_survives_what_programs_do_with_it,
        state_that_is_cleared_after_a_step_that_raised_stays_cleared,
        clipping_knows_what_became_of_parameters,
        what_wraps_an_optimizer_is_clipped,
        what_is_shown_of_state_is_a_view_of_the_optimizers_own_table,
        references_to_state_from_after_a_load_are_the_optimizers,
        state_is_shown_and_saved_where_the_module_is_gone,
    ),
    **at_night({3: (programs_over_param_groups_see_whole_parameters_and_gradients,)}),
}


@by_world(WORLDS)
def test_param_groups(world, case):
    check(WORLDS, world, case)
