"""Hugging Face's models divided by their own plans: logits, losses and all gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.tensor_parallel import apply_plan
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double
from tests.helpers.pairwise import in_world
from tests.tensor_parallel.models import (
    MODELS,
    VOCABULARY,
    assert_equal,
    batch_of,
    built,
    copied_model,
    gathered_from_ranks,
    gradients,
    whole_gradients,
)

WORLDS = (2, 4)
RUNS = ("labels", "count", "shifted", "own loss", "checkpointing")


def arguments(run: str) -> dict[str, Any]:
    batch = batch_of()
    if run == "count":
        return {**batch, "num_items_in_batch": torch.tensor(7)}
    if run == "shifted":
        return {**batch, "shift_labels": batch["labels"].roll(1, -1)}
    return batch


def loss_of(model: Any, run: str) -> tuple[Tensor, Tensor]:
    """And the logits."""
    batch = arguments(run)
    if run == "own loss":
        logits = model(input_ids=batch["input_ids"]).logits
        return (logits.log_softmax(-1) * torch.arange(VOCABULARY)).mean(), logits
    output = model(**batch)
    return output.loss, output.logits


def compare(kind: str, run: str) -> None:
    model = built(kind)
    divided = copied_model(model)
    if run == "checkpointing":
        for one in (model, divided):
            enable = getattr(one, "activation_checkpointing_enable", one.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
    apply_plan(divided, None, dist.group.WORLD)
    want, logits = loss_of(model, run)
    want.backward()
    found, own_logits = loss_of(divided, run)
    found.backward()
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    assert all(torch.equal(other, found) for other in gathered_from_ranks(found.detach()))
    if run != "own loss":
        assert own_logits.shape[-1] == VOCABULARY // dist.get_world_size()
        own_logits = torch.cat(gathered_from_ranks(own_logits.detach()), dim=-1)
    torch.testing.assert_close(own_logits, logits, rtol=0, atol=1e-12)
    assert_equal(whole_gradients(divided), gradients(model))


def every_gradient(rank: int, world: int) -> None:
    with in_double():
        for kind, run in in_world(world, WORLDS, MODELS, RUNS):
            try:
                compare(kind, run)
            except Exception as error:
                raise AssertionError(f"{kind}, {run}") from error


@pytest.mark.parametrize("world", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(world: int) -> None:
    run_distributed(every_gradient, world)
