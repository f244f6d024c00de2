"""Recompute inside sharded units: the same numbers to the bit, one gather in forward and one in backward, weights given back after it."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import nullcontext
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from lightning_mfsdp import Recompute, apply_recompute, fully_shard, no_sync
from lightning_mfsdp.engine import MixedPrecisionPolicy, sharded_parameters
from lightning_mfsdp.recompute.region import region_of
from tests.engine import test_codec as quantized
from tests.engine.int8_codec import Int8Codec
from tests.engine.internals import unit_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, adamw, assert_same_weights, context
from tests.helpers.nights import NIGHT
from tests.helpers.pairwise import in_turn
from tests.moe import models as mixtures
from tests.recompute.models import Stack, batch, build, loss_of

BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
CONFIGS = {
    "each layer": Recompute(),
    "pairs of layers": Recompute(num_layers=2),
    "three together and one": Recompute(num_layers=3),
    "all together": Recompute(num_layers=4),
    "every second": Recompute(every_nth=2),
    "the first two": Recompute(method="block", num_layers=2),
    "parts of layers": Recompute(method="selective", modules=["layers.*.up", "layers.*.norm"]),
    "all but products": Recompute(method="selective", save_ops=["matmul"]),
    "in host memory": Recompute(offload=True),
    "pairs in host memory": Recompute(num_layers=2, offload=True),
}

FEW = ("each layer", "three together and one")
OF_EACH_KIND = (*FEW, "parts of layers", "all but products", "pairs in host memory")


def sharded(config: Recompute | None, together: int = 1, **options) -> Stack:
    model = build()
    if config is not None:
        apply_recompute(model, config)
    for first in range(0, len(model.layers), together):
        members = list(model.layers[first : first + together])
        fully_shard(members if together > 1 else members[0], **options)
    return fully_shard(model, **options)


def train(model: Stack, rank: int, steps: int = 2, microbatches: int = 1) -> torch.Tensor:
    optimizer, losses = adamw(model), []
    torch.manual_seed(5 + rank)
    for step in range(steps):
        for micro in range(microbatches):
            with no_sync(model) if micro < microbatches - 1 else nullcontext():
                loss = loss_of(model, batch(10 * step + micro, rank))
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        assert not any(unit_of(layer).uses_weights for layer in model.layers), "given back after backward"
    return torch.stack(losses)


def every_method_is_bit_equal(rank, world):
    rows = product(STRATEGIES, (None, BF16)) if NIGHT else ((STRATEGIES[0], BF16), (STRATEGIES[-1], None))
    for sharding, policy in rows:
        options = {"sharding": sharding, "policy": policy}
        plain = sharded(None, **options)
        every = sharding == STRATEGIES[-1]
        microbatches = 1 if every and not NIGHT else 2
        losses = train(plain, rank, microbatches=microbatches)
        chosen = CONFIGS if every else {name: CONFIGS[name] for name in FEW}
        for name, config in chosen.items():
            model = sharded(config, **options)
            assert torch.equal(train(model, rank, microbatches=microbatches), losses), f"{name} {options}"
            assert_same_weights(model, plain, f"{name} {options}")


def a_unit_is_gathered_once_in_forward_and_once_in_backward(rank, world):
    """What backward needs first never left. Regions inside of a unit and regions of several units alike."""
    for name in ("none", *(CONFIGS if NIGHT else OF_EACH_KIND)):
        model = sharded(CONFIGS[name] if name in CONFIGS else Recompute(method="none"))
        train(model, rank, steps=2)
        shared = context(model)
        before = shared.lane.started
        loss = loss_of(model, batch(7, rank))
        in_forward = shared.lane.started - before
        assert in_forward == 5, f"{name}: {in_forward} gathers in forward"
        reduced = shared.reductions.started
        loss.backward()
        in_backward = shared.lane.started - before - in_forward
        assert in_backward == 3, f"{name}: {in_backward} gathers in backward"
        assert shared.reductions.started - reduced == 5, name
        assert not any(group.weights.present for unit in shared.units for group in unit.groups), f"{name}: given back"


def units_of_several_layers(rank, world):
    """Grouped modules: regions inside make no other gathers than none, in numbers and to the bit."""
    plain = sharded(None, together=2)
    losses = train(plain, rank)
    for name in CONFIGS if NIGHT else OF_EACH_KIND:
        model = sharded(CONFIGS[name], together=2)
        assert torch.equal(train(model, rank), losses), name
        assert_same_weights(model, plain, name)
        before = context(model).lane.started
        loss_of(model, batch(7, rank)).backward()
        assert context(model).lane.started - before == 3 + 1, f"{name}: {context(model).lane.started - before}"


def weights_are_there_from_forward_on_where_they_stay(rank, world):
    plain = sharded(None, reshard_after_forward=False)
    losses = train(plain, rank)
    model = sharded(Recompute(num_layers=2), reshard_after_forward=False)
    assert torch.equal(train(model, rank), losses)
    before = context(model).lane.started
    loss_of(model, batch(7, rank)).backward()
    assert context(model).lane.started - before == 5


def two_forwards_before_a_backward_and_lost_forwards(rank, world):
    found = []
    for config in (None, Recompute(), Recompute(num_layers=2), Recompute(num_layers=2, offload=True)):
        model = sharded(config, storage="pooled")
        train(model, rank, steps=2)
        torch.manual_seed(3)
        first, lost, second = (loss_of(model, batch(number, rank)) for number in (20, 21, 22))
        del lost
        with torch.no_grad():
            loss_of(model, batch(23, rank))
        second.backward()
        loss_of(model, batch(24, rank)).backward()
        found.append([view.grad.clone() for view in sharded_parameters(model) if view.grad is not None])
        del first
    for number, grads in enumerate(found):
        assert all(torch.equal(*pair) for pair in zip(grads, found[0], strict=True)), number


def uneven(config: Recompute, between: bool) -> Stack:
    """Units of different sizes. `between`: the second layer is not called with what the first one computed."""
    model = build(layers=5)
    for number, layer in enumerate(model.layers):
        layer.up, layer.down = nn.Linear(8, 8 + 4 * number), nn.Linear(8 + 4 * number, 8)
    if between:
        model.layers[0].register_forward_hook(lambda module, args, output: torch.sin(output))
    apply_recompute(model, config)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def a_rank_without_tokens_goes_the_way_of_all_others(rank, world):
    """It links layers of a chunk where others do and nowhere else, so units are gathered in one order on all ranks."""
    for between in (False, True):
        found = []
        for config in (Recompute(method="none"), Recompute(num_layers=3), Recompute(num_layers=3, offload=True)):
            model = uneven(config, between)
            torch.manual_seed(3)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(2):
                    model(batch(step, rank, rows=0 if rank else 4)).square().sum().backward()
            messages = [str(one.message) for one in caught if "is given no tensor that" in str(one.message)]
            assert len(messages) == bool(between and config.num_layers), messages
            found.append([view.grad.clone() for view in sharded_parameters(model) if view.grad is not None])
        for grads in found[1:]:
            assert all(torch.equal(*pair) for pair in zip(grads, found[0], strict=True)), between


def a_region_with_units_inside(rank, world):
    """The inner unit is entered by its own hooks, once in forward and once in backward; the whole region runs again."""
    for config in (None, Recompute(), Recompute(num_layers=2)):
        model = build()
        if config is not None:
            apply_recompute(model, config)
        for layer in model.layers:
            fully_shard(layer.down)
            fully_shard(layer)
        fully_shard(model)
        losses = train(model, rank)
        assert config is None or not any(region_of(layer).stops_early for layer in model.layers)
        before = context(model).lane.started
        loss_of(model, batch(7, rank)).backward()
        gathers = context(model).lane.started - before
        if config is None:
            expected, expected_gathers = losses, gathers
        assert torch.equal(losses, expected)
        assert gathers == expected_gathers, f"{config}: {gathers}, {expected_gathers} without"


def experts_on_other_ranks(rank, world):
    """Routes are skewed, and another way on each rank. Ranks talk to each other inside of what is computed again, so all of it is."""
    for dispatcher in ("all_gather", "all_to_all"):
        found = []
        for config in (None, Recompute(), Recompute(num_layers=2)):
            model = mixtures.build()
            if config is not None:
                apply_recompute(model, config)
            mixtures.sharded(model, world, world, dispatcher=dispatcher)
            optimizer, losses = adamw(model), []
            for step in range(2):
                ids = torch.full((4, 6), (step + rank) % mixtures.VOCAB)
                ids[0] = torch.arange(6) + rank
                loss = mixtures.loss_of(model, ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            found.append((torch.stack(losses), model, [block.router.load.clone() for block in model.blocks]))
            assert config is None or not any(region_of(block).stops_early for block in model.blocks)
        for losses, model, loads in found[1:]:
            assert torch.equal(losses, found[0][0]), dispatcher
            assert_same_weights(model, found[0][1], dispatcher)
            assert all(torch.equal(*pair) for pair in zip(loads, found[0][2], strict=True))


def weights_whose_backward_reads_other_bytes(rank, world):
    """A codec of two planes: what is computed again reads those of the forward, which the gather for the backward left out."""
    for planes in (1, 2):
        found = []
        for config in (None, Recompute(), Recompute(num_layers=3), Recompute(method="selective", modules=["*.up"])):
            model = quantized.build(planes=planes)
            if config is not None:
                apply_recompute(model, config)
            quantized.shard(model, Int8Codec(planes))
            optimizer = adamw(model)
            found.append((torch.stack(quantized.train(model, optimizer, range(3), rank, world)), model))
        for losses, model in found[1:]:
            assert torch.equal(losses, found[0][0]), planes
            assert_same_weights(model, found[0][1], planes)


def a_tied_weight_and_a_frozen_layer(rank, world):
    found = []
    for config in (None, Recompute(), Recompute(num_layers=3)):
        model = build()
        model.layers[3].up.weight = model.layers[0].up.weight
        model.layers[1].requires_grad_(False)
        model.inputs.requires_grad_(False)
        if config is not None:
            apply_recompute(model, config)
        for layer in model.layers[1:3]:
            fully_shard(layer)
        fully_shard(model)
        found.append((train_frozen(model, rank), model))
    for losses, model in found[1:]:
        assert torch.equal(losses, found[0][0])
        assert_same_weights(model, found[0][1])


def train_frozen(model: nn.Module, rank: int) -> torch.Tensor:
    optimizer = adamw(model)
    torch.manual_seed(2)
    losses = []
    for step in range(3):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def a_mesh_of_two_axes(rank, world):
    """Whole weights on each node, and optimizer state that is also split over nodes."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    for number, outer_sharding in enumerate(("no_shard", "optim") if NIGHT else ("optim",)):
        options = {"mesh": mesh, "outer_sharding": outer_sharding, "policy": BF16}
        plain = sharded(None, **options)
        losses = train(plain, rank, microbatches=2)
        started = counts_of_a_step(plain, rank)
        for name in in_turn(number, (*FEW, "pairs in host memory", "all but products")):
            model = sharded(CONFIGS[name], **options)
            assert torch.equal(train(model, rank, microbatches=2), losses), f"{name} {outer_sharding}"
            assert_same_weights(model, plain, f"{name} {outer_sharding}")
            assert counts_of_a_step(model, rank) == started, f"{name} {outer_sharding}"


