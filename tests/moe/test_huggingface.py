"""Hugging Face's experts, computed by this package: the same logits and gradients as their own loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import fully_shard, sharded_parameters
from lightning_mfsdp.moe import GroupedExperts, OrdinarySaver, enable_grouped_experts
from lightning_mfsdp.moe.huggingface import models_with_experts
from tests.engine.cases import Problems
from tests.helpers.distributed import run_distributed

transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MORE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "Lfm2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "num_dense_layers": 1,
        "layer_types": ["full_attention"] * 2,
    },
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


def built(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MORE[kind], pad_token_id=0, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 2:
                parameter.mul_(10)  # experts should show in the logits
    return model


def ids() -> Tensor:
    return torch.randint(1, 32, (4, 9), generator=torch.Generator().manual_seed(1))


def outcome(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients."""
    model.zero_grad()
    result = model(input_ids=ids(), labels=ids())
    result.loss.backward()
    return result.logits.detach(), {name: value.grad for name, value in model.named_parameters()}


class Counter(OrdinarySaver):
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def save(self, ctx, tensors, live_rows):
        self.shapes += [tuple(one.shape) for one in tensors]
        return super().save(ctx, tensors, live_rows)


@pytest.mark.parametrize(("kind", "layers"), [("Mixtral", 2), ("Qwen3Moe", 2), ("Olmoe", 2), ("DeepseekV3", 1)])
def test_a_model_computes_the_same_as_with_its_own_experts(kind: str, layers: int) -> None:
    model = built(kind, experts_implementation="eager")
    logits, gradients = outcome(model)
    saver = Counter()
    report = enable_grouped_experts(nn.ModuleDict({"model": model}), saver)
    assert report.enabled == [f"model.model.layers.{index}.mlp.experts" for index in range(2)[-layers:]]
    assert not report.refused
    found_logits, found_gradients = outcome(model)
    torch.testing.assert_close(found_logits, logits)
    torch.testing.assert_close(found_gradients, gradients)
    assert len(saver.shapes) == layers, "the projection; the input is there in a row for each token"
    assert all(rows == 80 for rows, _ in saver.shapes)  # of 72 choices, rounded up
    enable_grouped_experts(model)
    outcome(model)
    assert len(saver.shapes) == layers, "another saver took over"


def test_an_activation_that_is_a_function_is_known_as_well() -> None:
    model = built("Lfm2Moe", experts_implementation="eager")
    expected = outcome(model)
    assert enable_grouped_experts(model).enabled == ["model.layers.1.feed_forward.experts"]
    torch.testing.assert_close(outcome(model), expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # its new name is newer than 5.0
@pytest.mark.parametrize(
    "reentrant",
    [
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                torch.__version__ < "2.11", reason="torch 2.10: no gradients of weights, of plain modules neither"
            ),
        ),
        False,
    ],
)
def test_under_autocast_and_checkpoints_products_are_what_autocast_says(reentrant: bool) -> None:
    class Dtypes(OrdinarySaver):
        def save(self, ctx, tensors, live_rows):
            found.update(one.dtype for one in tensors)
            return tensors

    found: set[torch.dtype] = set()
    model = built("Mixtral", experts_implementation="eager").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with torch.autocast("cpu", torch.bfloat16):
        logits, gradients = outcome(model)
        enable_grouped_experts(model, Dtypes())
        found_logits, found_gradients = outcome(model)
    assert found == {torch.bfloat16}
    torch.testing.assert_close(found_logits, logits, rtol=0.05, atol=0.01)
    for name, value in found_gradients.items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, gradients[name], rtol=0.05, atol=0.05 * float(gradients[name].abs().max()))


def test_greedy_generation_is_the_same() -> None:
    model = built("Qwen3Moe", experts_implementation="eager").eval()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids(), **options)
    enable_grouped_experts(model)
    assert torch.equal(model.generate(ids(), **options), expected)


def test_no_tokens_go_through_and_gradients_are_zero() -> None:
    model = built("Mixtral")
    enable_grouped_experts(model)
    experts = model.model.layers[0].mlp.experts
    output = experts(torch.zeros(0, 16), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert output.shape == (0, 16)
    output.sum().backward()
    assert not experts.gate_up_proj.grad.any()


def test_a_model_inside_another_gets_back_what_each_part_of_its_configuration_said() -> None:
    text = transformers.MixtralConfig(**SIZES, **MORE["Mixtral"], pad_token_id=0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text, vision_config=vision))
    model.config._experts_implementation = {"": "eager", "vision_config": "eager", "text_config": "batched_mm"}
    (found,) = models_with_experts(model)
    found.switch(OrdinarySaver())
    assert found.is_switched
    assert model.config.text_config._experts_implementation == "mfsdp_grouped"
    found.restore()
    assert model.config._experts_implementation == "eager"
    assert model.config.text_config._experts_implementation == "batched_mm"
    assert not any("saver" in vars(part) for part in model.modules())


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("GptOss", {}, "because its experts have biases"),
        ("Mixtral", {"hidden_act": "gelu"}, "because its activation is GELUActivation and not SiLU"),
    ],
)
def test_what_cannot_be_grouped_stays_and_says_why(kind: str, change: dict[str, Any], reason: str) -> None:
    model = built(kind, experts_implementation="eager", **change)
    report = enable_grouped_experts(model)
    assert report.enabled == []
    assert set(report.refused.values()) == {reason}
    assert model.config._experts_implementation == "eager"
    assert f"model.layers.1.mlp.experts ({kind}Experts): left alone, {reason}" in str(report)


def test_one_layer_that_cannot_be_grouped_keeps_its_model_as_it_is() -> None:
    model = built("Mixtral", experts_implementation="eager")
    model.model.layers[1].mlp.experts.act_fn = nn.Tanh()
    report = enable_grouped_experts(model)
    assert report.refused == {
        "model.layers.0.mlp.experts": "because the model has model.layers.1.mlp.experts, which cannot be grouped",
        "model.layers.1.mlp.experts": "because its activation is Tanh and not SiLU",
    }


def test_weights_of_8_bits_are_refused_because_their_scales_are_unknown() -> None:
    model = built("Mixtral")
    for layer in model.model.layers:
        weight = layer.mlp.experts.down_proj
        layer.mlp.experts.down_proj = nn.Parameter(weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    reasons = enable_grouped_experts(model).refused.values()
    assert set(reasons) == {"because its weights are not stacked as floating-point numbers of 16 bits or more"}


def test_modules_with_a_saver_of_their_own_get_the_new_one() -> None:
    model = nn.Sequential(GroupedExperts(num_experts=2, hidden_size=4, intermediate_size=4))
    saver = Counter()
    assert enable_grouped_experts(model, saver).enabled == ["0"]
    assert model[0].saver is saver
    other = nn.Linear(2, 2)
    other.saver = "a folder, say"
    assert enable_grouped_experts(other, saver).enabled == []
    assert other.saver == "a folder, say"
    assert str(enable_grouped_experts(nn.Linear(2, 2))) == "experts: no layer of a kind that is known was found"


def sharded_mixtral(rank: int, world: int) -> None:
    problems = Problems()
    logits, gradients = outcome(built("Mixtral", experts_implementation="eager"))
    model = built("Mixtral")
    enable_grouped_experts(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    problems.close(outcome(model)[0], logits, "logits")
    for view in sharded_parameters(model):
        if view.main.numel():
            expected = gradients[view.name][view.rows.start : view.rows.stop]
            problems.close(view.grad, expected, view.name, rtol=1e-4)
    problems.finish()


def test_a_sharded_model_computes_the_same() -> None:
    run_distributed(sharded_mixtral, 2)
