"""A context axis in a loop of one's own: batches are divided where the loop says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mfsdp import grad_norm
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import rest_at_night
from tests.lightning.models import full_state, strict_warnings
from tests.lightning.test_context import Finetuned, Texts

STEPS = 3


def train(rank: int, world: int, context: int, divides: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    strict_warnings()
    strategy = MFSDPFabricStrategy(context=context, units=["LlamaDecoderLayer"], loss_count="tokens")
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision="64-true")
    fabric.launch()
    model: Any = Finetuned()
    model, optimizer = fabric.setup(model.model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader: Any = fabric.setup_dataloaders(DataLoader(Texts("padded"), batch_size=4 * context // world))
    losses, norms = [], []
    for whole in loader:
        if divides:
            with strategy.divided(whole) as batch:
                loss = model(**batch).loss
                fabric.backward(loss)
        else:
            loss = model(**whole).loss
            fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach()).item())
        norms.append(grad_norm(model.module).item())
        optimizer.step()
        optimizer.zero_grad()
    assert len(losses) == STEPS
    return losses, norms, full_state(model.module)


@pytest.mark.parametrize(
    ("world", "context", "divides"),
    rest_at_night(
        [(2, 2, True), (4, 2, True), (2, 2, False), (1, 1, True), (2, 1, False)],
        lambda world, context, divides: world == 2,
    ),
)
def test_a_loop_trains_as_one_rank_with_whole_sequences(world: int, context: int, divides: bool) -> None:
    """Also where it divides nothing, when all ranks of a group compute the same, and without a context axis."""
    (expected,) = run_distributed(train, 1, 1, False)
    for losses, norms, state in run_distributed(train, world, context, divides):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert norms == pytest.approx(expected[1], rel=2e-6)
        for name, value in expected[2].items():
            torch.testing.assert_close(state[name], value, rtol=2e-6, atol=2e-6, msg=name)


def fails_in_between(rank: int, world: int) -> list[float]:
    """Losses of whole sequences, before and after an error inside of `divided`."""
    strict_warnings()
    strategy = MFSDPFabricStrategy(context=2)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision="64-true")
    fabric.launch()
    model: Any = fabric.setup_module(Finetuned().model)
    tokens = Texts("whole").tokens[:2]
    losses = [model(tokens[:, :8], labels=tokens[:, :8]).loss.item()]

    def fail() -> None:
        with strategy.divided({"input_ids": tokens}) as part:
            model(**part)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    return [*losses, model(tokens[:, :8], labels=tokens[:, :8]).loss.item()]


def test_an_error_inside_leaves_nothing_divided() -> None:
    for before, after in run_distributed(fails_in_between, 2):
        assert after == before
