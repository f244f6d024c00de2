"""Quantized weights: main weights in float32 are trained, raw data are held and gathered, and the numbers are one process's."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    fully_shard_optimizer,
    fully_shard_units,
    no_sync,
    sharded_parameters,
    units,
    unshard,
)
from tests.engine.cases import device_type
from tests.engine.int8_codec import (
    MASK,
    Int8Codec,
    Int8Linear,
    Int8Tensor,
    LateInt8Linear,
    parameter_of,
    raw_of,
    scale_of,
)
from tests.engine.internals import WeightCodec, context_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, in_world, pairwise

DIM, ROWS = 16, 12


class Block(nn.Module):
    """Ordinary parameters beside quantized ones. Its first weight may be another block's too."""

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = Int8Linear(DIM, 2 * DIM, planes)
        self.down = Int8Linear(2 * DIM, DIM, planes)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, planes: int = 1, *, tied: bool = False, recompute: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(planes) for _ in range(3))
        self.out = nn.Linear(DIM, 3)
        self.recompute = recompute
        if tied:
            self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.out(x)


def build(seed: int = 0, planes: int = 1, *, frozen: tuple[str, ...] = (), **options) -> Net:
    torch.manual_seed(seed)
    model = Net(planes, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


def shard(model: Net, codec: Int8Codec, mesh=None, *, reshard: bool = True, **options) -> Net:
    options["policy"] = MixedPrecisionPolicy(weight_codecs=(codec,), **options.pop("dtypes", {}))
    for block in model.blocks:
        fully_shard(block, mesh, reshard_after_forward=reshard, **options)
    return fully_shard(model, mesh, **options)


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(number), requires_grad=False)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def reference(steps: int, ranks: int = 1, accumulation: int = 1, **options) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Main weights of one process that quantizes after each step, and losses; gradients are averaged as `ranks` ranks do."""
    model = build(**options)
    main: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        quantized = isinstance(parameter, Int8Tensor)
        main[name] = nn.Parameter(parameter._initial.clone()) if quantized else parameter
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = adamw([main[name] for name in trained])
    losses = []
    for step in range(steps):
        sums: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        for micro, (rank, own) in product(range(accumulation), enumerate(sums)):
            x = batch(step * accumulation + micro).chunk(ranks)[rank].clone().requires_grad_()
            loss = model(x).square().mean() / accumulation
            loss.backward()
            losses.append(loss.detach())
            for name in trained:
                parameter = model.get_parameter(name)
                own[name] = own[name] + parameter.grad if micro else parameter.grad
                parameter.grad = None
        while len(sums) > 1:  # as reductions over a shard axis, then an outer one, add
            pairs = zip(sums[::2], sums[1::2], strict=len(sums) % 2 == 0)
            sums = [{name: one[name] + two[name] for name in trained} for one, two in pairs]
        total = {name: value / ranks for name, value in sums[0].items()}
        for name in trained:
            main[name].grad = total[name]
        optimizer.step()
        optimizer.zero_grad()
        for name in trained:
            quantize(model.get_parameter(name), main[name])
    return {name: value.detach() for name, value in main.items()}, losses


@torch.no_grad()
def quantize(parameter: nn.Parameter, main: Tensor) -> None:
    if isinstance(parameter, Int8Tensor):
        parameter._scale, parameter._transposed = scale_of(main.abs().max()), None
        raw = raw_of(main, parameter._scale)
        parameter._raw = [raw, raw ^ MASK][: len(parameter._raw)]


def train(model: Net, optimizer, steps: range, rank=0, world=1, accumulation=1, held=False) -> list[Tensor]:
    losses = []
    for step in steps:
        for micro in range(accumulation):
            x = batch(step * accumulation + micro).chunk(world)[rank].clone().requires_grad_()
            waits = held and micro < accumulation - 1
            with no_sync(model) if waits else nullcontext():
                loss = model(x).square().mean() / accumulation
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main_weights(model: Net) -> dict[str, Tensor]:
    with unshard(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    wrong = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not wrong, f"{what}: {wrong}"


def trained_as_in_one_process(rank, world, steps=3, *, planes=1, keep=False, mesh=None, accumulation=1, **options):
    plan = {key: options.pop(key) for key in ("sharding", "outer_sharding", "reshard") if key in options}
    expected, losses = reference(steps, world, accumulation, planes=planes, **options)
    model = shard(build(planes=planes, **options), Int8Codec(planes, keep=keep), mesh, **plan)
    optimizer = fully_shard_optimizer(adamw(model.parameters()))
    seen = train(model, optimizer, range(steps), rank, world, accumulation, held=True)
    what = (plan, planes, keep, options)
    assert [float(loss) for loss in seen] == [float(loss) for loss in losses[rank::world]], what
    same(main_weights(model), expected, what)
    return model


# -- the same numbers --------------------------------------------------------------------------------------------------


def bit_equal_in_every_placement(rank, world):
    """On several ranks too: the reference adds the ranks' gradients in the same order."""
    for sharding, (planes, keep) in in_world(
        world, (1, 2), STRATEGIES, ((1, False), (1, True), (2, False)), together=1
    ):
        trained_as_in_one_process(rank, world, sharding=sharding, planes=planes, keep=keep)
    for sharding in STRATEGIES[::3]:
        trained_as_in_one_process(rank, world, sharding=sharding, tied=True)
    trained_as_in_one_process(rank, world, accumulation=2 if world < 3 else 1, reshard=False)


