"""NaNGradientReporter: what it names, when, and what each action does."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy
from lightning_mfsdp.callbacks import NaNGradientReporter, NonFiniteGradientError
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

STEPS = 3
BAD_STEP = 1

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Poisoned(Classifier):
    """Adds NaN or Inf to the gradient of two elements of one block, on rank 1 alone, in one microbatch."""

    def __init__(self, *, bad_batch: int = BAD_STEP, value: float = float("nan")) -> None:
        super().__init__()
        self.bad_batch = bad_batch
        self.value = value
        self.completed: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx != self.bad_batch or torch.distributed.get_rank() != 1:
            return super().training_step(batch, batch_idx)
        with self.blocks[1].register_forward_pre_hook(self._poison_weight):
            return super().training_step(batch, batch_idx)

    def _poison_weight(self, block: nn.Module, _: Any) -> None:
        def poison(grad: Tensor) -> Tensor:
            handle.remove()
            grad = grad.clone()
            grad[0, 0] = grad[11, 3] = self.value
            return grad

        handle = block.linear.weight.register_hook(poison)

    def on_train_batch_end(self, *_: Any) -> None:
        self.completed.append(self.trainer.global_step)


class ByHand(Poisoned):
    """Steps an optimizer that Lightning did not wrap."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class BadLoss(Poisoned):
    """The loss itself is NaN, on rank 1 in one microbatch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = Classifier.training_step(self, batch, batch_idx)
        return loss * self.value if batch_idx == self.bad_batch and torch.distributed.get_rank() == 1 else loss


class BadLossByHand(ByHand, BadLoss):
    """As both."""


class Recorder(Logger):
    """Keeps the counts it is given."""

    name = version = "recorder"

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[float] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.counts += [value for name, value in metrics.items() if name == "nan_gradients/steps"]


def run(
    rank: int,
    world_size: int,
    action: str,
    *,
    accumulate: int = 1,
    kind: str = "local",
    logger: Any = False,
    clip: float | None = None,
    ignored: tuple[str, ...] = (),
    module: type[Poisoned] = Poisoned,
    sharding_strategy: str = "optim_grads_params",
    **options: Any,
) -> Any:
    """Returns (error or warning text, completed steps, weights, count)."""
    reporter = NaNGradientReporter(action)  # type: ignore[arg-type]
    model = seeded(module, **options)
    trainer = make_trainer(
        tempfile.gettempdir(),
        world_size,
        strategy=MFSDPStrategy(
            sharding=sharding_strategy,
            units=["Block"],
            accumulation=kind,  # type: ignore[arg-type]
            ignored_parameters=ignored,
        ),
        callbacks=[reporter],
        accumulate_grad_batches=accumulate,
        logger=logger,
        gradient_clip_val=clip,
    )
    text = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, loader(8 // world_size, 8 * STEPS * accumulate, rank, world_size))
        except NonFiniteGradientError as error:
            text = str(error)
    text += "".join(str(item.message) for item in caught if "non-finite" in str(item.message))
    return {"text": text, "completed": model.completed, "weights": full_state(model), "steps": reporter.steps}


def scenarios(rank: int, world_size: int) -> dict[str, Any]:
    strict_warnings()
    results = {action: run(rank, world_size, action) for action in ("raise", "warn", "skip")}
    for action in ("raise", "warn", "skip"):
        results[f"loss {action}"] = run(rank, world_size, action, module=BadLoss, accumulate=2, bad_batch=3)
    results["bare optimizer loss"] = run(rank, world_size, "raise", module=BadLossByHand)
    results["inf"] = run(rank, world_size, "warn", value=float("inf"))
    results["sharded accumulation"] = run(rank, world_size, "raise", accumulate=3, kind="sharded", bad_batch=4)
    results["local accumulation"] = run(rank, world_size, "raise", accumulate=3, bad_batch=4)
    results["last step"] = run(rank, world_size, "raise", bad_batch=STEPS - 1)
    results["finite"] = run(rank, world_size, "raise", bad_batch=-1)
    results["clipped"] = run(rank, world_size, "raise", clip=0.5, value=float("inf"))
    for action in ("raise", "skip"):
        results[f"ignored {action}"] = run(rank, world_size, action, ignored=("blocks.1.linear.weight",))
    for sharding in ("no_shard", "optim", "optim_grads") if NIGHT else ("no_shard",):
        results[f"raise {sharding}"] = run(rank, world_size, "raise", sharding_strategy=sharding)
    for action in ("raise", "skip"):
        results[f"bare optimizer {action}"] = run(rank, world_size, action, module=ByHand)
    logger = Recorder()
    run(rank, world_size, "warn", logger=logger)
    results["metrics"] = logger.counts
    return results


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_distributed(scenarios, 2)


@pytest.mark.parametrize(
    "scenario",
    rest_at_night(
        ["raise", "raise no_shard", "raise optim", "raise optim_grads"], lambda scenario: "optim" not in scenario
    ),
)
def test_raise_names_the_parameter_and_the_rank_where_it_arose_on_all_ranks(two_ranks: Any, scenario: str) -> None:
    for results in two_ranks:
        lines = results[scenario]["text"].splitlines()
        # Rows 0 and 11 lie on different ranks where the gradient is sharded; both came from rank 1.
        assert lines == [
            f"non-finite gradients in step {BAD_STEP}, microbatch 0: 1 parameters, on rank 1; first unit in backward order: blocks.1, "
            "on rank 1",
            "  every loss was finite before its backward",
            "  blocks.1.linear.weight (unit blocks.1): NaN on rank 1",
            "Look first at what the backward of the first unit above computes, since the forward gave a finite loss: roots, norms and "
            "logarithms near zero, your own autograd functions, and numbers too large for the dtype; then at the data of that rank and "
            "microbatch",
        ]


@pytest.mark.parametrize(
    ("scenario", "microbatch"), [("loss raise", 1), ("loss warn", 1), ("loss skip", 1), ("bare optimizer loss", 0)]
)
def test_a_loss_that_was_nan_already_is_said_first(two_ranks: Any, scenario: str, microbatch: int) -> None:
    lines = two_ranks[0][scenario]["text"].splitlines()
    assert f", microbatch {microbatch}: " in lines[0]
    assert lines[1] == f"  the loss was NaN before its backward, on rank 1 in microbatch {microbatch}"
    assert any(line.startswith("Look first at the data and the forward of the unit") for line in lines)


def test_raise_stops_before_the_step_is_taken(two_ranks: Any) -> None:
    for results in two_ranks:
        assert results["raise"]["completed"] == [BAD_STEP]
        assert all(bool(tensor.isfinite().all()) for tensor in results["raise"]["weights"].values())


def test_steps_that_lightning_does_not_hear_of_are_reported_and_cannot_be_skipped(two_ranks: Any) -> None:
    for results in two_ranks:
        assert "blocks.1.linear.weight (unit blocks.1): NaN on rank 1" in results["bare optimizer raise"]["text"]
        assert "step what self.optimizers() returns" in results["bare optimizer skip"]["text"]


def test_warn_reports_once_on_rank_zero_and_training_goes_on(two_ranks: Any) -> None:
    first, second = (results["warn"] for results in two_ranks)
    assert "step 1" in first["text"]
    assert second["text"] == ""
    assert first["completed"] == [1, 2, 3]
    # The bad step was taken, so everything is NaN from there on.
    assert first["steps"] == second["steps"] == STEPS - BAD_STEP


def test_skip_leaves_weights_as_if_the_step_had_not_been(two_ranks: Any) -> None:
    model = seeded(Poisoned, bad_batch=-1)
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(loader(8, 8 * STEPS)):
        optimizer.zero_grad()
        model.loss(batch).backward()
        if index != BAD_STEP:
            optimizer.step()
    for results in two_ranks:
        found = results["skip"]
        assert found["steps"] == 1
        for name, tensor in model.named_parameters():
            torch.testing.assert_close(found["weights"][name], tensor.detach(), rtol=1e-5, atol=1e-6)
    assert "this optimizer step is skipped" in two_ranks[0]["skip"]["text"]


def test_infinite_gradients_are_named_as_such(two_ranks: Any) -> None:
    assert "blocks.1.linear.weight (unit blocks.1): Inf on rank 1" in two_ranks[0]["inf"]["text"]


def test_clipping_by_norm_leaves_the_culprit_alone_in_the_report(two_ranks: Any) -> None:
    text = two_ranks[0]["clipped"]["text"]
    assert f"step {BAD_STEP}, microbatch 0: 1 parameters" in text
    assert "blocks.1.linear.weight (unit blocks.1): Inf" in text


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_gradients_that_are_not_sharded_are_reported_in_the_step_and_on_the_rank_they_appear(
    two_ranks: Any, action: str
) -> None:
    text = two_ranks[0][f"ignored {action}"]["text"]
    assert f"step {BAD_STEP}, microbatch 0: 1 parameters, on rank 1" in text
    assert "blocks.1.linear.weight (unit (ignored_parameters)): NaN on rank 1" in text


@pytest.mark.parametrize("kind", ["sharded accumulation", "local accumulation"])
def test_the_microbatch_is_the_one_where_it_arose(two_ranks: Any, kind: str) -> None:
    assert "step 1, microbatch 1: 1 parameters, on rank 1" in two_ranks[0][kind]["text"]


def test_the_last_step_of_training_is_checked_too(two_ranks: Any) -> None:
    assert f"step {STEPS - 1}" in two_ranks[0]["last step"]["text"]


def test_finite_gradients_report_nothing(two_ranks: Any) -> None:
    assert two_ranks[0]["finite"]["text"] == ""
    assert two_ranks[0]["finite"]["steps"] == 0


def test_the_count_is_logged_at_start_and_when_it_changes(two_ranks: Any) -> None:
    assert two_ranks[0]["metrics"] == [0.0, 1.0, 2.0]


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(ValueError, match='expected "raise", "skip" or "warn"'):
        NaNGradientReporter("ignore")  # type: ignore[arg-type]


def test_another_strategy_is_refused(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, 1, strategy="auto", callbacks=[NaNGradientReporter()])
    with pytest.raises(TypeError, match="SingleDeviceStrategy"):
        trainer.fit(seeded(), loader(8))
