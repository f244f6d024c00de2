"""A predictor's layers under Recompute: a stack of their own, of which any number of layers from 1 on covers a single one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from lightning_mfsdp import fully_shard_optimizer, fully_shard_units
from lightning_mfsdp.mtp import MultiTokenPredictor
from lightning_mfsdp.recompute import Recompute, apply_recompute
from tests.engine.worlds import by_world, check
from tests.helpers.nights import NIGHT
from tests.mtp.models import DIM, VOCAB, CausalLayer, build
from tests.mtp.test_predictor import counted_calls
from tests.mtp.test_sharded import STEPS, automatic, steps


def any_number_of_layers_covers_a_predictor_by_both_methods_and_changes_no_bit(rank, world):
    every = (("none", None), *product(("uniform", "block"), (1, 2, 7)))
    few = (every[0], ("uniform", 2), ("block", 1))
    for depth, shared in ((1, False), (2, False), (2, True)):
        expected = None
        for method, number in every if NIGHT or (not shared and depth == 2) else few:
            model = build(depth=depth, shared=shared, dropout=0.2)
            names = apply_recompute(model, Recompute(method=method, num_layers=number))
            calls = counted_calls(model)
            fully_shard_units(model, automatic(model))
            losses = steps(model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.02)), rank, world)
            case = f"{depth=} {shared=} {method} {number}"
            expected = losses if expected is None else expected
            assert torch.equal(losses, expected), case
            again = [method != "none" and (method == "uniform" or index < number) for index in range(len(calls))]
            each = STEPS * depth // len(calls)
            assert calls == [each * (1 + one) for one in again], case
            assert [name for name in names if name.startswith("predictor")] == [
                f"predictor.layers.{index}" for index, one in enumerate(again) if one
            ]


WORLDS = {2: (any_number_of_layers_covers_a_predictor_by_both_methods_and_changes_no_bit,)}


@by_world(WORLDS)
def test_a_predictor_under_recompute(world: int, case: Any) -> None:
    check(WORLDS, world, case)


@pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing_enable. is deprecated"
)  # its new name is not in older versions
def test_the_switch_of_hugging_face_leaves_a_predictor_inside_its_model_alone() -> None:
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": DIM, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    for recompute in (False, True):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**config, num_key_value_heads=2, vocab_size=VOCAB)
        )
        model.predictor = MultiTokenPredictor(DIM, CausalLayer, recompute=recompute)
        model.gradient_checkpointing_enable()
        assert model.predictor.layers[0].recomputes_itself == recompute
        with pytest.raises(
            ValueError, match=r"model\.layers\.0\.mlp checkpoints itself already, or a module around it does"
        ):
            apply_recompute(model, Recompute(modules=["*.mlp"]))
        if not recompute:
            assert apply_recompute(model, Recompute(modules=["predictor.layers.*"])) == ["predictor.layers.0"]


def test_a_layer_that_is_computed_again_already_is_refused() -> None:
    with pytest.raises(ValueError, match=r"predictor.layers.0 checkpoints itself already"):
        apply_recompute(build(recompute=True), Recompute())
    with pytest.raises(
        ValueError, match=r"predictor.layers.0.layer checkpoints itself already, or a module around it does"
    ):
        apply_recompute(build(recompute=True), Recompute(modules=["predictor.layers.*.layer"]))
