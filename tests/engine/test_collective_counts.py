"""How many collectives a step costs: exact per unit, per microbatch and per mesh axis, and none that is not needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_pending,
    sharded_parameters,
    unshard,
)
from tests.engine.cases import device_type
from tests.engine.internals import unit_of
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.chain import STRATEGIES, adamw, context
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, pairwise

ROWS = (48, 80, 112, 144)  # full and half length of every unit are unlike those of the others
DIM = 8
LAYERS = tuple(f"layers.{index}" for index in range(len(ROWS)))
LAST = LAYERS[-1]
UNITS = (*LAYERS, "root")
SYNCS = ("always", "no_sync", "keep_sharded")
OPERATORS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}
Counts = Counter  # (operation, axis, unit) -> number


class Funnel(nn.Module):
    """Units that all differ in size, so that a collective's length tells whose it is. A scale belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, rows, bias=False) for rows in ROWS)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.reentrant: bool | None = None
        self.regions = [[0], [1], [2], [3]]

    def region(self, x: Tensor, indices: list[int]) -> Tensor:
        for index in indices:
            x = torch.tanh(self.layers[index](x).unflatten(-1, (DIM, -1)).mean(-1))
        return x

    def forward(self, x: Tensor) -> Tensor:
        for indices in self.regions:
            keep = self.reentrant is None
            x = self.region(x, indices) if keep else checkpoint(self.region, x, indices, use_reentrant=self.reentrant)
        return x * self.scale


def build(mesh=None, **options) -> Funnel:
    torch.manual_seed(0)
    model = Funnel()
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


class Dispatched(TorchDispatchMode):
    """Counts what reaches c10d's operators, whichever Python function led there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.__name__.removesuffix(".default")
            self.calls[OPERATORS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


class Observer:
    """Counts flat collectives by operation, axis and unit."""

    def __init__(self, model: Funnel) -> None:
        self.counts: Counts = Counter()
        self.context = context(model)
        mesh = self.context.mesh
        self.unit_by_numel: dict[int, str] = {}
        for name in UNITS:
            unit = unit_of(model if name == "root" else model.get_submodule(name))
            (group,) = unit.groups
            (segment,) = group.layout.segments
            full = segment.shard_numel * len(group.full_extent)
            for numel in {full, full // (mesh.shard.size if mesh.outer else 1)}:
                assert self.unit_by_numel.setdefault(numel, name) == name, "sizes must tell units apart"

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """The name of the axis that a process group talks over. On GPUs reductions have groups of their own, from the first forward on."""
        groups = [group for unit in self.context.units for group in unit.groups]
        axes = [axis for one in groups for axis in (one.axes.shard, one.axes.outer) if axis is not None]
        (name,) = {axis.name for axis in (*axes, *self.context.mesh.axes) if group in (axis.group, axis.reduce_group)}
        return name

    def note(self, operation: str, longest: Tensor, group: dist.ProcessGroup) -> None:
        if longest.dtype is torch.uint8:  # which parameters were used
            assert longest.numel() == len(UNITS), "a byte for each parameter"
            self.counts["usage", self.axis_of(group), "all"] += 1
            return
        self.counts[operation, self.axis_of(group), self.unit_by_numel[longest.numel()]] += 1

    @contextmanager
    def watching(self) -> Iterator[Counts]:
        """Inside, count; leaves with the context's own counters checked against what was seen."""
        self.counts = Counter()
        gathers, reductions = self.context.lane.started, self.context.reductions.started
        with Dispatched() as dispatched, self._wrapped():
            yield self.counts
        assert dispatched.calls.total() == self.counts.total()
        seen = Counter()
        for (operation, axis, unit), number in self.counts.items():
            # Under HFSDP one gather goes over both axes after a step, and one reduction over both: the counters count it once.
            if operation == "usage":
                continue
            both = {
                one
                for name, one, whose in self.counts
                if whose == unit and name != "usage" and (name == "gather") == (operation == "gather")
            }
            if axis == "shard" or "shard" not in both:
                seen[operation == "gather", unit] += number
        assert self.context.lane.started - gathers == sum(n for (is_gather, _), n in seen.items() if is_gather)
        assert self.context.reductions.started - reductions == sum(
            n for (is_gather, _), n in seen.items() if not is_gather
        )

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        names = {"gather": "all_gather_flat", "reduce_scatter": "reduce_scatter_flat"}
        flat = {name: self._counted(operation, getattr(compat, name)) for operation, name in names.items()}
        whole = self._counted("all_reduce", dist.all_reduce)
        with mock.patch.multiple(compat, **flat), mock.patch.object(dist, "all_reduce", whole):
            yield

    def _counted(self, operation, original):
        def call(*arguments, **options):
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            group = next((one for one in arguments if isinstance(one, dist.ProcessGroup)), options.get("group"))
            self.note(operation, max(tensors, key=Tensor.numel), group)
            return original(*arguments, **options)

        return call


