"""Features that behave in another way on GPUs: evaluation in inference mode over NCCL, and synchronized batch norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning.features import Side
from tests.lightning.models import Classifier, dataset, loader, seeded, strict_warnings, train_plainly

pytestmark = [
    pytest.mark.gpus2,
    needs_gpus(2),
]

STEPS = 3


class Normalized(Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def on_gpus(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Rank 0 has 2 batches to evaluate and rank 1 has 5, before and after a fit."""
    strict_warnings()
    side = Side(name="mfsdp", rank=rank, world_size=world_size, folder=Path(folder))
    model = seeded()
    trainer = side.trainer(accelerator="cuda")
    mine = DataLoader(Subset(dataset(32), range(4) if rank == 0 else range(4, 14)), batch_size=2)
    found: dict[str, Any] = {
        "validated": trainer.validate(model, mine, verbose=False),
        "predicted": trainer.predict(model, mine),
    }
    trainer.fit(model, loader(4, 8 * STEPS, rank, world_size), mine)
    found["weights"] = side.weights(model)
    synced = seeded(Normalized)
    side.trainer(accelerator="cuda", sync_batchnorm=True).fit(synced, loader(4, 8 * STEPS, rank, world_size))
    found["synced"] = side.weights(synced), synced.norm.running_mean.cpu()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(on_gpus, 2, str(tmp_path_factory.mktemp("features")), backend="nccl")


def assert_near(state: dict[str, Tensor], reference: nn.Module) -> None:
    for name, tensor in reference.named_parameters():
        torch.testing.assert_close(state[name], tensor.detach(), rtol=1e-3, atol=1e-4, msg=name)


def test_ranks_with_unlike_numbers_of_batches_evaluate_over_nccl(ranks: Any) -> None:
    model = seeded()
    x, y = (torch.stack(column) for column in zip(*Subset(dataset(32), range(14)), strict=True))
    with torch.no_grad():
        expected, loss = model(x), model.loss([x, y])
    assert ranks[0]["validated"][0]["val_loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert [len(found["predicted"]) for found in ranks] == [2, 5]
    predicted = torch.cat([*ranks[0]["predicted"], *ranks[1]["predicted"]]).cpu()
    torch.testing.assert_close(predicted, expected, rtol=1e-3, atol=1e-4)
    assert_near(ranks[0]["weights"], train_plainly(seeded(), 8, STEPS))


def test_synchronized_batch_norm_trains_like_one_process_on_the_whole_batch(ranks: Any) -> None:
    reference = train_plainly(seeded(Normalized), 8, STEPS)
    for found in ranks:
        weights, running_mean = found["synced"]
        assert_near(weights, reference)
        torch.testing.assert_close(running_mean, reference.norm.running_mean, rtol=1e-3, atol=1e-4)
