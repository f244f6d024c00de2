"""Parameters that are parts along a tensor axis train as whole ones on one process; states move between models that lie otherwise."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp import DistributedGradScaler
from lightning_mfsdp.engine import (
    AveragedWeights,
    EngineStateError,
    clip_grad_norm_,
    clip_grad_value_,
    fully_shard,
    fully_shard_optimizer,
    grad_norm,
    no_sync,
)
from tests.engine.cases import Problems
from tests.engine.parts import (
    ANYHOW,
    DIVISIONS,
    FEW,
    FOURS,
    OTHERWISE,
    SHAPES,
    SHARDINGS,
    UNPACKED,
    WHOLE,
    Net,
    adopted,
    attempt,
    compare,
    lying,
    sharded,
    stepped,
    two_axes,
    values,
    whole,
)
from tests.engine.test_state_dicts import shared_folder
from tests.engine.worlds import by_world, check
from tests.helpers.fused_adam import FusedAdam
from tests.helpers.nights import NIGHT, thinned
from tests.helpers.other_optimizers import Adan
from tests.helpers.pairwise import in_turn, pairwise


class Factored(torch.optim.Optimizer):
    """Divides gradients by averages of their squares over rows and over columns, as Adafactor does, and by their norm."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            grad, state = parameter.grad, self.state[parameter]
            if grad is None:
                continue
            if grad.dim() > 1:
                square = grad.square() + 1e-6
                for key, dim in (("of rows", -1), ("of columns", -2)):
                    mean = square.mean(dim, keepdim=True)
                    state[key] = mean if key not in state else state[key].lerp(mean, 0.5)
                grad = grad / (state["of rows"] * state["of columns"] / state["of rows"].mean(-2, keepdim=True)).sqrt()
            parameter.sub_(grad / grad.norm().clamp(min=1.0), alpha=self.param_groups[0]["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.05, use_decoupled_grad=True),
    "Adan": Adan,
    "factored": Factored,
}
SOME = ("columns", "packed_rows", "whole")
ORDERS = (1.0, 2.0, math.inf)
# Of a sharded model and of a plain one; one after the other, in each step.
CLIPS: dict[str, tuple[Callable[[Net], Any], Callable[[Net], Any]]] = {
    **{
        f"norm {p}": (
            lambda model, p=p: grad_norm(model, p),
            lambda model, p=p: nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()], p),
        )
        for p in ORDERS
    },
    **{
        f"clip {p}": (
            lambda model, p=p: clip_grad_norm_(model, 4.0 / p if p < 9 else 0.5, p),
            lambda model, p=p: nn.utils.clip_grad_norm_(model.parameters(), 4.0 / p if p < 9 else 0.5, p),
        )
        for p in ORDERS
    },
    "some": (
        lambda model: clip_grad_norm_([model.get_parameter(name) for name in SOME], 0.5),
        lambda model: nn.utils.clip_grad_norm_([model.get_parameter(name) for name in SOME], 0.5),
    ),
    "torch's": (
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.7),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.7),
    ),
    "value": (
        lambda model: clip_grad_value_(model, 0.1),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    ),
}
# How microbatches of one step are added up.
HOLDS: dict[str, Callable[[Net], Any]] = {
    "each": lambda model: nullcontext(),
    "no_sync": no_sync,
    "keep_sharded": lambda model: no_sync(model, keep_sharded=True),
}
MESHES = {
    "data 2 x tensor 2": ((2, 2), ("data", "tensor")),
    "tensor 2 x data 2": ((2, 2), ("tensor", "data")),
    "outer 2 x data 1 x tensor 2": ((2, 1, 2), ("outer", "data", "tensor")),
    "data 1 x tensor 4": ((1, 4), ("data", "tensor")),
}