def step(model, optimizer, rank, *, microbatches, sync) -> None:
    for micro in range(microbatches):
        waits = sync != "always" and micro < microbatches - 1
        with no_sync(model, keep_sharded=sync == "keep_sharded") if waits else nullcontext():
            x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(10 * micro + rank))
            model(x.requires_grad_()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def steady_step(model, rank, *, microbatches, sync) -> Counts:
    """Counts of a step after one that taught the engine what follows what."""
    optimizer, observer = adamw(model), Observer(model)
    step(model, optimizer, rank, microbatches=microbatches, sync=sync)
    with observer.watching() as counts:
        step(model, optimizer, rank, microbatches=microbatches, sync=sync)
    return counts


def expected_on_one_axis(sharding: str, microbatches: int, sync: str) -> Counts:
    """From the definition of each strategy, not from the engine."""
    level = STRATEGIES.index(sharding)
    expected: Counts = Counter()
    for unit in UNITS:
        if level in (1, 2):
            expected["gather", "shard", unit] = 1  # whole weights, written in parts by the optimizer
        elif level == 3:
            # Forward and backward; what backward needs first never left.
            expected["gather", "shard", unit] = microbatches * (1 if unit in ("root", LAST) else 2)
        every = sync == "always" or (sync == "keep_sharded" and level >= 2)
        operation = "all_reduce" if level == 0 else "reduce_scatter"
        expected[operation, "shard", unit] = expected["usage", "shard", "all"] = microbatches if every else 1
    return expected


def gathers_and_reductions_are_exact_for_every_strategy(rank, world):
    for sharding, sync, microbatches in thinned(pairwise(STRATEGIES, SYNCS, (1, 3) if world < 3 else (2,)), 2):
        found = steady_step(build(sharding=sharding), rank, microbatches=microbatches, sync=sync)
        expected = expected_on_one_axis(sharding, microbatches, sync) if world > 1 else Counter()
        assert found == expected, (
            f"{sharding} {sync} x{microbatches}: {found - expected} over, {expected - found} missing"
        )


def expected_on_two_axes(sharding: str, outer: str, microbatches: int, sync: str) -> Counts:
    expected = expected_on_one_axis(sharding, microbatches, sync)
    shard_is_reduced_each_time = sync == "always" or (sync == "keep_sharded" and STRATEGIES.index(sharding) >= 2)
    assert not (shard_is_reduced_each_time and sharding in ("no_shard", "optim")) or sync == "always"
    for unit in UNITS:
        operation = "reduce_scatter" if outer == "optim" else "all_reduce"
        expected[operation, "outer", unit] = microbatches if sync == "always" else 1
        if outer == "optim":
            expected["gather", "outer", unit] = 1
    for axis in ("outer", "shard"):
        expected["usage", axis, "all"] = microbatches if sync == "always" else 1
    return expected


def outer_axis_is_used_on_the_last_microbatch_only(rank, world):
    """HSDP: one all-reduce per unit. HFSDP: (microbatches + 1) reduce-scatters per unit, no all-reduce, one outer gather."""
    mesh = dist.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    possible = lambda sharding, outer, sync: not (sharding == "no_shard" and outer == "optim")  # noqa: E731
    for sharding, outer, sync in thinned(pairwise(STRATEGIES, ("no_shard", "optim"), SYNCS, possible=possible), 2):
        model = build(mesh, sharding=sharding, outer_sharding=outer)
        found = steady_step(model, rank, microbatches=3, sync=sync)
        expected = expected_on_two_axes(sharding, outer, 3, sync)
        assert found == expected, f"{sharding} {outer} {sync}: {found - expected} over, {expected - found} missing"


def look(model, rank, sync: str) -> Counts:
    """Counts of looking, twice, at gradients that were held back."""
    observer = Observer(model)
    with no_sync(model, keep_sharded=sync == "keep_sharded"):
        model(torch.full((2, DIM), rank + 1.0, requires_grad=True)).square().sum().backward()
    with observer.watching() as counts:
        for _ in range(2):
            for view in sharded_parameters(model):
                if view.local.numel():
                    assert torch.isfinite(view.grad.detach()).all()
            reduce_pending(model)
    return counts


def a_look_at_what_is_held_back_reduces_what_is_missing(rank, world):
    """Nothing where `keep_sharded` reduced all there is to reduce."""
    for sharding, sync in thinned(product(in_turn(0, STRATEGIES), ("no_sync", "keep_sharded")), 3):
        found = look(build(sharding=sharding), rank, sync)
        level = STRATEGIES.index(sharding)
        operation = "reduce_scatter" if level else "all_reduce"
        is_there = world == 1 or (sync == "keep_sharded" and level >= 2)
        missing = {("usage", "shard", "all"): 1, **{(operation, "shard", unit): 1 for unit in UNITS}}
        expected = Counter() if is_there else Counter(missing)
        assert found == expected, f"{sharding} {sync}: {found - expected} over, {expected - found} missing"


def dropping_what_is_held_back_communicates_nothing(rank, world):
    """Also asking whether a gradient is there, and of what shape, as loops do before they drop it."""

    def describe(model, optimizer):
        assert all(
            p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in model.parameters()
        )
        for parameter in model.parameters():
            parameter.grad = None

    ways = (
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        describe,
    )
    for sharding, way in thinned(product(in_turn(1, STRATEGIES), ways), 2):
        model = build(sharding=sharding)
        optimizer, observer = adamw(model), Observer(model)
        with no_sync(model):
            model(torch.ones(2, DIM, requires_grad=True)).square().sum().backward()
        with observer.watching() as counts:
            way(model, optimizer)
        assert not counts, counts
        model(torch.zeros(2, DIM, requires_grad=True)).sum().backward()
        assert not any(view.grad.detach().any() for view in sharded_parameters(model) if view.local.numel())


def a_look_reduces_over_the_axis_that_waits(rank, world):
    mesh = dist.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
    rows = product(in_turn(2, STRATEGIES), ("no_shard", "optim"), ("no_sync", "keep_sharded"))
    for sharding, outer, sync in thinned(rows, 3):
        if sharding == "no_shard" and outer == "optim":
            continue
        found = look(build(mesh, sharding=sharding, outer_sharding=outer), rank, sync)
        level = STRATEGIES.index(sharding)
        expected = Counter(
            {("reduce_scatter" if outer == "optim" else "all_reduce", "outer", unit): 1 for unit in UNITS}
        )
        expected.update({("usage", axis, "all"): 1 for axis in ("shard", "outer")})
        if sync == "no_sync" or level < 2:
            expected.update({("reduce_scatter" if level else "all_reduce", "shard", unit): 1 for unit in UNITS})
        assert found == expected, f"{sharding} {outer} {sync}: {found - expected} over, {expected - found} missing"


def checkpointing_costs_one_gather_in_forward_and_one_in_backward(rank, world):
    for reentrant, regions in product((False, True), ([[0], [1], [2], [3]], [[0, 1], [2, 3]])):
        model = build()
        optimizer, observer = adamw(model), Observer(model)
        for _ in range(2):
            model.reentrant, model.regions = reentrant, regions
            step(model, optimizer, rank, microbatches=1, sync="always")
        case = f"reentrant={reentrant} {regions}"
        x = torch.ones(2, DIM, requires_grad=True)
        with observer.watching() as counts:
            loss = model(x).sum()
        assert counts == Counter({("gather", "shard", unit): 1 for unit in UNITS}), f"{case}: {counts}"
        with observer.watching() as counts:
            loss.backward()
        # Reentrant forwards run without gradients, so even the last unit was given back.
        gathered = LAYERS if reentrant else LAYERS[:-1]
        expected = Counter({("gather", "shard", unit): 1 for unit in gathered})
        expected.update({("reduce_scatter", "shard", unit): 1 for unit in UNITS})
        expected["usage", "shard", "all"] = 1
        assert counts == expected, f"{case}: {counts - expected} over, {expected - counts} missing"


def passes_without_gradients_gather_once_and_reduce_nothing(rank, world):
    for sharding in in_turn(3, STRATEGIES):
        level = STRATEGIES.index(sharding)
        model = build(sharding=sharding)
        optimizer, observer = adamw(model), Observer(model)
        for _ in range(2):
            step(model, optimizer, rank, microbatches=1, sync="always")
        x = torch.ones(2, DIM)
        for number, mode in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
            with observer.watching() as counts, mode():
                model(x)
            # The first pass after a step brings whole weights up to date; later ones find them so.
            gathers = 1 if level == 3 or (level > 0 and number == 0) else 0
            assert counts == Counter({("gather", "shard", unit): gathers for unit in UNITS}), f"{sharding}: {counts}"
        with observer.watching() as counts:
            step(model, optimizer, rank, microbatches=1, sync="always")
        expected = expected_on_one_axis(sharding, 1, "always")
        if level in (1, 2):
            expected.subtract({("gather", "shard", unit): 1 for unit in UNITS})
        assert counts == expected, f"{sharding} after validation: {counts}"


def keeping_weights_after_forward_saves_the_gather_of_backward(rank, world):
    model = build(reshard_after_forward=False)
    found = steady_step(model, rank, microbatches=2, sync="no_sync")
    expected = expected_on_one_axis("optim_grads_params", 2, "no_sync")
    expected.update({("gather", "shard", unit): -2 for unit in UNITS if unit not in ("root", LAST)})
    assert found == expected, found


def a_lookup_is_not_gathered_for_its_backward(rank, world):
    """Its gradient needs the indices alone. A head tied to it does need the weight, and gathers it."""
    for tied in (False, True):
        torch.manual_seed(0)
        table, head = nn.Embedding(48, DIM), nn.Linear(DIM, 48, bias=False)
        if tied:
            head.weight = table.weight
        model = nn.Sequential(table, nn.Linear(DIM, DIM), head)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = adamw(model)
        gathers = 0
        for _ in range(3):
            before = context(model).lane.started
            model(torch.tensor([[rank, 5, 7]])).square().mean().backward()
            gathers = context(model).lane.started - before
            optimizer.step()
            optimizer.zero_grad()
        # Forward: table, linear, head (if tied, the table's group again). Backward: linear; the head stays from forward.
        assert gathers == 4, (tied, gathers)


def a_precise_reduction_is_one_all_to_all_and_a_gather_where_gradients_stay_whole(rank, world):
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16, high_precision_reduce=True)
    for sharding, sync in thinned(product(in_turn(4, STRATEGIES), ("always", "no_sync")), 3):
        model = build(sharding=sharding, policy=policy)
        optimizer, expected = adamw(model), Counter()
        for (operation, _, _), number in expected_on_one_axis(sharding, 2, sync).items():
            precise = {"usage": ("all_reduce",), "gather": ("gather",), "all_reduce": ("all_to_all", "gather")}
            expected.update(dict.fromkeys(precise.get(operation, ("all_to_all",)), number))
        step(model, optimizer, rank, microbatches=2, sync=sync)
        with Dispatched() as dispatched:
            step(model, optimizer, rank, microbatches=2, sync=sync)
        assert dispatched.calls == expected, f"{sharding} {sync}: {dispatched.calls} instead of {expected}"


