"""Hugging Face's models divided by their own plans: logits, losses and all gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp import ShardingError
from lightning_mfsdp.tensor_parallel import Part, apply_plan, divide, materialize_divided, part_of
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double
from tests.helpers.pairwise import in_world
from tests.tensor_parallel.models import (
    MODELS,
    OTHERS,
    SIZES,
    VOCABULARY,
    assert_equal,
    batch_of,
    built,
    copied_model,
    gathered_from_ranks,
    gradients,
    transformers,
    whole_gradients,
)

WORLDS = (2, 4)
RUNS = ("labels", "count", "shifted", "own loss", "checkpointing")


def arguments(run: str) -> dict[str, Any]:
    batch = batch_of()
    if run == "count":
        return {**batch, "num_items_in_batch": torch.tensor(7)}
    if run == "shifted":
        return {**batch, "shift_labels": batch["labels"].roll(1, -1)}
    return batch


def loss_of(model: Any, run: str) -> tuple[Tensor, Tensor]:
    """And the logits."""
    batch = arguments(run)
    if run == "own loss":
        logits = model(input_ids=batch["input_ids"]).logits
        return (logits.log_softmax(-1) * torch.arange(VOCABULARY)).mean(), logits
    output = model(**batch)
    return output.loss, output.logits


def compare(kind: str, run: str) -> None:
    model = built(kind)
    divided = copied_model(model)
    if run == "checkpointing":
        for one in (model, divided):
            enable = getattr(one, "activation_checkpointing_enable", one.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
    apply_plan(divided, None, dist.group.WORLD)
    want, logits = loss_of(model, run)
    want.backward()
    found, own_logits = loss_of(divided, run)
    found.backward()
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    assert all(torch.equal(other, found) for other in gathered_from_ranks(found.detach()))
    if run != "own loss":
        assert own_logits.as_subclass(Tensor).shape[-1] == VOCABULARY // dist.get_world_size()
        own_logits = own_logits + 0  # read, and so whole
    torch.testing.assert_close(own_logits, logits, rtol=0, atol=1e-12)
    assert_equal(whole_gradients(divided), gradients(model))


def every_gradient(rank: int, world: int) -> None:
    with in_double():
        for kind, run in in_world(world, WORLDS, MODELS, RUNS, together=1):
            try:
                compare(kind, run)
            except Exception as error:
                raise AssertionError(f"{kind}, {run}") from error


@pytest.mark.parametrize("world", WORLDS)
def test_losses_and_gradients_are_those_of_one_process(world: int) -> None:
    run_distributed(every_gradient, world)


def others(rank: int, world: int) -> None:
    with in_double():
        for kind in OTHERS:
            try:
                compare(kind, "labels")
            except Exception as error:
                raise AssertionError(kind) from error


@pytest.mark.nightly
def test_other_models() -> None:
    run_distributed(others, 2)


def evaluation(rank: int, world: int) -> None:
    """Logits are whole on every rank, so that losses, metrics and generation are those of one process."""
    for kind in ("Llama, tied", "Qwen3", "Mixtral"):
        model = built(kind).eval()
        divided = copied_model(model)
        apply_plan(divided, None, dist.group.WORLD)
        batch = batch_of()
        with in_double(), torch.no_grad():
            want, found = model(**batch), divided(**batch)
            torch.testing.assert_close(found.loss, want.loss, rtol=0, atol=1e-12)
            torch.testing.assert_close(found.logits, want.logits, rtol=0, atol=1e-12)
            tokens = batch["input_ids"][:, :4]
            options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "eos_token_id": None}
            generated = divided.generate(tokens, **options)
            assert torch.equal(generated, model.generate(tokens, **options))
        assert all(torch.equal(other, generated) for other in gathered_from_ranks(generated))


def ties(rank: int, world: int) -> None:
    model = built("Llama, tied")
    apply_plan(model, None, dist.group.WORLD)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert part_of(model.lm_head.weight) == Part(dim=0, sections=(VOCABULARY,), size=world, rank=rank)


def collectives(rank: int, world: int) -> None:
    """One all-reduce for each attention and each MLP, in forward and in backward, with one for the embedding and one for the head."""
    model = built("Llama, biases")
    apply_plan(model, None, dist.group.WORLD)
    embedding = int(part_of(model.model.embed_tokens.weight) is not None)  # transformers 5.17 leaves it whole
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        loss = model(**batch_of()).loss
        assert reduce.call_count == 2 * 2 + embedding
        loss.backward()
        assert reduce.call_count == 2 * (2 * 2) + embedding + 1
    attention = model.model.layers[0].self_attn
    hidden = torch.ones(1, 2, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="not enough values"):
        attention(hidden, (hidden,))  # after its projections
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:  # nothing is shared outside of that forward
        (attention.q_proj(hidden).sum() + attention.k_proj(hidden).sum()).backward()
        assert reduce.call_count == 2


def heads_outside_of_forwards(rank: int, world: int) -> None:
    """Logits stay divided in a training forward alone, also if that ends with an error."""
    model = built("Llama")
    apply_plan(model, None, dist.group.WORLD)
    hidden = torch.ones(1, 2, SIZES["hidden_size"], dtype=torch.float64)
    model(**batch_of())
    assert model.lm_head(hidden).shape[-1] == VOCABULARY
    with pytest.raises(RuntimeError):
        model(batch_of()["input_ids"], labels=torch.zeros(3, dtype=torch.int64))
    assert model.lm_head(hidden).shape[-1] == VOCABULARY


def own_losses(rank: int, world: int) -> None:
    """A model whose loss is not that of causal language models has whole logits, also where labels are given."""

    def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return (logits * labels[..., None]).sum()

    model = built("Llama")
    divided = copied_model(model)
    for one in (model, divided):
        one.loss_function = loss
    apply_plan(divided, None, dist.group.WORLD)
    with in_double():
        want, found = model(**batch_of()), divided(**batch_of())
        torch.testing.assert_close(found.logits, want.logits, rtol=0, atol=1e-12)
        for output in (want, found):
            output.loss.backward()
        for name, gradient in whole_gradients(divided).items():
            torch.testing.assert_close(gradient, gradients(model)[name], rtol=1e-12, atol=1e-10)


class Training(torch.nn.Module):
    """A model of transformers inside another module, whose loss it computes with positional arguments."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inside = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        output: Tensor = self.inside(tokens, None, None, None, None, labels).loss
        return output


