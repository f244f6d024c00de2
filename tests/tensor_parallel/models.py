"""Models on one process and divided over ranks, and how their gradients compare."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mfsdp.tensor_parallel import part_of

transformers = pytest.importorskip("transformers", minversion="5.0")

VOCABULARY = 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
# Configuration, model, options.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Llama, biases": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "Llama, tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "OLMo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "Phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "Mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"},
    ),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
    ),
    "DeepSeek-V2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
    ),
}
_HEADS = {"head_dim": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_OLD = {"n_embd": 32, "n_head": 8, "n_layer": 2, "n_positions": 64, "rotary_dim": 4}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_SHARED = {"shared_expert_intermediate_size": 8, "moe_intermediate_size": 8}
# More, by the beginnings of their names, for the night: each has something in its plan or its forward that others have not.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: (f"{name}{text}Config", f"{name}ForCausalLM", options)
    for name, text, options in (
        ("Gemma3", "Text", _HEADS),
        ("Glm4", "", _HEADS),
        ("Cohere", "", {}),
        ("Starcoder2", "", {}),
        ("Phi", "", {}),
        ("GPTNeoX", "", {}),
        ("GPTJ", "", {**_OLD, "attn_implementation": "eager"}),
        ("CodeGen", "", {**_OLD, "attn_implementation": "eager"}),
        ("Exaone4", "", {}),
        ("Olmoe", "", _EXPERTS),
        ("Qwen2Moe", "", {**_EXPERTS, **_SHARED}),
        ("Qwen3Next", "", {**_EXPERTS, **_SHARED, **_LINEAR, "head_dim": 8}),
        ("GptOss", "", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"}),
        ("Llama4", "Text", {**_HEADS, "num_local_experts": 4, "intermediate_size_mlp": 16}),
        ("MiniMax", "", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Jamba", "", {}),
    )
}


def built(kind: str, **more: Any) -> Any:
    """A model in float64 whose parameters are all different from those of an initialization."""
    config, model, options = {**MODELS, **OTHERS}[kind]
    torch.manual_seed(0)
    settings = {"experts_implementation": "eager", "attn_implementation": "sdpa", **SIZES, **options, **more}
    made = getattr(transformers, model)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.double().train()


def batch_of(length: int = 10) -> dict[str, Tensor]:
    """Tokens with labels, some of which do not count."""
    numbers = torch.Generator().manual_seed(3)
    labels = torch.randint(0, VOCABULARY, (2, length), generator=numbers)
    labels[0, :4] = -100
    return {"input_ids": torch.randint(1, VOCABULARY, (2, length), generator=numbers), "labels": labels}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name; every parameter has one."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, gradient in found.items() if gradient is None] == []
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def gathered_from_ranks(tensor: Tensor) -> list[Tensor]:
    received = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(received, tensor.contiguous())
    return received


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of one process, from a divided model: parts are joined. Others must be equal on all ranks to the bit."""
    whole = {}
    for name, gradient in gradients(model).items():
        parameter = model.get_parameter(name)
        ranks, part = gathered_from_ranks(gradient), part_of(parameter)
        if part is not None:
            whole[name] = part.joined(ranks)
        else:
            assert all(torch.equal(other, gradient) for other in ranks), name
            whole[name] = gradient
    return whole


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def copied_model(model: Any) -> Any:
    other = copy.deepcopy(model)
    other.zero_grad()
    return other