# What is done with a model between two steps, and how many collectives of each axis it takes where all is sharded.
BETWEEN_STEPS: dict[str, tuple[Callable[[Funnel, torch.optim.Optimizer], object], Counts]] = {
    "a whole weight": (lambda m, o: m.layers[0].weight.full_tensor(), Counter(gather=1)),
    "a whole gradient": (lambda m, o: m.scale.grad.full_tensor(), Counter(gather=1)),
    "whole state of an optimizer": (lambda m, o: o.state[m.scale]["exp_avg"].full_tensor(), Counter(gather=1)),
    "a weight and an activation": (lambda m, o: torch.ones(2, DIM) * m.scale, Counter(gather=1)),
    "a weight twice": (lambda m, o: torch.cat([m.scale, m.scale]), Counter(gather=2)),
    "a row that is written": (lambda m, o: m.layers[1].weight.data.__setitem__(3, 0.5), Counter(gather=1)),
    "a look at all weights": (lambda m, o: _look_at(m), Counter(gather=len(UNITS))),
    "a look at one unit": (lambda m, o: _look_at(m.layers[2]), Counter(gather=1)),
    "a norm": (lambda m, o: m.scale.data.norm().item(), Counter(all_reduce=1)),
    "clipping": (lambda m, o: clip_grad_norm_(m, 1e9), Counter(all_reduce=1)),
    "arithmetic on rows": (lambda m, o: m.scale.data.mul_(0.5).add_(1.0), Counter()),
    "clearing": (lambda m, o: o.zero_grad(), Counter()),
    "a step": (lambda m, o: o.step(), Counter()),
    "state dicts": (lambda m, o: (m.state_dict(), o.state_dict()), Counter()),
}


