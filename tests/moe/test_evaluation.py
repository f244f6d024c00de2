"""Evaluations in which ranks that share experts have different numbers of batches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_mfsdp.moe import GroupedExperts, expert_parallel
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, make_trainer, strict_warnings
from tests.moe.test_checkpoint import Trained

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]
ROWS = (5, 2)


class Predicting(Trained):
    def predict_step(self, ids: Tensor, index: int) -> Tensor:
        return self.model(ids)


def predicted(rank: int, world: int, precision: str) -> dict[str, list[Tensor]]:
    """What each rank predicts of its own rows: five on the first, two on the second."""
    strict_warnings()
    rows = torch.arange(6).expand(sum(ROWS), 6) + torch.arange(sum(ROWS))[:, None]
    own = rows.split(ROWS)[rank]
    found = {}
    for name, ep in (("none", 1), ("all_gather", 2), ("all_to_all", 2)):
        model = Predicting(ep, dispatcher="all_gather" if ep == 1 else name)
        trainer = make_trainer("", world, precision=precision, use_distributed_sampler=False)
        outputs = trainer.predict(model, DataLoader(own, batch_size=1))
        assert outputs is not None
        found[name] = [output.float() for output in outputs]
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_rank_without_batches_computes_for_others_with_its_experts(precision: str) -> None:
    for rank, found in enumerate(run_distributed(predicted, 2, precision)):
        expected = found.pop("none")
        assert len(expected) == ROWS[rank]
        for outputs in found.values():
            for output, whole in zip(outputs, expected, strict=True):
                tolerance = 1e-5 if precision == "32-true" else 2e-2
                torch.testing.assert_close(output, whole, rtol=tolerance, atol=tolerance)


def copied(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    experts = expert_parallel(GroupedExperts(num_experts=4, hidden_size=8, intermediate_size=8), mesh)
    other = copy.deepcopy(experts)
    other.load_state_dict({name: value * 0 for name, value in experts.state_dict().items()})
    hidden, index = torch.randn(3, 8), torch.tensor([[0], [1], [3]])
    assert experts(hidden, index, torch.ones(3, 1)).any()
    assert not other(hidden, index, torch.ones(3, 1)).any()
    with pytest.raises(TypeError, match=r"divided among ranks cannot be pickled: .* Save the module's state_dict\(\)"):
        pickle.dumps(experts)
    return []


def test_divided_experts_can_be_copied_and_say_why_they_cannot_be_pickled() -> None:
    run_distributed(copied, 2)