def inside_others(rank: int, world: int) -> None:
    model = Training(built("Llama"))
    divided = copied_model(model)
    applied = apply_plan(divided, None, dist.group.WORLD)
    assert applied.styles["inside.model.layers.1.mlp.down_proj"] == "rowwise"
    copied = copied_model(divided)  # with its own loss and its own state
    assert copied.inside.loss_function.__self__ is not divided.inside.loss_function.__self__
    divide(copied)
    with in_double():
        model(*batch_of().values()).backward()
        for one in (divided, copied):
            one(*batch_of().values()).backward()
            assert_equal(whole_gradients(one), gradients(model))


def on_meta(rank: int, world: int) -> None:
    """Values of a model that was built on one process under the same seed."""
    for kind in ("Llama, tied", "Mixtral"):
        config, name, options = MODELS[kind]
        made = getattr(transformers, config)(**{**SIZES, **options})
        with torch.device("meta"):
            want, model = getattr(transformers, name)(made), getattr(transformers, name)(made)
        for one in (want, model):
            one.tie_weights()
        torch.manual_seed(5)
        materialize_divided(want, torch.device("cpu"))
        apply_plan(model, None, dist.group.WORLD)
        torch.manual_seed(5)
        materialize_divided(model, torch.device("cpu"))
        parts = {name: part_of(parameter) for name, parameter in model.named_parameters()}
        assert sum(part is not None for part in parts.values()) > len(parts) / 2
        for key, parameter in want.named_parameters():
            part = parts[key]
            assert torch.equal(model.get_parameter(key), parameter if part is None else part.own(parameter)), key
        model(**batch_of()).loss.backward()


