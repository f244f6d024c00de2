"""offload="optimizer": the same numbers as without it, one step to everyone, and little on the device at a time.

On CPU "host memory" is ordinary memory, so the same code moves weights and state to staging areas and back.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp import EngineStateError
from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    ParameterView,
    ShardingError,
    capture_step,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    sharded_parameters,
    unshard,
)
from lightning_mfsdp.engine.core import host_memory
from lightning_mfsdp.engine.features.offload import offloaded_state, staging
from lightning_mfsdp.engine.features.offload.offloaded_state import state_of
from lightning_mfsdp.optim import Muon
from tests.engine.cases import device_type
from tests.engine.internals import context_of
from tests.engine.internals import streamed_step as streaming
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.chain import STRATEGIES, inputs, loss_of, plain_chain, sharded_chain, train, weights
from tests.helpers.models import batch, build
from tests.helpers.models import loss_of as decoder_loss
from tests.helpers.optimizer_state import state_of_rows
from tests.helpers.pairwise import in_turn, pairwise

BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
GRADS16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, fused=True, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, initial_accumulator_value=0.1),
}


@contextmanager
def small_chunks():
    """Every group visits by itself, so that chunks follow one another in all areas."""
    with mock.patch.object(streaming, "_TOGETHER_BYTES", 1):
        yield


def decoder(offload: str | None, mesh=None, **options) -> nn.Module:
    """Blocks with norms, a 0-D parameter in the root, and a frozen block."""
    model = build()
    model.blocks[1].requires_grad_(False)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh, offload=offload, **options)
    return model


def train_decoder(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> list[Tensor]:
    losses = []
    for step in range(steps):
        for micro in range(2):
            ids, targets = batch(2 * step + micro, 3)
            loss = decoder_loss(model, ids.roll(rank), targets)
            loss.backward()
            losses.append(loss.detach())
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    """Local rows of it."""
    names = {id(view.local): view.name for view in sharded_parameters(model)}
    found = {names[id(rows)]: values for rows, values in state_of_rows(optimizer).items()}
    return {name: found[name] for name in sorted(found)}


def assert_equal(found: object, expected: object, case: object) -> None:
    """Bit equality through containers."""
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), f"{case}: differs by {(found - expected).abs().max()}"
    elif isinstance(expected, dict):
        assert list(found) == list(expected), case
        for key in expected:
            assert_equal(found[key], expected[key], (case, key))
    elif isinstance(expected, list):
        assert len(found) == len(expected), case
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, (case, number))
    else:
        assert found == expected, case


def rests(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether all main weights lie in host memory, and all state of each group in one piece of it."""
    groups = [group for unit in context_of(model).units for group in unit.groups if group.offloads]
    homes = [group for group in groups if group.host_buffer is not None]
    for group in homes:
        start = group.host_buffer.host.data_ptr()
        for entry in group.entries:
            if entry.local.numel() and not start <= entry.local.data_ptr() < start + group.host_buffer.size_bytes:
                return False
    states = [found for group in groups if (found := state_of(SimpleNamespace(state=state_of_rows(optimizer)), group))]
    pieces = {one.tensor.untyped_storage().data_ptr() for found in states for one in found}
    return bool(homes) and len(pieces) == len(states)


# -- the same numbers --------------------------------------------------------------------------------------------------


# (sharding, outer sharding, policy, optimizer) by number of ranks; four of them form a mesh with an outer axis.
SETTINGS = {
    1: [("optim_grads_params", "no_shard", None, "adamw"), ("optim_grads_params", "no_shard", BF16, "fused adam")],
    2: [
        (sharding, "no_shard", policy, kind)
        for sharding, (policy, kind) in pairwise(
            STRATEGIES, ((None, "momentum"), (BF16, "adamw"), (GRADS16, "adagrad")), together=1
        )
    ],
    3: [(sharding, "no_shard", BF16, "fused adam") for sharding in in_turn(1, STRATEGIES)],
    4: in_turn(
        1,
        [
            ("optim_grads_params", "no_shard", BF16, "adamw"),
            ("optim_grads_params", "optim", BF16, "fused adam"),
            ("optim_grads_params", "optim", None, "momentum"),
            ("optim", "optim", BF16, "adagrad"),
        ],
    ),
}


