from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from examples.benchmark.context import LongDecoder
from examples.decoder import PRESETS, TENSOR_PLAN, Decoder, DecoderConfig, next_token_loss, rotary_tables, rotate
from lightning_mfsdp.fabric import MFSDPFabricStrategy
from tests.helpers.distributed import run_distributed
from tests.helpers.double import in_double

SMALL = DecoderConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64, seq=16)


def build(config: DecoderConfig = SMALL, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(config)


def tokens(rows: int = 2, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", 3.737856), ("300m", 373.867520), ("1b", 1_364.297728), ("8b", 8_030.261248)]
)
def test_presets_have_the_advertised_number_of_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == round(millions * 1e6)


def test_logits_have_one_row_per_token_and_the_first_loss_is_that_of_guessing() -> None:
    logits = build()(tokens())
    assert logits.shape == (2, 16, SMALL.vocab)
    assert next_token_loss(logits, tokens(seed=2)).item() == pytest.approx(math.log(SMALL.vocab), abs=0.05)


def test_a_token_changes_no_logit_before_it() -> None:
    model, before = build(), tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % SMALL.vocab
    first, second = model(before), model(after)
    torch.testing.assert_close(first[:, :9], second[:, :9], rtol=0, atol=0)
    assert not torch.equal(first[:, 9:], second[:, 9:])


def test_grouped_query_attention_equals_attention_with_repeated_key_and_value_heads() -> None:
    grouped = build()
    full = build(replace(SMALL, kv_heads=SMALL.heads))
    state = copy.deepcopy(grouped.state_dict())
    for name, value in state.items():
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            heads = value.view(SMALL.kv_heads, SMALL.head_dim, SMALL.dim)
            state[name] = heads.repeat_interleave(SMALL.heads // SMALL.kv_heads, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), full(tokens()))


def test_rotary_products_depend_on_the_distance_between_positions_only() -> None:
    cos, sin = rotary_tables(12, 8, 10_000.0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8, generator=generator).expand(1, 1, 12, 8) for _ in range(2))
    products = rotate(query, cos, sin)[0, 0] @ rotate(key, cos, sin)[0, 0].T
    for distance in range(1, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_a_tied_head_is_the_embedding_itself() -> None:
    model = build(replace(SMALL, tie_head=True))
    assert model.head.weight is model.embedding.weight
    untied = sum(parameter.numel() for parameter in build().parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == untied - SMALL.vocab * SMALL.dim


def test_every_module_with_parameters_can_draw_them_again_as_its_constructor_did() -> None:
    with torch.device("meta"):
        model = Decoder(SMALL)
    torch.manual_seed(0)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    for (name, parameter), expected in zip(model.named_parameters(), build().parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def test_projections_into_the_residual_stream_start_smaller() -> None:
    block = build(replace(SMALL, dim=256, ffn=512)).blocks[0]
    scale = 0.02 / math.sqrt(2 * SMALL.layers)
    assert block.attention.out.weight.std().item() == pytest.approx(scale, rel=0.05)
    assert block.feed_forward.down.weight.std().item() == pytest.approx(scale, rel=0.05)
    assert block.feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_bfloat16_stays_near_float32() -> None:
    model = build()
    exact = model(tokens())
    rounded = copy.deepcopy(model).to(torch.bfloat16)(tokens())
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.1, atol=0.02)


# Tracing a block looks at the `.grad` of its input, which is no leaf in a chain of blocks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
def test_blocks_compile_without_a_graph_break() -> None:
    model, compiled = build(), build()
    for index, block in enumerate(compiled.blocks):
        compiled.blocks[index] = torch.compile(block, backend="aot_eager", fullgraph=True)
    expected, actual = model(tokens()), compiled(tokens())
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    assert all(parameter.grad is not None for parameter in compiled.parameters())


def test_the_model_keeps_no_buffers() -> None:
    assert not list(build().buffers())
    assert not any(isinstance(module, nn.Linear) and module.bias is not None for module in build().modules())


@pytest.mark.parametrize(("change", "message"), [({"heads": 5}, "dim must be"), ({"kv_heads": 3}, "kv_heads must")])
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def losses_and_norms(rank: int, world: int) -> list[float]:
    """Of the decoder with whole logits and of the one that never has them, in float64."""
    found = []
    for kind in (Decoder, LongDecoder):
        strategy = MFSDPFabricStrategy(tensor=world, tensor_plan=TENSOR_PLAN, units=["Block", "Embedding"])
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision="64-true")
        fabric.launch()
        torch.manual_seed(0)
        model = (
            Decoder(SMALL) if kind is Decoder else LongDecoder("tiny", nn.functional.scaled_dot_product_attention, None)
        )
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            ids, targets = tokens(seed=step), tokens(seed=step + 3)
            with in_double():
                loss = next_token_loss(model(ids), targets) if kind is Decoder else model(ids, targets)
                fabric.backward(loss)
            found += [loss.item(), fabric.clip_gradients(model, optimizer, max_norm=0.5).item()]
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_two_ranks_that_divide_its_weights_compute_what_one_computes() -> None:
    (expected,) = run_distributed(losses_and_norms, 1)
    for found in run_distributed(losses_and_norms, 2):
        assert found == pytest.approx(expected, rel=1e-11)
