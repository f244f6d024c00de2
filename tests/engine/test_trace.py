"""A rank without data repeats the gathers of its last forward-only step, so that the others can go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import fully_shard, gather_root, traced_step
from tests.helpers.chain import STRATEGIES, Chain, adamw, context, inputs, plain_chain, sharded_chain, train
from tests.helpers.distributed import run_distributed

STEPS = 4
CASES = (*STRATEGIES, "grouped modules")


class Winding(nn.Module):
    """Calls one unit twice, leaves one out, and runs the whole model two times in a step."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: Tensor) -> Tensor:
        first, second, _, last = self.chain.layers
        return self.chain.out(last(first(second(first(x)))))


def step(model: Chain, x: Tensor) -> Tensor:
    return Winding(model)(x) + model(x)


def sharded(case: str) -> Chain:
    """A strategy, or two layers as one unit, which `Winding` calls out of turn."""
    if case != "grouped modules":
        return sharded_chain(sharding=case)
    model = plain_chain()
    fully_shard(list(model.layers[:2]))
    fully_shard(list(model.layers[2:]))
    return fully_shard(model)


def uneven_steps(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0 runs one forward and repeats it; the other ranks run all. Before and after training, which leaves another order behind."""
    found: dict[str, Any] = {}
    for case in CASES:
        model = sharded(case)
        for moment in ("before", "after"):
            outputs, gathers = [], context(model).lane.started
            with torch.no_grad():
                for number in range(1 if rank == 0 else STEPS):
                    with traced_step(model) as trace, gather_root(model):
                        outputs.append(step(model, inputs(number, rank)))
                for _ in range(STEPS - len(outputs)):
                    trace.repeat()
            found[f"{case} {moment}"] = outputs, context(model).lane.started - gathers
            train(model, adamw(model), range(2), rank)
    return found


@pytest.fixture(scope="module")
def three_ranks() -> list[dict[str, Any]]:
    return run_distributed(uneven_steps, 3)


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_more_steps_compute_what_one_process_computes(three_ranks: list[dict[str, Any]], case: str) -> None:
    plain = plain_chain()
    for rank, found in enumerate(three_ranks):
        outputs, _ = found[f"{case} before"]
        assert len(outputs) == (1 if rank == 0 else STEPS)
        for number, output in enumerate(outputs):
            torch.testing.assert_close(output, step(plain, inputs(number, rank)))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_repeated_step_issues_the_gathers_of_a_step(three_ranks: list[dict[str, Any]], moment: str) -> None:
    for case in CASES:
        counts = [found[f"{case} {moment}"][1] for found in three_ranks]
        assert len(set(counts)) == 1, (case, counts)
    assert three_ranks[0][f"optim_grads_params {moment}"][1] >= 5 * STEPS