def it_trains_to_the_bit_as_without(rank, world):
    mesh = dist.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard")) if world == 4 else None
    for sharding, outer, policy, kind in SETTINGS[world]:
        outcomes = []
        for offload in (None, "optimizer"):
            model = decoder(offload, mesh, sharding=sharding, outer_sharding=outer, policy=policy)
            optimizer = fully_shard_optimizer(OPTIMIZERS[kind](model.parameters()))
            with small_chunks():
                losses = train_decoder(model, optimizer, rank)
            outcomes.append([losses, weights(model), state_by_name(model, optimizer)])
            assert rests(model, optimizer) == (offload is not None)
        case = f"{sharding} {outer} {policy} {kind}"
        assert_equal(outcomes[1], outcomes[0], case)
        assert outcomes[0][2], f"{case}: there is state"


def groups_freezing_and_several_optimizers_train_as_without(rank, world):
    """Two param groups and two optimizers share engine groups; layers are added, frozen and unfrozen on the way."""
    outcomes = []
    for offload in (None, "optimizer"):
        model = plain_chain()
        model.layers[3].requires_grad_(False)
        for layer in model.layers:
            fully_shard(layer, offload=offload)
        fully_shard(model, offload=offload)
        first, second, third, late = model.layers
        groups = [{"params": [first.weight, second.weight]}, {"params": [first.bias], "lr": 1e-3}]
        one = fully_shard_optimizer(torch.optim.AdamW(groups, lr=1e-2))
        other = fully_shard_optimizer(
            torch.optim.SGD([second.bias, *third.parameters(), *model.out.parameters()], lr=1e-2, momentum=0.9)
        )
        losses = []
        for step in range(6):
            if step == 2:
                one.add_param_group({"params": list(late.parameters()), "lr": 1e-3})
                second.weight.requires_grad_(False)
            if step == 4:
                late.requires_grad_(True)
                second.weight.requires_grad_(True)
            losses += train(model, _Both(one, other), [step], rank)
        outcomes.append([losses, weights(model), state_by_name(model, one), state_by_name(model, other)])
        assert (step, bool(offload)) == (5, rests(model, other))
    assert_equal(outcomes[1], outcomes[0], "several")
    assert any(name.startswith("layers.3") for name in outcomes[1][2]), "unfrozen in the end"


class _Both:
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def writes_from_elsewhere_are_seen(rank, world):
    for sharding in in_turn(1, STRATEGIES):
        outcomes = []
        for offload in (None, "optimizer"):
            model = sharded_chain(sharding=sharding, policy=BF16, offload=offload)
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            losses = train(model, optimizer, [0], rank)
            with torch.no_grad():
                model.layers[0].weight.mul_(2.0)
            losses += train(model, optimizer, [1], rank)
            with unshard(model, writeback=True), torch.no_grad():
                model.layers[1].weight.neg_()
            losses += train(model, optimizer, [2], rank)
            model.load_state_dict(sharded_chain(7, sharding=sharding).state_dict())
            losses += train(model, optimizer, [3], rank)
            outcomes.append([losses, weights(model)])
        assert_equal(outcomes[1], outcomes[0], sharding)


def what_a_hook_or_the_loop_writes_after_a_step_is_seen(rank, world):
    """Through any representation, also those the engine does not watch. The step itself wrote the compute weights already."""
    ways: list[Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]] = [
        lambda model, optimizer: optimizer.param_groups[0]["params"],
        lambda model, optimizer: [view.main for view in sharded_parameters(model)],
        lambda model, optimizer: [parameter.to_local() for parameter in model.parameters()],
    ]
    for (number, way), sharding in pairwise(enumerate(ways), STRATEGIES, together=1):
        outcomes = []
        for offload in (None, "optimizer"):
            model = sharded_chain(sharding=sharding, policy=BF16, offload=offload)
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

            def clamp(*_, model=model, optimizer=optimizer, way=way):
                with torch.no_grad():
                    for rows in way(model, optimizer):
                        rows.clamp_(-0.1, 0.1)

            if number == 0:
                optimizer.register_step_post_hook(clamp)
            losses = []
            for step in range(3):
                losses += train(model, optimizer, [step], rank)
                clamp()
            outcomes.append([losses, weights(model)])
        assert_equal(outcomes[1], outcomes[0], (number, sharding))