def fragments_end_between_rows_that_belong_together(rank, world):
    """What the codec asserts. Three ranks would divide a block elsewhere."""
    for sharding in in_turn(0, STRATEGIES):
        model = shard(build(), Int8Codec(rows_together=16), sharding=sharding)
        train(model, fully_shard_optimizer(adamw(model.parameters())), range(2), rank, world)
        held = [view.rows for view in sharded_parameters(model) if view.name.split(".")[-2] in ("up", "down")]
        assert all(rows.start % 16 == rows.stop % 16 == 0 for rows in held)


def strips_of_sub_shards_stay_together(rank, world):
    """Where an outer axis divides shards further, too."""
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("outer", "shard"))
    model = shard(build(), Int8Codec(rows_together=16), mesh, outer_sharding="optim")
    train(model, fully_shard_optimizer(adamw(model.parameters())), range(2), rank, world)


def recomputed_weights_are_the_same(rank, world):
    for reentrant, planes, sharding in pairwise((False, True), (1, 2), STRATEGIES[2:], together=1):
        trained_as_in_one_process(rank, world, planes=planes, recompute=reentrant, sharding=sharding)


def frozen_weights_stay_quantized(rank, world):
    frozen = ("blocks.0.up.weight", "blocks.1.down.weight")
    for sharding in in_turn(1, STRATEGIES):
        model = trained_as_in_one_process(rank, world, sharding=sharding, frozen=frozen)
        assert all(view.grad is None for view in sharded_parameters(model) if view.name in frozen)


def bit_equal_with_an_outer_axis(rank, world):
    """HSDP and HFSDP; scales need the rows of all ranks that share them out."""
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("outer", "shard"))
    for outer, planes, sharding in pairwise(("no_shard", "optim"), (1, 2), STRATEGIES[1:], together=1):
        trained_as_in_one_process(rank, world, 2, mesh=mesh, sharding=sharding, outer_sharding=outer, planes=planes)


def near_on_three_ranks(rank, world):
    """Three ranks add in an order of the backend's; main weights stay together, and what is gathered is the main weights, quantized."""
    expected, _ = reference(3)
    for sharding in in_turn(2, STRATEGIES):
        model = shard(build(seed=rank), Int8Codec(), sharding=sharding)
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        train(model, optimizer, range(3), rank, world)
        found = main_weights(model)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-3)
        seen: dict[str, Tensor] = {}
        for block in model.blocks:
            block.norm.register_forward_hook(partial(note_raw, seen, model, block))
        with torch.no_grad():
            model(batch(0))
        assert len(seen) == 6
        for name, raw in seen.items():
            assert torch.equal(raw, raw_of(found[name], scale_of(found[name].abs().max()))), name


def note_raw(seen: dict[str, Tensor], model: Net, block: Block, *_: object) -> None:
    """What a block computes with, while it does."""
    inside = {id(parameter) for parameter in block.parameters()}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Int8Tensor) and id(parameter) in inside:
            seen[name] = parameter._raw[0].clone()


# -- what goes over the wire -------------------------------------------------------------------------------------------


