"""Plans of one's own: every style on a small model, parameters on the meta device, layers of other libraries, and every refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mfsdp import EngineStateError, ShardingError
from lightning_mfsdp.ops import LinearLossHead
from lightning_mfsdp.tensor_parallel import (
    STYLES,
    Part,
    TensorGroup,
    apply_plan,
    divide,
    divided_cross_entropy,
    is_summed,
    materialize_divided,
    part_of,
    share_random_state,
)
from lightning_mfsdp.tensor_parallel.megatron import mark_megatron_layers
from lightning_mfsdp.tensor_parallel.styles import REFUSED
from tests.helpers.distributed import run_distributed
from tests.tensor_parallel.models import assert_equal, gathered_from_ranks, gradients, whole_gradients

WIDTH, HEADS, TOKENS = 16, 4, 8


class Attention(nn.Module):
    """One weight for queries, keys and values of each head, and norms of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.RMSNorm(self.head_dim)
        self.scale = nn.Parameter(torch.ones(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2).unbind(3)
        heads = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        return self.out((heads * self.scale[:, None, None]).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two experts for all tokens, in transposed weights, and one that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, 2 * 8))
        self.down = nn.Parameter(torch.randn(2, 8, WIDTH))
        self.same = nn.Identity()

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        gate, up = (x[:, None] @ self.up).chunk(2, -1)
        return (shares[..., None, None] * ((gate.sigmoid() * up) @ self.down)).sum(1) + self.same(x)


