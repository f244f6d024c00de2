"""Adapters of PEFT in models that a plan divides: gradients are those of one process, or the adapter is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp import ShardingError
from lightning_mfsdp.tensor_parallel import apply_plan, part_of
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double
from tests.tensor_parallel.models import assert_equal, batch_of, built, copied_model, gathered_from_ranks

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DIVIDED_ALIKE = ["gate_proj", "up_proj", "down_proj", "embed_tokens"]
# Model, options of LoRA.
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("Llama", {"target_modules": ATTENTION}),
    "everything": ("Llama, biases", {"target_modules": [*ATTENTION, *DIVIDED_ALIKE, "lm_head"]}),
    "dropout": ("Qwen3", {"target_modules": [*ATTENTION, "down_proj"], "lora_dropout": 0.25}),
    "biases": ("Qwen2", {"target_modules": ATTENTION, "lora_bias": True}),
    "packed": ("Phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}),
    "whole copies": ("Llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "rows of another rank": (
        "DeepSeek-V2",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    ),
}


def adapted(kind: str, options: dict[str, Any]) -> Any:
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")  # peft asks transformers for it
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **options)
    return peft.get_peft_model(built(kind), config, autocast_adapter_dtype=False).double()


def compare(model: Any) -> None:
    divided = copied_model(model)
    apply_plan(divided, None, dist.group.WORLD)
    for one in (model, divided):
        torch.manual_seed(5)
        one(**batch_of()).loss.backward()
    found: dict[str, Tensor] = {}
    for name, parameter in divided.named_parameters():
        if parameter.grad is None:
            continue
        ranks, part = gathered_from_ranks(parameter.grad), part_of(parameter)
        assert part is not None or all(torch.equal(other, parameter.grad) for other in ranks), name
        found[name] = parameter.grad if part is None else part.joined(ranks)
    wanted = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert any("lora_A" in name for name in wanted)
    assert_equal(found, wanted)


def every_gradient(rank: int, world: int) -> None:
    with in_double():
        for case, (kind, options) in ADAPTED.items():
            try:
                compare(adapted(kind, options))
            except Exception as error:
                raise AssertionError(case) from error


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_gradients_of_adapters_are_those_of_one_process(world: int) -> None:
    run_distributed(every_gradient, world)


def several(rank: int, world: int) -> None:
    """A second adapter, of which each is used in turn, and none."""
    with in_double():
        model = adapted("Llama", {"target_modules": ATTENTION})
        model.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["o_proj", "up_proj"]))
        model.double()
        divided = copied_model(model)
        apply_plan(divided, None, dist.group.WORLD)
        for use in (lambda one: one.set_adapter("other"), lambda one: one.set_adapter("default")):
            outputs = []
            for one in (model, divided):
                use(one)
                outputs.append(one(**batch_of()).loss)
            torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-12)
        with model.disable_adapter(), divided.disable_adapter():
            torch.testing.assert_close(divided(**batch_of()).loss, model(**batch_of()).loss, rtol=0, atol=1e-12)


def test_adapters_may_be_several_and_switched() -> None:
    run_distributed(several, 2)


def mixture() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])


# Model, its adapter, message.
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "DoRA": (
        "Llama",
        lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
        "q_proj (Linear): a variant of LoRA, such as DoRA, that computes with whole weights",
    ),
    "AdaLoRA": (
        "Llama",
        lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
        "q_proj: the style 'colwise' is for nn.Linear, and this is a peft.tuners.adalora.layer.SVDLinear",
    ),
    "IA3": (
        "Llama",
        lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        "k_proj: the style 'colwise' is for nn.Linear, and this is a peft.tuners.ia3.layer.Linear",
    ),
    "parameters of experts": (
        "Mixtral",
        mixture,
        "layers.0.mlp.experts.base_layer.gate_up_proj: an adapter is around it, and the rule",
    ),
}


def refuse(rank: int, world: int) -> dict[str, str]:
    warnings.simplefilter("ignore")  # of PEFT, about layouts of experts
    said = {}
    for case, (kind, config, _) in REFUSED.items():
        model = peft.get_peft_model(built(kind), config(), autocast_adapter_dtype=False)
        with pytest.raises(ShardingError) as info:
            apply_plan(model, None, dist.group.WORLD)
        said[case] = str(info.value)
    return said


def test_other_adapters_are_refused_by_name() -> None:
    for said in run_distributed(refuse, 2):
        for case, (_, _, message) in REFUSED.items():
            assert message in said[case], said[case]