@contextmanager
def watched() -> Iterator[Counter]:
    """Bytes gathered and maxima agreed on."""
    seen: Counter = Counter()
    flat, coalesced, reduce = compat.all_gather_flat, compat.all_gather_coalesced, dist.all_reduce

    def note(output: Tensor) -> None:
        seen[f"gathered {output.dtype}"] += output.numel() * output.element_size()

    def gather(output, *rest):
        note(output)
        flat(output, *rest)

    def gather_several(outputs, *rest):
        for output in outputs:
            note(output)
        coalesced(outputs, *rest)

    def all_reduce(tensor, *rest, **options):
        seen["maxima"] += options.get("op") == dist.ReduceOp.MAX and tensor.dtype is not torch.uint8
        return reduce(tensor, *rest, **options)

    with (
        mock.patch.multiple(compat, all_gather_flat=gather, all_gather_coalesced=gather_several),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        yield seen


def half_of_what_bfloat16_gathers(rank, world):
    """In every placement, and one agreement on scales a step for all units together."""
    for sharding, planes in pairwise(STRATEGIES[1:], (1, 2), together=1):
        model = shard(build(planes=planes), Int8Codec(planes), sharding=sharding)
        plain = build()
        for block in plain.blocks:
            block.up, block.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, fp32_modules=(nn.LayerNorm, "out"))
        for part in (*plain.blocks, plain):
            fully_shard(part, sharding=sharding, policy=policy)
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        other = fully_shard_optimizer(adamw(plain.parameters()))
        for step in range(3):
            with watched() as seen:
                train(model, optimizer, range(step, step + 1), rank, world)
            assert seen["maxima"] == 1, (sharding, step)
            with watched() as usual:
                train(plain, other, range(step, step + 1), rank, world)
        assert seen["gathered torch.float32"] == usual["gathered torch.float32"]
        # Whole weights are gathered once a step, with all planes. Sharded ones are gathered twice, one plane each time; of the last
        # block forward's are still there for backward, unless that reads the other plane.
        share = (
            Fraction(1, 2) * planes if sharding != STRATEGIES[3] else Fraction(1, 2) if planes == 1 else Fraction(6, 10)
        )
        assert seen["gathered torch.uint8"] == share * usual["gathered torch.bfloat16"] > 0, (sharding, planes)


def memory_is_that_of_the_raw_data(rank, world):
    for sharding, planes in thinned(product(in_turn(3, STRATEGIES), (1, 2)), 3):
        model = shard(build(planes=planes), Int8Codec(planes), sharding=sharding)
        numel = 2 * 2 * DIM * DIM
        for unit in units(model)[1:]:
            (quantized,) = [group for group in unit_groups(model, unit.name) if group.spec.codec is not None]
            whole = sharding != STRATEGIES[3]
            assert quantized.weights.extra_bytes == planes * numel // (1 if whole else world)
            assert quantized.weights.client.size_bytes == planes * numel
            assert quantized.main.size_bytes == 4 * numel // (1 if sharding == STRATEGIES[0] else world)
            for entry in quantized.entries:
                assert entry.full._initial is None
                if not whole:
                    assert entry.full._raw[0].untyped_storage().size() == 1, (
                        "no memory of its own before the first gather"
                    )
                assert not {"_raw", "_scale", "_initial"} & vars(entry.local).keys() | vars(entry.sharded).keys() & {
                    "_raw"
                }


def unit_groups(model: Net, name: str):
    return next(unit.groups for unit in context_of(model).units if unit.name == name)


# -- the rest of a training --------------------------------------------------------------------------------------------


def resumes_bit_equal(rank, world):
    for sharding in in_turn(4, STRATEGIES):
        expected, _ = reference(4, world)
        model = shard(build(), Int8Codec(), sharding=sharding)
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        train(model, optimizer, range(2), rank, world)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        dcp.save(model.state_dict(), checkpoint_id=folder[0])
        kept = copy.deepcopy(optimizer.state_dict())
        other = shard(build(seed=7), Int8Codec(), sharding=sharding)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder[0])
        other.load_state_dict(state)
        resumed = fully_shard_optimizer(adamw(other.parameters()))
        resumed.load_state_dict(kept)
        train(other, resumed, range(2, 4), rank, world)
        same(main_weights(other), expected, sharding)


