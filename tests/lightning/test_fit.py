"""Trainer.fit, validate, test and predict under MFSDPStrategy against one process of plain PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric

import lightning_mfsdp
from lightning_mfsdp import MFSDPStrategy, fully_shard
from tests.engine.internals import context_of
from tests.helpers.distributed import run_distributed
from tests.lightning.models import (
    DIM,
    Block,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
    train_plainly,
)

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS = 3


def fit(
    model: LightningModule, rank: int, world_size: int, *, accumulate: int = 1, strategy: Any = None, **options: Any
) -> Any:
    """Fit for STEPS optimizer steps on global batches of 8."""
    trainer = make_trainer(
        tempfile.gettempdir(),
        world_size,
        strategy=strategy or MFSDPStrategy(units=["Block"]),
        accumulate_grad_batches=accumulate,
        **options,
    )
    trainer.fit(model, loader(8 // world_size, 8 * STEPS * accumulate, rank, world_size))
    return trainer


# -- scenarios: each runs on both ranks; what it returns is checked by one test below --------------------------------


def each_strategy(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    states = {}
    for name in STRATEGIES:
        model = seeded()
        fit(model, rank, world_size, strategy=MFSDPStrategy(sharding=name, units=["Block"]), gradient_clip_val=0.1)
        states[name] = full_state(model)
    return states


def accumulation(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("local", "sharded"):
        model = seeded(optimizer="sgd")
        strategy = MFSDPStrategy(units=["Block"], accumulation=kind)
        fit(model, rank, world_size, accumulate=4, strategy=strategy)
        found[kind] = full_state(model), context_of(model).reductions.started
    return found


def value_clipping(rank: int, world_size: int) -> dict[str, Tensor]:
    model = seeded(optimizer="sgd")
    fit(model, rank, world_size, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    return full_state(model)


class GradientWatcher(Callback):
    """Norm of all gradients at each hook, before clipping."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {"after_backward": [], "before_step": []}

    def _note(self, hook: str, module: LightningModule) -> None:
        self.seen[hook].append(float(lightning_mfsdp.grad_norm(module)))

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        self._note("after_backward", pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        self._note("before_step", pl_module)


def gradients_in_hooks(rank: int, world_size: int) -> dict[str, list[float]]:
    watcher = GradientWatcher()
    fit(seeded(), rank, world_size, callbacks=[watcher])
    return watcher.seen


def entry_points(rank: int, world_size: int) -> dict[str, Any]:
    """validate, fit, test, predict with one trainer and one model, and a second fit with another trainer."""
    model = seeded(optimizer="sgd")
    trainer = make_trainer(tempfile.gettempdir(), world_size, strategy=MFSDPStrategy(units=["Block"]))
    batches = loader(4, 8 * STEPS, rank, world_size)
    before = trainer.validate(model, batches, verbose=False)[0]["val_loss"]
    trainer.fit(model, batches)
    state = full_state(model)
    after = trainer.test(model, batches, verbose=False)[0]["test_loss"]
    predicted = trainer.predict(model, batches)
    again = make_trainer(tempfile.gettempdir(), world_size, strategy=MFSDPStrategy(units=["Block"]))
    again.fit(model, batches)
    return {
        "state": state,
        "val_loss": before,
        "test_loss": after,
        "predicted": torch.cat(predicted),
        "second_state": full_state(model),
    }


class InsideValidation(Classifier):
    """Validation in the middle of an epoch, with a metric object and a gather of predictions."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.mean = MeanMetric()
        self.gathered: list[tuple[int, ...]] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.mean.update(self.loss(batch))
        self.log("mean", self.mean)
        self.gathered.append(tuple(self.all_gather(self(batch[0])).shape))


def validation_between_steps(rank: int, world_size: int) -> dict[str, Any]:
    model = seeded(InsideValidation)
    trainer = make_trainer(
        tempfile.gettempdir(), world_size, strategy=MFSDPStrategy(units=["Block"]), val_check_interval=1
    )
    train, val = loader(4, 8 * STEPS, rank, world_size), loader(4, 16, rank, world_size)
    trainer.fit(model, train, val)
    return {"state": full_state(model), "mean": float(trainer.callback_metrics["mean"]), "gathered": model.gathered}


class Manual(Classifier):
    """Two optimizers and two backwards in one training_step; the second forward sees the first optimizer's step."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.losses.append(loss.detach())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD([self.scale, *self.inputs.parameters(), *self.blocks.parameters()], lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.2),
        ]