def rows_written_before_a_step_are_seen_in_its_closure_and_after_it(rank, world):
    """The step casts what it steps itself, and no group without gradients."""

    def write(view: ParameterView, assigns: bool | None) -> None:
        with torch.no_grad():
            if assigns:
                view.local.data = view.local.data + 1.0
            else:
                view.local.add_(1.0)

    for sharding, policy, adopt in product(in_turn(1, STRATEGIES), (MixedPrecisionPolicy(), BF16), (None, True)):
        seen = []
        for offload in (None, "optimizer"):
            model = sharded_chain(sharding=sharding, policy=policy, offload=offload)
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), elementwise=adopt)
            losses = train(model, optimizer, range(2), rank)

            def evaluate(model: nn.Module = model, losses: list[Tensor] = losses) -> Tensor:
                model.zero_grad()
                losses.append(loss_of(model, inputs(2, rank)))
                losses[-1].backward()
                return losses[-1]

            for view in sharded_parameters(model):
                write(view, assigns=adopt)
            optimizer.step(evaluate)
            for view in sharded_parameters(model):
                if view.unit == "layers.0":
                    write(view, assigns=False)
                    view.local.grad = None
            for parameter in model.layers[0].parameters():
                parameter.grad = None
            optimizer.step()
            seen.append([*losses, loss_of(model, inputs(3, rank)).detach()])
        assert_equal(seen[1], seen[0], (sharding, policy.compute_dtype, adopt))


def parameters_put_in_the_place_of_others_are_taken_over(rank, world):
    outcomes = []
    for offload in (None, "optimizer"):
        model = sharded_chain(offload=offload)
        first, second, third, *_ = model.layers
        optimizer = fully_shard_optimizer(torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2))
        losses = train(model, optimizer, range(2), rank)
        optimizer.param_groups[0]["params"] = [*third.parameters(), *second.parameters()]
        model.zero_grad()
        losses += train(model, optimizer, range(2, 4), rank)
        assert {id(one) for one in optimizer.state} == {
            id(one) for layer in (first, second, third) for one in layer.parameters()
        }
        assert optimizer.param_groups[0]["params"] == [*third.parameters(), *second.parameters()]
        outcomes.append([losses, weights(model), state_by_name(model, optimizer)])
        assert rests(model, optimizer) == (offload is not None)
    assert_equal(outcomes[1], outcomes[0], "replaced")


# -- one step to everyone ----------------------------------------------------------------------------------------------