def trained(problems: Problems, what: str, mesh: DeviceMesh, optimizer: str, hold: str, **options: Any) -> None:
    axis = mesh["outer" if "outer" in mesh.mesh_dim_names else "data"]
    if axis.mesh_dim_names == ("outer",) and options["sharding"] != "no_shard" and options["offload"] is None:
        options["outer_sharding"] = "optim"
    model, plain = sharded(mesh, 1, SHAPES if mesh["tensor"].size() == 2 else FOURS, **options), Net()
    optimizers = (
        fully_shard_optimizer(OPTIMIZERS[optimizer](model.parameters())),
        OPTIMIZERS[optimizer](plain.parameters()),
    )
    for step in range(2):
        for micro in range(2):
            with HOLDS[hold](model) if micro == 0 else nullcontext():
                model(torch.tensor(0.1 * (step + 3 * micro + 5 * axis.get_local_rank()))).backward()
            for rank in range(axis.size()):
                (plain(torch.tensor(0.1 * (step + 3 * micro + 5 * rank))) / axis.size()).backward()
        for label, (ours, theirs) in list(CLIPS.items())[:: 1 if NIGHT else 2] if step else CLIPS.items():
            found, expected = ours(model), theirs(plain)
            compare(problems, found, expected, f"{what}: {label} of step {step}", 1e-4)
        if optimizer == "FusedAdam":  # the plain one has no other name for gradients
            for parameter in plain.parameters():
                parameter.decoupled_grad = parameter.grad
        for one in optimizers:
            one.step()
            one.zero_grad()
        plain.zero_grad()
    compare(problems, dict(model.named_parameters()), dict(plain.named_parameters()), what, 1e-5)


def training_is_that_of_one_process(rank: int, world: int) -> None:
    problems = Problems()
    meshes = {name: init_device_mesh("cpu", sizes, mesh_dim_names=names) for name, (sizes, names) in MESHES.items()}

    def possible(mesh: str, sharding: str, optimizer: str, hold: str, offload: Any) -> bool:
        return offload is None or optimizer not in ("Adan", "factored", "FusedAdam")

    for name, sharding, optimizer, hold, offload in pairwise(
        MESHES, SHARDINGS, OPTIMIZERS, HOLDS, (None, "optimizer"), possible=possible, together=1
    ):
        case = f"{name} {sharding} {optimizer} {hold} {offload}"
        options = {"sharding": sharding, "offload": offload}
        given = case, meshes[name], optimizer, hold
        attempt(problems, case, lambda given=given, options=options: trained(problems, *given, **options))
    problems.finish()


