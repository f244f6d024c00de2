"""What checkpoints hold of an optimizer is what its `state_dict()` has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp import fully_shard, fully_shard_optimizer
from tests.checkpoint.internals import ParameterIndex, full_optimizer_state, lightning_io


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stepped(kind: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(nn.Linear(3, 2))
    optimizer = fully_shard_optimizer(kind(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


class Shown(torch.optim.AdamW):
    """Shows its second moments by their roots."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        state = {
            number: {**values, "exp_avg_sq": values["exp_avg_sq"].sqrt()} for number, values in saved["state"].items()
        }
        return {**saved, "state": state}


def test_state_is_saved_as_its_optimizer_shows_it() -> None:
    model, optimizer = stepped(Shown)
    (root,) = (values["exp_avg_sq"].sqrt() for values in optimizer.state.values() if values["exp_avg_sq"].dim() == 2)
    sharded = lightning_io.optimizer_state(ParameterIndex(model), optimizer)["state"]["weight"]["exp_avg_sq"]
    assert torch.equal(sharded.local.view(root.shape), root)
    assert torch.equal(full_optimizer_state(optimizer, keep=True)["state"][0]["exp_avg_sq"], root)


class Wrapped(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict(), "averages": {}}


def test_another_form_is_refused_with_the_form_that_is_needed() -> None:
    model, optimizer = stepped(Wrapped)
    expected = r"Wrapped.state_dict\(\) has no \"state\", only \['averages', 'base'\]: a checkpoint needs the form of"
    with pytest.raises(ValueError, match=expected):
        lightning_io.optimizer_state(ParameterIndex(model), optimizer)
    with pytest.raises(ValueError, match=expected):
        full_optimizer_state(optimizer, keep=True)


def test_state_of_no_parameter_is_in_a_full_checkpoint_and_refused_in_a_sharded_one() -> None:
    model, optimizer = stepped(torch.optim.SGD)
    optimizer.state["all"] = {"count": torch.tensor(3)}
    assert full_optimizer_state(optimizer, keep=True)["state"]["all"]["count"] == 3
    with pytest.raises(ValueError, match=r"state of 'all' in SGD: expected state of parameters alone.*\"full\""):
        lightning_io.optimizer_state(ParameterIndex(model), optimizer)
