"""Recompute in models and compilers of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.recompute import Recompute, apply_recompute
from tests.helpers.nights import NIGHT
from tests.recompute.models import batch, build, equal, loss_of


def test_a_decoder_of_hugging_face() -> None:
    """Its layers take tensors in tuples by name, and say themselves that they are layers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.1)
    ids = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    found = []
    for chosen in (
        Recompute(method="none"),
        Recompute(num_layers=3),
        Recompute(method="selective", save_ops=["attention"]),
    ):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        assert apply_recompute(model, chosen) == [
            f"model.layers.{number}" for number in range(3) if chosen.method != "none"
        ]
        model.config.use_cache = False
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(equal(one, found[0]) for one in found)
    with pytest.raises(
        RuntimeError, match=r"model\.layers\.0 was given (past_key_values|cache), a cache that its forward writes to"
    ):
        model(input_ids=ids, labels=ids, use_cache=True)
    with torch.no_grad():
        result = model(input_ids=ids, use_cache=True)
    assert result.get("cache", result.get("past_key_values")) is not None
    model.model.layers[0].gradient_checkpointing = True  # as the model's own switch does it
    with pytest.raises(ValueError, match=r"model\.layers\.0 checkpoints itself already"):
        apply_recompute(model, Recompute())


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # PyTorch's own look
def test_a_compiler_that_looks_into_a_model_computes_again_what_it_should() -> None:
    """Without random numbers, which a compiler draws in its own order. Chunks and copies break its graph, and run as they are."""
    configs = (
        Recompute(num_layers=2),
        Recompute(method="selective", save_ops=["matmul"]),
        Recompute(offload=True),
        Recompute(),
        Recompute(method="selective", modules=["*.up", "*.down"]),
    )
    for config in configs if NIGHT else configs[:2]:
        found = []
        for compiled in (False, True):
            model = build().eval()
            apply_recompute(model, config)
            program = torch.compile(model, backend="aot_eager") if compiled else model
            loss = loss_of(program, batch(0))
            loss.backward()
            found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


class Decoder(nn.Module):
    """Takes a cache as decoders do, and adds to it what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, past_key_values: Any = None, cache: Any = None) -> Tensor:
        if past_key_values is not None:
            past_key_values.update(x)
        return self.layer(x) * (1.0 if cache is None else cache["scale"])


class Cache:
    def update(self, x: Tensor) -> None:
        raise AssertionError("it is refused first")


def test_a_cache_is_refused_however_it_is_given_and_a_dict_is_none() -> None:
    model = nn.ModuleList([Decoder()])
    apply_recompute(model, Recompute(modules=["0"]))
    x = torch.ones(2, 4, requires_grad=True)
    for call in (
        lambda: model[0](x, Cache()),
        lambda: model[0](x, past_key_values=Cache()),
        lambda: model[0](x, None, Cache()),
    ):
        with pytest.raises(RuntimeError, match="a cache that its forward writes to"):
            call()
    model[0](x, cache={"scale": 2.0}).sum().backward()
    model[0](x, None, {"scale": 2.0}).sum().backward()