class MLP(nn.Module):
    """Gate and up in one weight, and some of the products dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * 24)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(self.drop(gate.sigmoid() * up))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = MLP()
        self.experts = Experts()
        self.share = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(x)
        return x + self.experts(x, self.share(x.mean(1)).softmax(-1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH, padding_idx=5)
        self.places = nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.wide = nn.Linear(WIDTH, 12)
        self.narrow = nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(input=tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.narrow(self.wide(x).sin()))


PLAN = {
    "tokens": "embedding_rowwise",
    "places": "embedding_colwise",
    "blocks.*.attention": "local_params",
    "blocks.*.attention.qkv": "colwise",
    "blocks.*.attention.norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.scale": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "packed_colwise",
    "blocks.*.mlp.drop": "dropout_of_parts",
    "blocks.*.mlp.down": "rowwise",
    "blocks.*.experts": "moe_tp_experts",
    "blocks.*.experts.up": "packed_rowwise",
    "blocks.*.experts.down": "colwise",
    "blocks.*.experts.same": "moe_identity_expert",
    "blocks.*.share": "replicate",
    "wide": "colwise_gather_output",
    "narrow": "rowwise_split_input",
    "head": "colwise",
}
NOT_HERE = {"mla_kv_a_proj", "all_reduce", "rowwise_rep", "colwise_rep"}  # of models of test_huggingface.py, and below


def built() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, TOKENS, (3, 6), generator=torch.Generator().manual_seed(2))
    return tokens, tokens.roll(-1, 1).masked_fill(tokens == 3, -100)


def test_the_plan_has_every_style() -> None:
    assert set(PLAN.values()) | NOT_HERE == set(STYLES)


def test_the_documentation_has_every_style() -> None:
    page = (Path(__file__).parents[2] / "docs/design/tensor_parallel.md").read_text()
    assert [style for name, style in STYLES.items() if f"| `{style.name}` | {style.meaning} |" not in page] == []
    assert [name for name in (*STYLES, *REFUSED) if f"`{name}`" not in page] == []


def own_plan(rank: int, world: int) -> None:
    model = built()
    divided = copy.deepcopy(model)
    applied = apply_plan(divided, PLAN, dist.group.WORLD)
    assert applied.unused == ()
    assert applied.styles["blocks.1.mlp.up"] == "packed_colwise"
    assert part_of(divided.head.weight) == Part(dim=0, sections=(TOKENS,), size=world, rank=rank)
    tokens, targets = batch()
    torch.manual_seed(5)
    want = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    want.backward()
    for one in (divided, copy.deepcopy(divided)):
        divide(one)  # a copy has lost its marks
        torch.manual_seed(5)
        loss = divided_cross_entropy(one(tokens), targets, TensorGroup.of(dist.group.WORLD))
        loss.backward()
        torch.testing.assert_close(loss, want, rtol=0, atol=1e-12)
        assert_equal(whole_gradients(one), gradients(model))
    assert [name for name, parameter in divided.named_parameters() if is_summed(parameter)] == [
        f"blocks.{index}.attention.norm.weight" for index in range(2)
    ]
    assert (divided.head.out_features, divided.narrow.in_features) == (TOKENS // world, 12 // world)


def on_meta(rank: int, world: int) -> None:
    """Values of one process, also where the fan-in or a row of padding decides."""
    torch.manual_seed(4)
    want = Model()
    with torch.device("meta"):
        model = Model()
    for parts in (model.modules(), want.modules()):
        for part in parts:
            if isinstance(part, (Attention, Experts)):
                part.reset_parameters = reset.__get__(part)
    torch.manual_seed(4)
    for module in want.children():
        materialize_divided(module.to("meta"), torch.device("cpu"))  # without a plan it divides nothing
    apply_plan(model, PLAN, dist.group.WORLD)
    assert model.head.weight.is_meta
    torch.manual_seed(4)
    for module in model.children():
        materialize_divided(module, torch.device("cpu"))
    for name, parameter in want.named_parameters():
        found = model.get_parameter(name)
        part = part_of(found)
        assert torch.equal(found, parameter if part is None else part.own(parameter)), name
        assert (part is None) == (found.shape == parameter.shape)
    model(batch()[0])
    with torch.device("meta"):
        model = Model()
    apply_plan(model, {"head": "colwise"}, dist.group.WORLD)
    model.to_empty(device="cpu")
    with pytest.raises(
        EngineStateError, match="head: its parameters were initialized, but not divided over the tensor axis"
    ):
        model(batch()[0])


def reset(module: Any) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def one_rank(rank: int, world: int) -> None:
    groups = [dist.new_group([index]) for index in range(world)]
    model = built()
    divided = copy.deepcopy(model)
    apply_plan(divided, PLAN, groups[rank])
    for one in (divided, model):
        one.eval()
    assert torch.equal(divided(batch()[0]), model(batch()[0]))


def summed_outputs(rank: int, world: int) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8, bias=False)
            self.down = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.up(x), self.down)

    torch.manual_seed(1)
    model = nn.Sequential(Shared()).double()
    divided = copy.deepcopy(model)
    apply_plan(divided, {"*": "all_reduce", "*.up": "colwise", "*.down": "rowwise"}, dist.group.WORLD)
    x = torch.randn(3, 4, dtype=torch.float64)
    for one in (model, divided):
        one(x).square().sum().backward()
    assert_equal(whole_gradients(divided), gradients(model))


def shared_inputs(rank: int, world: int) -> None:
    """Layers share an input that is the same tensor with the same need of gradients, and no other one."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.out = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                first = self.a(x)
            first = first + self.a(x) + self.b(x)
            second = self.a(x + 1)
            return self.out(first * second + self.b(2 * x))

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), Pair()).double()
    divided = copy.deepcopy(model)
    apply_plan(divided, {"1.a": "colwise", "1.b": "colwise", "1.out": "rowwise"}, dist.group.WORLD)
    x = torch.randn(3, 4, dtype=torch.float64)
    outputs = [one(x) for one in (model, divided)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-12)
    for output in outputs:
        output.square().sum().backward()
    assert_equal(whole_gradients(divided), gradients(model))
    with torch.inference_mode():  # as Lightning evaluates with NCCL, and not with gloo
        torch.testing.assert_close(divided(x), outputs[0], rtol=0, atol=1e-12)


