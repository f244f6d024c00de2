"""When gradients take memory under the Trainer, which clears them only after the next training_step unless told otherwise."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy, units
from lightning_mfsdp.callbacks import NaNGradientReporter, NonFiniteGradientError
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, dataset, make_trainer, seeded


class Watched(Classifier):
    """Notes what gradients occupy whenever a block's forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def configure_model(self) -> None:
        for block in self.blocks:
            block.register_forward_pre_hook(self.note)

    def note(self, *_: Any) -> None:
        if self.training:
            self.seen.append(sum(view.gradient_bytes for view in units(self)))


def fit(rank: int, world: int, free: bool, accumulate: int) -> tuple[list[int], list[Tensor]]:
    model = seeded(Watched)
    trainer = make_trainer(
        tempfile.gettempdir(),
        2,
        strategy=MFSDPStrategy(free_gradients=free),
        accumulate_grad_batches=accumulate,
        max_epochs=2,
    )
    trainer.fit(model, torch.utils.data.DataLoader(dataset(), batch_size=4))
    return model.seen, [parameter.full_tensor() for parameter in model.parameters()]


class Broken(Watched):
    """Its second step has a NaN."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_index)
        return loss * float("nan") if self.global_step == 1 else loss


def report(rank: int, world: int) -> str:
    trainer = make_trainer(
        tempfile.gettempdir(),
        2,
        strategy=MFSDPStrategy(free_gradients=True),
        callbacks=[NaNGradientReporter(action="raise")],
        max_epochs=2,
    )
    try:
        trainer.fit(seeded(Broken), torch.utils.data.DataLoader(dataset(), batch_size=4))
    except NonFiniteGradientError as error:
        return str(error)
    return "nothing"


def test_a_nan_is_reported_though_gradients_were_freed() -> None:
    for text in run_distributed(report, 2):
        assert "step 1" in text
        assert "blocks.0" in text


def both(rank: int, world: int) -> list[Any]:
    return [(free, accumulate, *fit(rank, world, free, accumulate)) for accumulate in (1, 2) for free in (False, True)]


def test_freed_gradients_take_no_memory_during_the_next_forward_and_change_nothing() -> None:
    for results in run_distributed(both, 2):
        for (_, accumulate, kept, weights), (_, _, freed, same) in zip(results[::2], results[1::2], strict=True):
            assert any(kept)
            if accumulate == 1:
                assert not any(freed), freed
            assert sum(freed) < sum(kept)
            assert all(torch.equal(*pair) for pair in zip(weights, same, strict=True))
