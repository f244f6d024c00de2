"""Optimizers of a resumed run: those that hold DTensors too, all of them or none; and what does not fit changes nothing."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lightning_mfsdp import MFSDPStrategy, sharded_parameters
from lightning_mfsdp.optim import AdamW
from tests.checkpoint.internals import full_optimizer_state
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT, rest_at_night
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class OwnAdamW(torch.optim.AdamW):
    """Nobody knows that it works element by element, so it holds DTensors."""


class Own(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OwnAdamW(self.parameters(), lr=0.05)


class Scaled(Classifier):
    """Of numbers, too, one rank has the state."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.factor


class Narrow(Classifier):
    """Its moments are in bfloat16, or in what the run that goes on asks for."""

    def __init__(self, kind: str = "bfloat16") -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "torch":
            return torch.optim.AdamW(self.parameters(), lr=0.05)
        return AdamW(self.parameters(), lr=0.05, state_dtype=self.kind)  # type: ignore[arg-type]


class Lean(Classifier):
    """Weights in bfloat16 with remainders, and moments in 8 bits."""

    precision = "bf16-true"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW(self.parameters(), lr=0.05, state_dtype="8bit", store_param_remainders=True)


class TwoGroups(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        return torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=0.05)


class TwoOptimizers(Classifier):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.count = count

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        both = [torch.optim.AdamW(parameters[:3]), torch.optim.AdamW(parameters[3:])]
        return both[: self.count]


KEPT = {
    "Own": "full",
    "Scaled": "sharded",
    "Narrow": "sharded",
    "Lean": "full",
}  # kinds of their checkpoints, on a push


def runs(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    data = loader(8 // world, 8, rank, world)
    found: dict[str, Any] = {}

    def fit(model: Any, steps: int, kind: str = "sharded", **options: Any) -> Any:
        strategy = MFSDPStrategy(units=["Block"], state_dict_type=kind)  # type: ignore[arg-type]
        precision = getattr(model, "precision", None)
        trainer = make_trainer(folder, world, strategy=strategy, precision=precision, max_epochs=-1, max_steps=steps)
        trainer.fit(model, data, **options)
        return trainer

    for model in (Own, Scaled, Narrow, Lean):
        straight = seeded(model)
        fit(straight, 4)
        for kind in ("sharded", "full") if NIGHT else (KEPT[model.__name__],):
            path = f"{folder}/{model.__name__}-{kind}.ckpt"
            fit(seeded(model), 2, kind).save_checkpoint(path)
            again = seeded(model)
            trainer = fit(again, 4, ckpt_path=path)
            steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
            found[f"{model.__name__} {kind}"] = full_state(straight), full_state(again), steps

    found["moments"] = {}
    for kind in ("float32", "torch", "bfloat16"):
        source = f"{folder}/Narrow-sharded.ckpt" if kind != "bfloat16" else f"{folder}/moments-torch.ckpt"
        trainer = fit(seeded(Narrow, kind=kind), 2, ckpt_path=source)
        trainer.save_checkpoint(f"{folder}/moments-{kind}.ckpt")
        state = full_optimizer_state(trainer.optimizers[0], keep=True)["state"]
        found["moments"][kind] = {number: values["exp_avg_sq"] for number, values in state.items()}

    fit(seeded(Classifier), 1, "full").save_checkpoint(f"{folder}/one.ckpt")
    other = seeded(TwoGroups)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(3.0)
    with pytest.raises(RuntimeError, match="has parameter groups of"):
        fit(other, 2, ckpt_path=f"{folder}/one.ckpt")
    found["untouched"] = all(bool(view.main.eq(3.0).all()) for view in sharded_parameters(other))

    for kind in ("sharded", "full"):
        for count in (1, 2):
            fit(seeded(TwoOptimizers, count=count), 2, kind).save_checkpoint(f"{folder}/{count}-{kind}.ckpt")
    said = found["numbers"] = []
    for saved, present in (("2-sharded", 1), ("2-full", 1), ("1-full", 2)):
        with pytest.raises(RuntimeError) as info:
            fit(seeded(TwoOptimizers, count=present), 4, ckpt_path=f"{folder}/{saved}.ckpt")
        said.append(str(info.value))
    missing = "holds no state for 1 of 2 optimizers, which start afresh"
    with pytest.warns(UserWarning, match=missing) if rank == 0 else nullcontext():
        trainer = fit(seeded(TwoOptimizers, count=2), 6, ckpt_path=f"{folder}/1-sharded.ckpt")
    found["afresh"] = [
        {float(state["step"]) for state in optimizer.state.values() if state} for optimizer in trainer.optimizers
    ]
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(runs, 2, str(tmp_path_factory.mktemp("optimizers")))


@pytest.mark.parametrize(
    ("model", "kind"),
    rest_at_night(itertools.product(KEPT, ("sharded", "full")), lambda model, kind: kind == KEPT[model]),
)
def test_an_optimizer_goes_on_to_the_bit_whether_it_holds_dtensors_or_rows(ran: Any, model: str, kind: str) -> None:
    for found in ran:
        straight, again, steps = found[f"{model} {kind}"]
        assert steps == {4.0}, "on every rank, also for parameters without rows there"
        for name, value in straight.items():
            assert torch.equal(again[name], value), name


def test_moments_take_the_dtype_of_the_run_that_goes_on(ran: Any) -> None:
    """From bfloat16 to float32, of ours and of torch's, and back, to the bit."""
    for found in ran:
        moments = found["moments"]
        assert {kind: {value.dtype for value in values.values()} for kind, values in moments.items()} == {
            "float32": {torch.float32},
            "torch": {torch.float32},
            "bfloat16": {torch.bfloat16},
        }
        for number, value in moments["bfloat16"].items():
            assert torch.equal(moments["float32"][number], value.float()), number
            assert torch.equal(moments["torch"][number], value.float()), number


def test_a_full_checkpoint_that_does_not_fit_the_optimizer_leaves_the_model_alone(ran: Any) -> None:
    assert [found["untouched"] for found in ran] == [True, True]


def test_another_number_of_optimizers_is_refused_or_told(ran: Any) -> None:
    for found in ran:
        fewer, fewer_in_full, more_in_full = found["numbers"]
        assert "holds 2 states of optimizers, but 1 optimizers are there" in fewer
        assert "holds 2 states of optimizers, but 1 optimizers are there" in fewer_in_full
        assert "holds 1 states of optimizers, but 2 optimizers are there" in more_in_full
        assert found["afresh"] == [{4.0}, {2.0}]