def hooks_schedules_and_closures_see_one_step(rank, world):
    outcomes = []
    for offload in (None, "optimizer"):
        model = sharded_chain(offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen: list[object] = []

        def look(when, seen=seen, model=model):
            views = sharded_parameters(model)
            seen.append([when, [view.main.clone() for view in views], [view.grad is not None for view in views]])

        optimizer.register_step_post_hook(lambda *_, look=look: look("early post"))
        optimizer.register_step_pre_hook(lambda *_, look=look: look("early pre"))
        fully_shard_optimizer(optimizer)
        optimizer.register_step_pre_hook(lambda *_, look=look: look("late pre"))
        optimizer.register_step_post_hook(lambda *_, look=look: look("late post"))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        losses = []

        def closure(step, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, inputs(step, rank))
            loss.backward()
            return loss

        with small_chunks():
            for step in range(4):
                if step == 3:
                    closure(3)
                    assert optimizer.step() is None
                elif step == 2:
                    losses.append(optimizer.step(closure=lambda step=step, c=closure: c(step)).detach())
                else:
                    losses.append(optimizer.step(lambda step=step, c=closure: c(step)).detach())
                schedule.step()
        assert optimizer.param_groups[0]["lr"] == 1e-2 / 16
        outcomes.append([losses, seen, weights(model)])
    assert [entry[0] for entry in outcomes[1][1]] == ["early pre", "late pre", "early post", "late post"] * 4
    assert_equal(outcomes[1], outcomes[0], "hooks")


def loss_scaling_accumulation_and_skipped_steps_work(rank, world):
    policy = MixedPrecisionPolicy(compute_dtype=torch.float16)
    for fused in (False, True):
        outcomes = []
        for offload in (None, "optimizer"):
            model = sharded_chain(policy=policy, offload=offload)
            scaler = torch.amp.GradScaler(device_type(), init_scale=256.0, growth_interval=2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
            fully_shard_optimizer(optimizer, grad_scaler=scaler)
            losses = []
            for step in range(4):
                with no_sync(model):
                    scaler.scale(loss_of(model, inputs(step))).backward()
                loss = loss_of(model, inputs(10 + step))
                scaler.scale(loss).backward()
                if step == 2:
                    for view in sharded_parameters(model):
                        if view.grad is not None:
                            view.grad.fill_(float("inf"))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.detach())
            outcomes.append([losses, weights(model), state_by_name(model, optimizer), scaler.get_scale()])
        assert_equal(outcomes[1], outcomes[0], f"fused={fused}")
        assert all(torch.isfinite(value).all() for value in outcomes[1][1].values())


class OutOfPlace(torch.optim.Optimizer):
    """Elementwise, and puts a new tensor into its state in every step; counts its state on the device."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                        parameter.sub_(group["lr"] * state["mean"])
        return loss


class Wrapping(torch.optim.AdamW):
    """Its step is made of another class's, so hooks run inside hooks."""

    def step(self, closure=None):
        return super().step(closure)


class Counting(OutOfPlace):
    """Counts steps in its groups, as fused optimizers of other libraries do: numbers, also made in the first step, and tensors."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["in_place"] = torch.tensor(1.0)

    def step(self, closure=None, *, factor=1.0):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["in_place"] += 0.5
            group["lr"] = factor * group["in_place"].item() * 1e-2 / group["step"]
        super().step()
        return loss


def what_an_optimizer_counts_in_its_groups_is_counted_once(rank, world):
    outcomes = []
    for offload in (None, "optimizer"):
        model = sharded_chain(offload=offload)
        optimizer = fully_shard_optimizer(Counting(model.parameters()), elementwise=True)
        with small_chunks():
            for step in range(3):
                loss_of(model, inputs(step, rank)).backward()
                optimizer.step(factor=0.5)
                optimizer.zero_grad()
        options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        outcomes.append([options, weights(model)])
    assert outcomes[1][0]["step"] == 3
    assert_equal(outcomes[1], outcomes[0], "counting")


def optimizers_of_ones_own_are_streamed(rank, world):
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # from now on, its step calls hooks
    for kind in (OutOfPlace, Wrapping):
        outcomes = []
        for offload in (None, "optimizer"):
            model = sharded_chain(offload=offload)
            optimizer = fully_shard_optimizer(kind(model.parameters(), lr=1e-2), elementwise=True)
            with small_chunks():
                losses = train(model, optimizer, range(3), rank)
            outcomes.append([losses, weights(model), state_by_name(model, optimizer)])
            assert rests(model, optimizer) == (offload is not None)
        assert_equal(outcomes[1], outcomes[0], kind.__name__)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Failing(OutOfPlace):
    """Raises when it meets the parameter `fails_at`."""

    fails_at: object = None

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        if any(one is self.fails_at and one.grad is not None for one in self.param_groups[0]["params"]):
            raise ArithmeticError("in the middle")
        return super().step() if loss is None else loss


def an_error_in_the_middle_of_a_step_leaves_everything_in_its_place(rank, world):
    for sharding in in_turn(3, STRATEGIES):
        model = sharded_chain(sharding=sharding, policy=BF16, offload="optimizer")
        optimizer = fully_shard_optimizer(Failing(model.parameters()), elementwise=True)
        views = sharded_parameters(model)
        with small_chunks():
            train(model, optimizer, range(2), rank)
            loss_of(model, inputs(2, rank)).backward()
            grads = [view.grad for view in views]
            optimizer.fails_at = next(view.local for view in views if view.unit == "layers.2" and view.local.numel())
            with pytest.raises(ArithmeticError, match="in the middle"):
                optimizer.step()
            assert all(view.grad is grad for view, grad in zip(views, grads, strict=True))
            assert rests(model, optimizer)
            assert all(area.slot.allocated_bytes == 0 for area in areas_of(optimizer))
            # Forward computes with the weights that are there now, on all ranks.
            main = weights(model)
            with torch.no_grad():
                loss = loss_of(model, inputs(3))
            other = sharded_chain(sharding=sharding, policy=BF16)
            with unshard(other, writeback=True), torch.no_grad():
                for name, parameter in other.named_parameters():
                    parameter.copy_(main[name])
            with torch.no_grad():
                assert torch.equal(loss, loss_of(other, inputs(3)))
            optimizer.fails_at = None
            optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, [4], rank)


def areas_of(optimizer: torch.optim.Optimizer) -> list[staging.Area]:
    """Staging areas of its last step, found through its hooks."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    drivers = [driver for hook in hooks for driver in vars(hook).get("_drivers", ())]
    steps = [driver for driver in drivers if isinstance(driver, streaming.StreamedStep)]
    return list({id(chunk.area): chunk.area for step in steps for chunk in step._chunks}.values())


# -- memory ------------------------------------------------------------------------------------------------------------


def little_is_on_the_device_at_a_time(rank, world):
    """State and staging areas together, from the first step on: some chunks and never all of it."""
    model = sharded_chain(layers=12, dim=32, offload="optimizer")
    layer_bytes = 4 * (32 * 32 + 32) // world
    homes: list[int] = []
    peak = 0

    class Watched(torch.optim.AdamW):
        def step(self, closure=None):
            nonlocal peak
            result = super().step(closure)
            state = [value for table in self.state.values() for value in table.values() if value.dim()]
            memories = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in state}
            resting = {pointer: size for pointer, size in memories.items() if pointer not in homes}
            staged = {id(area): area.slot for area in areas_of(self)}
            for slot in staged.values():
                if slot.is_allocated:
                    resting[slot.memory.untyped_storage().data_ptr()] = slot.allocated_bytes
            kept = [one for area in areas_of(self) for one in area.kept]
            resting.update((one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in kept)
            peak = max(peak, sum(resting.values()))
            return result

    real = streaming.OffloadedState

    def remember(tensors, device):
        made = real(tensors, device)
        homes.append(made.memory.host.untyped_storage().data_ptr())
        return made

    with small_chunks(), mock.patch.object(streaming, "OffloadedState", remember):
        optimizer = fully_shard_optimizer(Watched(model.parameters(), lr=1e-2), elementwise=True)
        found = []
        for step in range(3):
            peak = 0
            loss_of(model, inputs(step, rank, dim=32)).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(peak)
            assert all(area.slot.allocated_bytes == 0 and not area.kept for area in areas_of(optimizer))
    # Three areas with a layer's weight, and in the first step the new state of as many layers; later three times all of it.
    for peak_bytes in found:
        assert 3 * layer_bytes <= peak_bytes <= 1.2 * 9 * layer_bytes + 4096, (found, layer_bytes)
    assert rests(model, optimizer)


def the_compute_shard_is_its_own_memory(rank, world):
    for sharding, policy in product(in_turn(4, STRATEGIES), (None, BF16)):
        model = sharded_chain(sharding=sharding, policy=policy, offload="optimizer")
        for unit in context_of(model).units:
            for group in unit.groups:
                held = group.weights.shards[0].segments[0].untyped_storage().data_ptr()
                assert held != group.main.segments[0].untyped_storage().data_ptr(), sharding
                assert group.weights.extra_bytes == group.weights.shards[0].size_bytes


# -- state from elsewhere ----------------------------------------------------------------------------------------------


def host_memory_of_state_is_allocated_once(rank, world):
    model = decoder("optimizer")
    optimizer = fully_shard_optimizer(OPTIMIZERS["adamw"](model.parameters()))
    with small_chunks(), mock.patch.object(offloaded_state, "HostMemory", wraps=offloaded_state.HostMemory) as allocate:
        train_decoder(model, optimizer, rank, steps=1)
        first = allocate.call_count
        train_decoder(model, optimizer, rank, steps=3)
    assert allocate.call_count == first > 0


def state_that_is_loaded_goes_to_host_memory(rank, world):
    plain = sharded_chain()
    expected = fully_shard_optimizer(torch.optim.AdamW(plain.parameters(), lr=1e-2))
    train(plain, expected, range(2), rank)
    model = sharded_chain(offload="optimizer")
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer, [9], rank)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    assert_equal(train(model, optimizer, [2, 3], rank), train(plain, expected, [2, 3], rank), "losses")
    assert_equal(state_by_name(model, optimizer), state_by_name(plain, expected), "state")
    assert rests(model, optimizer)
    back = fully_shard_optimizer(torch.optim.AdamW(plain.parameters(), lr=1e-2))
    back.load_state_dict(optimizer.state_dict())
    assert_equal(train(plain, back, [4], rank), train(model, optimizer, [4], rank), "back")


