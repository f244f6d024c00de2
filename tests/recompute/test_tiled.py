"""Modules computed for pieces of the sequence: the same numbers, and activations of one piece at a time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp import Recompute, apply_recompute, fully_shard, fully_shard_optimizer, no_sync
from lightning_mfsdp.callbacks import ActivationRecompute
from lightning_mfsdp.engine import MixedPrecisionPolicy, sharded_parameters
from lightning_mfsdp.moe import TopKRouter
from lightning_mfsdp.options.compilation import compile_units
from lightning_mfsdp.recompute import as_recompute, plan_recompute, recomputed, record_step, remove_recompute
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.chain import DOUBLE, STRATEGIES, context
from tests.helpers.nights import NIGHT
from tests.recompute.counting import CountedMemory, Counting
from tests.recompute.models import equal

DIM, WIDE, TILES = 8, 40, 4
OPTIONS: dict[str, Any] = {"tiled_modules": ["*.mlp"], "tiles": TILES}
TILED = Recompute(method="none", **OPTIONS)
CONFIGS = {
    "alone": TILED,
    "each layer": Recompute(**OPTIONS),
    "pairs of layers": Recompute(num_layers=2, **OPTIONS),
    "the first": Recompute(method="block", num_layers=1, **OPTIONS),
    "in host memory": Recompute(offload=True, **OPTIONS),
    "attention kept": Recompute(method="selective", save_ops=["attention"], **OPTIONS),
    "other parts": Recompute(method="selective", modules=["*.norm"], **OPTIONS),
}


class MLP(nn.Module):
    """Gated, with a dropout.

    Attributes:
        pieces: Into how many it divides the sequence by itself, with nothing recomputed.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)
        self.dropout, self.pieces = dropout, 1

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(max(1, -(-x.shape[-2] // self.pieces)), dim=-2)
        return torch.cat([self.piece(part) for part in parts], dim=-2)

    def piece(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(F.dropout(hidden, self.dropout, self.training))


class Block(nn.Module):
    """Attention between all tokens, and an MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.norm, self.mlp = nn.Linear(DIM, 3 * DIM), nn.LayerNorm(DIM), MLP(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x + self.mlp(self.norm(x))


def build(config: Recompute | None = None, *, layers: int = 3, dropout: float = 0.0, pieces: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dropout) for _ in range(layers))).double()
    for block in model:
        block.mlp.pieces = pieces
    if config is not None:
        apply_recompute(model, config)
    return model


def sequence(length: int = 22, step: int = 0, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, length, DIM, generator=generator, dtype=torch.float64)


def results(model: nn.Module, x: Tensor, program: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Output, gradients of the input and of weights, and the next random numbers."""
    torch.manual_seed(5)
    model.zero_grad()
    x = x.clone().requires_grad_()
    output = (program or model)(x * 1)
    output.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [output.detach(), x.grad, *grads, torch.rand(3)]


def assert_close(found: list[Tensor], expected: list[Tensor], message: str) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        scale = float(other.abs().max()) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * scale, msg=lambda text: f"{message}: {text}")


@pytest.mark.parametrize("length", [24, 22, 5, 3, 1, 0])
def test_as_the_whole_module_whatever_the_length(length) -> None:
    """Pieces divide it or not; there are fewer tokens than pieces; one; none."""
    x = sequence(length)
    expected = results(build(), x)
    for name, config in CONFIGS.items():
        assert_close(results(build(config), x), expected, name)
    with torch.no_grad():
        assert_close([build(TILED)(x)], expected[:1], "without gradients")


def test_no_batch_no_rows_and_other_dims() -> None:
    for shape in ((22, DIM), (0, 22, DIM), (2, 3, 22, DIM)):
        x = torch.randn(shape, dtype=torch.float64)
        whole, tiled = nn.Sequential(build()[0].mlp), nn.Sequential(build()[0].mlp)
        apply_recompute(tiled, Recompute(method="none", tiled_modules=["0"], tiles=TILES))
        assert_close(results(tiled, x), results(whole, x), str(shape))


@pytest.mark.parametrize("name", CONFIGS)
def test_to_the_bit_as_pieces_that_are_not_recomputed_dropout_included(name) -> None:
    by_hand = build(dropout=0.3, pieces=TILES)
    assert equal(results(build(CONFIGS[name], dropout=0.3), sequence()), results(by_hand, sequence()))


def is_wide(result: Any) -> bool:
    """Whether it was computed inside a module; not one of its weights and biases, or their gradients."""
    return (
        isinstance(result, Tensor)
        and result.dim() > 1
        and result.shape[-1] == WIDE
        and result.shape[-2] not in (1, DIM)
    )


class Wide(CountedMemory):
    """Counts what the modules compute inside only."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if is_wide(result):
            self._see(result.untyped_storage())
        return result


def most_wide(model: nn.Module, x: Tensor) -> int:
    x.requires_grad_()
    with Wide() as memory:
        memory.begin()
        loss = model(x).square().sum()
        in_forward = memory.now
        loss.backward()
    assert memory.now == 0
    assert in_forward == 0 or not recomputed(model)
    return memory.most


def kept(model: nn.Module, x: Tensor) -> int:
    """Bytes from forward to backward."""
    with CountedMemory() as memory:
        loss = model(x.requires_grad_()).square().sum()
        before = memory.now
        loss.backward()
    return before


def test_what_is_kept_is_the_input_of_each_module_or_layer() -> None:
    x = sequence(400)
    configs = (None, TILED, Recompute(), Recompute(**OPTIONS))
    whole, tiled, layers, both = (kept(build(config), x) / (x.numel() * 8) for config in configs)
    assert both == pytest.approx(layers, abs=0.01)
    assert tiled == pytest.approx(whole - 3 * 4 * WIDE / DIM, abs=0.01), "without gate, up, activation and product"


def test_activations_of_one_piece_exist_at_a_time() -> None:
    """In forward and backward of any number of layers as many bytes as one piece takes in one layer by itself."""
    length, tiles = 192, 8
    piece = most_wide(build(layers=1), sequence(length // tiles))
    whole = most_wide(build(layers=1), sequence(length))
    assert whole == tiles * piece > 0
    for name, config in CONFIGS.items():
        config = Recompute(**{**vars(config), "tiles": tiles})
        assert most_wide(build(config), sequence(length)) == piece, name
    assert most_wide(build(Recompute()), sequence(length)) == whole, "what layers need without it"


def test_the_module_is_computed_once_more_whether_its_layer_is_recomputed_or_not() -> None:
    """A layer's recomputation ends with the inputs of the pieces."""
    for name, expected in (("alone", 2), ("each layer", 2), ("attention kept", 2), ("pairs of layers", 3)):
        config = CONFIGS[name]
        model = build(config, layers=2)
        with Counting(torch.ops.aten.silu.default) as counted:
            model(sequence(24)).sum().backward()
        assert counted.count == 2 * TILES * expected, name


class PostNorm(Block):
    """Backward needs the result of the MLP."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.mlp(x))


def test_a_layer_that_needs_the_result_in_backward_computes_the_pieces_for_it() -> None:
    models = [build(dropout=0.3, pieces=TILES), build(dropout=0.3)]
    for model in models:
        for block in model:
            block.__class__ = PostNorm
    apply_recompute(models[1], CONFIGS["each layer"])
    with Counting(torch.ops.aten.silu.default) as counted:
        tiled = results(models[1], sequence(24))
    assert counted.count == 3 * 3 * TILES
    assert equal(tiled, results(models[0], sequence(24)))


def test_frozen_weights_inputs_without_gradients_two_uses_and_two_backwards() -> None:
    def freeze(model: nn.Module) -> None:
        model[1].mlp.requires_grad_(False)
        model[0].mlp.up.requires_grad_(False)

    def freeze_all(model: nn.Module) -> None:
        model.requires_grad_(False)

    for prepare in (freeze, freeze_all):
        whole = build()
        prepare(whole)
        expected = results(whole, sequence())
        for name, config in CONFIGS.items():
            tiled = build(config)
            prepare(tiled)
            assert_close(results(tiled, sequence()), expected, f"{name} {prepare.__name__}")

    def program(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(5)
        mlp, x = model[0].mlp, sequence()  # without gradient
        for step in range(2):
            loss = (mlp(mlp(x)) + model(sequence(13, step)).mean()).square().sum()
            loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = program(build())
    for name, config in CONFIGS.items():
        if not config.save_ops:  # a graph with kept operators runs backward once
            assert_close(program(build(config)), expected, name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint_of_your_own(use_reentrant) -> None:
    by_hand, tiled = build(dropout=0.3, pieces=TILES), build(TILED, dropout=0.3)
    found = [
        results(model, sequence(), lambda x, model=model: checkpoint(model, x, use_reentrant=use_reentrant))
        for model in (tiled, by_hand)
    ]
    assert equal(*found)


def test_under_autocast_pieces_add_up_in_the_dtype_of_the_weight() -> None:
    x, found = sequence().float(), []
    for model, cached in ((build(TILED), True), (build(pieces=TILES), False)):
        model.float()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            loss = model[0].mlp(x).float().square().sum()
        loss.backward()
        found.append([parameter.grad for parameter in model[0].mlp.parameters()])
    assert equal(*found)
    assert all(not torch.equal(grad, grad.bfloat16().float()) for grad in found[0][::2])


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # PyTorch's own look
@pytest.mark.parametrize("name", [pytest.param("alone", marks=pytest.mark.nightly), "each layer"])
def test_a_compiler_takes_it_into_its_graph_where_activations_of_one_piece_exist_at_a_time_too(name) -> None:
    """None is kept for the compiled backward, where they end before those of the next piece begin."""
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=look,
        partition_fn=min_cut_rematerialization_partition,
    )
    model = build(CONFIGS[name], layers=2)
    program = torch.compile(model, backend=backend, fullgraph=True)
    assert_close(results(model, sequence(24), program), results(build(layers=2), sequence(24)), name)
    (graph,) = graphs
    ends = {source: number for number, node in enumerate(graph.graph.nodes) for source in node.all_input_nodes}
    alive: dict[Any, int] = {}
    most = 0
    for number, node in enumerate(graph.graph.nodes):
        if is_wide(node.meta.get("val")):
            assert node.op != "placeholder", "kept from forward"
            alive[node] = 0 if "view" in str(node.target) else node.meta["val"].numel()
        most = max(most, sum(alive.values()))
        alive = {one: size for one, size in alive.items() if ends.get(one, -1) > number}
    piece = 2 * 24 // TILES * WIDE
    assert 0 < most < 2 * 5 * piece, "autograd alone keeps five tensors of each"


# -- which modules ----------------------------------------------------------------------------------------------------


def test_names_are_those_of_layers_and_tiled_modules_and_it_is_undone() -> None:
    model = build(layers=2)
    mlps = ["0.mlp", "1.mlp"]
    assert apply_recompute(model, TILED) == recomputed(model) == mlps
    forward = model[0].mlp.forward
    assert apply_recompute(model, copy.copy(TILED)) == mlps
    assert model[0].mlp.forward is forward, "nothing changed"
    assert apply_recompute(model, Recompute(**OPTIONS)) == recomputed(model) == ["0", "0.mlp", "1", "1.mlp"]
    twin = copy.deepcopy(model)
    remove_recompute(model)
    assert not recomputed(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert recomputed(twin) == ["0", "0.mlp", "1", "1.mlp"]
    assert_close(results(twin, sequence()), results(model, sequence()), "a copy")
    outermost = Recompute(method="none", tiled_modules=["*.mlp*", "*.norm"], tiles=2)
    assert apply_recompute(model, outermost) == ["0.norm", "0.mlp", "1.norm", "1.mlp"]
    assert apply_recompute(model, Recompute(method="none")) == recomputed(model) == []


class Mixes(nn.Module):
    """A module with one that is not token-wise inside."""

    def __init__(self, inner: nn.Module, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.inner, self.gradient_checkpointing = inner, checkpoints

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class MyAttention(nn.Identity):
    pass


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (nn.BatchNorm1d(DIM), r"0\.inner, a BatchNorm1d, computes several tokens together"),
        (nn.InstanceNorm1d(DIM), r"0\.inner, a InstanceNorm1d, computes several tokens together"),
        (nn.GroupNorm(2, DIM), r"0\.inner, a GroupNorm, computes"),
        (nn.Conv1d(DIM, DIM, 1), r"0\.inner, a Conv1d, computes"),
        (nn.GRU(DIM, DIM), r"0\.inner, a GRU, computes"),
        (nn.MultiheadAttention(DIM, 2), r"0\.inner, a MultiheadAttention, computes"),
        (MyAttention(), r"0\.inner, a MyAttention, computes"),
        (nn.LayerNorm((4, DIM)), r"0\.inner, a LayerNorm, normalizes over several dims"),
        (
            TopKRouter(hidden_size=DIM, num_experts=4, top_k=1),
            r"0\.inner, a TopKRouter, routes the tokens of a batch together",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_that_look_at_other_tokens_are_refused(inner, message) -> None:
    with pytest.raises(ValueError, match=message):
        apply_recompute(nn.Sequential(Mixes(inner)), Recompute(method="none", tiled_modules=["0"], tiles=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**OPTIONS, "tiled_modules": ["*.mpl"]}, r"tiled_modules: '\*\.mpl' matches no module"),
        ({**OPTIONS, "tiled_modules": ["blocks"]}, "match only containers"),
        ({"method": "selective", "modules": ["*.mlp"], **OPTIONS}, r"blocks\.0\.mlp is recomputed piece by piece, and"),
        ({"method": "selective", "modules": ["*.up"], **OPTIONS}, r"and blocks\.0\.mlp\.up is recomputed already"),
        ({"method": "selective", "save_ops": ["matmul"], **OPTIONS}, r"keeps the results of aten\._grouped_mm in"),
        ({"method": "selective", "save_ops": ["aten.mm"], **OPTIONS}, r"results of aten\.mm in blocks\.0\.mlp too"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(options, message) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(build(layers=2))
    with pytest.raises(ValueError, match=message):
        apply_recompute(model, Recompute(**options))
    assert not recomputed(model)


def test_a_part_that_checkpoints_itself_is_refused_and_products_kept_elsewhere_are_not() -> None:
    mixes = nn.Sequential(Mixes(nn.Identity(), checkpoints=True))
    with pytest.raises(ValueError, match="0 is recomputed piece by piece, and a part of it"):
        apply_recompute(mixes, Recompute(method="none", tiled_modules=["0"], tiles=2))
    elsewhere = Recompute(method="selective", modules=["*.norm"], save_ops=["matmul"], **OPTIONS)
    assert_close(results(build(elsewhere), sequence()), results(build(), sequence()), "elsewhere")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tiles": 4}, ValueError, "expected both"),
        ({"tiled_modules": ["*.mlp"]}, ValueError, "expected both"),
        ({"tiled_modules": ["*.mlp"], "tiles": 1}, ValueError, "tiles=1: expected a number of pieces of at least 2"),
        ({"tiled_modules": ["*.mlp"], "tiles": True}, ValueError, "tiles=True: expected a number"),
        ({"tiled_modules": "*.mlp", "tiles": 4}, TypeError, r"tiled_modules='\*\.mlp': expected a list"),
    ],
)
def test_options_out_of_their_range(options, error, message) -> None:
    with pytest.raises(error, match=message):
        Recompute(**options)


def test_as_a_mapping_and_as_a_callback() -> None:
    assert (
        as_recompute({"method": "none", **OPTIONS}) == TILED == ActivationRecompute(method="none", **OPTIONS).recompute
    )


class Returns(nn.Module):
    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        return self.make(x, *others, **named)


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (lambda x: x.mean(-2), [sequence()], r"0 returned a tensor of shape \(2, 8\) for a piece of shape \(2, 6, 8\)"),
        (lambda x: (x, x), [sequence()], r"0 returned tuple for a piece of shape \(2, 6, 8\)"),
        (
            lambda x, *_: x,
            [sequence(), sequence()],
            r"with tensors of shapes \[\(2, 22, 8\), \(2, 22, 8\)\]; expected one",
        ),
        (lambda x, *_: x, [sequence(), [sequence()]], r"\[\(2, 22, 8\)\] and \['list'\]; expected one"),
        (lambda x: x, [torch.ones(3)], r"shapes \[\(3,\)\]; expected one tensor"),
    ],
)
def test_what_a_module_takes_and_returns_is_checked(make, args, message) -> None:
    model = nn.Sequential(Returns(make))
    apply_recompute(model, Recompute(method="none", tiled_modules=["0"], tiles=TILES))
    with pytest.raises(ValueError, match=message):
        model[0](*args)


def test_other_arguments_are_the_same_for_every_piece() -> None:
    model = nn.Sequential(Returns(lambda x, factor, *, shift: x * factor + shift))
    apply_recompute(model, Recompute(method="none", tiled_modules=["0"], tiles=TILES))
    x = sequence()
    assert torch.equal(model[0](x, 2.0, shift=1), x * 2.0 + 1)


def test_a_step_with_tiles_is_no_record_to_plan_from() -> None:
    model = build(TILED)
    with record_step(model) as recorder:
        model(sequence()).sum().backward()
    with pytest.raises(ValueError, match=r"in the recorded step 0\.mlp was recomputed already"):
        plan_recompute(recorder.record, 1 << 20)


# -- sharded ----------------------------------------------------------------------------------------------------------


def sharded(config: Recompute | None, *, unit: str = "block", pieces: int = 1, **options: Any) -> nn.Sequential:
    model = build(config, pieces=pieces)
    model[2].mlp.requires_grad_(False)
    for block in model:
        fully_shard(block.mlp if unit == "mlp" else block, **options)
    return fully_shard(model, **options)


def train(model: nn.Sequential, rank: int) -> list[Tensor]:
    """Losses and gradients of two steps of two microbatches each; one length for each rank."""
    optimizer, found = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2)), []
    dtype = next(iter(model.parameters())).dtype
    for step in range(2):
        for micro in range(2):
            with no_sync(model) if micro == 0 else nullcontext():
                loss = model(sequence(22 - 5 * rank, 10 * step + micro + 100 * rank).to(dtype)).double().square().mean()
                loss.backward()
            found.append(loss.detach())
        found += [view.grad.double().clone() for view in sharded_parameters(model) if view.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def every_strategy_and_method(rank: int, world: int) -> None:
    """To the bit as pieces that are not recomputed, and in float64 to 1e-12 as the whole modules."""
    wide = {"main_params_dtype": torch.float64, "main_grads_dtype": torch.float64}
    policies = {
        "double": DOUBLE,
        "direct": MixedPrecisionPolicy(**wide, direct_weight_gradients=True),
        "mixed": MixedPrecisionPolicy(**wide, compute_dtype=torch.bfloat16),
    }
    few = (("optim_grads_params", "double"), ("optim_grads", "direct"), ("optim_grads_params", "mixed"))
    for number, (sharding, policy) in enumerate(product(STRATEGIES, policies) if NIGHT else few):
        unit = ("block", "mlp")[number % 2]
        options = {"sharding": sharding, "policy": policies[policy], "unit": unit}
        by_hand = train(sharded(None, pieces=TILES, **options), rank)
        name = ("alone", "each layer")[(number // 2 + world) % 2]
        found = train(sharded(CONFIGS[name], **options), rank)
        assert equal(found, by_hand), f"{name} {sharding} {policy} {unit}"
        if policy != "mixed":
            assert_close(by_hand, train(sharded(None, **options), rank), f"{sharding} {policy} {unit}")


def a_unit_is_gathered_and_reduced_as_without_pieces(rank: int, world: int) -> None:
    for config in (None, *CONFIGS.values()):
        model = sharded(config, policy=DOUBLE)
        train(model, rank)
        shared = context(model)
        gathers, reductions = shared.lane.started, shared.reductions.started
        loss = model(sequence()).sum()
        in_forward = shared.lane.started - gathers
        loss.backward()
        counts = (in_forward, shared.lane.started - gathers, shared.reductions.started - reductions)
        assert counts == (4, 6, 3), f"{config}: {counts}"
        assert not any(group.weights.present for unit in shared.units for group in unit.groups), config


def units_inside_are_refused(rank: int, world: int) -> None:
    model = build(TILED)
    fully_shard(model[1].mlp.up, policy=DOUBLE)
    fully_shard(model, policy=DOUBLE)
    with pytest.raises(RuntimeError, match=r"1\.mlp is computed in pieces \(tiled_modules\) and has units of its own"):
        model(sequence())


def compiled_units(rank: int, world: int) -> None:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    for name, unit in (("alone", "block"), ("each layer", "mlp")):
        torch.compiler.reset()
        by_hand = train(sharded(None, pieces=TILES, policy=DOUBLE, unit=unit), rank)
        model = sharded(CONFIGS[name], policy=DOUBLE, unit=unit)
        assert len(compile_units(model, {"backend": "eager", "fullgraph": True})) == 3
        assert equal(train(model, rank), by_hand), f"{name} {unit}"


CASES = {
    1: [compiled_units],
    **at_night({1: [every_strategy_and_method, compiled_units]}),
    2: [every_strategy_and_method, a_unit_is_gathered_and_reduced_as_without_pieces, units_inside_are_refused],
}


@by_world(CASES)
def test_sharded(world, case) -> None:
    check(CASES, world, case)