def ruled_twice(rank: int, world: int) -> None:
    """By a pattern, and by name; through an adapter, and for the layer inside."""
    torch.manual_seed(1)
    model = nn.Sequential(Adapter({}, {})).double()
    divided = copy.deepcopy(model)
    plan = {
        "0": "colwise_gather_output",
        "0.base*": "colwise_gather_output",
        "0.lora_B.default": "colwise_gather_output",
    }
    apply_plan(divided, plan, dist.group.WORLD)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for one in (model, divided):
        one(x).square().sum().backward()
    assert_equal(whole_gradients(divided), gradients(model))


def dropped_twice(rank: int, world: int) -> None:
    """One layer for a part and for a whole tensor."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.down(self.drop(self.up(x))))

    model = Twice()
    apply_plan(model, {"up": "colwise", "down": "rowwise", "drop": "dropout_of_parts"}, dist.group.WORLD)
    with pytest.raises(ShardingError, match="drop has the style 'dropout_of_parts' and got a whole tensor of shape"):
        model(torch.randn(3, 4))


def compiled_dropout(rank: int, world: int) -> None:
    """What dropout layers look at in their first forwards is no reason to compile again."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.5))
    apply_plan(model, {"0": "colwise", "1": "dropout_of_parts", "2": "rowwise"}, dist.group.WORLD)
    model.compile(backend="eager")
    x = torch.randn(3, 4)
    for _ in range(2):
        model(x).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(10):
            model(x).sum().backward()


