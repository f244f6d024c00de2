"""What a program does with `optimizer.param_groups` is what it does without sharding: they hold what the module shows, except in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.engine import MixedPrecisionPolicy, fully_shard_optimizer, sharded_parameters
from lightning_mfsdp.optim import Muon
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, inputs, loss_of, plain_chain, sharded_chain, weights
from tests.helpers.pairwise import in_world

DOUBLE = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None)
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


PROGRAMS: tuple[Program, ...] = (
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
    evaluate()
    program()
    optimizer.step()


def after_a_load_that_was_refused(
    optimizer: torch.optim.Optimizer, program: Callable[[], None], evaluate: Callable[[], Any]
) -> None:
    with contextlib.suppress(ValueError):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    evaluate()
    program()
    optimizer.step()


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


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
    rows = in_world(world, (2, 3), PLACES, PROGRAMS, STRATEGIES, OPTIMIZERS, possible=possible)
    for place, program, sharding, kind in rows:
        case = f"{place.__name__} {program.__name__} {sharding} {kind}"
        with in_double():
            plain, model = plain_chain(), sharded_chain(sharding=sharding, policy=DOUBLE)
        expected = outcome(plain, OPTIMIZERS[kind](plain.parameters()), place, program, list(range(world)))
        optimizer = fully_shard_optimizer(OPTIMIZERS[kind](model.parameters()))
        found = outcome(model, optimizer, place, program, [rank])
        for one, other in zip(found, expected, strict=True):
            assert one is other is None or torch.allclose(one, other, rtol=1e-10, atol=1e-13), case
        for name, value in weights(model).items():
            assert torch.allclose(value, plain.get_parameter(name).detach(), rtol=1e-10, atol=1e-13), (case, name)
        assert_shown(model, optimizer)


def a_plain_grad_scaler_decides_alike_on_all_ranks(rank, world):
    """An overflow on one rank: all of them leave the step out, and scale less from then on; clipping follows `unscale_`."""
    for sharding, fused in product(STRATEGIES, (False, True)):
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
    """`param_groups` hold what the module shows, and the optimizer stepped rows."""
    views = sharded_parameters(model)
    assert {id(one) for one in held(optimizer)} == {id(one) for one in model.parameters()}
    assert {id(one) for one in optimizer.state} <= {id(view.local) for view in views}
    assert optimizer.state


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


WORLDS = {
    1: (programs_over_param_groups_see_whole_parameters_and_gradients,),
    2: (
        programs_over_param_groups_see_whole_parameters_and_gradients,
        an_optimizer_of_ours_steps_rows_and_shows_what_the_module_shows,
        a_step_that_raised_and_new_parameters_leave_them_as_they_are_between_steps,
        parameters_that_are_no_part_of_a_sharded_module_stay,
        a_plain_grad_scaler_decides_alike_on_all_ranks,
        state_that_a_program_puts_in_is_that_of_rows,
    ),
    3: (programs_over_param_groups_see_whole_parameters_and_gradients,),
}


@by_world(WORLDS)
def test_param_groups(world, case):
    check(WORLDS, world, case)