def evaluation_and_surgery_see_the_main_weights(rank, world):
    for sharding in in_turn(5, STRATEGIES):
        model = shard(build(), Int8Codec(keep=True), sharding=sharding)
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        train(model, optimizer, range(1), rank, world)
        plain = build()
        for name, value in main_weights(model).items():
            assert value.dtype is torch.float32
            if isinstance(plain.get_parameter(name), Int8Tensor):
                quantize(plain.get_parameter(name), value)
            else:
                plain.get_parameter(name).data.copy_(value)
        with torch.no_grad(), watched() as seen:
            assert torch.equal(model(batch(9)), plain(batch(9)))
            assert torch.equal(model(batch(8)), plain(batch(8)))
        assert seen["maxima"] == 1, "evaluation quantizes nothing anew"
        with unshard(model, writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        with torch.no_grad():
            for name, value in main_weights(model).items():
                parameter = plain.get_parameter(name)
                quantize(parameter, value) if isinstance(parameter, Int8Tensor) else parameter.copy_(value)
            assert torch.equal(model(batch(9)), plain(batch(9)))


def ordinary_weights_become_quantized_when_they_are_sharded(rank, world):
    expected, losses = reference(2, world)
    model = build()
    for block in model.blocks:
        for name, layer in (("up", block.up), ("down", block.down)):
            late = LateInt8Linear(*layer.weight.shape[::-1])
            late.weight.data = layer.weight._initial
            setattr(block, name, late)
    optimizer = adamw(model.parameters())  # its parameters are not those that the model will have
    shard(model, Int8Codec())
    found = train(model, fully_shard_optimizer(optimizer), range(2), rank, world)
    same(main_weights(model), expected, "quantized late")
    assert [loss.item() for loss in losses[rank::world]] == list(map(float, found))


def weights_on_meta_become_quantized_and_stay_tied(rank, world):
    for by_itself in (False, True):
        found = []
        for device in ("cpu", "meta"):
            torch.manual_seed(0)
            with torch.device(device):
                layers = [LateInt8Linear(DIM, DIM, by_itself=by_itself) for _ in range(3)]
            layers[1].weight.requires_grad_(False)
            if by_itself:
                layers[2].weight = layers[0].weight
            model = nn.Sequential(*layers)
            torch.manual_seed(0)
            policy = MixedPrecisionPolicy(weight_codecs=(Int8Codec(),))
            fully_shard_units(model, layers, policy=policy)
            assert (layers[2].weight is layers[0].weight) is by_itself
            assert not layers[1].weight.requires_grad
            assert all(group.spec.codec is not None for unit in context_of(model).units for group in unit.groups)
            found.append(main_weights(model))
        same(found[1], found[0], f"from meta, {by_itself}")


def misfits_are_refused(rank, world):
    model = build()
    model.blocks[0].up.weight = parameter_of(torch.ones(4, 4), keeps_initial=False)
    with pytest.raises(ShardingError, match=r"up\.weight of Block cannot be sharded as it is stored: it does not know"):
        shard(model, Int8Codec())
    with pytest.raises(ShardingError, match=r"small steps would be lost in its torch\.uint8 values"):
        shard(build(), Int8Codec(), dtypes={"main_params_dtype": None})
    with pytest.raises(
        ShardingError, match=r"up\.weight is quantized, and its module is one that policy\.fp32_modules keeps"
    ):
        shard(build(), Int8Codec(), dtypes={"fp32_modules": (Int8Linear,)})
    with pytest.raises(
        ShardingError,
        match="weight_codecs: expected objects with the methods of WeightCodec, got 8, which lacks storage_dtype, ",
    ):
        MixedPrecisionPolicy(weight_codecs=(8,))
    incomplete = type(
        "Incomplete", (), {name: None for name in dir(WeightCodec) if name[0] != "_" and name != "rows_together"}
    )
    with pytest.raises(ShardingError, match=r"which lacks rows_together$"):
        MixedPrecisionPolicy(weight_codecs=(incomplete(),))
    with pytest.raises(ShardingError, match=r"which is a class$"):
        MixedPrecisionPolicy(weight_codecs=(Int8Codec,))


def a_codec_without_its_kind_changes_nothing(rank, world):
    found = []
    for codecs in ((), (Int8Codec(),)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, 7), nn.Linear(7, 3))
        fully_shard(model, policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16, weight_codecs=codecs))
        optimizer = fully_shard_optimizer(adamw(model.parameters()))
        with watched() as seen:
            train(model, optimizer, range(2), rank, world)
        found.append((main_weights(model), seen))
    same(found[1][0], found[0][0], "a codec nobody needs")
    assert found[0][1] == found[1][1]


WORLDS = {
    1: [bit_equal_in_every_placement, misfits_are_refused],
    2: [
        bit_equal_in_every_placement,
        recomputed_weights_are_the_same,
        frozen_weights_stay_quantized,
        half_of_what_bfloat16_gathers,
        memory_is_that_of_the_raw_data,
        resumes_bit_equal,
        evaluation_and_surgery_see_the_main_weights,
        ordinary_weights_become_quantized_when_they_are_sharded,
        weights_on_meta_become_quantized_and_stay_tied,
        a_codec_without_its_kind_changes_nothing,
    ],
    3: [near_on_three_ranks, fragments_end_between_rows_that_belong_together],
    4: [bit_equal_with_an_outer_axis, strips_of_sub_shards_stay_together],
}


@by_world(WORLDS)
def test_quantized_weights(world, case):
    check(WORLDS, world, case)
