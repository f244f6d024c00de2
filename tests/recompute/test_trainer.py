"""Recompute under the Trainer and under Fabric: as an argument, as a mapping, as a callback; compiled; in the same model again."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy, Recompute
from lightning_mfsdp.callbacks import ActivationRecompute
from lightning_mfsdp.recompute import plan_recompute, recomputed, record_step
from tests.fabric.loops import batches, launched, train, whole
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import Classifier, TinyData, full_state, loader, make_trainer, seeded, strict_warnings

LAYERS = ["blocks.0", "blocks.1"]


class Dropping(Classifier):
    """With dropout, and two optimizer steps that see two batches each."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        return self.head(x * self.scale + self.shift)


def fit(model: Classifier, world: int, rank: int = 0, callbacks: Any = (), **strategy: Any) -> Classifier:
    torch.manual_seed(rank)
    options = {"strategy": MFSDPStrategy(units=["Block"], **strategy), "accumulate_grad_batches": 2}
    trainer = make_trainer(tempfile.gettempdir(), world, callbacks=list(callbacks), **options)
    trainer.fit(model, loader(4, 32, rank, world))
    return model


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def front_doors(rank: int, world: int) -> dict[str, Any]:
    strict_warnings()
    expected = full_state(fit(seeded(Dropping), world, rank))
    found: dict[str, Any] = {}
    callback = ActivationRecompute(method="block", num_layers=1)
    for name, options in {
        "argument": {"recompute": Recompute()},
        "mapping": {"recompute": {"method": "block", "num_layers": 1}},
        "callback": {"callbacks": [callback]},
        "operators": {"recompute": Recompute(method="selective", save_ops=["matmul"])},
        "host": {"recompute": Recompute(offload=True), "sharding": "optim_grads"},
        "none": {"recompute": Recompute(method="none")},
    }.items():
        model = fit(seeded(Dropping), world, rank, **options)  # type: ignore[arg-type]
        found[name] = recomputed(model), same(full_state(model), expected)
    model = fit(seeded(Dropping), world, rank)
    twice = full_state(fit(model, world, rank))
    model = fit(seeded(Dropping), world, rank)
    fit(model, world, rank, recompute=Recompute())
    found["a model that is sharded already"] = recomputed(model), same(full_state(model), twice)
    model = fit(seeded(Dropping), world, rank, recompute=Recompute())
    fit(model, world, rank, recompute={"method": "block", "num_layers": 1})
    found["another choice the second time"] = recomputed(model), same(full_state(model), twice)
    found["compiled"] = compiled(rank, world)
    found["fabric"] = fabric(rank, world)
    found["planned"] = planned(rank, world)
    with pytest.raises(ValueError, match=r"MFSDPStrategy\(recompute=...\) and ActivationRecompute both specify"):
        fit(seeded(), world, rank, callbacks=[callback], recompute=Recompute())
    with pytest.raises(ValueError, match="ActivationRecompute and ActivationRecompute both specify"):
        fit(seeded(), world, rank, callbacks=[callback, ActivationRecompute()])
    return found


def compiled(rank: int, world: int) -> list[bool]:
    """Compiled code is computed again, and operators to keep are kept by the compiler. The second fit recompiles nothing."""
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf"
    )  # PyTorch's own look
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(1)
        return graph.forward

    expected = full_state(fit(seeded(), world, rank))
    equal = []
    configs = (Recompute(), Recompute(num_layers=2), Recompute(method="selective", save_ops=["matmul"]))
    for config in configs if NIGHT else configs[1:]:
        torch.compiler.reset()
        graphs.clear()
        backend = "aot_eager" if config.save_ops else counting
        model = fit(seeded(), world, rank, recompute=config, compile={"backend": backend, "fullgraph": True})
        equal.append(same(full_state(model), expected))
        seen = len(graphs)
        fit(model, world, rank, recompute=config)
        equal.append(len(graphs) == seen and (bool(seen) or bool(config.save_ops)))
    return equal


def fabric(rank: int, world: int) -> tuple[list[str], bool]:
    states = []
    for config in (None, {"num_layers": 2}):
        started = launched(world, {"recompute": config})
        module = seeded()
        model, optimizer = started.setup(module, module.configure_optimizers())
        train(started, model, optimizer, batches(rank, world, 4), accumulate=2)
        states.append(whole(model))
        names = recomputed(module)
    return names, same(*states)


class Measured(Classifier):
    """Plans after its first step, from a hook."""

    layers = -1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            with record_step(self) as recorder:
                self.trainer.strategy.backward(self.trainer.strategy.training_step(batch, batch_idx), None)
            plan = plan_recompute(recorder.record, recorder.record.saved_bytes - 1)
            self.layers = plan.chosen.num_layers


def planned(rank: int, world: int) -> int:
    return fit(seeded(Measured), world, rank).layers


def test_every_front_door_leads_to_the_same_numbers() -> None:
    for found in run_distributed(front_doors, 2):
        assert found == {
            "argument": (LAYERS, True),
            "mapping": (LAYERS[:1], True),
            "callback": (LAYERS[:1], True),
            "operators": (LAYERS, True),
            "host": (LAYERS, True),
            "none": ([], True),
            "a model that is sharded already": (LAYERS, True),
            "another choice the second time": (LAYERS[:1], True),
            "compiled": [True] * (6 if NIGHT else 4),
            "fabric": (LAYERS, True),
            "planned": 1,
        }


def configured(rank: int, world: int) -> tuple[str, int | None, list[str]]:
    strategy = {"class_path": "lightning_mfsdp.MFSDPStrategy"}
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": "false", "limit_val_batches": 0}
    options |= {"enable_checkpointing": "false", "enable_progress_bar": "false", "enable_model_summary": "false"}
    arguments = [f"--trainer.{option}={value}" for option, value in options.items()]
    arguments += [f"--trainer.strategy={strategy['class_path']}", "--trainer.strategy.recompute.method=block"]
    arguments += ["--trainer.strategy.recompute.num_layers=2", f"--trainer.default_root_dir={tempfile.gettempdir()}"]
    with mock.patch("sys.argv", ["train.py"]):
        cli = LightningCLI(Classifier, TinyData, args=["fit", *arguments], save_config_callback=None)
    chosen = cli.trainer.strategy._options.recompute  # type: ignore[attr-defined]
    return chosen.method, chosen.num_layers, recomputed(cli.model)


def test_the_command_line_takes_the_options() -> None:
    assert run_distributed(configured, 1) == [("block", 2, LAYERS)]


def test_what_cannot_work_is_refused_before_it_starts() -> None:
    with pytest.raises(ValueError, match="no graph can hold its copies to and from host memory"):
        MFSDPStrategy(cuda_graph=True, recompute=Recompute(offload=True))
    with pytest.raises(ValueError, match="unknown option 'layers'"):
        MFSDPStrategy(recompute={"layers": 2})
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(TypeError, match="ActivationRecompute: expected MFSDPStrategy, got SingleDeviceStrategy"):
        ActivationRecompute().setup(trainer, seeded(), "fit")