def counts_of_a_step(model: Stack, rank: int) -> tuple[int, int]:
    """Gathers and reductions."""
    shared = context(model)
    gathers, reductions = shared.lane.started, shared.reductions.started
    loss_of(model, batch(7, rank)).backward()
    return shared.lane.started - gathers, shared.reductions.started - reductions


def names_in_checkpoints_are_those_of_the_plain_model(rank, world):
    import torch.distributed.checkpoint as dcp

    plain, model = sharded(None), sharded(Recompute(num_layers=2))
    train(plain, rank, steps=1)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        state = {"model": plain.state_dict()}
        assert list(model.state_dict()) == list(plain.state_dict()) == list(build().state_dict())
        dcp.save(state, checkpoint_id=folders[0])
        own = {"model": model.state_dict()}
        dcp.load(own, checkpoint_id=folders[0])
        model.load_state_dict(own["model"])
        dist.barrier()
    assert_same_weights(model, plain)


TWO = (
    every_method_is_bit_equal,
    a_unit_is_gathered_once_in_forward_and_once_in_backward,
    units_of_several_layers,
    weights_are_there_from_forward_on_where_they_stay,
    two_forwards_before_a_backward_and_lost_forwards,
    a_rank_without_tokens_goes_the_way_of_all_others,
    a_region_with_units_inside,
    experts_on_other_ranks,
    weights_whose_backward_reads_other_bytes,
    a_tied_weight_and_a_frozen_layer,
    names_in_checkpoints_are_those_of_the_plain_model,
)
WORLDS = {2: TWO, 4: (a_mesh_of_two_axes,)}


@by_world(WORLDS)
def test_sharded_recompute(world, case):
    check(WORLDS, world, case)
