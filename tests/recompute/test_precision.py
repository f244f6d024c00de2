"""Transformer Engine's modules inside of what is computed again: its own checkpoint, its recipes. A small engine is in its place."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import Recompute, apply_recompute
from lightning_mfsdp.te import Fp8Compute, Fp8Options
from tests.helpers.distributed import run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import full_state, seeded, strict_warnings
from tests.te import fake_engine
from tests.te.test_training import ROWS, Net, data, fp8, kinds, scales, trainer_for

# Of a push.
FEW = {"delayed": ("uniform", "pairs", "linear"), "current": ("pairs",), "nvfp4": ("host",)}


def trained(rank: int, world: int, recompute: Recompute | None, recipe: Any, **options: Any) -> dict[str, Tensor]:
    fake_engine.forget()
    model = seeded(Net)
    strategy = {"recompute": recompute}
    trainer = trainer_for(
        world, fp8(recipe, **options), strategy_options=strategy, accumulate_grad_batches=2, max_steps=3
    )
    trainer.fit(model, data(rank, world, 6))
    return full_state(model) | scales(model)


def runs(rank: int, world: int) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {"states": {}}
    configs = {"uniform": Recompute(), "pairs": Recompute(num_layers=2), "host": Recompute(offload=True)}
    configs["linear"] = Recompute(method="selective", modules=["blocks.*.linear"])
    with fake_engine.installed(), mock.patch.dict(fake_engine.answers, nvfp4=(True, "")):
        for name, recipe in (
            ("delayed", fake_engine.DelayedScaling(amax_history_len=3)),
            ("current", "current"),
            ("nvfp4", fake_engine.NVFP4BlockScaling()),
        ):
            around = {"keep_high_precision": ["inputs", "head"]}  # FP4 multiplies other sizes
            plain = trained(rank, world, None, recipe, **around)
            assert not fake_engine.checkpoints
            for kind, config in configs.items():
                if not NIGHT and kind not in FEW[name]:
                    continue
                if (name, kind) == ("delayed", "pairs"):
                    with pytest.raises(RuntimeError, match="keeps the scales of one region at a time"):
                        trained(rank, world, config, recipe, **around)
                    continue
                found["states"][name, kind] = trained(rank, world, config, recipe, **around), plain
                assert len(fake_engine.checkpoints) == 3 * 6, "three regions, six microbatches"
        trained(
            rank,
            world,
            Recompute(),
            "current",
            keep_high_precision=["blocks.1", "head"],
            overrides={"blocks.2": "block"},
        )
        found["groups"] = Counter(call.group is None for call in fake_engine.calls if call.recipe is not None)
        found["kinds"] = kinds()
    return found


def test_runs_are_equal_to_the_bit_whatever_the_recipe() -> None:
    """Delayed scaling would see later scales in anything but the library's own checkpoint."""
    for found in run_distributed(runs, 2):
        assert len(found["states"]) == (11 if NIGHT else 4)
        for case, (state, expected) in found["states"].items():
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(state[key], value), (case, key)
        # inputs, two blocks of three; in backward the blocks again, the last one first. Six microbatches.
        assert found["kinds"] == ["current", "current", "block", "block", "current"] * 6
        assert list(found["groups"]) == [False], "scales are shared by the same ranks when computed again"


def layers(recipe: Any, before: Recompute | None = None) -> tuple[nn.Sequential, Fp8Compute]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)))
    if before is not None:
        apply_recompute(model, before)
    compute = Fp8Compute(Fp8Options(recipe=recipe, replace_layers=True))
    compute.prepare(model, None)
    return model, compute


def test_a_plain_loop_needs_no_context_around_its_backward() -> None:
    """And one around it that is another one does no harm: what was off stays off, what was one recipe stays it."""
    with fake_engine.installed():
        others = fake_engine.autocast(enabled=True, recipe=fake_engine.Float8BlockScaling())
        for config in (Recompute(), Recompute(num_layers=2)):
            for enabled, expected in ((True, ["current"] * 4), (False, [None] * 4)):
                model, compute = layers("current")
                apply_recompute(model, config)
                fake_engine.calls.clear()
                with fake_engine.autocast(enabled=enabled, recipe=compute.recipe):
                    loss = model(torch.randn(ROWS, 16)).sum()
                with others:
                    loss.backward()
                assert kinds() == expected, (config, enabled)
                assert fake_engine.state.depth == 0


def test_modules_of_the_library_may_come_after_recompute_was_applied() -> None:
    """As where a model applies it in `configure_model`, before the precision plugin replaces layers."""
    with fake_engine.installed():
        fake_engine.forget()
        model, compute = layers("current", Recompute())
        with fake_engine.autocast(enabled=True, recipe=compute.recipe):
            loss = model(torch.randn(ROWS, 16)).sum()
        loss.backward()
        assert len(fake_engine.checkpoints) == 2, "the library's own checkpoint"
        assert kinds() == ["current"] * 4
        model, _ = layers("current", Recompute(method="selective", save_ops=["matmul"]))
        with pytest.raises(ValueError, match=r"save_ops: 0 has modules of Transformer Engine"):
            model(torch.randn(ROWS, 16))


def test_operators_inside_of_library_modules_cannot_be_kept() -> None:
    with fake_engine.installed():
        model, _ = layers("current")
        with pytest.raises(ValueError, match=r"save_ops: 0 has modules of Transformer Engine"):
            apply_recompute(model, Recompute(method="selective", save_ops=["matmul"]))


@pytest.mark.parametrize("gradients", [True, False])
def test_library_modules_are_not_computed_in_pieces(gradients) -> None:
    tiled = Recompute(method="none", tiled_modules=["0"], tiles=2)
    with fake_engine.installed(), torch.set_grad_enabled(gradients):
        model, _ = layers("current", tiled)
        with pytest.raises(ValueError, match=r"tiled_modules: 0 has modules of Transformer Engine"):
            model(torch.randn(ROWS, 16))
        with pytest.raises(ValueError, match=r"tiled_modules: 0 has modules of Transformer Engine"):
            apply_recompute(model, tiled)


def test_the_library_is_not_asked_for_where_none_of_its_modules_is() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    apply_recompute(model, Recompute())
    with mock.patch("lightning_mfsdp.te.library.load", side_effect=AssertionError("asked")):
        model(torch.randn(2, 4)).sum().backward()
    assert model[0][0].weight.grad is not None
