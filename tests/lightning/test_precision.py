"""MFSDPPrecision: translation of Lightning's plugins, loss scaling over ranks, clipping."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn

from lightning_mfsdp import DistributedGradScaler, MFSDPPrecision, MFSDPStrategy, MixedPrecisionPolicy
from lightning_mfsdp.trainer.precision import translate_precision
from tests.helpers.distributed import run_distributed
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded, strict_warnings, train_plainly

STEPS = 3


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (Precision(), "32-true"),
        (DoublePrecision(), "64-true"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (HalfPrecision("16-true"), "16-true"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (MixedPrecision("16-mixed", "cpu"), "16-mixed"),
    ],
)
def test_lightnings_plugins_are_translated(plugin: Precision, name: str) -> None:
    translated = translate_precision(plugin, None)
    assert translated.precision == name
    assert translated.needs_scaler == name.startswith("16")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_the_trainers_precision_string_arrives(precision: Any, tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, 1, precision=precision)
    assert isinstance(trainer.precision_plugin, MFSDPPrecision)
    assert trainer.precision == precision


def test_plugins_without_a_counterpart_are_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"FSDPPrecision.*Use precision=..."):
        translate_precision(FSDPPrecision("32-true"), None)


def test_unknown_names_and_useless_scalers_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of '32-true'"):
        MFSDPPrecision("fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing computes in float16"):
        MFSDPPrecision("bf16-mixed", scaler=torch.amp.GradScaler("cpu"))


def test_a_plain_scaler_is_taken_as_settings_and_another_class_as_it_is() -> None:
    precision = MFSDPPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5))
    precision.connect_device("cpu")
    assert type(precision.scaler) is DistributedGradScaler
    assert precision.scaler.get_scale() == 8.0
    assert precision.scaler.get_growth_interval() == 5
    own = DistributedGradScaler("cpu")
    precision = MFSDPPrecision("16-mixed", scaler=own)
    precision.connect_device("cpu")
    assert precision.scaler is own


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # of Lightning's evaluation under other strategies
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_under_another_strategy_it_is_the_precision_of_that_name(precision: Any, tmp_path: Any) -> None:
    found = []
    for plugin in ({"plugins": [MFSDPPrecision(precision)]}, {"precision": precision}):
        model = seeded(Classifier)
        trainer = make_trainer(tmp_path, 1, strategy="auto", **plugin)
        trainer.fit(model, loader(8), loader(8))
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert {name: value.dtype for name, value in found[0].items()} == {
        name: value.dtype for name, value in found[1].items()
    }
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_options_about_sharded_modules_are_refused_under_another_strategy(tmp_path: Any) -> None:
    plugin = MFSDPPrecision("32-true", policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16))
    trainer = make_trainer(tmp_path, 1, strategy="auto", plugins=[plugin])
    with pytest.raises(ValueError, match=r"policy=MixedPrecisionPolicy.* another strategy. Use strategy=\"mfsdp\""):
        trainer.fit(seeded(Classifier), loader(8), loader(8))


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_what_is_complex_stays_so_in_a_true_precision(precision: Any, tmp_path: Any) -> None:
    """Under DDP, 64-true leaves it alone and the others take the real part."""

    class Rotated(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.phase = torch.nn.Parameter(torch.polar(torch.ones(12), torch.arange(12.0)))
            self.register_buffer("turns", torch.polar(torch.ones(12), torch.arange(12.0)))

    model = Rotated()
    before = model.phase.detach().clone()
    MFSDPPrecision(precision).cast_module(model)
    assert model.phase.dtype == model.turns.dtype == torch.complex64
    assert torch.equal(model.phase.detach(), before)
    assert model.head.weight.dtype == {"64-true": torch.float64, "16-true": torch.float16}.get(
        precision, torch.bfloat16
    )


def test_inputs_follow_the_true_precisions_only() -> None:
    batch = {"x": torch.ones(2), "y": [torch.ones(2, dtype=torch.int64)]}
    for name, dtype in {"16-true": torch.float16, "64-true": torch.float64, "bf16-mixed": torch.float32}.items():
        converted = MFSDPPrecision(name).convert_input(batch)  # type: ignore[arg-type]
        assert converted["x"].dtype == dtype
        assert converted["y"][0].dtype == torch.int64


class Overflowing(Classifier):
    """float16 overflows on rank 1 alone, in the second batch, in rows that rank 1 owns or not."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e30 if batch_idx == 1 and torch.distributed.get_rank() == 1 else loss


