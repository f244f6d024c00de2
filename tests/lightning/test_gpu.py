"""The strategy under the Trainer on CUDA with NCCL."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import MFSDPPrecision, MFSDPStrategy, fully_shard_optimizer
from lightning_mfsdp.callbacks import MemoryReport, NaNGradientReporter, NormMonitor, StepProfile
from lightning_mfsdp.engine import MemorySample, MemoryTimeline
from lightning_mfsdp.profile import Breakdown
from tests.engine.internals import context_of
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded, strict_warnings, train_plainly
from tests.lightning.test_checkpoint import assert_same, local_state
from tests.lightning.test_nan_gradients import Poisoned
from tests.lightning.test_norm_monitor import Metrics

STEPS = 4

one_gpu = [pytest.mark.gpu, needs_gpus(1)]
two_gpus = [pytest.mark.gpus2, needs_gpus(2)]


class Fused(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1, fused=True)


def cuda_trainer(world_size: int, **options: Any) -> Any:
    settings = {"accelerator": "cuda", "max_epochs": -1, "max_steps": STEPS, "strategy": MFSDPStrategy(units=["Block"])}
    return make_trainer(tempfile.gettempdir(), world_size, **{**settings, **options})


def precision_options(precision: Any) -> dict[str, Any]:
    """A scale that such a small model does not overflow: a skipped step could not be compared."""
    if precision != "16-mixed":
        return {"precision": precision}
    return {"plugins": [MFSDPPrecision(precision, scaler=torch.amp.GradScaler("cuda", init_scale=128.0))]}


def fit_resume_and_report(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    data = loader(8 // world_size, 8 * STEPS, rank, world_size)
    for precision in ("32-true", "bf16-mixed", "bf16-true", "16-mixed"):
        model = seeded(Fused)
        trainer = cuda_trainer(world_size, **precision_options(precision))
        trainer.fit(model, data)
        found[precision] = full_state(model)
        if precision == "bf16-mixed":
            trainer.save_checkpoint(f"{folder}/fused.ckpt")
            again_model = seeded(Fused)
            again = cuda_trainer(world_size, precision=precision)
            again.fit(again_model, data, ckpt_path=f"{folder}/fused.ckpt")
            found["saved"], found["loaded"] = local_state(trainer, model), local_state(again, again_model)
            found["val_loss"] = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    poisoned = seeded(Poisoned)
    reporter = NaNGradientReporter("skip")
    with pytest.warns(UserWarning, match="blocks.1.linear.weight") if rank == 0 else nullcontext():
        cuda_trainer(world_size, callbacks=[reporter]).fit(poisoned, data)
    found["skipped"] = reporter.steps, all(bool(tensor.isfinite().all()) for tensor in full_state(poisoned).values())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("cuda")
    return run_distributed(fit_resume_and_report, 2, str(folder), backend="nccl")


def assert_near(state: dict[str, Tensor], reference: nn.Module, tolerance: float) -> None:
    for name, tensor in reference.named_parameters():
        torch.testing.assert_close(state[name].float(), tensor.detach(), rtol=tolerance, atol=tolerance, msg=name)


def profile_steps(rank: int, world_size: int) -> Breakdown | None:
    strict_warnings()
    monitor = StepProfile(3, steps=2)
    trainer = cuda_trainer(world_size, callbacks=[monitor], gradient_clip_val=1.0, max_steps=8)
    trainer.fit(seeded(), loader(8, 8 * 8 * world_size, rank, world_size))
    return monitor.breakdown


def check_breakdown(found: Breakdown | None) -> None:
    assert found is not None
    assert found.steps == 2
    assert found.idle + sum(found.shown.values()) == pytest.approx(found.step)
    assert found.shown["compute"] > 0
    assert found.shown["optimizer"] > 0
    assert 0 < found.at_work < found.step
    assert found.for_data > 0


class TestTwoGpus:
    pytestmark = two_gpus

    def test_what_units_gather_and_reduce_is_part_of_profiled_steps(self) -> None:
        found, other = run_distributed(profile_steps, 2, backend="nccl")
        check_breakdown(found)
        assert found.shown.keys() >= {"all-gathers", "reductions"}
        assert any(name.startswith("blocks.") for name in found.exposed)
        assert other is None

    # Adam divides by the size of a gradient, so a rounding of a tiny one moves its weight by a good part of lr * steps.
    @pytest.mark.parametrize(
        ("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 0.1), ("bf16-true", 0.1), ("16-mixed", 0.1)]
    )
    def test_training_is_near_one_cpu_process(self, ranks: Any, precision: str, tolerance: float) -> None:
        assert_near(ranks[0][precision], train_plainly(seeded(), 8, STEPS), tolerance)

    def test_resume_is_bit_equal(self, ranks: Any) -> None:
        for found in ranks:
            assert_same(found["loaded"], found["saved"])

    def test_a_poisoned_step_is_skipped_on_both(self, ranks: Any) -> None:
        assert [found["skipped"] for found in ranks] == [(1, True), (1, True)]


def check_without_waiting(rank: int, world_size: int) -> bool:
    """Everything the callback does with "warn", with host waits turned into errors."""
    strict_warnings()
    model = seeded()
    reporter = NaNGradientReporter("warn")
    trainer = cuda_trainer(world_size, callbacks=[reporter])
    trainer.fit(model, loader(8, 8 * STEPS))
    context = context_of(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reporter.on_train_start(trainer, model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            reporter.on_after_backward(trainer, model)
            reporter.on_before_optimizer_step(trainer, model, optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        reporter.on_train_end(trainer, model)
    return context.device.type == "cuda"


def log_norms_without_waiting(rank: int, world_size: int) -> list[float]:
    """All that NormMonitor does in a step, with host waits turned into errors; what it logs in the end."""
    strict_warnings()
    model = seeded()
    monitor = NormMonitor(every_n_steps=1, levels=[])
    metrics = Metrics()
    trainer = cuda_trainer(world_size, callbacks=[monitor], logger=metrics, log_every_n_steps=1)
    trainer.fit(model, loader(8, 8 * STEPS))
    metrics.by_step.clear()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    monitor.on_train_start(trainer, model)
    model.loss([part.cuda() for part in next(iter(loader(8)))]).backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        monitor.on_before_optimizer_step(trainer, model, optimizer)
        optimizer.step()
        monitor.on_train_batch_end(trainer, model, None, None, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monitor.on_train_end(trainer, model)
    (logged,) = metrics.by_step.values()
    return [logged[f"{kind}_norm_total"] for kind in ("grad", "weight", "update")]


def watch_memory_without_waiting(rank: int, world_size: int) -> list[MemorySample]:
    strict_warnings()
    model = seeded()
    report = MemoryReport(step=2)
    trainer = cuda_trainer(world_size, callbacks=[report])
    trainer.fit(model, loader(8, 8 * STEPS))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        with MemoryTimeline(model, trainer.optimizers) as timeline:
            timeline.sample("here")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return report.samples


class TestOneGpu:
    pytestmark = one_gpu

    def test_each_moment_of_profiled_steps_is_of_one_kind(self) -> None:
        (found,) = run_distributed(profile_steps, 1, backend="nccl")
        check_breakdown(found)
        assert "all-gathers" not in found.shown

    def test_norms_are_logged_without_waiting_for_the_device(self) -> None:
        ((gradient, weight, update),) = run_distributed(log_norms_without_waiting, 1, backend="nccl")
        assert update == pytest.approx(0.1 * gradient, rel=1e-3)
        assert weight > update > 0

    def test_memory_of_a_step_is_counted_by_kind_without_waiting_for_the_device(self) -> None:
        (samples,) = run_distributed(watch_memory_without_waiting, 1, backend="nccl")
        assert {one.phase for one in samples} == {"", "forward begins", "forward ended", "backward ended"}
        for one in samples:
            assert one.known <= one.allocated <= one.peak
        assert samples[0].optimizer > samples[0].weights, "two moments"
        assert max(one.rest for one in samples) > samples[0].rest, "activations"

    def test_the_finite_check_never_synchronizes(self) -> None:
        assert run_distributed(check_without_waiting, 1, backend="nccl") == [True]
