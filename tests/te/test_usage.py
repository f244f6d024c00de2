"""What users do with FP8 beside plain training, on the CPU with a small engine in the library's place."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import MixedPrecisionPolicy
from lightning_mfsdp.options import dtypes
from lightning_mfsdp.te import Fp8Compute, Fp8Options
from tests.helpers.distributed import run_distributed
from tests.helpers.fused_adam import FusedAdam
from tests.helpers.nights import NIGHT
from tests.helpers.pairwise import pairwise
from tests.lightning.models import full_state, seeded, strict_warnings
from tests.te import fake_engine
from tests.te.test_training import ROWS, Net, assert_equal_states, data, fp8, kinds, scales, trainer_for
from tests.te.test_weights import outcome, quantized_names, trained

LINEARS = [f"blocks.{index}.linear" for index in range(3)]


def calls_of_ones_own(rank: int, world: int, found: dict[str, Any]) -> None:
    """After training, with and without autocast, gradients and the library's own context around."""
    model = seeded(Net)
    trainer_for(world, fp8(fp8_weights=True), max_steps=1).fit(model, data(rank, world, 1))
    kinds()
    x = torch.ones(ROWS, 16)
    outputs = []
    for around in (nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.inference_mode()):
        with around:
            outputs.append(model(x).detach())
        found.setdefault("own calls", []).append(kinds())
    found["own outputs"] = all(torch.equal(output, outputs[0]) for output in outputs)


class Nested(Net):
    """One block without FP8, one without autocast, as the user wants it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        with fake_engine.autocast(enabled=False, recipe=fake_engine.Float8CurrentScaling()):
            x = self.blocks[0](x)
        with torch.autocast("cpu", enabled=False):
            x = self.blocks[1](x)
        return self.head(self.blocks[2](x))


def contexts_of_ones_own(rank: int, world: int, found: dict[str, Any]) -> None:
    trainer_for(world, fp8("delayed"), max_steps=1).fit(seeded(Nested), data(rank, world, 1))
    found["nested"] = kinds(), list(fake_engine.updates), fake_engine.state.depth


def message_of(run: Any, *arguments: Any, **options: Any) -> str:
    try:
        run(*arguments, **options)
    except ValueError as error:
        return str(error)
    return ""


def another_run_of_one_model(rank: int, world: int, found: dict[str, Any]) -> None:
    """With the same options in other words, and with others: the model was changed for those of the first run."""
    for weights in (False, True) if NIGHT else (True,):
        model = seeded(Net)
        trainer_for(world, fp8(fp8_weights=weights), max_steps=1).fit(model, data(rank, world, 1))
        for name, options in {
            "same": {"recipe": fake_engine.Float8CurrentScaling(), "replace_layers": False},
            "kept": {"keep_high_precision": ["head"]},
            "overridden": {"overrides": {"blocks.1": "block"}},
            "delayed": {"recipe": "delayed"},
            "other weights": {"fp8_weights": not weights},
        }.items():
            kinds()
            trainer = trainer_for(world, fp8(**{"fp8_weights": weights, **options}), max_steps=1)
            said = message_of(trainer.fit, model, data(rank, world, 1))
            found[f"again {weights} {name}"] = said or set(kinds())


class Manual(Net):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__(recompute)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def manual_optimization(rank: int, world: int, found: dict[str, Any]) -> None:
    """The backward is inside of the step then; scales follow the step's forwards all the same."""
    states = []
    for kind in (Net, Manual):
        model = trained(rank, world, seeded(kind), fp8("delayed"))
        states.append(outcome(model) | scales(model))
    found["equal: manual"] = states[1], states[0]
    # What is computed again finds the scales of its forward: these change when the step has ended, and not before the backward.
    found["manual scales"] = scales(trained(rank, world, seeded(Manual, recompute=True), fp8("delayed")))


def later_models(rank: int, world: int, found: dict[str, Any]) -> None:
    """Parts that are known in a model that is not, and a known model in a run without FP8."""
    known = trained(rank, world, seeded(Net), fp8(), steps=1)
    larger = seeded(Net)
    larger.blocks = known.blocks
    found["larger"] = message_of(trained, rank, world, larger, fp8())
    found["without"] = message_of(trained, rank, world, known, "bf16-mixed")


def ignored_layers(rank: int, world: int, found: dict[str, Any]) -> None:
    options = {"strategy_options": {"ignored_parameters": ["head.*"]}}
    found["ignored quantized"] = message_of(trained, rank, world, seeded(Net), fp8(fp8_weights=True), **options)
    for fused in (False, True):
        said: list[str] = []
        with mock.patch.object(dtypes, "rank_zero_info", said.append):
            model = trained(rank, world, seeded(Net), fp8(fuse_weight_gradients=fused), steps=2, **options)
        found[f"ignored {fused}"] = len(fake_engine.writes), model.head.weight.grad is not None
        found[f"said {fused}"] = said


