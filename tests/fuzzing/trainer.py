"""A description under a Trainer, with automatic or manual optimization."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy
from tests.fuzzing.description import Description, Step
from tests.fuzzing.model import BlockModule, Inner, JudgeLayer, Parts, seeded
from tests.fuzzing.running import Event, make_optimizer
from tests.fuzzing.sharded import EngineRun, sharding_options
from tests.helpers.gpus import nodes_and_devices

PRECISIONS = {"float64": "64-true", "float32": "32-true", "mixed": "bf16-mixed", "bfloat16": "bf16-true"}


class TrainedNet(Parts, LightningModule):
    """The same root as a LightningModule. Its batches are numbers: the data are known to the run."""

    fuzz: TrainerRun

    def __init__(self, case: Description) -> None:
        super().__init__()
        self.build(case)
        self.automatic_optimization = case.program.loop == "automatic"

    def forward(self, x: Tensor, skipped: tuple[int, ...] = ()) -> Any:
        return self.compute(x, skipped)

    def training_step(self, batch: int, batch_idx: int) -> Tensor | None:
        steps = self.case.program.steps
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            self.fuzz.whole_step(batch_idx, steps[batch_idx], self.manual_backward, optimizer)
            return None
        number, index = divmod(batch_idx, len(steps[0].micros))
        if index == 0:
            self.fuzz.begin(steps[number])
        micro = steps[number].micros[index]
        return self.fuzz.loss((number, index), micro, 1.0, self.manual_backward)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.fuzz.clear(self._step(batch_idx))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            self.fuzz.look_and_edit(self._step(self.fuzz.batch))

    def on_train_batch_start(self, batch: int, batch_idx: int) -> None:
        self.fuzz.batch = batch_idx

    def on_train_batch_end(self, outputs: Any, batch: int, batch_idx: int) -> None:
        step = self._step(batch_idx)
        if self.automatic_optimization:
            micro = step.micros[batch_idx % len(step.micros)]
            if micro.evaluates == "after":
                self.fuzz.evaluate(divmod(batch_idx, len(step.micros)), micro)
            if (batch_idx + 1) % len(step.micros):
                return
        self.fuzz.end(step)

    def _step(self, batch_idx: int) -> Step:
        steps = self.case.program.steps
        return steps[batch_idx // len(steps[0].micros) if self.automatic_optimization else batch_idx]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.fuzz.optimizer = make_optimizer(self.case, self.parameters())
        return self.fuzz.optimizer

    def on_train_start(self) -> None:
        self.fuzz.start()


class TrainerRun(EngineRun):
    """One rank under a Trainer."""

    batch = 0

    def __init__(self, case: Description, rank: int, mesh: Any) -> None:
        super().__init__(case, rank, mesh, builds=False)
        self.model = seeded(case, TrainedNet, seed=rank)
        self.model.fuzz = self

    def forward(self, x: Tensor, skipped: tuple[int, ...]) -> Any:
        inside = self.case.program.calls_method and self.inside
        return self.model.compute(x, skipped) if inside else self.model(x, skipped)


def is_unit(module: nn.Module) -> bool:
    """For the strategy's `units`."""
    return isinstance(module, (Inner, JudgeLayer)) or (isinstance(module, BlockModule) and module.spec.unit)


def run_trainer(case: Description, rank: int, mesh: Any) -> list[Event]:
    """Fit, then look."""
    run = TrainerRun(case, rank, mesh)
    program, configuration = case.program, case.configuration
    micros = program.steps[0].micros
    automatic = program.loop == "automatic"
    strategy = MFSDPStrategy(
        **sharding_options(case),
        mesh=mesh,
        units=is_unit if any(block.unit for block in case.model.blocks) else (lambda module: False),
        blocks_per_unit=2 if configuration.grouped else 1,
        accumulation="sharded" if automatic and micros[0].sync == "keep_sharded" else "local",
    )
    trainer = Trainer(
        accelerator=configuration.device,
        **(
            nodes_and_devices(configuration.ranks)
            if configuration.device == "cuda"
            else {"devices": configuration.ranks}
        ),
        strategy=strategy,
        precision=PRECISIONS[configuration.precision],  # type: ignore[arg-type]
        accumulate_grad_batches=len(micros) if automatic else 1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(run.model, list(range(len(program.steps) * (len(micros) if automatic else 1))))
    run.finish()
    return run.events
