"""Transformer Engine's FusedAdam, with a stand-in: it works on local rows, resumes to the bit, and its other options are refused."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp import (
    MFSDPStrategy,
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
)
from lightning_mfsdp.engine import sharded_parameters
from tests.engine.internals import fused_adam
from tests.helpers.distributed import run_distributed
from tests.helpers.fused_adam import FusedAdam, joined
from tests.helpers.nights import NIGHT, rest_at_night
from tests.lightning.models import Classifier, full_state, loader, make_trainer, seeded, strict_warnings
from tests.lightning.test_exact_continuation import Loader, SaveAt

BF16 = torch.bfloat16
MOMENTS: dict[str, Any] = {"float32": {}, "bfloat16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}}
KINDS = ("sharded", "full")
KEPT = {"float32": "sharded", "bfloat16": "full"}  # of checkpoints, on a push
REFUSED: dict[str, dict[str, Any]] = {
    r"FusedAdam\(master_weights=True\): .* float32 weights of its own": {"master_weights": True},
    r"FusedAdam\(.*store_param_remainders=True\): main weights are torch.float32, and it keeps": {
        "master_weights": True,
        "store_param_remainders": True,
    },
    r"FusedAdam\(capturable=True\): its step counter would come back": {"capturable": True},
    r"FusedAdam\(exp_avg_dtype=torch.float16\) keeps scales beside its state": {"exp_avg_dtype": torch.float16},
    r"FusedAdam\(exp_avg_sq_dtype=torch.uint8\) keeps scales beside its state": {"exp_avg_sq_dtype": torch.uint8},
}
# Main weights of 16 bits: the optimizer keeps the other 16, and reads gradients in float32.
HALVES: dict[str, Any] = {"master_weights": True, "store_param_remainders": True, "use_decoupled_grad": True}
LOW = MixedPrecisionPolicy(main_params_dtype=BF16, compute_dtype=BF16)
FULL = MixedPrecisionPolicy(compute_dtype=BF16)
LOW_GRADS = MixedPrecisionPolicy(compute_dtype=BF16, main_grads_dtype=BF16)
LOW_RUN: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


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
        more = {key: options.pop(key) for key in LOW_RUN if key in options}
        strategy = MFSDPStrategy(units=["Block"], state_dict_type=kind, policy=options.pop("policy", None))  # type: ignore[arg-type]
        trainer = make_trainer(folder, world, strategy=strategy, max_epochs=-1, max_steps=steps, **more)
        trainer.fit(model, data, **options)
        return trainer

    adamw, fused = seeded(Model, options={}, known=False), seeded(Model, options={})
    fit(adamw, 4)
    held = fit(fused, 4).optimizers[0].param_groups[0]["params"]
    found["near"] = [full_state(model) for model in (fused, adamw)]
    found["local"] = not any(isinstance(parameter, DTensor) for parameter in held)
    for name, options in MOMENTS.items():
        for kind in KINDS if NIGHT else [KEPT[name]]:
            straight, again = seeded(Model, options=options), Model(options)
            path = f"{folder}/{name}-{kind}"
            fit(seeded(Model, options=options), 2, kind).save_checkpoint(path)
            expected = fit(straight, 4, kind).optimizers[0]
            resumed = fit(again, 4, kind, ckpt_path=path).optimizers[0]
            found[f"{name} {kind}"] = [full_state(again), full_state(straight)]
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {kind} {key}"] = [moments(resumed, key), moments(expected, key)]
    found["inside"] = inside_a_step(rank, world, folder)
    return found | halves(fit, folder) | refusals()


def rounded() -> Model:
    """Bfloat16 has its weights."""
    return seeded(Model, options={}).to(BF16).float()


def halves(fit: Any, folder: str) -> dict[str, Any]:
    """Weights in two halves against whole ones; then another optimizer on the same model; then gradients lower than weights."""
    found: dict[str, Any] = {}
    whole, split = rounded(), rounded()
    split.options = HALVES
    fit(whole, 5, policy=FULL, **LOW_RUN)
    steps = fit(split, 5, policy=LOW, **LOW_RUN).optimizers[0]
    parameters = [one for group in steps.param_groups for one in group["params"]]
    upper = {view.name: view.main for view in sharded_parameters(split)}
    lower = dict(zip(upper, (steps.state[one]["master_param"] for one in parameters), strict=True))
    found["whole"] = {view.name: view.main.clone() for view in sharded_parameters(whole)}
    found["joined"] = {name: joined(value, lower[name]) for name, value in upper.items()}
    found["bits"] = sum(int(value.ne(0).sum()) for value in lower.values())
    found["dtypes"] = {value.dtype for value in upper.values()}

    for kind in KINDS if NIGHT else ["full"]:
        first, again = rounded(), rounded()
        first.options = again.options = {**HALVES, **MOMENTS["bfloat16"]}
        fit(first, 2, kind, policy=LOW, **LOW_RUN).save_checkpoint(f"{folder}/halves-{kind}")
        straight = rounded()
        straight.options = first.options
        expected = fit(straight, 4, kind, policy=LOW, **LOW_RUN).optimizers[0]
        resumed = fit(again, 4, kind, policy=LOW, ckpt_path=f"{folder}/halves-{kind}", **LOW_RUN).optimizers[0]
        found[f"halves {kind}"] = [full_state(again), full_state(straight)]
        found[f"remainders {kind}"] = [moments(one, "master_param") for one in (resumed, expected)]

    path, from_whole, from_halves = f"{folder}/of-whole", rounded(), rounded()
    fit(rounded(), 2, policy=FULL, **LOW_RUN).save_checkpoint(path)
    from_whole.options = HALVES
    fit(from_whole, 5, policy=LOW, ckpt_path=path, **LOW_RUN)
    fit(from_halves, 5, policy=FULL, ckpt_path=f"{folder}/halves-full", **LOW_RUN)
    found["other main weights"] = [full_state(one) for one in (whole, from_whole, from_halves)]

    split.known, split.options = False, {}
    fit(split, 2, policy=LOW, **LOW_RUN)
    found["back"] = all(type(view.local) is nn.Parameter for view in sharded_parameters(split))

    usual, low = rounded(), rounded()
    low.options = {"use_decoupled_grad": True}
    seen: set[torch.dtype] = set()
    low.on_before_optimizer_step = lambda optimizer: seen.update(gradient_dtypes(optimizer))  # type: ignore[method-assign]
    fit(usual, 4, policy=LOW_GRADS, **{**LOW_RUN, "gradient_clip_val": None})
    fit(low, 4, policy=LOW_GRADS, **{**LOW_RUN, "gradient_clip_val": None})
    found["low gradients"] = [full_state(low), full_state(usual)], seen
    return found


def inside_a_step(rank: int, world: int, folder: str) -> list[dict[str, Tensor]]:
    """Saved with two of three microbatches added up in float32, and resumed."""
    states, path = [], f"{folder}/inside"
    for options in ({"callbacks": [SaveAt(5, path)]}, {}):
        model = rounded()
        model.options = HALVES
        settings = {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "max_epochs": 1, **options}
        trainer = make_trainer(folder, world, strategy=MFSDPStrategy(units=["Block"], policy=LOW), **settings)
        trainer.fit(model, Loader(rank), ckpt_path=None if options else path)
        states.append(full_state(model))
    return states


def gradient_dtypes(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {one.grad.dtype for one in parameters if one.grad is not None}


def moments(optimizer: torch.optim.Optimizer, key: str) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {str(number): optimizer.state[one][key] for number, one in enumerate(parameters) if one.numel()}


def refusals() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for expected, options in REFUSED.items():
        model = fully_shard(nn.Linear(4, 6), policy=FULL)  # its dtype of computing is not that of the main weights
        with pytest.raises(ShardingError, match=expected):
            fully_shard_optimizer(FusedAdam(model.parameters(), **options))
    for library, is_old in {"2.19.1+cu130": True, "1.14": True, "2.20.0": False, "3.0.dev1": False}.items():
        model = fully_shard(nn.Linear(4, 6))
        optimizer = FusedAdam(model.parameters())
        refused = pytest.raises(ShardingError, match="leaves out updates where a rank") if is_old else nullcontext()
        with mock.patch.object(fused_adam, "version", return_value=library), refused:
            fully_shard_optimizer(optimizer)
    model = fully_shard(nn.Linear(4, 6), offload="optimizer")
    with pytest.raises(ShardingError, match="FusedAdam counts the calls of its step, and offload"):
        fully_shard_optimizer(FusedAdam(model.parameters()))
    policy = MixedPrecisionPolicy(main_params_dtype=BF16)
    model = fully_shard(nn.Linear(4, 6), policy=policy)
    with pytest.raises(
        ShardingError, match=r"weight is to have a gradient in torch.float32, .* with that of bias \(of 1\)"
    ):
        fully_shard_optimizer(FusedAdam([model.weight], use_decoupled_grad=True))
    with no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(
        ShardingError, match=r"gradients that wait for their reduction \(no_sync\), .* in torch.float32"
    ):
        fully_shard_optimizer(FusedAdam(model.parameters(), use_decoupled_grad=True))
    with pytest.raises(ShardingError, match=r"use_decoupled_grad=True\) would find no gradient"):
        fully_shard_optimizer(FusedAdam(model.parameters(), use_decoupled_grad=True), elementwise=False)
    model(torch.ones(2, 4)).sum().backward()
    optimizer = fully_shard_optimizer(FusedAdam(model.parameters(), use_decoupled_grad=True))
    found["twice"] = gradient_dtypes(optimizer), model.bias.grad.to_local().clone()
    model(torch.ones(2, 4)).sum().backward()
    found["thrice"] = model.bias.grad.to_local().clone()
    optimizer.zero_grad()
    found["after zero_grad"] = gradient_dtypes(optimizer) == set()
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


@pytest.mark.parametrize(
    ("moments", "kind"), rest_at_night(itertools.product(MOMENTS, KINDS), lambda moments, kind: kind == KEPT[moments])
)
def test_it_resumes_to_the_bit(ranks: Any, moments: str, kind: str) -> None:
    for found in ranks:
        for part in ("", " exp_avg", " exp_avg_sq"):
            again, straight = found[f"{moments} {kind}{part}"]
            assert again.keys() == straight.keys()
            for name, value in straight.items():
                assert torch.equal(again[name], value), f"{part} {name}"
                assert again[name].dtype is value.dtype
                assert not part or value.dtype is getattr(torch, moments)


def test_a_bfloat16_weight_and_its_remainder_are_the_float32_weight_to_the_bit(ranks: Any) -> None:
    """Also under clipping and over microbatches; a gradient rounded to bfloat16 on the way would show."""
    for found in ranks:
        assert found["whole"].keys() == found["joined"].keys()
        for name, value in found["whole"].items():
            assert torch.equal(found["joined"][name], value), name
        assert found["bits"] > 50
        assert found["dtypes"] == {BF16}


@pytest.mark.parametrize("kind", rest_at_night(KINDS, lambda kind: kind == "full"))
def test_remainders_resume_to_the_bit(ranks: Any, kind: str) -> None:
    for found in ranks:
        for part in ("halves", "remainders"):
            again, straight = found[f"{part} {kind}"]
            assert again.keys() == straight.keys()
            for name, value in straight.items():
                assert torch.equal(again[name], value), f"{part} {name}"
                assert again[name].dtype is value.dtype is (BF16 if part == "halves" else torch.int16)


def test_a_run_resumes_inside_a_step_with_decoupled_gradients(ranks: Any) -> None:
    for found in ranks:
        straight, resumed = found["inside"]
        for name, value in straight.items():
            assert torch.equal(resumed[name], value), name


def test_checkpoints_go_between_main_weights_in_halves_and_whole_ones(ranks: Any) -> None:
    for found in ranks:
        expected, *others = found["other main weights"]
        for other in others:
            for name, value in expected.items():
                torch.testing.assert_close(other[name].float(), value, rtol=0.05, atol=0.02)


def test_another_optimizer_of_the_same_model_finds_gradients_as_ever(ranks: Any) -> None:
    assert all(found["back"] for found in ranks)


def test_gradients_may_be_lower_than_the_main_weights_without_a_copy(ranks: Any) -> None:
    for found in ranks:
        (low, usual), seen = found["low gradients"]
        assert seen == {BF16}
        for name, value in usual.items():
            assert torch.equal(low[name], value), name


def test_gradients_from_before_the_optimizer_are_added_to(ranks: Any) -> None:
    assert any(found["twice"][1].numel() for found in ranks)
    for found in ranks:
        dtypes, twice = found["twice"]
        assert dtypes == {torch.float32}
        assert bool((twice == 4.0).all())
        assert bool((found["thrice"] == 6.0).all())


def test_clearing_decoupled_gradients_clears_gradients(ranks: Any) -> None:
    assert all(found["after zero_grad"] for found in ranks)