def adapters(rank: int, world: int, found: dict[str, Any]) -> None:
    """Adapters over frozen layers: of the same numbers whether the frozen ones are kept in 8 bits or not, and these stay what they are."""
    from peft import LoraConfig, inject_adapter_in_model

    for size, kept in ((16, []), (4, ["*.lora_*"])):
        states = []
        for weights in (False, True):
            model = seeded(Net)
            inject_adapter_in_model(
                LoraConfig(r=size, target_modules=["linear"], init_lora_weights="gaussian"), model.blocks
            )
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name)
            before = {name: value.detach().clone() for name, value in model.named_parameters()}
            trained(rank, world, model, fp8(fp8_weights=weights, keep_high_precision=kept))
            states.append(outcome(model))
            after = full_state(model)
            found[f"adapters {size} {weights}"] = [
                name for name, value in after.items() if not torch.equal(value, before[name])
            ]
        found[f"equal: adapters {size}"] = states[1], states[0]
        found[f"adapters {size} quantized"] = quantized_names(model)


WAYS = pairwise(
    (
        {"sharding": "no_shard"},
        {"sharding": "optim"},
        {"sharding": "optim_grads"},
        {"outer_size": 2},
        {"outer_size": 2, "outer_sharding": "optim"},
    ),
    ("current", "delayed"),
    together=1,
)


def ways_of_sharding(rank: int, world: int, found: dict[str, Any]) -> None:
    """Whole weights, shards, and shards of shards: quantized from this rank's rows to what 16-bit weights are rounded to."""
    for options, recipe in WAYS:
        more = {"strategy_options": options, "steps": 2}
        usual = trained(rank, world, seeded(Net), fp8(recipe), **more)
        model = trained(rank, world, seeded(Net), fp8(recipe, fp8_weights=True), **more)
        found[f"equal: {options} {recipe}"] = outcome(model), outcome(usual)


class Uneven(Net):
    """One block computes twice, one never, and one only in every second microbatch."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        x = self.blocks[0](self.blocks[0](x))
        self.count += 1
        return self.head(self.blocks[1](x) if self.count % 2 else x)


class Halves(Net):
    """Main weights are bfloat16, and the optimizer has the rest."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"master_weights": True, "store_param_remainders": True, "use_decoupled_grad": True}
        return FusedAdam(self.parameters(), lr=0.01, **options)


def main_weights_in_halves(rank: int, world: int, found: dict[str, Any]) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
    usual = trained(rank, world, seeded(Halves), fp8(policy=policy))
    model = trained(rank, world, seeded(Halves), fp8(policy=policy, fp8_weights=True, fuse_weight_gradients=True))
    found["equal: halves"] = outcome(model), outcome(usual)


def gradients_by_layers(rank: int, world: int, found: dict[str, Any]) -> None:
    """Over microbatches, of a module that is called twice, and of some that are not called."""
    for weights in (False, True):
        states = []
        for fused in (False, True):
            precision = fp8(fp8_weights=weights, fuse_weight_gradients=fused)
            model = trained(rank, world, seeded(Uneven), precision, accumulate_grad_batches=4, steps=1)
            states.append(outcome(model))
            found[f"written {weights} {fused}"] = len(fake_engine.writes)
        # What is called twice in a microbatch: autograd adds the two in bfloat16, the layers in float32.
        twice = [state.pop("blocks.0.linear.weight") for state in states]
        found[f"shared {weights}"] = ((twice[0] - twice[1]).abs() > 1e-3).float().mean().item()  # of steps of 1e-2
        found[f"equal: written {weights}"] = states[1], states[0]


def two_ranks(rank: int, world: int) -> dict[str, Any]:
    strict_warnings()
    found: dict[str, Any] = {}
    for case in (
        calls_of_ones_own,
        contexts_of_ones_own,
        another_run_of_one_model,
        manual_optimization,
        later_models,
        ignored_layers,
        adapters,
        ways_of_sharding,
        main_weights_in_halves,
        gradients_by_layers,
    ):
        with fake_engine.installed():
            case(rank, world, found)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(two_ranks, 2)


def test_a_call_of_ones_own_computes_in_fp8_also_under_an_autocast_of_ones_own(ranks: Any) -> None:
    for found in ranks:
        assert found["own calls"] == [["current"] * 5] * 4
        assert found["own outputs"]


def test_contexts_of_ones_own_hold_inside_of_a_step(ranks: Any) -> None:
    for found in ranks:
        assert found["nested"] == (
            ["delayed", None, "delayed", "delayed", "delayed"],
            ["scaling_fwd", "scaling_bwd"],
            0,
        )