# -- refusals ----------------------------------------------------------------------------------------------------------


class NormScaled(torch.optim.Optimizer):
    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self):
        raise AssertionError("not reached")


class Deaf(OutOfPlace):
    def step(self, closure=None):
        return None


class Repeating(OutOfPlace):
    def step(self, closure=None):
        if closure is not None:
            closure()
        return super().step(closure)


def what_cannot_be_streamed_is_refused(rank, world):
    model = sharded_chain(offload="optimizer")
    with pytest.raises(ShardingError, match="which needs an optimizer that treats every number by itself"):
        fully_shard_optimizer(NormScaled(model.parameters()))
    with pytest.raises(ShardingError, match="and Muon reads whole tensors"):
        fully_shard_optimizer(Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1))
    with pytest.raises(ShardingError, match="steps NormScaled chunk by chunk from inside its closure"):
        fully_shard_optimizer(NormScaled(model.parameters()), elementwise=True)
    with pytest.raises(ShardingError, match="a graph through the step would need state"):
        fully_shard_optimizer(torch.optim.Adam(model.parameters(), differentiable=True))
    with pytest.raises(ShardingError, match='offload: expected None or "optimizer", got True'):
        fully_shard(nn.Linear(2, 2), offload=True)
    deaf = fully_shard_optimizer(Deaf(model.parameters()), elementwise=True)
    loss_of(model, inputs(0)).backward()
    with pytest.raises(EngineStateError, match="did not call the closure it was given"):
        deaf.step()
    again = sharded_chain(offload="optimizer")
    repeating = fully_shard_optimizer(Repeating(again.parameters()), elementwise=True)
    loss_of(again, inputs(0)).backward()
    with pytest.raises(EngineStateError, match="called the closure it was given twice"):
        repeating.step()
    assert all(view.grad is not None for view in sharded_parameters(again))
    with pytest.raises(EngineStateError, match="no graph can hold its copies"):
        capture_step(lambda: None, model, deaf)