def losses_of_the_forward(rank: int, world: int) -> None:
    """A model that computes a loss without its loss function is refused, and told how to go on."""

    class OwnLoss(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            output = super().forward(input_ids)
            output.loss = output.logits.square().mean()
            return output

    model = OwnLoss(built("Llama").config).train()
    divided = copied_model(model)
    apply_plan(divided, None, dist.group.WORLD)
    with pytest.raises(ShardingError, match="OwnLoss was given labels and did not call its loss_function"):
        divided(**batch_of())
    assert divided(batch_of()["input_ids"]).logits.shape[-1] == VOCABULARY
    divided = copied_model(model)
    divided.loss_function = None
    apply_plan(divided, None, dist.group.WORLD)
    torch.testing.assert_close(divided(**batch_of()).loss, model(**batch_of()).loss)


def under_autocast(rank: int, world: int) -> None:
    """Every layer returns the dtype that it returns on one process."""
    model = built("Llama, biases").float()
    divided = copied_model(model)
    apply_plan(divided, None, dist.group.WORLD)
    dtypes: list[dict[str, torch.dtype]] = [{}, {}]
    for one, found in zip((model, divided), dtypes, strict=True):
        for name, module in one.named_modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.register_forward_hook(lambda _, __, output, f=found, n=name: f.update({n: output.dtype}))
        with torch.autocast("cpu", torch.bfloat16):
            one(**batch_of()).loss.backward()
    assert dtypes[0] == dtypes[1]
    assert torch.bfloat16 in dtypes[1].values()
    found, want = whole_gradients(divided), gradients(model)
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0.05 * gradient.abs().max().item())


class LearnedActivation(torch.nn.Module):
    """Its parameter meets features of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.slope * x).sigmoid()


def forgotten_rules(rank: int, world: int) -> None:
    """A module without a rule that computes with parts is found in the first forward, and the rule that it asks for is right."""
    model = built("Llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = LearnedActivation()
    divided = copied_model(model)
    apply_plan(divided, None, dist.group.WORLD)
    with torch.no_grad():
        divided(**batch_of())  # there are no gradients that could be wrong
    with pytest.raises(ShardingError) as error:
        divided(**batch_of())
    assert str(error.value) == (
        "model.layers.0.mlp.act_fn (LearnedActivation): its input is a part of a tensor, so the gradients of its parameters are partial"
        ' sums. Add the rule "model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce" to the plan (model.tp_plan of a transformers'
        " model)."
    )
    divided = copied_model(model)
    divided.tp_plan = {**divided.tp_plan, "model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}
    apply_plan(divided, None, dist.group.WORLD)
    with in_double():
        for one in (model, divided):
            one(**batch_of()).loss.backward()
    assert_equal(whole_gradients(divided), gradients(model))


TWO_RANKS = [
    *(evaluation, collectives, heads_outside_of_forwards, ties, own_losses, losses_of_the_forward),
    *(under_autocast, inside_others, on_meta, forgotten_rules),
]


@pytest.mark.parametrize("program", TWO_RANKS)
def test_two_ranks(program: Callable[[int, int], None]) -> None:
    run_distributed(program, 2)


def refusals(rank: int, world: int) -> dict[str, str]:
    told = {}

    def refused(name: str, model: Any, plan: dict[str, str] | None = None) -> None:
        with pytest.raises(ShardingError) as error:
            apply_plan(model, plan, dist.group.WORLD)
        told[name] = str(error.value)

    refused("KV heads", built("Llama", num_key_value_heads=2))
    refused("query heads", built("DeepSeek-V2", hidden_size=48, num_attention_heads=6, num_key_value_heads=6))
    refused("dropout", built("Qwen2", attention_dropout=0.1))
    refused("vocabulary", built("Llama", vocab_size=34))
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 1}
    refused("no plan", transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    refused("own plan", built("Llama"), {"layers.*.mlp.up_proj": "colwise"})
    model = built("Llama")
    apply_plan(model, None, dist.group.WORLD)
    refused("twice", model)
    return told


def test_refusals() -> None:
    told = run_distributed(refusals, 4)[0]
    assert told["KV heads"].startswith(
        "model.layers.0.self_attn (LlamaAttention): its 2 KV heads cannot be divided over 4 tensor ranks"
    )
    assert told["query heads"].startswith(
        "model.layers.0.self_attn (DeepseekV2Attention): its 6 query heads cannot be divided over 4"
    )
    assert "(Qwen2Attention): attention_dropout=0.1: dropout of attention weights" in told["dropout"]
    assert (
        "lm_head.weight: the style 'colwise_gather_output' divides dim 0 of its shape [34, 32], and 34 cannot"
        in told["vocabulary"]
    )
    assert told["no plan"].startswith("GPT2LMHeadModel has no tensor parallel plan")
    assert told["own plan"] == (
        "the tensor parallel plan has rules that match nothing in LlamaForCausalLM; remove them: layers.*.mlp.up_proj"
    )
    assert "is a part already" in told["twice"]