def test_a_model_keeps_the_options_it_was_made_ready_with_and_others_are_refused(ranks: Any) -> None:
    for found in ranks:
        for weights in (False, True) if NIGHT else (True,):
            again = {name: found[f"again {weights} {name}"] for name in ("same", "kept", "overridden", "delayed")}
            assert again.pop("same") == {"current"}
            for name, option in (("kept", "keep_high_precision=()"), ("overridden", "overrides={}")):
                start = "Net was prepared for FP8 by an earlier run, with other options: "
                assert again[name].startswith(f"{start}{option}, now "), again[name]
            assert "recipe=Float8CurrentScaling(), now DelayedScaling(" in again["delayed"]
            assert f"fp8_weights={weights}, now {not weights}" in found[f"again {weights} other weights"]


def test_a_model_with_parts_that_are_known_or_in_a_run_without_fp8_is_refused(ranks: Any) -> None:
    for found in ranks:
        assert (
            "has modules that an earlier run prepared for FP8, and inputs, head, which were added later"
            in found["larger"]
        )
        assert "Net was prepared for FP8 by an earlier run, and precision='bf16-mixed' is not FP8" in found["without"]


def test_scales_follow_under_manual_optimization(ranks: Any) -> None:
    for found in ranks:
        assert found["equal: manual"][0].keys() >= found["manual scales"].keys()
        assert not torch.equal(found["manual scales"]["head.scaling_fwd.scale"], torch.ones(3))


def test_ignored_weights_are_not_quantized_and_have_gradients_of_their_own(ranks: Any) -> None:
    for found in ranks:
        assert "head.weight of Net are among ignored_parameters and were to be quantized" in found["ignored quantized"]
        assert found["ignored False"] == (0, True)
        assert found["ignored True"] == (2 * 4, True)
        message = "1 modules leave gradients of ignored_parameters to autograd: head"
        assert (message in found["said False"], message in found["said True"]) == (False, True)


def test_adapters_train_over_frozen_layers(ranks: Any) -> None:
    for found in ranks:
        for size in (16, 4):
            changed = [f"{name}.lora_{part}.default.weight" for name in LINEARS for part in "AB"]
            assert found[f"adapters {size} False"] == found[f"adapters {size} True"] == changed
        frozen = [*(f"{name}.base_layer.weight" for name in LINEARS), "head.weight", "inputs.weight"]
        assert found["adapters 4 quantized"] == frozen
        assert set(found["adapters 16 quantized"]) == {*frozen, *changed}


def test_numbers_are_those_of_16_bit_weights(ranks: Any) -> None:
    for found in ranks:
        pairs = {name: pair for name, pair in found.items() if name.startswith("equal: ")}
        assert len(pairs) == 1 + 2 + len(WAYS) + 1 + 2
        for pair in pairs.values():
            assert_equal_states(pair)


def test_layers_write_gradients_of_shared_modules_and_microbatches(ranks: Any) -> None:
    for found in ranks:
        for weights in (False, True):
            # Two layers of the root once, the first block twice, the second in half of the microbatches, the third never.
            assert (found[f"written {weights} False"], found[f"written {weights} True"]) == (0, 4 * (2 + 2) + 2)
            assert found[f"shared {weights}"] < 0.02


class TestNothingToCompute:
    @pytest.fixture(autouse=True)
    def _fake(self) -> Iterator[None]:
        with fake_engine.installed():
            yield

    @pytest.mark.parametrize(
        ("model", "options", "words"),
        [
            (nn.Sequential(nn.Conv1d(4, 4, 3)), {}, r"No nn\.Linear is there that could be replaced"),
            (nn.Sequential(nn.Conv1d(4, 4, 3), nn.LayerNorm(16)), {}, r"No nn\.Linear is there"),
            (nn.Sequential(nn.Linear(16, 16)), {"keep_high_precision": ["*"]}, r"in keep_high_precision=\['\*'\] stay"),
            (nn.Sequential(fake_engine.RMSNorm(16)), {"replace_layers": False}, r"replace_layers=True"),
        ],
        ids=["convolution", "norm", "all kept", "norm of the library"],
    )
    def test_a_model_that_multiplies_nothing_in_fp8_is_refused(self, model: Any, options: Any, words: str) -> None:
        with pytest.raises(ValueError, match=rf"Sequential has no module of .* that multiplies matrices.*{words}"):
            Fp8Compute(Fp8Options(**{"replace_layers": True, **options})).prepare(model, None)

    def test_operations_of_the_library_multiply_too(self) -> None:
        Fp8Compute(Fp8Options()).prepare(nn.Sequential(fake_engine.BasicLinear()), None)


def test_threads_of_a_backward_know_that_a_step_is_under_way() -> None:
    """Autograd has threads of its own for devices; what is computed again there must not enter contexts a second time."""
    with fake_engine.installed(), ThreadPoolExecutor(1) as other:
        compute = Fp8Compute(Fp8Options())

        def knows() -> bool:
            return other.submit(lambda: compute.is_in_forward).result()

        assert not knows()
        with compute.backward():
            assert knows()
        assert not knows()