def manual_reference() -> Manual:
    model = seeded(Manual)
    optimizers = model.configure_optimizers()
    for batch in loader(8, 8 * STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
    return model


def manual_optimization(rank: int, world_size: int) -> dict[str, Tensor]:
    model = seeded(Manual)
    fit(model, rank, world_size)
    return full_state(model)


class MethodUser(Classifier):
    """The step calls a method of its own instead of forward, and the head's weight belongs to the root."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.features(batch[0]) @ self.head.weight.T + self.head.bias, batch[1])

    def features(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


def own_methods(rank: int, world_size: int) -> dict[str, Tensor]:
    model = seeded(MethodUser)
    fit(model, rank, world_size)
    return full_state(model)


class Configured(Classifier):
    """Builds itself in configure_model, which Lightning calls again for every entry point."""

    def __init__(self, *, on_meta: bool, shard_blocks: bool) -> None:
        LightningModule.__init__(self)
        self.on_meta, self.shard_blocks = on_meta, shard_blocks
        self.built = 0
        self.losses: list[Tensor] = []
        self.lr, self.optimizer_name = 0.05, "adamw"

    def configure_model(self) -> None:
        if self.built:
            return
        self.built += 1
        torch.manual_seed(11)
        with torch.device("meta" if self.on_meta else "cpu"):
            self.inputs = nn.Linear(3, DIM)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(DIM, 5)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.register_buffer("shift", torch.full((DIM,), 0.25))
        if self.shard_blocks:
            for block in self.blocks:
                fully_shard(block, self.device_mesh)


def configured_model(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, on_meta, shard_blocks in (("real", False, False), ("meta", True, False), ("by hand", False, True)):
        model = Configured(on_meta=on_meta, shard_blocks=shard_blocks)
        strategy = MFSDPStrategy() if shard_blocks else MFSDPStrategy(units=["Block"])
        trainer = fit(model, rank, world_size, strategy=strategy)
        state = full_state(model)
        trainer.validate(model, loader(4, 8, rank, world_size), verbose=False)
        found[name] = state, [unit.module_class for unit in lightning_mfsdp.units(model)], model.built
    return found


def precisions(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("32-true", "bf16-mixed", "bf16-true", "64-true"):
        model = seeded(optimizer="sgd")
        trainer = fit(model, rank, world_size, precision=name)
        views = lightning_mfsdp.sharded_parameters(model)
        found[name] = {
            "state": full_state(model),
            "main": {str(view.dtype) for view in views},
            "compute": {view.name: str(view.compute_dtype) for view in views},
            "precision": trainer.precision,
        }
    return found


class Toggled(Manual):
    """As a GAN is trained: each optimizer's turn freezes the other's parameters."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()


def toggled_optimizers(rank: int, world_size: int) -> dict[str, Tensor]:
    model = seeded(Toggled)
    fit(model, rank, world_size)
    return full_state(model)


def built_on_meta_by_the_trainer(rank: int, world_size: int) -> dict[str, Tensor]:
    trainer = make_trainer(tempfile.gettempdir(), world_size, strategy=MFSDPStrategy(units=["Block"]))
    with trainer.init_module(empty_init=True):
        model = Classifier()
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(11)
    trainer.fit(model, loader(8 // world_size, 8 * STEPS, rank, world_size))
    return full_state(model)


def ignored_parameters(rank: int, world_size: int) -> dict[str, Any]:
    """The model is the same on both ranks, so the gradients of ignored parameters differ by rank only through the data."""
    model = seeded(optimizer="sgd")
    strategy = MFSDPStrategy(units=["Block"], ignored_parameters=["*.norm.*", model.scale])
    trainer = make_trainer(tempfile.gettempdir(), world_size, strategy=strategy)
    trainer.fit(model, loader(8, 8 * STEPS))
    with pytest.raises(ValueError, match="matches no parameter"):
        fit(seeded(), rank, world_size, strategy=MFSDPStrategy(ignored_parameters=["nothing"]))
    plain = {name for name, parameter in model.named_parameters() if type(parameter) is nn.Parameter}
    return {"plain": plain, "state": full_state(model)}


class Failing(Classifier):
    """Raises inside the second unit in the second step."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.fails = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.fails:
            self.blocks[1](torch.ones(1, DIM + 1))
        return super().training_step(batch, batch_idx)


def fit_after_an_exception(rank: int, world_size: int) -> dict[str, Tensor]:
    model = seeded(Failing)
    with pytest.raises(RuntimeError, match="shape"):
        fit(model, rank, world_size)
    model.fails = False
    fit(model, rank, world_size)
    return full_state(model)


SCENARIOS: tuple[Callable[[int, int], Any], ...] = (
    each_strategy,
    accumulation,
    value_clipping,
    gradients_in_hooks,
    entry_points,
    validation_between_steps,
    manual_optimization,
    own_methods,
    configured_model,
    precisions,
    toggled_optimizers,
    built_on_meta_by_the_trainer,
    ignored_parameters,
    fit_after_an_exception,
)


def run_scenarios(rank: int, world_size: int) -> dict[str, Any]:
    strict_warnings()
    return {scenario.__name__: scenario(rank, world_size) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_distributed(run_scenarios, 2)


def assert_equal_state(actual: dict[str, Tensor], expected: nn.Module | dict[str, Tensor], **tolerances: float) -> None:
    wanted = dict(expected.named_parameters()) if isinstance(expected, nn.Module) else expected
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        settings = {"rtol": 1e-5, "atol": 1e-6, **tolerances}
        torch.testing.assert_close(
            actual[name], tensor.detach(), msg=lambda text, name=name: f"{name}: {text}", **settings
        )


# -- tests -----------------------------------------------------------------------------------------------------------


def test_one_rank_trains_bit_for_bit_like_plain_pytorch(tmp_path: Any) -> None:
    (state,) = run_distributed(one_rank, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        reference = train_plainly(seeded(), 8, STEPS, clip_norm=0.1)
    finally:
        torch.set_num_threads(threads)
    assert_equal_state(state, reference, rtol=0.0, atol=0.0)


def one_rank(rank: int, world_size: int) -> dict[str, Tensor]:
    strict_warnings()
    model = seeded()
    fit(model, rank, world_size, gradient_clip_val=0.1)
    return full_state(model)


@pytest.mark.parametrize("sharding", STRATEGIES)
def test_two_ranks_with_norm_clipping_match_one_process_on_the_whole_batch(two_ranks: Any, sharding: str) -> None:
    reference = train_plainly(seeded(), 8, STEPS, clip_norm=0.1)
    for results in two_ranks:
        assert_equal_state(results["each_strategy"][sharding], reference)


def test_value_clipping_matches_one_process(two_ranks: Any) -> None:
    reference = train_plainly(seeded(optimizer="sgd"), 8, STEPS, clip_value=0.01)
    # Clamping turns a tiny difference in a gradient into none or the same one, so the tolerance stays.
    assert_equal_state(two_ranks[0]["value_clipping"], reference)


@pytest.mark.parametrize(("kind", "reductions_per_group_and_step"), [("local", 1), ("sharded", 4)])
def test_accumulation_matches_one_process_and_communicates_only_what_it_must(
    two_ranks: Any, kind: str, reductions_per_group_and_step: int
) -> None:
    reference = train_plainly(seeded(optimizer="sgd"), 8, STEPS, accumulate=4)
    state, reductions = two_ranks[0]["accumulation"][kind]
    assert_equal_state(state, reference)
    assert reductions == 3 * STEPS * reductions_per_group_and_step


def test_gradients_are_final_in_on_after_backward_and_on_before_optimizer_step(two_ranks: Any) -> None:
    seen = two_ranks[0]["gradients_in_hooks"]
    model = seeded()
    optimizer = model.configure_optimizers()
    norms = []
    for batch in loader(8, 8 * STEPS):
        optimizer.zero_grad()
        model.loss(batch).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
    assert seen["after_backward"] == pytest.approx(norms, rel=1e-5)
    assert seen["before_step"] == pytest.approx(norms, rel=1e-5)


def test_validate_fit_test_predict_and_fit_again_shard_once_and_agree_with_one_process(two_ranks: Any) -> None:
    model = seeded(optimizer="sgd")
    batches = list(loader(8, 8 * STEPS))
    with torch.no_grad():
        before = torch.stack([model.loss(batch) for batch in batches]).mean()
    train_plainly(model, 8, STEPS)
    first = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        after = torch.stack([model.loss(batch) for batch in batches]).mean()
        predicted = torch.cat([model(batch[0]) for batch in batches])
    train_plainly(model, 8, STEPS)
    for rank, results in enumerate(two_ranks):
        found = results["entry_points"]
        assert found["val_loss"] == pytest.approx(float(before), rel=1e-5)
        assert found["test_loss"] == pytest.approx(float(after), rel=1e-5)
        assert_equal_state(found["state"], first)
        torch.testing.assert_close(found["predicted"], predicted[rank::2], rtol=1e-5, atol=1e-5)
        assert_equal_state(found["second_state"], model)


def test_validation_inside_an_epoch_with_metrics_changes_nothing(two_ranks: Any) -> None:
    reference = train_plainly(seeded(InsideValidation), 8, STEPS)
    for results in two_ranks:
        found = results["validation_between_steps"]
        assert_equal_state(found["state"], reference)
        assert found["gathered"] == [(2, 4, 5)] * (2 * STEPS)
    with torch.no_grad():
        mean = torch.stack([reference.loss(batch) for batch in loader(8, 16)]).mean()
    assert two_ranks[0]["validation_between_steps"]["mean"] == pytest.approx(float(mean), rel=1e-5)


def test_manual_optimization_sees_each_step_in_the_next_forward(two_ranks: Any) -> None:
    assert_equal_state(two_ranks[0]["manual_optimization"], manual_reference())


def test_methods_called_instead_of_forward_find_the_roots_weights(two_ranks: Any) -> None:
    assert_equal_state(two_ranks[0]["own_methods"], train_plainly(seeded(), 8, STEPS))


@pytest.mark.parametrize("kind", ["real", "meta", "by hand"])
def test_configure_model_may_build_for_real_on_meta_or_shard_by_hand(two_ranks: Any, kind: str) -> None:
    state, classes, built = two_ranks[0]["configured_model"][kind]
    expected, _, _ = two_ranks[0]["configured_model"]["real"]
    assert classes == ["Configured", "Block", "Block"]
    assert built == 1
    assert state.keys() == {name for name, _ in seeded().named_parameters()}
    assert_equal_state(state, expected)


def test_precision_strings_decide_the_dtypes_of_main_and_compute_weights(two_ranks: Any) -> None:
    found = two_ranks[0]["precisions"]
    assert {name: found[name]["main"] for name in found} == {
        "32-true": {"torch.float32"},
        "bf16-mixed": {"torch.float32"},
        "bf16-true": {"torch.bfloat16"},
        "64-true": {"torch.float64"},
    }
    mixed = found["bf16-mixed"]["compute"]
    assert mixed["blocks.0.linear.weight"] == "torch.bfloat16"
    assert mixed["blocks.0.norm.weight"] == "torch.float32"
    assert [found[name]["precision"] for name in found] == list(found)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.02), ("bf16-true", 0.05), ("64-true", 1e-5)])
def test_other_precisions_stay_near_float32(two_ranks: Any, precision: str, tolerance: float) -> None:
    reference = {
        name: tensor.detach() for name, tensor in train_plainly(seeded(optimizer="sgd"), 8, STEPS).named_parameters()
    }
    state = {name: tensor.float() for name, tensor in two_ranks[0]["precisions"][precision]["state"].items()}
    assert_equal_state(state, reference, rtol=tolerance, atol=tolerance)


def test_toggled_optimizers_train_as_in_one_process(two_ranks: Any) -> None:
    assert_equal_state(two_ranks[0]["toggled_optimizers"], manual_reference())


def test_a_model_built_on_meta_by_the_trainer_starts_from_the_seed(two_ranks: Any) -> None:
    assert_equal_state(two_ranks[0]["built_on_meta_by_the_trainer"], train_plainly(seeded(), 8, STEPS))


def test_ignored_parameters_stay_plain_and_train_locally(two_ranks: Any) -> None:
    reference = train_plainly(seeded(optimizer="sgd"), 8, STEPS)
    for results in two_ranks:
        found = results["ignored_parameters"]
        assert found["plain"] == {
            "scale",
            *(f"blocks.{i}.norm.{kind}" for i in range(2) for kind in ("weight", "bias")),
        }
        assert_equal_state(found["state"], reference)


def test_a_model_whose_step_raised_can_be_fitted_again(two_ranks: Any) -> None:
    reference = seeded(optimizer="sgd")
    optimizer = reference.configure_optimizers()
    reference.loss(next(iter(loader(8, 8 * STEPS)))).backward()
    optimizer.step()
    train_plainly(reference, 8, STEPS)
    assert_equal_state(two_ranks[0]["fit_after_an_exception"], reference)