def loss_scaling(rank: int, world_size: int) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    for name in ("16-mixed", "16-true"):
        model = seeded(Overflowing, optimizer="sgd")
        precision = MFSDPPrecision(name, scaler=torch.amp.GradScaler("cpu", init_scale=128.0))  # type: ignore[arg-type]
        trainer = make_trainer(
            tempfile.gettempdir(),
            world_size,
            strategy=MFSDPStrategy(units=["Block"]),
            plugins=[precision],
            gradient_clip_val=0.5,
        )
        trainer.fit(model, loader(8 // world_size, 8 * STEPS, rank, world_size))
        assert precision.scaler is not None
        found[name] = full_state(model), precision.scaler.get_scale(), precision.state_dict()["scale"]
    return found


@pytest.fixture(scope="module")
def scaled() -> list[dict[str, Any]]:
    return run_distributed(loss_scaling, 2)


@pytest.mark.parametrize(("name", "tolerance"), [("16-mixed", 2e-3), ("16-true", 1e-2)])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(
    scaled: Any, name: str, tolerance: float
) -> None:
    model = seeded(optimizer="sgd")
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(loader(8, 8 * STEPS)):
        optimizer.zero_grad()
        model.loss(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if index != 1:
            optimizer.step()
    for results in scaled:
        state, scale, saved = results[name]
        assert scale == saved == 64.0
        for key, tensor in model.named_parameters():
            torch.testing.assert_close(state[key].float(), tensor.detach(), rtol=tolerance, atol=tolerance, msg=key)


class CallsItself(Classifier):
    """Calls itself where Lightning has no autocast around it."""

    def on_train_epoch_end(self) -> None:
        self.outside = self(torch.ones(2, 3)).float()


def called_outside_of_steps(rank: int, world_size: int) -> list[Tensor]:
    strict_warnings()
    found = []
    for precision in ("32-true", "bf16-mixed"):
        model = seeded(CallsItself, lr=0.0)
        trainer = make_trainer(tempfile.gettempdir(), world_size, precision=precision, max_steps=1)
        trainer.fit(model, loader(4, 8, rank, world_size))
        found.append(model.outside)
    return found


def test_a_mixed_precision_model_may_be_called_outside_of_autocast() -> None:
    for full, mixed in run_distributed(called_outside_of_steps, 2):
        torch.testing.assert_close(mixed, full, rtol=0.02, atol=0.02)


def test_value_clipping_under_loss_scaling_clips_unscaled_gradients() -> None:
    (state,) = run_distributed(clip_scaled, 1)
    reference = train_plainly(seeded(optimizer="sgd"), 8, STEPS, clip_value=0.01)
    for key, tensor in reference.named_parameters():
        torch.testing.assert_close(state[key], tensor.detach(), rtol=2e-3, atol=2e-3, msg=key)


def clip_scaled(rank: int, world_size: int) -> dict[str, Tensor]:
    strict_warnings()
    model = seeded(optimizer="sgd")
    trainer = make_trainer(
        tempfile.gettempdir(),
        world_size,
        plugins=[MFSDPPrecision("16-mixed")],
        gradient_clip_val=0.01,
        gradient_clip_algorithm="value",
    )
    trainer.fit(model, loader(8, 8 * STEPS))
    return full_state(model)
