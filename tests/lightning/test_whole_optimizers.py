"""Under no_shard every optimizer trains under the Trainer as in one process, and is resumed to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mfsdp import MFSDPStrategy
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT, rest_at_night
from tests.helpers.other_optimizers import SOAP, Prodigy, Shampoo
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded, strict_warnings

STEPS, SAVED = 4, 2


def muon_and_adam(parameters: Any) -> list[torch.optim.Optimizer]:
    parameters = list(parameters)
    return [
        torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.02),
        torch.optim.AdamW([one for one in parameters if one.dim() != 2], lr=0.02),
    ]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3, tolerance_change=0.0, history_size=2),
    "LBFGS by hand": partial(torch.optim.LBFGS, lr=0.1, max_iter=3, tolerance_change=0.0),
    "Muon and AdamW by hand": muon_and_adam,
    "Prodigy": Prodigy,
    "Shampoo": Shampoo,
    "SOAP": SOAP,
}


KINDS = ("sharded", "full")


def kind_of(name: str) -> str:
    """Of its checkpoints, on a push."""
    return KINDS[list(OPTIMIZERS).index(name) % 2]


class Chooses(Classifier):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.automatic_optimization = "by hand" not in name

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.name](self.parameters())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        if self.automatic_optimization:
            return self.loss(batch)
        found = self.optimizers()
        for optimizer in found if isinstance(found, list) else [found]:

            def evaluate(optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=evaluate)
        return None


def in_one_process(name: str) -> dict[str, Tensor]:
    model = seeded(Chooses, name=name).double()
    made = model.configure_optimizers()
    (batch,) = loader(32, 32)
    batch = [batch[0].double(), batch[1]]
    for _ in range(STEPS):
        for optimizer in made if isinstance(made, list) else [made]:

            def evaluate(optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model.loss(batch)
                loss.backward()
                return loss

            optimizer.step(evaluate)
    return {key: value.detach() for key, value in model.named_parameters()}


def fits(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}

    def fit(name: str, kind: str, steps: int, path: str | None = None) -> Any:
        model = seeded(Chooses, name=name)
        strategy = MFSDPStrategy(sharding="no_shard", state_dict_type=kind)  # type: ignore[arg-type]
        trainer = make_trainer(folder, world, strategy=strategy, precision="64-true", max_epochs=steps)
        trainer.fit(model, loader(32 // world, 32, rank, world), ckpt_path=path)
        return trainer, full_state(model)

    for name in OPTIMIZERS:
        for kind in KINDS if NIGHT else [kind_of(name)]:
            path = f"{folder}/{name}-{kind}"
            fit(name, kind, SAVED)[0].save_checkpoint(path)
            found[f"{name} {kind}"] = fit(name, kind, STEPS, path)[1]
        found[name] = fit(name, "sharded", STEPS)[1]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(fits, 2, str(tmp_path_factory.mktemp("whole")))


# SOAP's basis is any where a gradient has no rows in a direction, as in this model; tests/engine/test_other_optimizers.py compares it.
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SOAP"])
def test_it_trains_as_in_one_process(trained: list[dict[str, Any]], name: str) -> None:
    expected = in_one_process(name)
    for found in trained:
        assert found[name].keys() == expected.keys()
        for key, value in found[name].items():
            torch.testing.assert_close(value, expected[key], rtol=1e-10, atol=1e-12, msg=lambda text: f"{key}: {text}")  # noqa: B023


@pytest.mark.parametrize(
    ("name", "kind"), rest_at_night(itertools.product(OPTIMIZERS, KINDS), lambda name, kind: kind == kind_of(name))
)
def test_it_is_resumed_to_the_bit(trained: list[dict[str, Any]], name: str, kind: str) -> None:
    for found in trained:
        for key, value in found[f"{name} {kind}"].items():
            assert torch.equal(value, found[name][key]), key
