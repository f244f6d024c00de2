"""FP8 and FP4 in the predictor's layers: the same recipes in forward and in what is computed again, with the small engine of tests/te."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp import EngineStateError
from lightning_mfsdp.te import Fp8Compute, Fp8Options
from tests.helpers.distributed import run_distributed
from tests.lightning.models import full_state, make_trainer, seeded, strict_warnings
from tests.mtp.models import Model, batch
from tests.mtp.test_checkpoint import Net, data
from tests.te import fake_engine
from tests.te.test_training import fp8, kinds, scales

DIM = 32
FP4 = {"model.predictor": "nvfp4"}


class WideNet(Net):
    """Sizes that 8 and 4 bits can multiply."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = Model(**{"dim": DIM, "dropout": 0.2, **options})


def trained(
    rank: int, world: int, overrides: dict[str, str], **options: Any
) -> tuple[dict[str, Tensor], list[str | None]]:
    """Weights after two steps, and the recipes of all linear layers in the order of their calls."""
    fake_engine.forget()
    model = seeded(WideNet, **options)
    trainer = make_trainer("unused", world, strategy="mfsdp", plugins=[fp8(overrides=overrides)], max_steps=2)
    torch.manual_seed(5 + rank)
    trainer.fit(model, data(rank, 2))
    assert type(model.model.predictor.layers[0].projection) is fake_engine.Linear
    return full_state(model), kinds()


def recipes(rank: int, world: int) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    everything = dict.fromkeys(fake_engine.answers, (True, ""))
    with fake_engine.installed(), mock.patch.object(fake_engine, "answers", everything):
        for name, overrides in (("fp8", {}), ("fp4", FP4)):
            for shared in (False, True):
                kept, again = (
                    trained(rank, world, overrides, depth=2, shared=shared, recompute=recompute)
                    for recompute in (False, True)
                )
                found[f"{name} {shared=}"] = kept, again
    return found


def test_recipes_of_the_predictor_are_entered_in_forward_and_recompute_alike() -> None:
    """Weights are those of a run that keeps everything, to the bit, with one layer for both depths too."""
    for ranks in run_distributed(recipes, 2):
        assert len(ranks) == 4
        for name, ((weights, once), (same, again)) in ranks.items():
            ahead = "nvfp4" if name.startswith("fp4") else "current"
            # Two blocks of two products, two depths of three; in backward the depths again.
            assert once == (["current"] * 4 + [ahead] * 6) * 2, name
            assert again == (["current"] * 4 + [ahead] * 12) * 2, name
            assert all(torch.equal(value, same[key]) for key, value in weights.items()), name


def as_the_library(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Enters again what is entered now, as the library's own checkpoint does."""
    enabled, recipe = fake_engine.state.enabled, fake_engine.state.recipe

    def contexts() -> tuple[AbstractContextManager[Any], ...]:
        return tuple(fake_engine.pytorch.autocast(enabled=enabled, recipe=recipe) for _ in range(2))

    again: Tensor = checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    return again


def test_a_function_of_ones_own_enters_contexts_where_only_the_forward_has_one() -> None:
    """A loop without a strategy: the backward runs outside of every context."""
    found = []
    with fake_engine.installed():
        for recompute in (False, as_the_library, True):
            fake_engine.forget()
            torch.manual_seed(0)
            model = Model(dim=DIM, recompute=recompute)
            compute = Fp8Compute(Fp8Options(replace_layers=True))
            compute.prepare(model, None)
            with torch.autocast("cpu", torch.bfloat16), compute.forward():
                loss = model.loss(*batch(0, length=8))
            loss.backward()
            assert kinds() == ["current"] * (10 if recompute else 7)
            found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*grads) for grads in zip(found[0], found[1], strict=True))
    assert all(torch.equal(*grads) for grads in zip(found[0], found[2], strict=True))


def test_delayed_scaling_trains_to_the_bit_as_without_recompute() -> None:
    """With the scales of the forward, and nothing noted twice. In a loop without a strategy."""
    found = []
    with fake_engine.installed():
        for recompute in (False, True):
            fake_engine.forget()
            torch.manual_seed(0)
            model = Model(dim=DIM, depth=2, dropout=0.2, recompute=recompute)
            compute = Fp8Compute(Fp8Options(recipe=fake_engine.DelayedScaling(amax_history_len=3), replace_layers=True))
            compute.prepare(model, None)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                with torch.autocast("cpu", torch.bfloat16), compute.forward():
                    loss = model.loss(*batch(step, length=8))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([*model.parameters(), *scales(model).values()])
            assert bool(fake_engine.checkpoints) == recompute
        assert len(found[0]) > len(list(model.parameters()))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_one_layer_for_all_depths_is_refused_where_its_scales_would_be_mixed_up() -> None:
    with fake_engine.installed():
        model = Model(dim=DIM, depth=2, shared=True, recompute=True)
        compute = Fp8Compute(Fp8Options(recipe="delayed", replace_layers=True))
        compute.prepare(model, None)
        with compute.forward(), pytest.raises(EngineStateError, match=r"in the wrong order.*shared=False"):
            model.loss(*batch(0, length=8))
