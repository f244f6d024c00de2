"""Hugging Face's models on divided sequences: outputs and gradients of one process on whole ones; every refusal has its message."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_mfsdp import ShardingError
from lightning_mfsdp.context_parallel.huggingface import use_context_attention
from lightning_mfsdp.context_parallel.mask_functions import read_mask_function
from lightning_mfsdp.context_parallel.sharing import METHODS, ContextParallel, Cut, Method
from tests.context_parallel.sequences import BATCH, LENGTH, allowed, cut_of, divided
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double
from tests.helpers.pairwise import in_world

transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Configuration, model, options.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama, 4 KV heads": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4}),
    "Llama, 2 KV heads": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Llama, 1 KV head": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "Mistral, sliding window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}),
    "Gemma3, some layers sliding": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 64,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    "BERT": (
        "BertConfig",
        "BertForMaskedLM",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "ModernBERT, some layers sliding": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {"local_attention": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
BIDIRECTIONAL = ("BERT", "ModernBERT, some layers sliding")  # transformers packs no documents for them
MIXED = (
    "Gemma3, some layers sliding",
    "ModernBERT, some layers sliding",
)  # one written-out mask does not fit all layers
WINDOWS = {"Mistral, sliding window": 5}


def built(kind: str, attention: str = "sdpa", **more: Any) -> Any:
    config, model, options = MODELS[kind]
    torch.manual_seed(0)
    sizes = {} if kind == "GPT-2" else SIZES
    settings = {
        "vocab_size": 32,
        "pad_token_id": 0,
        "use_cache": False,
        "experts_implementation": "eager",
        **sizes,
        **options,
        **more,
    }
    made = getattr(transformers, model)(getattr(transformers, config)(**settings, attn_implementation=attention))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.double()


def batch_of(cut: Cut) -> dict[str, Tensor]:
    """Tokens and positions of whole sequences; positions begin again in each document."""
    tokens = torch.randint(1, 32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    if cut.document is not None:
        first = (cut.document[:, :, None] == cut.document[:, None, :]).int().argmax(-1)
        places = places - first
    batch = {"input_ids": tokens, "position_ids": places.contiguous()}
    return batch if cut.is_real is None else {**batch, "attention_mask": cut.is_real.long()}


def loss_of(logits: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    chosen = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return -(chosen * weights).sum() / total


def targets_of(cut: Cut) -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, 32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4))
    weights = torch.ones(BATCH, LENGTH) if cut.is_real is None else cut.is_real
    return targets, weights.double()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def of_one_process(model: Any, kind: str, cut: Cut) -> tuple[Tensor, dict[str, Tensor]]:
    batch = batch_of(cut)
    if cut.document is not None and (
        cut.is_real is not None or kind in BIDIRECTIONAL
    ):  # transformers packs none of these
        batch["attention_mask"] = allowed(cut, is_causal=kind not in BIDIRECTIONAL, window=WINDOWS.get(kind))
    targets, weights = targets_of(cut)
    logits = model(**batch).logits
    loss_of(logits, targets, weights, weights.sum()).backward()
    return logits.detach(), gradients(model)


def of_this_rank(model: Any, parallel: ContextParallel, cut: Cut) -> tuple[Tensor, dict[str, Tensor]]:
    batch = {name: parallel.part_of(tensor, 1) for name, tensor in batch_of(cut).items()}
    targets, weights = targets_of(cut)
    logits = model(**batch).logits
    total = weights.sum() / parallel.size
    loss_of(logits, parallel.part_of(targets, 1), parallel.part_of(weights, 1), total).backward()
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
        gradient /= parallel.size
    return logits.detach(), found


def compare(kind: str, method: Method, cut: Cut, model: Any, change: Any = None) -> None:
    with in_double():
        _compare(kind, method, cut, model, change)


def _compare(kind: str, method: Method, cut: Cut, model: Any, change: Any) -> None:
    want = of_one_process(model, kind, cut)
    divided_model = copy.deepcopy(model)
    divided_model.zero_grad()
    if change:
        change(divided_model)
    with divided(method, cut) as parallel:
        undo = use_context_attention(divided_model, parallel)
        logits, found = of_this_rank(divided_model, parallel, cut)
        real = parallel.part_of(targets_of(cut)[1], 1)[..., None]
        torch.testing.assert_close(logits * real, parallel.part_of(want[0], 1) * real, rtol=0, atol=1e-12)
        assert found.keys() == want[1].keys()
        for name, gradient in want[1].items():
            torch.testing.assert_close(
                found[name], gradient, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
            )
        undo()


KINDS = ("plain", "padding", "padding_before", "documents", "both")
WORLDS = (2, 4)


def rows(world: int) -> list[tuple[Any, ...]]:
    """On a push each model once, each method and each kind of batch on one number of ranks or the other."""

    def possible(model: str, method: str, kind: str) -> bool:
        return not (kind == "both" and model in MIXED) and not (kind == "documents" and model in BIDIRECTIONAL)

    return in_world(world, WORLDS, MODELS, METHODS, KINDS, possible=possible, together=1)


def like_one_process(rank: int, world: int) -> int:
    for kind, method, batch in rows(world):
        try:
            compare(kind, method, cut_of(batch), built(kind))
        except AssertionError as error:
            raise AssertionError(f"{kind}, {method}, {batch}") from error
    return len(rows(world))


@pytest.mark.parametrize("world", WORLDS)
def test_logits_and_gradients_equal_those_of_one_process(world: int) -> None:
    assert run_distributed(like_one_process, world) == [len(rows(world))] * world


def recomputed(rank: int, world: int) -> bool:
    for method, kind, reentrant in (
        ("ulysses", "documents", False),
        ("gather", "padding_before", False),
        ("ulysses", "plain", True),
    ):

        def change(model: Any, reentrant: bool = reentrant) -> None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.train()

        compare("Qwen3", method, cut_of(kind), built("Qwen3"), change)  # type: ignore[arg-type]
    return True


def test_activation_checkpointing_of_the_model_gives_the_same_gradients() -> None:
    assert all(run_distributed(recomputed, 2))


def softcapped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function of one's own, as transformers calls it, with a cap of products and sinks."""
    key, value = (tensor.repeat_interleave(module.num_key_value_groups, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * options["scaling"]
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -1e30)
    if options.get("s_aux") is not None:
        sinks = options["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def register_softcapped() -> None:
    masks = transformers.masking_utils
    transformers.AttentionInterface.register("softcapped", softcapped)
    transformers.AttentionMaskInterface.register("softcapped", masks.sdpa_mask)


MODELS_WITH_MORE = {
    "Gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 2.0},
    ),
    "GptOss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def capped_and_sinks(rank: int, world: int) -> bool:
    register_softcapped()
    for kind in MODELS_WITH_MORE:
        MODELS[kind] = MODELS_WITH_MORE[kind]
        # transformers' gpt-oss knows documents with flash attention alone
        for batch in ("plain", "padding_before" if kind == "GptOss" else "documents"):
            compare(kind, "ulysses", cut_of(batch), built(kind, "softcapped"))
    return True


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_softcaps_and_sinks_of_each_head_reach_the_base_function(world: int) -> None:
    assert all(run_distributed(capped_and_sinks, world, apart=True))


def varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention that is told of windows and documents as flash attention is, and knows it by the name in the configuration."""
    assert module.config._attn_implementation == "varlen"
    assert options.get("position_ids") is None or options["position_ids"].shape[-1] == query.shape[2]
    batch, length = query.shape[0], query.shape[2]
    place = torch.arange(length)
    distance = place[:, None] - place
    allowed = distance.abs() < (options.get("sliding_window") or length)
    if module.is_causal:
        allowed = allowed & (distance >= 0)
    allowed = allowed.expand(batch, length, length)
    if mask is not None:
        assert mask.shape == (batch, length)
        allowed = allowed & mask[:, None].bool()
    if (ends := options.get("cu_seq_lens_q")) is not None:
        assert mask is None
        assert ends.dtype == torch.int32
        assert options["max_length_q"] == int(ends.diff().max())
        segment = torch.bucketize(torch.arange(batch * length), ends, right=True).view(batch, length)
        allowed = allowed & (segment[:, :, None] == segment[:, None])
    groups = module.num_key_value_groups
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed[:, None], enable_gqa=groups > 1)
    return output.transpose(1, 2).contiguous(), None


def register_varlen() -> None:
    transformers.AttentionInterface.register("varlen", varlen)
    transformers.AttentionMaskInterface.register("varlen", transformers.masking_utils.flash_attention_mask)


def told_as_flash_attention(rank: int, world: int) -> str:
    register_varlen()
    for kind in ("Mistral, sliding window", "Qwen3", "BERT"):
        for batch in KINDS:
            cut = cut_of(batch)
            with in_double():
                want = of_one_process(built(kind), kind, cut)
            model = built(kind, "varlen")
            with in_double(), divided("ulysses", cut) as parallel:
                use_context_attention(model, parallel)
                logits, found = of_this_rank(model, parallel, cut)
                real = parallel.part_of(targets_of(cut)[1], 1)[..., None]
                torch.testing.assert_close(logits * real, parallel.part_of(want[0], 1) * real, rtol=0, atol=1e-12)
                for name, gradient in want[1].items():
                    torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)
    both = cut_of("both")
    assert both.is_real is not None
    backward = Cut(length=LENGTH, is_real=both.is_real.flip(1), document=both.document)
    with divided("ulysses", backward) as parallel, pytest.raises(ShardingError) as error:
        of_this_rank(model, parallel, backward)
    return str(error.value)


def test_a_base_that_knows_no_masks_gets_windows_and_documents_as_arguments() -> None:
    told = run_distributed(told_as_flash_attention, 2, apart=True)
    assert "flash attention needs documents in ascending order, with padding only at the end" in told[0]


def flexible(rank: int, world: int) -> float:
    cut = cut_of("documents")
    model, reference = (built("Mistral, sliding window", attention).float() for attention in ("flex_attention", "sdpa"))
    with torch.no_grad(), divided("ulysses", cut) as parallel:
        whole = reference(**batch_of(cut)).logits
        use_context_attention(model, parallel)
        part = model(**{name: parallel.part_of(tensor, 1) for name, tensor in batch_of(cut).items()}).logits
    return float((part - parallel.part_of(whole, 1)).abs().max())


@pytest.mark.nightly
def test_flex_attention_gets_a_block_mask_of_whole_sequences() -> None:
    assert max(run_distributed(flexible, 2, apart=True)) < 1e-4


def caching(rank: int, world: int) -> bool:
    """Models make a cache in every forward unless they are told not to."""
    for kind in ("Llama, 2 KV heads", "Gemma3, some layers sliding", "Mistral, sliding window"):
        compare(kind, "gather", cut_of("plain"), built(kind, use_cache=True))
    return True


def test_a_cache_that_a_model_begins_in_a_forward_changes_nothing() -> None:
    assert all(run_distributed(caching, 2))


def switched(rank: int, world: int) -> bool:
    model = built("Llama, 2 KV heads")
    batch = batch_of(cut_of("padding"))
    want = model(**batch).logits
    prompt = {"input_ids": batch["input_ids"][:, :4], "attention_mask": torch.ones(BATCH, 4, dtype=torch.int64)}
    generated = model.generate(**prompt, max_new_tokens=5, do_sample=False, use_cache=True)
    with divided("ulysses", Cut(length=LENGTH)) as parallel:
        undo = use_context_attention(model, parallel)
        assert model.config._attn_implementation != "sdpa"
        of_this_rank(model, parallel, Cut(length=LENGTH))
        parallel.cut = None  # as in validation
        torch.testing.assert_close(model(**batch).logits, want, rtol=0, atol=0)
        assert torch.equal(model.generate(**prompt, max_new_tokens=5, do_sample=False, use_cache=True), generated)
        undo_again = use_context_attention(model, parallel)  # a run before it broke off and undid nothing
        parallel.cut = Cut(length=LENGTH)
        of_this_rank(model, parallel, parallel.cut)
    torch.testing.assert_close(model(**batch).logits, want, rtol=0, atol=0)  # after training
    undo_again()
    assert model.config._attn_implementation == "sdpa"
    undo()
    assert model.config._attn_implementation == "sdpa"
    assert not any(part._forward_hooks for part in model.modules())
    torch.testing.assert_close(model(**batch).logits, want, rtol=0, atol=0)
    return True


def test_whole_batches_and_generation_are_unchanged() -> None:
    assert all(run_distributed(switched, 2))


def static_refusals(rank: int, world: int) -> dict[str, str]:
    told = {}

    def refused(name: str, model: Any, method: Method = "ulysses") -> None:
        with divided(method, None) as parallel:
            before = [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]
            with pytest.raises(ShardingError) as error:
                use_context_attention(torch.nn.ModuleDict({"inner": model}), parallel)
            told[name] = str(error.value)
            after = [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]
            assert before == after, name

    register_softcapped()
    kind = "Llama, 2 KV heads"
    refused("eager", built(kind, "eager"))
    refused("gather", built(kind, "softcapped"), "gather")
    refused("heads", built(kind, num_attention_heads=3, num_key_value_heads=3, hidden_size=24))
    model = built("Gemma3, some layers sliding")
    model.config.layer_types = ["chunked_attention", "full_attention"]
    refused("layers", model)
    model = built(kind)
    model.model.layers[1].add_module("conv", torch.nn.Conv1d(2, 2, 3))
    refused("conv", model)
    model = built(kind)
    model.model.layers[0].add_module("memory", torch.nn.GRU(2, 2))
    refused("recurrent", model)
    sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
    refused("cross", transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))
    model = built(kind)
    model.model.layers[0].self_attn = torch.nn.Identity()
    model.model.layers[1].self_attn = torch.nn.Identity()
    refused("none", model)
    few = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "attn_implementation": "sdpa",
    }
    refused("falcon", transformers.FalconForCausalLM(transformers.FalconConfig(**few)))
    sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "vocab_size": 8}
    decoder = transformers.BartConfig(**sizes, is_encoder_decoder=False, attn_implementation="sdpa")
    refused("positions", transformers.BartForCausalLM(decoder))
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES, attn_implementation="sdpa"))
    refused("own registry", model)
    model = built(kind)
    model.model.config = copy.deepcopy(model.config)
    model.model.config._attn_implementation = "softcapped"
    refused("different", model)
    transformers.AttentionInterface.register("older", softcapped)
    transformers.AttentionMaskInterface.register("older", lambda batch_size, cache_position, **_: None)
    model = built(kind)
    model.config._attn_implementation = "older"
    refused("older", model)
    return told


def test_models_that_cannot_be_divided_are_refused_by_name() -> None:
    told = run_distributed(static_refusals, 2, apart=True)[0]
    assert told["eager"].startswith("inner (LlamaForCausalLM): its attention implementation 'eager' cannot be used")
    assert "load the model with attn_implementation='sdpa'" in told["eager"]
    assert (
        "context_method='gather' computes attn_implementation='sdpa', and the model has 'softcapped'" in told["gather"]
    )
    assert "3 query heads cannot be divided over 2 context ranks, as context_method='ulysses' does" in told["heads"]
    assert "Use context_method='auto' or 'gather', which divides no heads" in told["heads"]
    assert "layers of type 'chunked_attention'" in told["layers"]
    assert "model.layers.1.conv (Conv1d) computes a token from its neighbors" in told["conv"]
    assert "model.layers.0.memory (GRU) carries a state along the sequence" in told["recurrent"]
    assert "T5ForConditionalGeneration): it has cross-attention" in told["cross"]
    assert "no layer of attention was found" in told["none"]
    assert "transformers could not change its attention function" in told["falcon"]
    assert "its forward takes no position_ids, and would number the tokens of this rank" in told["positions"]
    assert "it has its own registry of attention functions" in told["own registry"]
    assert "its parts have different attention implementations, sdpa, softcapped" in told["different"]
    assert "the mask function of 'older' takes no q_length" in told["older"]


class OwnAttention(torch.nn.Module):
    """Computes a layer's attention without transformers' registry."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer.o_proj

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.layer(hidden_states.cumsum(1)), None


def refusals_in_forward(rank: int, world: int) -> dict[str, str]:
    told = {}

    def refused(name: str, model: Any, cut: Cut, method: Method = "ulysses", change: Any = None, **batch: Any) -> None:
        with divided(method, cut) as parallel:
            undo = use_context_attention(model, parallel)
            if change:
                change(model)
            with pytest.raises(ShardingError) as error:
                model(
                    **{key: parallel.part_of(tensor, 1) for key, tensor in batch_of(Cut(length=LENGTH)).items()} | batch
                )
            told[name] = str(error.value)
            undo()

    def model(kind: str = "Llama, 2 KV heads", **options: Any) -> Any:
        return built(kind, **options)

    half, plain = LENGTH // 2, Cut(length=LENGTH)
    padded = torch.ones(BATCH, half, dtype=torch.int64)
    padded[0, :2] = 0
    refused("4-D", model(), plain, attention_mask=torch.ones(BATCH, 1, half, half, dtype=torch.bool))
    refused("padding", model(), plain, attention_mask=padded)
    refused("other padding", model(), cut_of("padding"), attention_mask=padded)
    refused("whole mask", model(), plain, attention_mask=torch.ones(BATCH, LENGTH, dtype=torch.int64))
    restarting = torch.arange(half).expand(BATCH, half) % 3
    refused("documents", model(), plain, position_ids=restarting)
    refused("other documents", model(), cut_of("documents"), position_ids=restarting)
    refused("unread documents", model("BERT"), cut_of("documents"))
    refused("length", model(), Cut(length=2 * LENGTH))
    refused("flash arguments", model(), plain, cu_seq_lens_q=torch.tensor([0, half]))
    cache = transformers.DynamicCache(config=model().config)
    whole = model()
    with torch.no_grad():
        whole(input_ids=torch.ones(BATCH, 2, dtype=torch.int64), past_key_values=cache, use_cache=True)
    refused("cache", whole, plain, past_key_values=cache, use_cache=True)
    refused("images", model("Gemma3, some layers sliding", use_bidirectional_attention=True), plain)

    def replaced(made: Any) -> None:
        made.model.layers[1].self_attn.forward = OwnAttention(made.model.layers[1].self_attn).forward

    refused("own attention", model(), plain, change=replaced)

    def softcap(made: Any) -> None:
        made.model.layers[0].self_attn.forward = functools.partial(made.model.layers[0].self_attn.forward, softcap=3.0)

    refused("softcap", model(), plain, "gather", change=softcap)
    register_varlen()

    def bidirectional(made: Any) -> None:
        made.model.layers[1].self_attn.is_causal = False

    refused("arguments", built("Qwen3", "varlen"), plain, change=bidirectional)
    masks = transformers.masking_utils
    made = model()
    layer = made.model.layers[0].self_attn
    with divided("ulysses", plain) as parallel:
        use_context_attention(made, parallel)
        embeds, looking_back = torch.zeros(BATCH, half, 4), masks.sliding_window_overlay(3)
        with pytest.raises(ShardingError) as error:
            masks.create_bidirectional_mask(made.config, embeds, None, and_mask_function=looking_back)
        told["window"] = str(error.value)
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[made.config._attn_implementation]
        query, other = torch.zeros(BATCH, 4, half, 8), torch.zeros(BATCH, 2, half + 1, 8)
        with pytest.raises(ShardingError) as error:
            attend(layer, query, other, other, None)
        told["other sequence"] = str(error.value)
    return told


def test_what_a_divided_forward_cannot_compute_is_refused_by_name() -> None:
    told = run_distributed(refusals_in_forward, 2, apart=True)[0]
    assert told["4-D"].startswith("LlamaAttention of layer 0: got a mask of its own, a Tensor of shape (2, 1, 8, 8)")
    assert told["padding"].startswith("Llama: its attention_mask does not match the batch that was divided")
    assert told["other padding"].startswith("Llama: its attention_mask does not match the batch that was divided")
    assert "attention_mask has 16 tokens and this rank's part of the sequences 8" in told["whole mask"]
    assert told["documents"].startswith("Llama: where its position_ids begin again does not match the batch")
    assert told["unread documents"].startswith("Bert: position_ids of the batch begin again")
    assert told["other documents"].startswith("Llama: where its position_ids begin again does not match the batch")
    assert (
        "Llama: got sequences of 8 tokens, but this step's batch has 32 tokens divided over 2 context ranks, 16 each"
        in told["length"]
    )
    assert "LlamaAttention of layer 0: attention with cu_seq_lens_q cannot" in told["flash arguments"]
    assert "Llama: 10 keys for 8 queries: a cache of earlier tokens" in told["cache"]
    assert "Gemma3Text: its attention mask is made by" in told["images"]
    assert "model.layers.1.self_attn (LlamaAttention) did not call the attention function" in told["own attention"]
    assert "LlamaAttention of layer 0: softcap is not supported by context_method='gather'" in told["softcap"]
    assert (
        "its mask is causal and its arguments say bidirectional, of which varlen would take the second"
        in told["arguments"]
    )
    assert "Llama: its attention has a window to earlier tokens and attends to all later ones" in told["window"]
    assert "LlamaAttention of layer 0: 9 keys for 8 queries: attention to another sequence" in told["other sequence"]


def test_masks_that_cannot_be_read_are_refused_by_name() -> None:
    masks = transformers.masking_utils
    packed = [masks.packed_sequence_mask_function(torch.tensor([numbers])) for numbers in ([0, 0, 1], [0, 1, 1])]
    with pytest.raises(ShardingError, match="model: its attention keeps two kinds of documents apart at once"):
        read_mask_function(masks.and_masks(masks.causal_mask_function, *packed), "model")

    class Unhashable:
        __hash__ = None

        def __call__(self, *_: object) -> bool:
            return True

    with pytest.raises(ShardingError, match="model: its attention mask is made by Unhashable"):
        read_mask_function(Unhashable(), "model")
    pattern, documents = read_mask_function(masks.and_masks(masks.causal_mask_function, packed[0]), "model")
    assert pattern.causal
    assert documents is not None
    assert documents.tolist() == [[0, 0, 1]]
