"""Transformer Engine's FusedAdam, with a stand-in: it works on local rows, resumes to the bit, and its other options are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp import MFSDPStrategy, ShardingError, fully_shard, fully_shard_optimizer
from tests.helpers.distributed import run_distributed
from tests.helpers.fused_adam import FusedAdam
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded, strict_warnings

BF16 = torch.bfloat16
MOMENTS: dict[str, Any] = {"float32": {}, "bfloat16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}}
REFUSED: dict[str, dict[str, Any]] = {
    r"FusedAdam\(master_weights=True\): main weights are float32 already": {"master_weights": True},
    r"FusedAdam\(use_decoupled_grad=True\): gradients are where they always are": {"use_decoupled_grad": True},
    r"FusedAdam\(capturable=True\): its step counter would come back": {"capturable": True},
    r"FusedAdam\(exp_avg_dtype=torch.float16\) keeps scales beside its state": {"exp_avg_dtype": torch.float16},
    r"FusedAdam\(exp_avg_sq_dtype=torch.uint8\) keeps scales beside its state": {"exp_avg_sq_dtype": torch.uint8},
}


class Model(Classifier):
    def __init__(self, options: dict[str, Any], known: bool = True) -> None:
        super().__init__()
        self.options, self.known = options, known

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"lr": 0.05, "weight_decay": 0.1}
        return (FusedAdam if self.known else torch.optim.AdamW)(self.parameters(), **options, **self.options)


def runs(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    data = loader(8 // world, 8, rank, world)
    found: dict[str, Any] = {}

    def fit(model: Any, steps: int, kind: str = "sharded", **options: Any) -> Any:
        strategy = MFSDPStrategy(units=["Block"], state_dict_type=kind)  # type: ignore[arg-type]
        trainer = make_trainer(folder, world, strategy=strategy, max_epochs=-1, max_steps=steps)
        trainer.fit(model, data, **options)
        return trainer

    adamw, fused = seeded(Model, options={}, known=False), seeded(Model, options={})
    fit(adamw, 4)
    held = fit(fused, 4).optimizers[0].param_groups[0]["params"]
    found["near"] = [full_state(model) for model in (fused, adamw)]
    found["local"] = not any(isinstance(parameter, DTensor) for parameter in held)
    for name, options in MOMENTS.items():
        for kind in ("sharded", "full"):
            straight, again = seeded(Model, options=options), Model(options)
            path = f"{folder}/{name}-{kind}"
            fit(seeded(Model, options=options), 2, kind).save_checkpoint(path)
            expected = fit(straight, 4, kind).optimizers[0]
            resumed = fit(again, 4, kind, ckpt_path=path).optimizers[0]
            found[f"{name} {kind}"] = [full_state(again), full_state(straight)]
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {kind} {key}"] = [moments(resumed, key), moments(expected, key)]
    return found | refusals()


def moments(optimizer: torch.optim.Optimizer, key: str) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {str(number): optimizer.state[one][key] for number, one in enumerate(parameters) if one.numel()}


def refusals() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for expected, options in REFUSED.items():
        model = fully_shard(nn.Linear(4, 6))
        with pytest.raises(ShardingError, match=expected):
            fully_shard_optimizer(FusedAdam(model.parameters(), **options))
    model = fully_shard(nn.Linear(4, 6), offload="optimizer")
    with pytest.raises(ShardingError, match="FusedAdam counts the calls of its step, and offload"):
        fully_shard_optimizer(FusedAdam(model.parameters()))
    derived = type("FusedAdam", (FusedAdam,), {"__module__": "mine"})
    model = fully_shard(nn.Linear(4, 6))
    optimizer = fully_shard_optimizer(derived(model.parameters()))
    found["derived"] = all(isinstance(one, DTensor) for group in optimizer.param_groups for one in group["params"])
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("fused_adam")
    return run_distributed(runs, 2, str(folder))


def test_it_works_on_local_rows_and_a_subclass_does_not(ranks: Any) -> None:
    for found in ranks:
        assert found["local"]
        assert found["derived"]
        fused, adamw = found["near"]
        for name, value in adamw.items():
            torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("moments", MOMENTS)
def test_it_resumes_to_the_bit(ranks: Any, moments: str, kind: str) -> None:
    for found in ranks:
        for part in ("", " exp_avg", " exp_avg_sq"):
            again, straight = found[f"{moments} {kind}{part}"]
            assert again.keys() == straight.keys()
            for name, value in straight.items():
                assert torch.equal(again[name], value), f"{part} {name}"
                assert again[name].dtype is value.dtype
                assert not part or value.dtype is getattr(torch, moments)
