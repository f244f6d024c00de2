"""What a model that was sharded in one fit is good for afterwards: another fit, other strategies, plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import EngineStateError, MFSDPStrategy, ShardingError, full_state_dict, unshard_model
from tests.helpers.distributed import run_distributed
from tests.lightning.models import FOREIGN_WARNINGS, Classifier, loader, make_trainer, seeded

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


def fit(model: Classifier, rank: int, world_size: int, strategy: Any) -> None:
    if strategy == "mfsdp":
        strategy = MFSDPStrategy(units=["Block"])
    trainer = make_trainer("", world_size, max_epochs=-1, max_steps=2, strategy=strategy)
    trainer.fit(model, loader(4, 16, rank, world_size))


def whole(model: nn.Module) -> dict[str, Tensor]:
    return full_state_dict(model, rank0_only=False)


def go_on(rank: int, world_size: int) -> dict[str, Any]:
    import warnings

    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    others = "ddp" if world_size > 1 else "auto"
    reference = seeded()
    fit(reference, rank, world_size, others)
    fit(reference, rank, world_size, others)
    found["expected"] = {name: value.clone() for name, value in reference.state_dict().items()}

    def continued(name: str, between: Any, strategy: Any) -> None:
        model = seeded()
        fit(model, rank, world_size, "mfsdp")
        between(model)
        fit(model, rank, world_size, strategy)
        found[name] = whole(model)

    continued("again", lambda model: model, "mfsdp")
    continued("moved", lambda model: model.double().cpu().float().to("cpu"), "mfsdp")
    continued("left on the host", lambda model: model.cpu(), "mfsdp")
    try:
        continued("left as doubles", lambda model: model.double(), "mfsdp")
    except ShardingError as error:
        found["doubles"] = str(error)
    continued("unsharded", unshard_model, others)
    continued("sharded again", unshard_model, "mfsdp")

    model = seeded()
    fit(model, rank, world_size, "mfsdp")
    try:
        fit(model, rank, world_size, others)
        found["as it is"] = whole(model)
    except (ShardingError, EngineStateError) as error:
        found["refusal"] = str(error)
    try:
        torch.export.export(model, (torch.ones(2, 3),))
        found["export"] = ""
    except Exception as error:
        found["export"] = str(error)
    unshard_model(model)
    exported = torch.export.export(model.eval(), (torch.ones(2, 3),)).module()
    found["exported"] = torch.allclose(exported(torch.ones(2, 3)), model(torch.ones(2, 3)))
    return found


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.nightly), 2])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_distributed(go_on, request.param)[0]


@pytest.mark.parametrize("way", ["again", "moved", "left on the host", "unsharded", "sharded again"])
def test_training_goes_on_as_without_sharding(found: dict[str, Any], way: str) -> None:
    for name, value in found["expected"].items():
        torch.testing.assert_close(found[way][name], value, msg=lambda message, name=name: f"{name}: {message}")


def test_another_dtype_is_not_trained_in_silence(found: dict[str, Any]) -> None:
    assert "main weights of torch.float32 and later converted to torch.float64" in found["doubles"]
    assert "unshard_model" in found["doubles"]


def test_other_strategies_ask_for_a_plain_model_or_train_it_right(found: dict[str, Any]) -> None:
    if "refusal" in found:
        assert "unshard_model" in found["refusal"]
        return
    for name, value in found["expected"].items():
        torch.testing.assert_close(found["as it is"][name], value)


def test_an_export_asks_for_a_plain_model_and_takes_it(found: dict[str, Any]) -> None:
    assert "unshard_model" in found["export"]
    assert found["exported"]
