"""Losses of what a block kept, layers called before `self(...)`: a Trainer's run equals DDP's, or an error says what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.engine import EngineStateError
from lightning_mfsdp.recompute import Recompute
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.nights import NIGHT
from tests.helpers.pairwise import pairwise
from tests.lightning.models import CLASSES, DIM, Classifier, loader, make_trainer, seeded, strict_warnings

ORDINARY, STEPS = 2, 4
OPTIMIZERS = ("sgd", "adamw")
SHARDINGS = ("optim_grads", "optim", "no_shard", "optim_grads_params")


class Keeping(nn.Module):
    """A block that keeps what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.map: Tensor | None = None
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.a(x)
        self.penalty = self.b.weight.square().mean()
        return x + self.b(self.map.tanh())


class Base(Classifier):
    """Its blocks keep; a hook keeps a feature; `pre`, `gain` and `time` are for steps that use them before `self(...)`."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer=optimizer)
        self.blocks = nn.ModuleList(Keeping() for _ in range(5))
        self.pre, self.gain, self.time = nn.Linear(3, 3), nn.Parameter(torch.full((3,), 2.0)), nn.Linear(1, 3)
        self.features: list[Tensor] = []
        self.blocks[1].a.register_forward_hook(lambda _m, _i, output: self.features.append(output))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.features.clear()
        task = F.cross_entropy(self.result(*batch).float(), batch[1])
        return self.with_side_door(task.float(), batch_idx)

    def result(self, x: Tensor, y: Tensor) -> Tensor:
        return self(x)

    def with_side_door(self, task: Tensor, batch_idx: int) -> Tensor:
        return task


class Feature(Base):
    def with_side_door(self, task: Tensor, batch_idx: int) -> Tensor:
        return task if batch_idx < ORDINARY else (self.features[0] - 1).float().square().mean()


class Penalty(Base):
    def with_side_door(self, task: Tensor, batch_idx: int) -> Tensor:
        return task if batch_idx < ORDINARY else self.blocks[2].map.float().square().mean() + self.blocks[2].penalty


class Added(Base):
    def with_side_door(self, task: Tensor, batch_idx: int) -> Tensor:
        terms = [block.penalty + block.map.float().square().mean() for block in self.blocks]
        return task + sum(terms) + (self.features[0] - 1).float().square().mean()


class Slope(Base):
    """A penalty on a gradient's size that is not differentiated itself: the gradient of one map to an earlier one."""

    def with_side_door(self, task: Tensor, batch_idx: int) -> Tensor:
        if batch_idx < ORDINARY:
            return task
        (slope,) = torch.autograd.grad(self.blocks[2].map.float().sum(), self.blocks[1].map, retain_graph=True)
        # AdamW divides by the gradients' size: only what changes it much from step to step is seen.
        return task * (1 + 30 * slope.float().square().mean().detach())


class Layer(Base):
    def result(self, x: Tensor, y: Tensor) -> Tensor:
        return self(self.pre(x))


class Parameter(Base):
    def result(self, x: Tensor, y: Tensor) -> Tensor:
        return self(x * self.gain)


class Time(Base):
    def result(self, x: Tensor, y: Tensor) -> Tensor:
        return self(self.pre(x) + self.time(y.float().unsqueeze(1) / CLASSES) * self.gain)


ALONE: tuple[type[Base], ...] = (Feature, Penalty, Slope)
RIGHT: tuple[type[Base], ...] = (Added, Layer, Parameter, Time)


def fit(kind: type[Base], strategy: Any, precision: str, optimizer: str, rank: int, world: int) -> dict[str, Tensor]:
    model = seeded(kind, optimizer=optimizer)
    size = 4 * STEPS * world
    trainer = make_trainer(tempfile.gettempdir(), world, strategy=strategy, precision=precision)
    trainer.fit(model, loader(4, size, rank, world))
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one.clone() for name, one in model.state_dict().items()
    }


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of any weight, relative to the largest number of its tensor."""
    return max(float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items())


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The norm of all differences, relative to that of all weights; single elements in bfloat16 are chance."""
    squares = [float((found[name] - one).square().sum()) for name, one in expected.items()]
    return (sum(squares) / sum(float(one.square().sum()) for one in expected.values())) ** 0.5


@cache
def without_term(optimizer: str, rank: int, world: int) -> dict[str, Tensor]:
    """DDP's run of the loss that all programs begin with."""
    return fit(Base, ddp(), "32-true", optimizer, rank, world)


