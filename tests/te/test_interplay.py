"""FP8 beside what else may happen in a run: an interrupt, a second model, averaged weights. With a small engine in the library's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp.callbacks import ShardedEMA
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from lightning_mfsdp.te import Fp8Compute, Fp8Options
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import full_state, seeded, strict_warnings
from tests.te import fake_engine
from tests.te.test_training import ROWS, Net, data, fp8, scales, trainer_for


def delayed() -> fake_engine.DelayedScaling:
    return fake_engine.DelayedScaling(amax_history_len=3)


# -- an interrupt ------------------------------------------------------------------------------------------------------


def interrupt_forward(compute: Fp8Compute, model: nn.Module, x: Tensor) -> None:
    with compute.forward():
        model(x * 100)
        raise KeyboardInterrupt


def interrupt_backward(compute: Fp8Compute, model: nn.Module, x: Tensor) -> None:
    with compute.forward():
        y = model(x)
    with compute.backward():
        y.sum().backward()
        raise KeyboardInterrupt


def steps(interrupt: Any) -> tuple[list[Tensor], int]:
    """Weights and scales after four steps with an interrupted one between, and how often scales were set while it was left."""
    fake_engine.forget()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    compute = Fp8Compute(Fp8Options(recipe=delayed(), replace_layers=True))
    compute.prepare(model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = 0
    for step in range(4):
        x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step))
        if step == 2 and interrupt is not None:
            before = fake_engine.updates.count("scaling_fwd")
            with pytest.raises(KeyboardInterrupt):
                interrupt(compute, model, x)
            late = fake_engine.updates.count("scaling_fwd") - before
            assert fake_engine.state.depth == 0
            assert not fake_engine.state.enabled
            assert not compute.is_in_forward
            model.zero_grad()
        with compute.forward():
            loss = model(x).square().mean()
        with compute.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *scales(model).values()], late


def test_an_interrupted_forward_sets_no_scales_and_leaves_nothing_behind() -> None:
    """Setting scales is a collective, which other ranks would not come to."""
    with fake_engine.installed():
        expected, _ = steps(None)
        found, late = steps(interrupt_forward)
    assert late == 0
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_contexts_are_left_after_an_interrupted_backward() -> None:
    with fake_engine.installed():
        _, late = steps(interrupt_backward)
    assert late == 1, "its forward had ended"


# -- two models, and averages ------------------------------------------------------------------------------------------


def two_models(rank: int, world: int, folder: str, found: dict[str, Any]) -> None:
    """In turns, each with an optimizer of its own; resumed in the middle."""
    from lightning.fabric import Fabric

    def run(recipe: Any, wanted: range, path: str | None, names: tuple[str, ...]) -> Any:
        fake_engine.forget()
        strategy = MFSDPFabricStrategy(units=["Block"])
        strategy.precision = fp8(recipe)
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        state: dict[str, Any] = {}
        for name in names:
            torch.manual_seed(len(name))
            model = fabric.setup_module(Net())
            state |= {name: model, f"optimizer of {name}": None}
            state[f"optimizer of {name}"] = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
        if path is not None:
            fabric.load(path, state)
        for index, (x, y) in enumerate(data(rank, world, 4)):
            for name in names if index in wanted else ():
                fabric.backward(F.cross_entropy(state[name](x), y))
                state[f"optimizer of {name}"].step()
                state[f"optimizer of {name}"].zero_grad()
        numbers = {
            f"{name} {key}": value
            for name in names
            for key, value in (full_state(state[name]) | scales(state[name].module)).items()
        }
        return fabric, state, numbers

    both = ("critic", "generator")
    fabric, state, _ = run("current", range(2), None, both)
    fabric.save(f"{folder}/two", state)
    fabric, state, saved = run(delayed(), range(2), None, both)
    fabric.save(f"{folder}/two delayed", state)
    found["equal: scales of two models"] = run(delayed(), range(0), f"{folder}/two delayed", both)[2], saved
    expected = run("current", range(4), None, both)[2]
    found["equal: two models resumed"] = run("current", range(2, 4), f"{folder}/two", both)[2], expected
    alone = run("current", range(4), None, both[:1])[2] | run("current", range(4), None, both[1:])[2]
    found["equal: two models or one"] = expected, alone


AVERAGED = (False, True) if NIGHT else (True,)


def averaged(rank: int, world: int, folder: str, found: dict[str, Any]) -> None:
    """An average is shown in validation, where its values are far from the weights' own."""
    for fp8_weights in AVERAGED:
        states = []
        for callbacks in ([], [ShardedEMA(0.9)]):
            fake_engine.forget()
            model = seeded(Net)
            options = {"val_check_interval": 1, "limit_val_batches": 1, "callbacks": callbacks}
            trainer = trainer_for(world, fp8(delayed(), fp8_weights=fp8_weights), **options)
            trainer.fit(model, data(rank, world, 4), data(rank, world, 1, factor=100.0))
            noted = {key: value[1:] if "history" in key else value for key, value in scales(model).items()}
            states.append(full_state(model) | noted)  # the first row is of the forward under way
        found[f"equal: averaged, FP8 weights: {fp8_weights}"] = states[1], states[0]


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    for case in (two_models, averaged):
        with fake_engine.installed():
            case(rank, world, folder, found)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("interplay")
    return run_distributed(on_two_ranks, 2, str(folder))


@pytest.mark.parametrize(
    "case",
    [
        "two models resumed",
        "two models or one",
        "scales of two models",
        *(f"averaged, FP8 weights: {fp8_weights}" for fp8_weights in AVERAGED),
    ],
)
def test_no_number_is_another(ranks: list[dict[str, Any]], case: str) -> None:
    for found in ranks:
        one, other = found[f"equal: {case}"]
        assert one.keys() == other.keys()
        assert len(one) > 10
        different = [key for key, value in other.items() if not torch.equal(one[key], value)]
        assert not different, different