class Gated(nn.Module):
    """Uses some of two nets."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.nets = nn.ModuleList([Net(1, mesh), Net(2, mesh, OTHERWISE)])
        self.own = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, uses: tuple[int, ...]) -> Tensor:
        return sum((self.nets[number](x) for number in uses), self.own.sum() * x)


def unused_and_frozen_parameters(rank: int, world: int) -> None:
    problems, mesh, x = Problems(), two_axes(), torch.tensor(0.5)
    data_rank = mesh["data"].get_local_rank()
    for sharding, uses in pairwise(SHARDINGS, (((0,), (0, 1)), ((0,), (0,)), ((), (1,))), together=1):
        case = f"{sharding} {uses}"
        plain, model = Gated(), Gated(mesh)
        for one in (model, plain):
            one.nets[1].columns.requires_grad_(False)
        fully_shard(model, mesh, sharding=sharding)
        optimizers = adopted(model), adopted(plain)
        for step in range(3):
            if step == 2:
                for one in (model, plain):
                    one.nets[1].columns.requires_grad_(True)
                    one.nets[0].packed_rows.requires_grad_(False)
            model(x, uses[data_rank]).backward()
            for number in range(2):
                (plain(x, uses[number]) / 2).backward()
            for name, expected in plain.named_parameters():
                found = model.get_parameter(name).grad
                if expected.grad is None:
                    problems.expect(found is None, f"{case} {name}: a gradient nobody computed")
                else:
                    compare(problems, found, expected.grad, f"{case} step {step} {name}.grad")
            for one in optimizers:
                one.step()
                one.zero_grad()
        compare(problems, dict(model.named_parameters()), dict(plain.named_parameters()), case)
    problems.finish()


def gradients_are_read_while_they_are_held_back(rank: int, world: int) -> None:
    problems, mesh = Problems(), two_axes()
    for sharding in in_turn(2, SHARDINGS):
        model, plain = sharded(mesh, sharding=sharding), Net()
        for name, expected in plain.named_parameters():
            with no_sync(model):
                model(torch.tensor(0.5)).backward()
            plain(torch.tensor(0.5)).backward()
            grad = model.get_parameter(name).grad
            compare(problems, grad.sum(-1) if grad.dim() else grad, expected.grad.sum(-1), f"{sharding} {name} summed")
            compare(problems, grad, expected.grad, f"{sharding} {name}")
            with torch.no_grad():
                for one in (model, plain):
                    one.get_parameter(name).grad.zero_()
        for one in (model, plain):
            one(torch.tensor(0.25)).backward()
        for name, expected in plain.named_parameters():
            compare(problems, model.get_parameter(name).grad, expected.grad, f"{sharding} {name} in the end")
    problems.finish()


class Tied(nn.Module):
    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.first, self.second = Net(1, mesh), Net(2, mesh)
        for name in ("columns", "packed_rows"):
            self.second.register_parameter(name, self.first.get_parameter(name))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x * 2)


def tied_parts(rank: int, world: int) -> None:
    problems, mesh = Problems(), two_axes()
    for sharding, apart in thinned(product(in_turn(0, SHARDINGS), (False, True)), 3):
        model, plain = Tied(mesh), Tied()
        if apart:
            fully_shard(model.first, mesh, sharding=sharding)
        fully_shard(model, mesh, sharding=sharding)
        optimizers = adopted(model), adopted(plain)
        for pair in zip((model, plain), optimizers, strict=True):
            stepped(*pair)
        assert model.first.columns is model.second.columns
        compare(problems, dict(model.named_parameters()), dict(plain.named_parameters()), f"{sharding} {apart}")
    problems.finish()


def all_ranks_skip_a_step_whose_loss_scale_was_too_large(rank: int, world: int) -> None:
    """An overflow in one part, of an optimizer that steps rows and of one that steps DTensors."""
    mesh = two_axes()
    scalers = {"AdamW": DistributedGradScaler, "Adan": torch.amp.GradScaler}
    for sharding, name in thinned(product(in_turn(1, SHARDINGS), scalers), 3):
        model = sharded(mesh, sharding=sharding)
        optimizer = fully_shard_optimizer(OPTIMIZERS[name](model.parameters()))
        scaler = scalers[name]("cpu", init_scale=4.0)
        for bad in (False, True):
            before = whole(model.columns).clone()
            scaler.scale(model(torch.tensor(0.5))).backward()
            if bad:
                with torch.no_grad():
                    model.columns.grad[0, 5] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(whole(model.columns), before) is bad
            assert scaler.get_scale() == (2.0 if bad else 4.0)


# -- states ------------------------------------------------------------------------------------------------------------

ENTIRE = StateDictOptions(full_state_dict=True)


def states_move_between_models_that_lie_otherwise(rank: int, world: int) -> None:
    """By optimizers themselves, by `torch.distributed.checkpoint`'s functions for states, and through its files."""
    problems, mesh = Problems(), two_axes()
    plain = Net()
    reference = adopted(plain)
    stepped(plain, reference)
    state, expected = reference.state_dict(), get_state_dict(plain, reference, options=ENTIRE)
    for source, mine, target, theirs in pairwise(ANYHOW, FEW, ANYHOW, FEW, together=1):
        case = f"{target} {theirs} from {source} {mine}"
        model, other = lying(mesh, source, mine), lying(mesh, target, theirs, 3)
        first, second = adopted(model), adopted(other)
        stepped(model, first)
        compare(problems, first.state_dict(), state, f"{source} {mine} state_dict")
        compare(problems, get_state_dict(model, first, options=ENTIRE), expected, f"{source} {mine} get_state_dict")
        second.load_state_dict(first.state_dict())
        compare(problems, second.state_dict(), state, f"{case} load_state_dict")
        if source is None or target is None:
            continue
        with shared_folder() as folder:
            names = ("model", "optim")
            dcp.save(dict(zip(names, get_state_dict(model, first), strict=True)), checkpoint_id=folder)
            other = lying(mesh, target, theirs, 4)
            second = adopted(other)
            read = dict(zip(names, get_state_dict(other, second), strict=True))
            dcp.load(read, checkpoint_id=folder)
        set_state_dict(other, second, model_state_dict=read["model"], optim_state_dict=read["optim"])
        compare(problems, get_state_dict(other, second, options=ENTIRE), expected, f"{case} files")
    for division, sharding in pairwise(DIVISIONS, FEW, together=1):
        model = lying(mesh, division, sharding, 3)
        optimizer = adopted(model)
        weights, state = copy.deepcopy(expected)  # of which it makes DTensors
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=ENTIRE)
        found = get_state_dict(model, optimizer, options=ENTIRE)
        compare(problems, found, expected, f"{division} {sharding} set_state_dict")
    problems.finish()