class Comparison:
    """DDP's runs of one program, made once, and what differs by more than they allow."""

    def __init__(self, kind: type[Base], optimizer: str, rank: int, world: int) -> None:
        self.kind, self.optimizer, self.place = kind, optimizer, (rank, world)
        self.exact = fit(kind, ddp(), "32-true", optimizer, rank, world)
        self.mixed = apart(fit(kind, ddp(), "bf16-mixed", optimizer, rank, world), self.exact)
        without = apart(without_term(optimizer, rank, world), self.exact)
        assert without > max(1e-3, 2 * self.mixed), f"{kind.__name__}: the term makes no difference ({without:.1e})"

    def check(self, *, mixed: bool = True, **options: Any) -> None:
        case = self.kind.__name__, options, self.optimizer
        off = distance(fit(self.kind, MFSDPStrategy(**options), "32-true", self.optimizer, *self.place), self.exact)
        _, world = self.place
        assert off <= (0 if world == 2 else 1e-5), f"{case}: off by {off:.1e}"  # a sum of two has no order
        if not mixed:
            return
        off = apart(fit(self.kind, MFSDPStrategy(**options), "bf16-mixed", self.optimizer, *self.place), self.exact)
        assert off <= 1.5 * self.mixed, f"{case}: {off:.1e} from a run in float32, DDP {self.mixed:.1e}"


def compare(kinds: tuple[type[Base], ...], rank: int, world: int) -> None:
    strict_warnings()
    for kind in kinds:
        number = (ALONE + RIGHT).index(kind)
        for optimizer in OPTIMIZERS if NIGHT else OPTIMIZERS[number % 2 :][:1]:
            comparison = Comparison(kind, optimizer, rank, world)
            # What is kept of blocks whose weights stay gathered: tests/engine/test_side_doors.py.
            for sharding in SHARDINGS if NIGHT else SHARDINGS[-1:]:
                comparison.check(sharding=sharding)
            if kind in ALONE:
                comparison.check(side_doors="raise", reshard_after_forward=False, mixed=NIGHT)
            if kind in ALONE and kind is not Slope:  # autograd.grad of what is recomputed is PyTorch's own limit
                comparison.check(side_doors="raise", recompute=Recompute(), mixed=NIGHT)


def a_layer_before_the_root_equals_ddp(rank: int, world: int) -> None:
    compare((Layer,), rank, world)


def a_parameter_before_the_root_equals_ddp(rank: int, world: int) -> None:
    compare((Parameter, Time) if NIGHT else (Time,), rank, world)  # which uses a parameter as well


def terms_beside_the_loss_equal_ddp(rank: int, world: int) -> None:
    compare((Added,), rank, world)


def a_feature_alone_equals_ddp_followed_and_with_either_way_out(rank: int, world: int) -> None:
    compare((Feature,), rank, world)


def a_penalty_alone_equals_ddp_followed_and_with_either_way_out(rank: int, world: int) -> None:
    compare((Penalty,), rank, world)


def a_gradient_of_a_map_equals_ddp_followed_and_with_weights_kept(rank: int, world: int) -> None:
    compare((Slope,), rank, world)


def a_side_door_alone_stops_the_run_if_asked_with_unit_parameter_and_what_to_do(rank: int, world: int) -> None:
    for kind, precision in pairwise(ALONE, ("32-true", "bf16-mixed"), together=1):
        with pytest.raises(
            EngineStateError, match=r"^blocks\.[012]: a backward read its weight [ab]\.weight"
        ) as caught:
            fit(kind, MFSDPStrategy(side_doors="raise"), precision, "sgd", rank, world)
        assert "reshard_after_forward=False" in str(caught.value)
        assert "Recompute" in str(caught.value)


CASES = (
    a_layer_before_the_root_equals_ddp,
    a_side_door_alone_stops_the_run_if_asked_with_unit_parameter_and_what_to_do,
    a_parameter_before_the_root_equals_ddp,
    terms_beside_the_loss_equal_ddp,
    a_feature_alone_equals_ddp_followed_and_with_either_way_out,
    a_penalty_alone_equals_ddp_followed_and_with_either_way_out,
    a_gradient_of_a_map_equals_ddp_followed_and_with_weights_kept,
)
WORLDS = {2: CASES} | at_night({3: CASES})  # two ranks are held to the bit


@by_world(WORLDS)
def test_side_doors(world: int, case: Any) -> None:
    check(WORLDS, world, case)