def _look_at(module: nn.Module) -> None:
    with unshard(module):
        assert all(parameter.sum().isfinite() for parameter in module.parameters())


def what_is_done_between_steps_costs_what_it_must(rank, world):
    mesh, options = None, {}
    if world == 4:
        mesh = dist.init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "shard"))
        options = {"outer_sharding": "optim"}
    for name, (work, each) in BETWEEN_STEPS.items():
        model = build(mesh, **options)
        optimizer = adamw(model)
        for _ in range(2):
            model(torch.full((2, DIM), rank + 1.0, requires_grad=True)).square().sum().backward()
            optimizer.step()
        with torch.no_grad(), Dispatched() as dispatched:
            work(model, optimizer)
        expected = Counter({operation: number * (2 if mesh else 1) for operation, number in each.items()})
        assert dispatched.calls == expected, f"{name}: {dispatched.calls} instead of {expected}"


ON_TWO_AXES = (outer_axis_is_used_on_the_last_microbatch_only, a_look_reduces_over_the_axis_that_waits)
WORLDS = {
    1: (gathers_and_reductions_are_exact_for_every_strategy, a_look_at_what_is_held_back_reduces_what_is_missing),
    2: (
        gathers_and_reductions_are_exact_for_every_strategy,
        a_look_at_what_is_held_back_reduces_what_is_missing,
        dropping_what_is_held_back_communicates_nothing,
        checkpointing_costs_one_gather_in_forward_and_one_in_backward,
        passes_without_gradients_gather_once_and_reduce_nothing,
        keeping_weights_after_forward_saves_the_gather_of_backward,
        a_lookup_is_not_gathered_for_its_backward,
        a_precise_reduction_is_one_all_to_all_and_a_gather_where_gradients_stay_whole,
        what_is_done_between_steps_costs_what_it_must,
    ),
    4: ON_TWO_AXES,
    **at_night(
        {
            3: (gathers_and_reductions_are_exact_for_every_strategy,),
            4: (*ON_TWO_AXES, what_is_done_between_steps_costs_what_it_must),
        }
    ),
}


@by_world(WORLDS)
def test_collectives(world, case):
    check(WORLDS, world, case)
