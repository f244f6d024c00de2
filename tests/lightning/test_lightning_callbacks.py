"""Callbacks of Lightning that hold, write or replace whole parameters, against DDP on the same ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_mfsdp import MFSDPStrategy
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.features import OTHER_WARNINGS
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Block,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

SHARDINGS = ("no_shard", "optim_grads_params")
AGAINST_DDP = SHARDINGS if NIGHT else SHARDINGS[1:]
KEEPS_WHOLE = ".*keeps a whole copy of the model on every rank.*"


class Normed(Classifier):
    """With a batch norm, whose statistics StochasticWeightAveraging computes again in an epoch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, nn.BatchNorm1d(12))


AVERAGING: dict[str, tuple[type[LightningModule], Callable[[], Callback]]] = {
    "exponential": (Normed, lambda: EMAWeightAveraging(decay=0.9)),
    "of the last epochs": (Normed, lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)),
}


class Averaged(Callback):
    """Notes the losses of validations, which the averaged weights compute."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def state_of(model: LightningModule, *, sharded: bool) -> dict[str, Tensor]:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    weights = full_state(model) if sharded else {name: one.detach().clone() for name, one in model.named_parameters()}
    return {**buffers, **weights}


def averaged(rank: int, world_size: int, folder: str) -> dict[Any, Any]:
    """Weights, buffers and losses of validations, at the end and after a run that resumes; under DDP and under mfsdp."""
    strict_warnings()
    for message in (*OTHER_WARNINGS, KEEPS_WHOLE, ".*SWA is initializing after.*"):
        warnings.filterwarnings("ignore", message=message)
    found: dict[Any, Any] = {}
    for name, (kind, callback) in AVERAGING.items():
        for side in ("ddp", *AGAINST_DDP):
            strategy: Any = "ddp" if side == "ddp" else MFSDPStrategy(units=["Block"], sharding=side)
            place = Path(folder, name.replace(" ", "_"), side)
            saver = ModelCheckpoint(dirpath=place, filename="{epoch}", save_top_k=-1)
            model, seen = seeded(kind), Averaged()
            options: dict[str, Any] = {"strategy": strategy, "max_epochs": 2}
            callbacks = [callback(), saver, seen]
            data = (loader(4, 16, rank, world_size), loader(4, 16, rank, world_size))
            make_trainer(place, world_size, callbacks=callbacks, enable_checkpointing=True, **options).fit(model, *data)
            found[name, side, "straight"] = state_of(model, sharded=side != "ddp"), seen.losses
            if side != "ddp":
                options["strategy"] = MFSDPStrategy(units=["Block"], sharding=side)
            model, seen = seeded(kind), Averaged()
            trainer = make_trainer(place, world_size, callbacks=[callback(), seen], **options)
            trainer.fit(model, *data, ckpt_path=place / "epoch=0.ckpt")
            found[name, side, "resumed"] = state_of(model, sharded=side != "ddp"), seen.losses
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_distributed(averaged, 2, str(tmp_path_factory.mktemp("averaged")))


@pytest.mark.parametrize("part", ["straight", "resumed"])
@pytest.mark.parametrize("name", AVERAGING)
def test_weights_are_averaged_saved_and_resumed_as_under_ddp(runs: list[dict[Any, Any]], name: str, part: str) -> None:
    for found in runs:
        expected, losses = found[name, "ddp", part]
        for sharding in AGAINST_DDP:
            actual, actual_losses = found[name, sharding, part]
            assert actual_losses == pytest.approx(losses, rel=1e-5)
            assert actual.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-6, msg=f"{sharding} {part} {key}")


# -- what is said when fit begins -----------------------------------------------------------------------------------------


def fit(model: LightningModule, world_size: int, rank: int, *callbacks: Callback, **options: Any) -> LightningModule:
    sharding = options.pop("sharding", "optim_grads_params")
    strategy = MFSDPStrategy(units=["Block"], sharding=sharding)
    trainer = make_trainer("", world_size, strategy=strategy, callbacks=[*callbacks], **options)
    trainer.fit(model, loader(4, 16, rank, world_size))
    return model


def pruning_is_refused_by_name_before_the_first_step(rank: int, world_size: int) -> None:
    for sharding in SHARDINGS:
        model = seeded(Classifier)
        with pytest.raises(ValueError, match=r"ModelPruning replaces parameters.*call torch\.nn\.utils\.prune"):
            fit(model, world_size, rank, ModelPruning("l1_unstructured"), sharding=sharding)
        assert not model.losses


def layers_pruned_before_train_as_in_one_process(rank: int, world_size: int) -> None:
    def pruned() -> Any:
        model = seeded(Classifier)
        for layer in (model.inputs, model.blocks[0].linear):
            prune.l1_unstructured(layer, "weight", amount=0.5)
        return model

    model = fit(pruned(), world_size, rank)
    plain = pruned()
    optimizer = plain.configure_optimizers()
    for batch in loader(4 * world_size, 16):
        optimizer.zero_grad()
        plain.loss(batch).backward()
        optimizer.step()
    weights = full_state(model)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6)


def averaging_whole_weights_is_advised_against_where_rows_are_sharded(rank: int, world_size: int) -> None:
    for sharding in SHARDINGS:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fit(seeded(Classifier), world_size, rank, EMAWeightAveraging(), sharding=sharding)
        said = [str(each.message) for each in warned if "ShardedEMA" in str(each.message)]
        assert len(said) == (sharding != "no_shard" and world_size > 1 and rank == 0)


class WithTestLoss(Classifier):
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def averaging_goes_on_after_the_fit_in_a_test_and_in_another_fit_as_under_ddp(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")
    data = loader(4, 16, rank, world_size)
    for make in (lambda: EMAWeightAveraging(decay=0.9), lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)):
        results = []
        for side in ("ddp" if world_size > 1 else "auto", *AGAINST_DDP):
            is_other = side in ("ddp", "auto")
            strategy: Any = side if is_other else MFSDPStrategy(units=["Block"], sharding=side)
            model = seeded(WithTestLoss)
            trainer = make_trainer("", world_size, strategy=strategy, max_epochs=2, callbacks=[make()])
            trainer.fit(model, data)
            tested = trainer.test(model, data, verbose=False)[0]["test_loss"]
            trainer.fit_loop.max_epochs = 4
            trainer.fit(model, data)
            results.append((tested, state_of(model, sharded=not is_other)))
        for tested, state in results[1:]:
            assert tested == pytest.approx(results[0][0], rel=1e-5)
            torch.testing.assert_close(state, results[0][1], rtol=1e-5, atol=1e-6)


class KeepsWeights(Callback):
    """Puts weights of the model into checkpoints beside its state dict, as they are."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {"blocks": [block.linear.weight for block in pl_module.blocks if isinstance(block, Block)]}


