"""What of capturing a step shows without a GPU: refusals, and optimizers made ready. The graph itself: tests/gpu/test_capture.py."""

from __future__ import annotations

import pytest
import torch

from lightning_mfsdp.engine import EngineStateError, capture_step, fully_shard
from lightning_mfsdp.engine.features.graphs.capture import make_capturable
from tests.engine.cases import run_cases


def on_cpu(rank: int, world: int) -> None:
    model = fully_shard(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(EngineStateError, match="Linear is on cpu; CUDA graphs need parameters on cuda"):
        capture_step(lambda x: model(x), model, optimizer)


def test_capture_on_cpu_is_refused():
    assert run_cases({"on cpu": on_cpu}, 1) == {"on cpu": ""}


def test_learning_rates_become_tensors_that_schedulers_write_to():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": [weight], "lr": 0.5}], lr=0.1)
    weight.grad = torch.ones(3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    make_capturable(optimizer, torch.device("cpu"))
    (group,) = optimizer.param_groups
    rate = group["lr"]
    assert group["capturable"] is True
    assert rate.item() == 0.5
    schedule.step()
    assert group["lr"] is rate
    assert rate.item() == 0.25
    assert optimizer.state[weight]["step"].device.type == "cpu"


def test_learning_rates_are_as_exact_as_float32():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    make_capturable(optimizer, torch.device("cpu"))
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-3, rel=1e-6)


def test_an_optimizer_that_cannot_be_captured_is_named():
    with pytest.raises(EngineStateError, match="SGD has no option `capturable`"):
        make_capturable(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), torch.device("cpu"))