def parts_of_data(rank: int, world: int) -> None:
    """Nothing before the divided layer requires gradients: what follows it is found to be a part all the same."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8 // world), nn.Linear(8, 4))
    apply_plan(model, {"0": "colwise", "2": "rowwise"}, dist.group.WORLD)
    with pytest.raises(ShardingError, match=r'Add the rule "\*": "replicated_with_grad_allreduce"'):
        model(torch.randn(3, 4))


def loss_heads(rank: int, world: int) -> None:
    """Losses and log-probabilities of a divided `LinearLossHead`, its logits, and the gradients of each."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(TOKENS, WIDTH)
            self.tied = LinearLossHead(WIDTH, TOKENS, softcap=3.0, label_smoothing=0.1, z_loss=0.01)
            self.other = LinearLossHead(WIDTH, TOKENS, bias=True, temperature=0.5)
            self.tied.weight = self.tokens.weight

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            x = self.tokens(tokens).sin()
            logprobs, entropy = self.other(x, targets, "logprobs_and_entropy")
            logits = self.other(input=x)
            assert logits.shape == (*tokens.shape, TOKENS)
            other = self.other(x, target=targets, output="logprobs").cos().sum()
            return self.tied(x, targets) + (logprobs + 0.1 * entropy).square().mean() + other + logits.sin().mean()

    torch.manual_seed(1)
    model = Heads().double()
    plan = {"tokens": "embedding_rowwise", "tied": "colwise", "other": "colwise_gather_output"}
    divided = copy.deepcopy(model)
    apply_plan(divided, plan, dist.group.WORLD)
    want = model(*batch())
    want.backward()
    for one in (divided, copy.deepcopy(divided)):
        divide(one)  # a copy has lost its marks
        loss = one(*batch())
        loss.backward()
        torch.testing.assert_close(loss, want, rtol=0, atol=1e-12)
        assert_equal(whole_gradients(one), gradients(model))
    assert divided.tied(torch.randn(3, WIDTH).double()).shape == (3, TOKENS // world)
    with torch.device("meta"):
        model = Heads()
    apply_plan(model, plan, dist.group.WORLD)
    model.to_empty(device="cpu")
    with pytest.raises(EngineStateError, match="tied: its parameters were initialized, but not divided"):
        model.tied(torch.randn(3, WIDTH), torch.zeros(3, dtype=torch.int64))


def unknown_tokens(rank: int, world: int) -> None:
    """An embedding of a part reports what no rank has."""
    model = nn.Sequential(nn.Embedding(TOKENS, 4))
    apply_plan(model, {"0": "embedding_rowwise"}, dist.group.WORLD)
    for token, reports in ((TOKENS, world - 1), (-1, 0)):
        local = torch.tensor([token])
        if rank == reports:
            with pytest.raises(IndexError):
                model[0](local)


def megatron(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    weight, bias = model[0].weight, model[0].bias
    for parameter, dim, stride in ((weight, 0, 2), (bias, 0, 1)):
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
    model[1].weight.sequence_parallel = True
    applied = apply_plan(model, None, dist.group.WORLD)
    assert applied.styles == {}
    half = 6 * world // 2
    assert part_of(weight) == Part(dim=0, sections=(half, half), size=world, rank=rank)
    assert part_of(bias) == Part(dim=0, sections=(6 * world,), size=world, rank=rank)
    assert weight.shape == (6, 4)
    assert [is_summed(parameter) for parameter in model[1].parameters()] == [True, False]
    with pytest.raises(ShardingError, match="0: weight is a part already, and a plan divides plain whole parameters"):
        apply_plan(model, {"0": "colwise"}, dist.group.WORLD)
    mark_megatron_layers(model, dist.group.WORLD)  # a second time changes nothing
    assert part_of(weight) == Part(dim=0, sections=(half, half), size=world, rank=rank)


def random_state(rank: int, world: int) -> Tensor:
    torch.manual_seed(rank)
    share_random_state(dist.group.WORLD, torch.device("cpu"))
    drawn = F.dropout(torch.ones(64))
    assert all(torch.equal(drawn, other) for other in gathered_from_ranks(drawn))
    torch.manual_seed(0)
    assert torch.equal(drawn, F.dropout(torch.ones(64)))
    return drawn


DIVIDED = (
    *(own_plan, on_meta, summed_outputs, shared_inputs, loss_heads),
    *(unknown_tokens, ruled_twice, dropped_twice, compiled_dropout, parts_of_data),
)
ON_FOUR_RANKS = (own_plan, loss_heads)  # on a push


@pytest.mark.parametrize(
    ("program", "world"),
    [
        pytest.param(program, world, marks=[pytest.mark.nightly] if world == 4 and program not in ON_FOUR_RANKS else [])
        for program in DIVIDED
        for world in (2, 4)
    ],
)
def test_divided(program: Callable[[int, int], None], world: int) -> None:
    run_distributed(program, world)


@pytest.mark.parametrize("program", [one_rank, megatron, random_state])
def test_ranks(program: Callable[[int, int], None]) -> None:
    run_distributed(program, 2)


class CountingAttention(nn.Module):
    """It shapes its heads by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x).unflatten(-1, (self.num_heads, -1)).flatten(-2)


class DroppingAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.resid_dropout = nn.Dropout(0.5)
        self.attn_dropout = nn.Dropout(0.25)


class OwnLinear(nn.Linear):
    pass


class WithMore(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.more = nn.Parameter(torch.zeros(4))


class OwnDropout(nn.Dropout):
    """Drops in a way of its own."""


class Adapter(nn.Module):
    """Its attributes are those of LoRA in PEFT."""

    def __init__(self, variants: Any, dora: Any) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
        self.lora_variant, self.use_dora = variants, dora

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def tied() -> nn.Module:
    model = built()
    model.head.weight = model.tokens.weight
    return model


def after_backward() -> nn.Module:
    model = built()
    model(batch()[0]).sum().backward()
    return model


def changed(model: nn.Module, **values: Any) -> nn.Module:
    for key, value in values.items():
        setattr(model, key, value)
    return model


EXPERTS = {"0.down": "colwise", "0.up": "packed_rowwise", "0": "moe_tp_experts"}
# How each begins or what it contains: model, plan, message.
REFUSALS: dict[str, tuple[Callable[[], nn.Module], dict[str, str] | None, str]] = {
    "no plan": (built, None, "Model has no tensor parallel plan: give one, a mapping of names to styles"),
    "nothing": (
        built,
        {"blocks.*.mlp.up": "packed_colwise", "blocks.mlp.up": "rowwise", "blocks.*.ml": "colwise"},
        "the tensor parallel plan has rules that match nothing in Model; remove them: blocks.mlp.up, blocks.*.ml",
    ),
    "unknown": (
        built,
        {"head": "columns"},
        "head: unknown style 'columns', expected one of colwise, colwise_gather_output, packed",
    ),
    "refused": (
        built,
        {"blocks.*.norm": "sequence_parallel"},
        "blocks.*.norm: the style 'sequence_parallel' is not supported",
    ),
    "two": (
        built,
        {"head": "colwise", "hea*": "rowwise"},
        "head: rules of the plan give it two styles, 'colwise' and 'rowwise'",
    ),
    "kind": (
        built,
        {"tokens": "colwise"},
        "tokens: the style 'colwise' is for nn.Linear, and this is a torch.nn.modules.sparse.Embedding; choose another style",
    ),
    "module": (
        built,
        {"blocks.*.experts": "packed_rowwise"},
        "blocks.0.experts: the style 'packed_rowwise' is for parameters",
    ),
    "parameter": (
        built,
        {"head.weight": "rowwise_split_input"},
        "head.weight: the style 'rowwise_split_input' is for modules",
    ),
    "uneven": (
        lambda: nn.Sequential(nn.Linear(4, 6)),
        {"0": "colwise"},
        "0.weight: the style 'colwise' divides dim 0 of its shape [6, 4], and 6 cannot be divided over 4 tensor ranks",
    ),
    "uneven sections": (
        lambda: nn.Sequential(nn.Linear(4, 12)),
        {"0": "packed_colwise"},
        "divides dim 0 of its shape [12, 4] in 2 sections, and 12 cannot be divided over 4 tensor ranks",
    ),
    "more": (
        lambda: nn.Sequential(WithMore()),
        {"0": "colwise"},
        "0: the style 'colwise' divides weight and bias, and it also has more",
    ),
    "subclass": (
        lambda: nn.Sequential(OwnLinear(4, 4)),
        {"0": "rowwise"},
        "0: the style 'rowwise' adds the bias of an nn.Linear once, after the sum, and this is its subclass OwnLinear",
    ),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True)),
        {"0": "embedding_rowwise"},
        "0: an embedding with sparse cannot be divided",
    ),
    "heads": (
        lambda: changed(Attention(), head_dim=8),
        {"qkv": "colwise"},
        "qkv: 6 heads of 8 numbers cannot be divided over 4 tensor ranks",
    ),
    "counts": (
        lambda: nn.Sequential(CountingAttention()),
        {"0.q": "colwise"},
        "0 (CountingAttention): its forward reads num_heads, the number of heads of the whole layer",
    ),
    "dropout": (
        DroppingAttention,
        {"qkv": "colwise"},
        "the model (DroppingAttention): attn_dropout=0.25: dropout of attention weights",
    ),
    "own parameter": (
        lambda: nn.Sequential(Attention()),
        {"0.qkv": "colwise"},
        '0 (Attention): its parameter scale is beside layers that are divided, and the plan has no rule for it. Add one for "0.scale"',
    ),
    "whole experts": (
        lambda: nn.Sequential(Experts()),
        {"0.down": "colwise", "0": "moe_tp_experts"},
        "0 (Experts): no rule divides up of shape [2, 16, 16], so every tensor rank would add all of it",
    ),
    "normalized experts": (
        lambda: nn.Sequential(changed(Experts(), has_post_expert_norm=True)),
        EXPERTS,
        "0 (Experts): it normalizes the outputs of experts",
    ),
    "alternating": (
        lambda: nn.Sequential(changed(Experts(), is_concatenated=False)),
        EXPERTS,
        "0 (Experts): gate and up alternate in its weights",
    ),
    "tied": (
        tied,
        {"tokens": "embedding_rowwise"},
        "tokens.weight and head.weight are one parameter, and the plan divides them differently (dim 0 and whole)",
    ),
    "tied otherwise": (tied, {"tokens": "embedding_colwise", "head": "colwise"}, "differently (dim 1 and dim 0)"),
    "gradient": (
        after_backward,
        {"head": "colwise"},
        "head: weight has a gradient. Call apply_plan before the first backward.",
    ),
    "variant of an adapter": (
        lambda: nn.Sequential(Adapter({"default": object()}, {})),
        {"0": "colwise"},
        "0 (Adapter): a variant of LoRA, such as DoRA, that computes with whole weights, and the style 'colwise' divides them",
    ),
    "variant of older adapters": (
        lambda: nn.Sequential(Adapter({}, {"default": True})),
        {"0": "rowwise"},
        "0 (Adapter): a variant of LoRA, such as DoRA, that computes with whole weights, and the style 'rowwise' divides them",
    ),
    "adapter": (
        lambda: nn.Sequential(Adapter({}, {"default": False})),
        {"0": "embedding_rowwise"},
        "0.base_layer: the style 'embedding_rowwise' is for nn.Embedding, and this is a torch.nn.modules.linear.Linear",
    ),
    "wrapped parameter": (
        lambda: nn.Sequential(Adapter({}, {})),
        {"0.weight": "colwise"},
        "0.base_layer.weight: an adapter is around it, and the rule '0.weight' of the plan is for what it was before",
    ),
    "two inside": (
        lambda: nn.Sequential(Adapter({}, {})),
        {"0": "colwise", "0.lora_B.*": "rowwise"},
        "0.lora_B.default: rules of the plan give it two styles, 'colwise' and 'rowwise'; remove one",
    ),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))),
        {"0": "colwise"},
        "0: the style 'colwise' divides its weight, which is no parameter of its own",
    ),
    "parametrized, with a bias": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        {"0": "rowwise"},
        "0: the style 'rowwise' divides its weight, which is no parameter of its own",
    ),
    "own dropout": (
        lambda: nn.Sequential(OwnDropout(0.5)),
        {"0": "dropout_of_parts"},
        "0: the style 'dropout_of_parts' is for nn.Dropout, and this is a tests.tensor_parallel.test_plan.OwnDropout",
    ),
    "no dropout": (
        lambda: nn.Sequential(nn.AlphaDropout(0.5)),
        {"0": "dropout_of_parts"},
        "0: the style 'dropout_of_parts' is for nn.Dropout, and this is a torch.nn.modules.dropout.AlphaDropout",
    ),
    "rope": (
        built,
        {"wide": "mla_kv_a_proj"},
        "wide: the style 'mla_kv_a_proj' reads qk_rope_head_dim of the module around it",
    ),
}


def refusals(rank: int, world: int) -> dict[str, str]:
    told = {}
    for name, (build, plan, _) in REFUSALS.items():
        model = build()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(ShardingError) as error:
            apply_plan(model, plan, dist.group.WORLD)
        told[name] = str(error.value)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), name
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules()), name
    return told


def test_refusals_name_what_and_the_numbers_and_change_nothing() -> None:
    told = run_distributed(refusals, 4)[0]
    for name, (_, _, message) in REFUSALS.items():
        assert message in told[name], f"{name}: {told[name]}"


def wrong_output(rank: int, world: int) -> str:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    model = nn.Sequential(Pair())
    apply_plan(model, {"0": "all_reduce"}, dist.group.WORLD)
    with pytest.raises(ShardingError) as error:
        model(torch.zeros(2))
    return str(error.value)


def test_an_output_that_is_no_tensor_is_refused() -> None:
    assert run_distributed(wrong_output, 2)[0] == "Pair returned tuple under tensor parallelism, expected a tensor"
