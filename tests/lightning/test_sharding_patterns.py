"""`sharding={pattern: strategy}`: in the Trainer, Fabric and LightningCLI, with clipping, averages and accumulation, and in checkpoints."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy, ShardingError
from lightning_mfsdp.callbacks import ShardedEMA
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.engine.internals import context_of
from tests.fabric.loops import batches, launched, train, whole
from tests.helpers.distributed import run_distributed
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    TinyData,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
    train_plainly,
)

# As experts in a block: a part of each unit has whole weights, the rest sharded ones.
PARTS = {"*.linear": "optim", "*": "optim_grads_params"}
OTHERS: tuple[Any, ...] = (PARTS, {"blocks.0": "no_shard", "head": "optim_grads"}, "optim_grads", "optim_grads_params")
EPOCHS, STEPS = 2, 2  # of each epoch

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]
pytestmark.append(pytest.mark.filterwarnings("ignore::DeprecationWarning"))  # jsonargparse's, of what Lightning calls


def fit(
    folder: str, rank: int, world: int, model: Classifier, sharding: Any, epochs: int = EPOCHS, **options: Any
) -> None:
    path, data = options.pop("ckpt_path", None), loader(8 // world, 8 * STEPS, rank, world)
    strategy = MFSDPStrategy(sharding=sharding, units=["Block"])
    trainer = make_trainer(folder, world, strategy=strategy, max_epochs=epochs, gradient_clip_val=0.1, **options)
    trainer.fit(model, data, data if "callbacks" in options else None, ckpt_path=path)


def trained(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {"rank": rank, "validated": []}
    for sharding in (PARTS, "optim_grads_params"):
        model = seeded()
        fit(folder, rank, world, model, sharding, callbacks=[ShardedEMA(decay=0.5)])
        found["validated"].append(model.trainer.callback_metrics["val_loss"])  # with the averages
    model = seeded()
    fit(folder, rank, world, model, PARTS)
    found["trained"] = full_state(model)
    found["weights are sharded"] = {
        entry.name: group.weights.is_sharded for group in context_of(model).groups for entry in group.entries
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(folder, rank, world, model, PARTS)
        fit(folder, rank, world, model, "optim_grads")
    found["warned"] = [str(warning.message) for warning in caught if "is already sharded" in str(warning.message)]
    for accumulation in ("local", "sharded"):
        fabric = launched(world, {"sharding": PARTS, "accumulation": accumulation})
        module = seeded()
        sharded, optimizer = fabric.setup(module, module.configure_optimizers())
        train(fabric, sharded, optimizer, batches(rank, world, 2 * STEPS), accumulate=2, clip_norm=0.1)
        found[accumulation] = whole(sharded)
    return found


def plainly_for_epochs() -> Classifier:
    model = seeded()
    optimizer = model.configure_optimizers()
    for _ in range(EPOCHS):
        for batch in loader(8, 8 * STEPS):
            optimizer.zero_grad()
            model.loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return model


def assert_close(found: dict[str, Tensor], expected: Mapping[str, Tensor], case: str) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{case} {n}: {m}"
        )


def test_parts_that_are_sharded_otherwise_train_as_in_one_process(tmp_path: Path) -> None:
    plain = plainly_for_epochs()
    accumulated = train_plainly(seeded(), 8, STEPS, accumulate=2, clip_norm=0.1)
    for found in run_distributed(trained, 2, str(tmp_path)):
        assert_close(found["trained"], dict(plain.named_parameters()), "Trainer")
        for accumulation in ("local", "sharded"):
            assert_close(found[accumulation], dict(accumulated.named_parameters()), f"Fabric, {accumulation}")
        torch.testing.assert_close(*found["validated"])
        assert {name for name, is_sharded in found["weights are sharded"].items() if not is_sharded} == {
            "linear.weight",
            "linear.bias",
        }
        assert len(found["warned"]) == (found["rank"] == 0), "of the run under another strategy alone, on rank 0"


def saved_and_loaded(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}

    def run(sharding: Any, to: str = "", **options: Any) -> dict[str, Tensor]:
        model = seeded()
        if to:
            saving = ModelCheckpoint(f"{folder}/{to}", save_top_k=-1)
            options |= {"enable_checkpointing": True, "callbacks": [saving]}
        fit(folder, rank, world, model, sharding, **options)
        return full_state(model)

    found["through"] = run(PARTS, "mapping")
    run("optim_grads_params", "strategy", epochs=1)
    for sharding in OTHERS:
        found[f"mapping to {sharding}"] = run(sharding, ckpt_path=after_an_epoch(f"{folder}/mapping"))
    found["strategy to mapping"] = run(PARTS, ckpt_path=after_an_epoch(f"{folder}/strategy"))
    return found


def after_an_epoch(folder: str) -> str:
    (path,) = Path(folder).glob("epoch=0-*.ckpt")
    return str(path)


def test_a_checkpoint_is_loaded_under_other_patterns_and_without(tmp_path: Path) -> None:
    for found in run_distributed(saved_and_loaded, 2, str(tmp_path)):
        for case, state in found.items():
            assert_close(state, found["through"], case)


@pytest.mark.parametrize("strategy", [MFSDPStrategy, MFSDPFabricStrategy])
def test_strategies_are_checked_before_there_is_a_model(strategy: Any) -> None:
    assert strategy(sharding=PARTS).sharding == PARTS
    refused: list[tuple[dict[str, Any], str]] = [
        ({"sharding": {"*.experts": "zero1"}}, r"sharding\['\*\.experts'\]: expected one of no_shard, optim"),
        ({"sharding": {"*": "FULL_SHARD"}}, 'a name of FSDP\'s; use sharding="optim_grads_params"'),
        ({"sharding": {}}, "expected a strategy, or a mapping"),
        ({"sharding": {"*": "no_shard"}, "outer_sharding": "optim"}, 'outer_sharding="optim" shards'),
    ]
    for options, words in refused:
        with pytest.raises(ValueError, match=words):
            strategy(**options)


def test_a_pattern_without_a_module_is_an_error_that_lists_modules(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, strategy=MFSDPStrategy(sharding={"*.experts": "optim"}))
    with pytest.raises(ShardingError, match=r"'\*\.experts' matches no module .* blocks\.\*\.linear, head"):
        trainer.fit(seeded(), loader(8))


def test_patterns_come_from_a_file_and_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "trainer:\n  accelerator: cpu\n  devices: 1\n  logger: false\n  strategy:\n    class_path: lightning_mfsdp.MFSDPStrategy\n"
        "    init_args:\n      sharding:\n        '*.linear': optim\n        '*': 3\n"
    )
    given = {
        "a file": [f"--config={file}"],
        "the command line": ["--trainer.logger=false", "--trainer.strategy=lightning_mfsdp.MFSDPStrategy"],
    }
    given["the command line"].append('--trainer.strategy.sharding={"*.linear": "optim", "*": 3}')
    for arguments in given.values():
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        command = LightningCLI(
            Classifier, TinyData, save_config_callback=None, run=False, seed_everything_default=False
        )
        assert command.trainer.strategy.sharding == {"*.linear": "optim", "*": 3}