def test_pages_are_whole_zeroed_and_writable_and_not_inherited():
    pages = host_memory._pages(5000)
    assert pages.numel() == 2 * mmap.PAGESIZE
    assert pages.data_ptr() % mmap.PAGESIZE == 0
    assert not pages.any()
    pages.fill_(7)
    assert int(pages.sum(dtype=torch.int64)) == 7 * pages.numel()
    mapped = Path("/proc/self/smaps").read_text()
    start = mapped.index(f"{pages.data_ptr():x}-")
    flags = mapped[mapped.index("VmFlags:", start) :].splitlines()[0]
    assert "dc" in flags.split(), "don't copy on fork"


WORLDS = {
    1: [it_trains_to_the_bit_as_without, optimizers_of_ones_own_are_streamed, what_cannot_be_streamed_is_refused],
    2: [
        it_trains_to_the_bit_as_without,
        groups_freezing_and_several_optimizers_train_as_without,
        writes_from_elsewhere_are_seen,
        what_a_hook_or_the_loop_writes_after_a_step_is_seen,
        rows_written_before_a_step_are_seen_in_its_closure_and_after_it,
        parameters_put_in_the_place_of_others_are_taken_over,
        what_an_optimizer_counts_in_its_groups_is_counted_once,
        hooks_schedules_and_closures_see_one_step,
        loss_scaling_accumulation_and_skipped_steps_work,
        an_error_in_the_middle_of_a_step_leaves_everything_in_its_place,
        little_is_on_the_device_at_a_time,
        the_compute_shard_is_its_own_memory,
        state_that_is_loaded_goes_to_host_memory,
        host_memory_of_state_is_allocated_once,
    ],
    **at_night({3: [it_trains_to_the_bit_as_without]}),
    4: [it_trains_to_the_bit_as_without],
}


@by_world(WORLDS)
def test_offload(world, case):
    check(WORLDS, world, case)