def weights_that_a_hook_puts_into_a_checkpoint_are_saved_whole(rank: int, world_size: int, folder: str) -> None:
    for kind in ("sharded", "full"):
        strategy = MFSDPStrategy(units=["Block"], state_dict_type=kind)  # type: ignore[arg-type]
        model, place = seeded(Classifier), Path(folder, kind)
        trainer = make_trainer(folder, world_size, strategy=strategy, callbacks=[KeepsWeights()])
        trainer.fit(model, loader(4, 16, rank, world_size))
        trainer.save_checkpoint(place)
        weights = full_state(model)
        saved = torch.load(place / "meta.pt" if kind == "sharded" else place, weights_only=False)["kept"]["blocks"]
        for number, value in enumerate(saved):
            assert type(value) is Tensor
            assert torch.equal(value, weights[f"blocks.{number}.linear.weight"])


CASES = (
    pruning_is_refused_by_name_before_the_first_step,
    layers_pruned_before_train_as_in_one_process,
    averaging_whole_weights_is_advised_against_where_rows_are_sharded,
    averaging_goes_on_after_the_fit_in_a_test_and_in_another_fit_as_under_ddp,
)
WORLDS = at_night({1: CASES}) | {2: CASES}


@by_world(WORLDS)
def test_callbacks(world: int, case: Any) -> None:
    check(WORLDS, world, case)


def test_weights_in_a_checkpoint(tmp_path: Path) -> None:
    run_distributed(weights_that_a_hook_puts_into_a_checkpoint_are_saved_whole, 2, str(tmp_path))
