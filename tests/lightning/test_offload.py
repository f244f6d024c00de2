"""`MFSDPStrategy(offload="optimizer")` and Fabric's: the numbers of a run without it, and checkpoints that go both ways."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mfsdp import MFSDPStrategy, sharded_parameters
from lightning_mfsdp.callbacks import ShardedEMA
from lightning_mfsdp.checkpoint.state import optimizer as saved_state
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.fabric.loops import assert_same, batches, launched, train, whole
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.helpers.optimizer_state import state_of_rows
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

STEPS = 4  # two epochs of two
EPOCH = 8 * STEPS // 2

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


def fit(
    rank: int, world: int, folder: str, offload: Any, kind: Any, *, steps: int, ckpt_path: str | None = None
) -> tuple[Any, Any]:
    """Train to `steps`, clipped, in bfloat16 with an average; keeps the last checkpoint in `folder`."""
    model = seeded()
    saver = ModelCheckpoint(dirpath=folder, filename="last", every_n_train_steps=steps)
    trainer = make_trainer(
        folder,
        world,
        max_epochs=-1,
        max_steps=steps,
        precision="bf16-mixed",
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        callbacks=[ShardedEMA(0.9), saver],
        strategy=MFSDPStrategy(units=["Block"], offload=offload, state_dict_type=kind),
    )
    trainer.fit(model, loader(8 // world, EPOCH, rank, world), ckpt_path=ckpt_path)
    return trainer, model


def outcome(trainer: Any, model: Classifier) -> list[Any]:
    optimizer = trainer.optimizers[0]
    names = {id(view.local): view.name for view in sharded_parameters(model)}
    state = {names[id(rows)]: values for rows, values in state_of_rows(optimizer).items()}
    average = next(one for one in trainer.callbacks if isinstance(one, ShardedEMA)).parameter_state.rows()
    return [model.losses[-STEPS // 2 :], full_state(model), state, average]


def runs_and_checkpoints_equal_those_without(rank: int, world: int, folder: str) -> None:
    strict_warnings()
    expected = outcome(*fit(rank, world, f"{folder}/straight", None, "sharded", steps=STEPS))
    ways = list(itertools.product(("sharded", "full"), ((None, "optimizer"), ("optimizer", None), ("optimizer",) * 2)))
    for kind, (first, second) in ways if NIGHT else [ways[1], ways[2], ways[3]]:
        case = f"{kind} {first} {second}"
        place = f"{folder}/{kind}-{first}-{second}"
        fit(rank, world, place, first, kind, steps=STEPS // 2)
        going_on = fit(rank, world, f"{place}-on", second, kind, steps=STEPS, ckpt_path=f"{place}/last.ckpt")
        assert_same(outcome(*going_on), expected, case)


def restored_state_goes_straight_to_host_memory(rank: int, world: int, folder: str) -> None:
    """Both kinds of checkpoints make room where state rests, before anything is read into it."""
    strict_warnings()
    asked: list[Any] = []
    real = saved_state.empty_at_rest

    def watch(local: Any, dtype: torch.dtype) -> Any:
        asked.append(local)
        return real(local, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_state, "empty_at_rest", watch)
        path = f"{folder}/sharded-optimizer-None/last.ckpt"
        _, model = fit(rank, world, f"{folder}/again", "optimizer", "sharded", steps=STEPS, ckpt_path=path)
    views = [view for view in sharded_parameters(model) if view.main.numel()]
    assert [sum(one is view.local for one in asked) for view in views] == [2] * len(views)


def a_fabric_loop_equals_one_without(rank: int, world: int, folder: str) -> None:
    found = []
    for offload in (None, "optimizer"):
        fabric = launched(world, {"offload": offload})
        module = seeded(optimizer="sgd")
        model, optimizer = fabric.setup(module, module.configure_optimizers())
        losses = train(fabric, model, optimizer, batches(rank, world, STEPS), accumulate=2, clip_norm=0.5)
        found.append([losses, whole(model)])
    assert_same(found[1], found[0])


def another_place_than_the_model_has_is_said(rank: int, world: int, folder: str) -> None:
    _, model = fit(rank, world, f"{folder}/first", None, "sharded", steps=1)
    trainer = make_trainer(
        folder, world, strategy=MFSDPStrategy(units=["Block"], offload="optimizer"), precision="bf16-mixed"
    )
    said = "not with offload='optimizer'; its main weights are not moved"
    with pytest.warns(UserWarning, match=said) if rank == 0 else nullcontext():
        trainer.validate(model, loader(8, 8), verbose=False)


def everything(rank: int, world: int, folder: str) -> None:
    runs_and_checkpoints_equal_those_without(rank, world, folder)
    restored_state_goes_straight_to_host_memory(rank, world, folder)
    a_fabric_loop_equals_one_without(rank, world, folder)
    another_place_than_the_model_has_is_said(rank, world, folder)


def test_a_run_with_offload_equals_one_without_and_continues_its_checkpoints(tmp_path: Path) -> None:
    run_distributed(everything, 2, str(tmp_path))


def test_options_that_contradict_each_other_are_refused() -> None:
    for strategy in (MFSDPStrategy, MFSDPFabricStrategy):
        with pytest.raises(ValueError, match="offload='weights': expected one of None, 'optimizer'"):
            strategy(offload="weights")
    with pytest.raises(ValueError, match="a replay would read main weights from host memory"):
        MFSDPStrategy(offload="optimizer", cuda_graph=True)