def whole_weights_are_broadcast_from_the_first_rank(rank: int, world: int) -> None:
    """By PyTorch's function, which asks placements where a rank's numbers lie; of several strips there is no answer."""
    problems, mesh = Problems(), two_axes()
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for division, sharding in thinned(product((UNPACKED, WHOLE, SHAPES, OTHERWISE), SHARDINGS), 3):
        model = sharded(mesh, 3, division, sharding=sharding)
        weights = dict(Net().state_dict()) if rank == 0 else {}
        if division in (SHAPES, OTHERWISE):
            with pytest.raises(
                EngineStateError, match=r"of unit Net: along dim \d .* has strips of several sections.*load whole"
            ):
                set_model_state_dict(model, weights, options=from_first)
            continue
        set_model_state_dict(model, weights, options=from_first)
        compare(problems, dict(model.named_parameters()), values(), f"{sharding} broadcast")
    problems.finish()


def state_from_before_sharding_is_taken_along(rank: int, world: int) -> None:
    problems, mesh = Problems(), two_axes()
    for sharding, division in pairwise(SHARDINGS, ("alike", "divided otherwise"), together=1):
        plain, model = Net(), Net(1, mesh, DIVISIONS[division])
        reference, optimizer = adopted(plain), torch.optim.AdamW(model.parameters(), lr=0.05)
        for pair in ((plain, reference), (model, optimizer)):
            stepped(*pair)
        fully_shard(model, mesh, sharding=sharding)
        fully_shard_optimizer(optimizer)
        compare(problems, optimizer.state_dict(), reference.state_dict(), f"{sharding} {division} taken over")
        for pair in ((plain, reference), (model, optimizer)):
            stepped(*pair)
        compare(problems, optimizer.state_dict(), reference.state_dict(), f"{sharding} {division} stepped on")
        compare(problems, dict(model.named_parameters()), dict(plain.named_parameters()), f"{sharding} {division}")
    problems.finish()


def averages_of_weights(rank: int, world: int) -> None:
    problems, mesh = Problems(), two_axes()
    for sharding in in_turn(0, SHARDINGS):
        model = sharded(mesh, sharding=sharding)
        average = AveragedWeights(model)
        average.update(0.75)
        model.load_state_dict(values(2))
        average.update(0.75)
        expected = {name: value.lerp(values(2)[name], 0.25) for name, value in values().items()}
        compare(problems, average.in_place_of(model.state_dict()), expected, f"{sharding} in a state dict")
        average.show()
        compare(problems, dict(model.named_parameters()), expected, f"{sharding} shown")
        average.hide()
        compare(problems, dict(model.named_parameters()), values(2), f"{sharding} hidden")
    problems.finish()


CASES = (
    all_ranks_skip_a_step_whose_loss_scale_was_too_large,
    averages_of_weights,
    gradients_are_read_while_they_are_held_back,
    state_from_before_sharding_is_taken_along,
    states_move_between_models_that_lie_otherwise,
    tied_parts,
    training_is_that_of_one_process,
    unused_and_frozen_parameters,
    whole_weights_are_broadcast_from_the_first_rank,
)
WORLDS = {4: CASES}


@by_world(WORLDS)
def test_parts_in_training(world: int, case: Any) -> None:
    check(WORLDS, world, case)
