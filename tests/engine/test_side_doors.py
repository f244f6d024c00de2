"""Losses of what a unit computed and did not return: right; with `side_doors="raise"` an error that names the unit and what to do.

Every program runs on a plain model with the batches of all ranks, and on a sharded one with a rank's own. Slots are shared from the second
step on, so each takes several ordinary steps first.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    around_backward,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    gather_root,
    unshard_model,
    watch_backward,
)
from lightning_mfsdp.engine.core.versions import RESHARDED
from tests.engine.internals import unit_of
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.chain import context, weights
from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.hidden import Hidden
from tests.helpers.nights import NIGHT, thinned
from tests.helpers.pairwise import in_turn, pairwise

WIDTH, BLOCKS, ORDINARY, LAST = 6, 5, 3, 6
BFLOAT16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
SHARDED, WHOLE = "optim_grads_params", ("optim_grads", "optim", "no_shard")
STRATEGIES = (*WHOLE, SHARDED)


class Block(nn.Module):
    """Keeps what a program may ask for besides its result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.map: Tensor | None = None
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.a(x)
        self.penalty = self.b.weight.square().mean() + self.b(self.map).square().mean()
        return x + self.b(self.map.tanh()) * self.gain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.feature: Tensor | None = None

        def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self.feature = output

        self.blocks[1].a.register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Noted(Block):
    """Keeps a tensor with its graph if asked to, as a program does that draws what one rank computes."""

    notes = False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.a(x)
        if self.notes:
            self.map = inner
        return x + self.b(inner.tanh()) * self.gain


Loss = Callable[[Net, Tensor, int], Tensor]


def task(model: Net, x: Tensor) -> Tensor:
    return model(x).square().mean()


def task_alone(model: Net, x: Tensor, step: int) -> Tensor:
    return task(model, x)


def feature_alone(model: Net, x: Tensor, step: int) -> Tensor:
    loss = task(model, x)
    return loss if step < ORDINARY else (model.feature - 1).square().mean()  # type: ignore[operator]


def attribute_of_early_exit(model: Net, x: Tensor, step: int) -> Tensor:
    if step < ORDINARY:
        return task(model, x)
    x = model.pre(x)
    for block in model.blocks[:3]:
        x = block(x)
    found = model.blocks[2].map
    return found.square().mean()


def penalty_alone(model: Net, x: Tensor, step: int) -> Tensor:
    loss = task(model, x)
    return loss if step < ORDINARY else model.blocks[1].penalty


def gradient_of_a_map(model: Net, x: Tensor, step: int) -> Tensor:
    loss = task(model, x)
    if step >= ORDINARY:
        (slope,) = torch.autograd.grad(model.blocks[1].map.sum(), model.blocks[0].map, retain_graph=True)
        loss = loss * (1 + slope.square().mean().detach())
    return loss


SIDE_DOORS: tuple[Loss, ...] = (feature_alone, attribute_of_early_exit, penalty_alone, gradient_of_a_map)


def judged(model: Net, x: Tensor, step: int, judge: nn.Module | None = None) -> Tensor:
    """A frozen network with a hook, between a trained one and the loss."""
    assert judge is not None
    found: list[Tensor] = []
    handle = judge[1][0].register_forward_hook(lambda _m, _i, output: found.append(output))
    judge(model(x))
    handle.remove()
    return found[0].square().mean()


def feature_added(model: Net, x: Tensor, step: int) -> Tensor:
    return task(model, x) + (model.feature - 1).square().mean()  # type: ignore[operator]


def penalties_added(model: Net, x: Tensor, step: int) -> Tensor:
    return task(model, x) + sum(block.penalty for block in model.blocks)


RIGHT: tuple[Loss, ...] = (feature_added, penalties_added)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


@cache
def plain(loss: Loss, world: int, make: type[torch.optim.Optimizer] = torch.optim.SGD) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters(), lr=0.05)
    for step in range(LAST):
        for rank in range(world):
            (loss(model, batch(step, rank), step) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach() for name, one in model.named_parameters()}


def sharded(**options: Any) -> Net:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def train(model: Net, loss: Loss, rank: int, make: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
    optimizer = fully_shard_optimizer(make(model.parameters(), lr=0.05))
    for step in range(LAST):
        with around_backward(model):
            loss(model, batch(step, rank), step).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model: nn.Module, expected: dict[str, Tensor], what: object, tolerance: float = 1e-5) -> None:
    for name, found in weights(model).items():
        worst = (found - expected[name]).abs().max() / expected[name].abs().max()
        assert worst < tolerance, f"{what}: {name} is off by {worst:.1e}"


# -- loud where weights are sharded -------------------------------------------------------------------------------------


def a_read_of_resharded_weights_names_unit_and_parameter(rank: int, world: int) -> None:
    for loss, options in pairwise(SIDE_DOORS, ({}, {"storage": "dynamic"}, {"policy": BFLOAT16}), together=1):
        with pytest.raises(EngineStateError, match=r"blocks\.[0-4]: a backward read its weight [ab]\.weight") as caught:
            train(sharded(**options, side_doors="raise"), loss, rank)
        assert 'side_doors="follow"' in str(caught.value)
        assert "reshard_after_forward=False" in str(caught.value)
        assert "Recompute" in str(caught.value)


def without_our_words_it_is_autograds_error_and_training_goes_on(rank: int, world: int) -> None:
    model, expected = sharded(side_doors="raise"), plain(task_alone, world)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(LAST):
        if step >= ORDINARY:
            with pytest.raises(RuntimeError, match="is at version") as caught:
                feature_alone(model, batch(step, rank), step).backward()
            version = int(re.findall(r"is at version (\d+)", str(caught.value))[0])
            assert version in {group.weights.versions.resharded for group in context(model).groups}
            assert version >= RESHARDED
            optimizer.zero_grad()
        task(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, expected, "after errors")


def equal_with_either_way_out(rank: int, world: int) -> None:
    for loss in SIDE_DOORS:
        expected, ordinary = plain(loss, world), plain(task_alone, world)
        far = max((expected[name] - ordinary[name]).abs().max() for name in expected)
        assert far > 1e-3, "the term makes no difference"
        model = sharded(reshard_after_forward=False, side_doors="raise")
        train(model, loss, rank)
        assert_equal(model, expected, (loss.__name__, "kept"))
        if loss is gradient_of_a_map:
            continue  # autograd.grad of what is recomputed: PyTorch refuses it outside of the checkpoint's own backward
        model = sharded(side_doors="raise")
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        train(model, loss, rank)
        assert_equal(model, expected, (loss.__name__, "recomputed"))


# -- right --------------------------------------------------------------------------------------------------------------


def side_doors_beside_the_result_are_right(rank: int, world: int) -> None:
    for loss, make, sharding in pairwise(RIGHT, (torch.optim.SGD, torch.optim.AdamW), STRATEGIES, together=1):
        model = sharded(sharding=sharding)
        train(model, loss, rank, make)
        assert_equal(model, plain(loss, world, make), (loss.__name__, sharding))


def side_doors_alone_are_right(rank: int, world: int) -> None:
    others = [{"storage": "dynamic"}, *({"sharding": sharding} for sharding in WHOLE), {"side_doors": "follow"}]
    for number, loss in enumerate(SIDE_DOORS):
        expected = plain(loss, world)
        for options in ({}, *(others if NIGHT else [others[number - 1]])):
            model = sharded(**options)
            train(model, loss, rank)
            assert_equal(model, expected, (loss.__name__, options))


def in_bfloat16_they_are_no_further_off_than_an_ordinary_loss(rank: int, world: int) -> None:
    for loss in thinned((*SIDE_DOORS, *RIGHT), 2):
        expected, model = plain(loss, world), sharded(policy=BFLOAT16)
        train(model, loss, rank)
        assert_equal(model, expected, loss.__name__, 2e-2)


def followed_weights_are_resharded_after_forward_and_backward(rank: int, world: int) -> None:
    """Neither their unit's memory stays, nor a slot in the plan."""
    model = sharded()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(LAST):
        loss = feature_alone(model, batch(step, rank), step)
        weights = [weights for unit in context(model).units[:-1] for weights in unit.weights]
        if step:  # the first forward finds the side doors, and keeps these weights until the step
            assert not any(one.present for one in weights[:-1])
        loss.backward()
        if step:
            assert not any(one.present for one in weights)
        optimizer.step()
        optimizer.zero_grad()
    (root,) = context(model).units[-1].weights
    assert context(model).lane.pool.allocated_bytes == root.client.slot.allocated_bytes


def memory_of_followed_weights_is_freed_with_every_reshard(rank: int, world: int) -> None:
    for options in ({}, {"policy": BFLOAT16}):
        model = sharded(**options)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        slots: list[weakref.ref[Any]] = []
        for unit in context(model).units[:-1]:

            def note(*_: Any, weights: Any = unit.weights[0], slots: Any = slots) -> None:
                slots.append(weakref.ref(weights.client.slot))

            unit.modules[0].a.register_forward_hook(note)
        for step in range(3):
            loss = task(model, batch(step, rank))
            # The last one's weights stay for the backward that comes next.
            assert not any(slot() is not None and slot().allocated_bytes for slot in slots[:-1]), (step, options)
            loss.backward()
            assert not any(slot() is not None and slot().allocated_bytes for slot in slots), (step, options)
            optimizer.step()
            optimizer.zero_grad()
            slots.clear()


def what_no_optimizer_steps_does_not_stay(rank: int, world: int) -> None:
    class Hides(Noted):
        def forward(self, x: Tensor) -> Hidden:
            return Hidden(super().forward(x.value if isinstance(x, Hidden) else x))

    for make, frozen, notes, forwards in (
        (Noted, True, True, 2),
        (Noted, False, True, 2),
        (Hides, True, False, 1),  # of several that one backward reaches, one may still wait for its own
    ):
        judge = nn.Sequential(*(make() for _ in range(3))).requires_grad_(not frozen)
        for block in judge:
            block.notes = notes
            fully_shard(block)
        fully_shard(judge)
        for _ in range(2):
            results = [judge(batch(index, rank).requires_grad_()) for index in range(forwards)]
            sum((one.value if isinstance(one, Hidden) else one).sum() for one in results).backward()
            assert not any(
                weights.present or weights.stays for unit in context(judge).units for weights in unit.weights
            )
            assert context(judge).lane.pool.allocated_bytes == context(judge).lane.pool.fixed_bytes, (make, frozen)


def a_graph_that_waits_keeps_what_no_optimizer_steps(rank: int, world: int) -> None:
    """Of two forwards, or of a unit and another one that it shares its weight with."""

    class Hides(Noted):
        def forward(self, x: Tensor) -> Hidden:
            return Hidden(super().forward(x.value if isinstance(x, Hidden) else x))

    def gradient(make: Callable[[], Noted], shards: bool) -> Tensor:
        torch.manual_seed(0)
        judge = nn.Sequential(*(make() for _ in range(3))).requires_grad_(False)
        for block in judge:
            block.notes = make is Noted
            if shards:
                fully_shard(block)
        if shards:
            fully_shard(judge)
        rows = batch(0, rank).requires_grad_()
        first, second = judge(rows), judge(2 * rows)
        for found in (first, judge[1].map if make is Noted else second):
            (found.value if isinstance(found, Hidden) else found).square().sum().backward()
        return rows.grad

    for make in (Noted, Hides):
        torch.testing.assert_close(gradient(make, True), gradient(make, False))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x.argmax(-1)).tanh())


class Penalizing(nn.Module):
    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__()
        self.inner, self.penalty = inner, None

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.inner(torch.arange(8)).square().mean()
        return self.inner(x)


class Taking(nn.Linear):
    """Of its weight it leaves a view without a graph, which no look at the unit takes for a side door."""

    takes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.takes:
            self.taken = self.weight.detach()
        return super().forward(x)


class Sharing(nn.Module):
    """Two units share a weight. One keeps what it computes; of the other, which keeps nothing, some ranks take its weights."""

    def __init__(self, last: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(Taking(WIDTH, WIDTH), last()) for _ in range(2))
        self.two[0].weight = self.one[0].weight
        self.two[0].register_forward_hook(self.keep)
        self.kept: Tensor | None = None

    def keep(self, _: nn.Module, args: Any, output: Tensor) -> None:
        self.kept = output

    def forward(self, x: Tensor) -> Tensor:
        loss = self.one(x).square().mean()
        loss = loss + self.two(x).square().mean()
        return loss + self.kept.tanh().square().mean()


class Gain(nn.Module):
    """Saves its parameter itself and no view of it, so that nothing refers to the memory after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def what_one_rank_alone_keeps_of_a_shared_weight_changes_nothing(rank: int, world: int) -> None:
    """Both units pack what they save once one of them has a side door: a call that does not expects its weights where they were."""
    for last in (Gain, partial(nn.Linear, WIDTH, WIDTH)):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Sharing(last))
        model = models[1]
        for unit in (model.one, model.two, model):
            fully_shard(unit)
        optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1)]
        optimizers.append(fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
        for step in range(LAST):
            model.one[0].takes = rank == 0 and step > 1
            losses = [model(batch(step, 0)) for model in models]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(losses[1], losses[0])


@dataclass
class Settings:
    """As libraries keep them for each layer."""

    history: int = 1024
    algorithm: str = "max"
    inner: tuple[float, ...] = (1.0, 2.0)


def a_look_at_tables_of_settings_takes_few_calls(rank: int, world: int) -> None:
    """It is part of every forward: Transformer Engine's layers have two such tables each."""
    layer = Noted()
    layer.meta = {f"setting {at}": at for at in range(10)} | {"recipe": Settings(), "roles": [object()] * 3}
    model = fully_shard(nn.Sequential(layer))
    for step in range(2):
        model(batch(step, rank)).square().mean().backward()
    look, calls = unit_of(model).side_doors.look_at_attributes, 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = look()
    finally:
        sys.setprofile(before)
    assert not found
    assert calls < 250, calls  # beginnings and ends, in Python and in C
    layer.meta["roles"].append(layer.meta)  # holds itself
    assert not look()
    layer.meta["roles"][1] = {"feature": layer.a(batch(0, rank))}
    assert look()
    layer.meta["roles"][1], side_doors = Settings(inner=(layer.a(batch(0, rank)),)), unit_of(model).side_doors
    side_doors.found = False
    assert look()


def what_was_taken_of_a_followed_weight_keeps_the_values_of_then(rank: int, world: int) -> None:
    """Also where something of the step before, in which the unit was not followed yet, still refers to the memory."""
    model = nn.Sequential(*(nn.Sequential(Noted(), Taking(WIDTH, WIDTH)) for _ in range(3)))
    for unit in model:
        unit[0].notes = unit[1].takes = True
        fully_shard(unit)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(LAST):
        before = [unit[1].weight.full_tensor().clone() for unit in model]
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for unit, expected in zip(model, before, strict=True):
            if step > 1:
                torch.testing.assert_close(unit[1].taken, expected, rtol=0, atol=0)
    for unit in model:  # and where nothing refers to it, it is left to nothing
        unit[1].takes, unit[1].taken = False, None
    clients = [weights.client for unit in model for weights in unit_of(unit).weights]
    found = []
    for step in range(LAST):
        slots = [client.slot for client in clients]
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(slots == [client.slot for client in clients])
    assert any(found), "a thread of the backend may refer to it for a moment, but not each time"


def a_unit_that_shares_a_weight_leaves_its_memory_to_the_owner(rank: int, world: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Tied()
        model.words = Penalizing(model.words)
        models.append(model)
    fully_shard(models[1].words)
    fully_shard(models[1].head)
    fully_shard(models[1])
    optimizer = fully_shard_optimizer(torch.optim.SGD(models[1].parameters(), lr=0.05))
    for model in models:
        model(batch(0, rank)).square().mean().backward()
        model.words.penalty.backward()
    (expected,) = models[0].parameters()
    dist.all_reduce(expected.grad)
    torch.testing.assert_close(models[1].head.weight.grad.full_tensor(), expected.grad / world)
    optimizer.step()


def a_result_is_right_beside_something_kept_of_the_same_unit(rank: int, world: int) -> None:
    """Its graph expects the weights elsewhere than where they rest: it was made before slots were planned."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(Noted() for _ in range(4))))
    for block in models[1]:
        fully_shard(block)
    fully_shard(models[1])
    optimizer = fully_shard_optimizer(torch.optim.SGD(models[1].parameters(), lr=0.0))
    for model in models:
        one, other = (model(batch(step, rank)).square().mean() for step in range(2))
        one.backward()
        model[1].notes = True
        model(batch(2, rank))
        other.backward()
    for parameter, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        dist.all_reduce(expected.grad)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad / world)
    optimizer.step()


def a_forward_that_raises_leaves_nothing_in_memory(rank: int, world: int) -> None:
    model = nn.Sequential(*(Noted() for _ in range(3)))
    for block in model:
        block.notes = True
        fully_shard(block)
    fully_shard(model)
    model[2].b.register_forward_pre_hook(_fail)
    with pytest.raises(ValueError, match="out of memory"):
        model(batch(0, rank))
    assert context(model).lane.pool.allocated_bytes == 0


def _fail(*_: Any) -> None:
    raise ValueError("out of memory")


def a_write_to_a_parameter_of_a_unit_whose_memory_stays_is_refused(rank: int, world: int) -> None:
    class Keeps(Noted):
        kept: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.__dict__["kept"] = self.a.weight
            return super().forward(x)

    def step(model: nn.Module) -> None:
        fully_shard_optimizer(torch.optim.SGD(model.parameters())).step()

    def assign(kept: Tensor) -> None:
        kept.data = torch.zeros(2 * WIDTH, WIDTH)

    thens = (lambda model: model(batch(1, rank)), unshard_model, step)
    for write, then in pairwise((torch.Tensor.zero_, assign), thens):
        model = nn.Sequential(*(Keeps() for _ in range(3)))
        for block in model:
            block.notes = True
            fully_shard(block)
        fully_shard(model)
        model(batch(0, rank))
        with torch.no_grad():
            write(model[0].kept)
        with pytest.raises(EngineStateError, match=r"parameter a\.weight was written while its unit was resharded"):
            then(model)
        assert not bool(model(batch(1, rank)).isnan().any())


def a_model_may_be_unsharded_while_something_kept_refers_to_its_weights(rank: int, world: int) -> None:
    torch.manual_seed(0)
    expected, model, rows = Net(), sharded(), batch(0, rank)
    pool = context(model).lane.pool
    loss = feature_alone(model, rows, LAST)
    assert pool.allocated_bytes > context(model).units[-1].full_bytes
    unshard_model(model)
    assert pool.allocated_bytes == 0
    torch.testing.assert_close(model(rows), expected(rows))
    with pytest.raises(RuntimeError, match=r"is at version|of a unit that no longer exists"):
        loss.backward()


def what_one_rank_alone_keeps_changes_nothing(rank: int, world: int) -> None:
    """Gathers and reductions come in the same order as on the ranks that keep nothing, and what it keeps may be in its loss."""

    def net() -> Net:
        torch.manual_seed(0)
        model = Net()
        for block in model.blocks:
            block.__class__ = Noted
            block.a._forward_hooks.clear()
        return model

    def begin(block: Noted, how: str) -> None:
        if how == "hook":
            block.a.register_forward_hook(lambda _module, _inputs, output: setattr(block, "map", output))
        else:
            block.notes = True

    def loss(model: Net, block: int, x: Tensor) -> Tensor:
        result, found = task(model, x), model.blocks[block].map
        return result if found is None else result + found.square().mean()

    rows = (
        (1, 0, "hook", False),
        (4, 3, "hook", True),
        (0, 0, "attribute", True),
        (1, 3, "attribute", True),
        (4, 3, "attribute", False),
    )
    for block, since, how, adds in thinned(rows, 2):
        models = [net() for _ in range(world)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in models]
        model = net()
        for one in model.blocks:
            fully_shard(one)
        fully_shard(model)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        for step in range(LAST):
            if step == since:
                begin(models[0].blocks[block], how)
                if rank == 0:
                    begin(model.blocks[block], how)
            for micro in range(2):
                rows = [batch(2 * step + micro, each) for each in range(world)]
                for each, one in enumerate(models):
                    (loss(one, block, rows[each]) if adds else task(one, rows[each])).div(world).backward()
                with around_backward(model):
                    (loss(model, block, rows[rank]) if adds else task(model, rows[rank])).backward()
                with torch.no_grad():
                    model(rows[rank])
            for parameters in zip(*(one.parameters() for one in models), strict=True):
                total = sum(one.grad for one in parameters)
                for one in parameters:
                    one.grad = total
            for one in (*optimizers, optimizer):
                one.step()
                one.zero_grad()
        assert_equal(model, dict(models[0].named_parameters()), (block, since, how, adds))


def a_unit_that_ran_before_it_was_nested_leaves_its_memory_behind(rank: int, world: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(Noted() for _ in range(3))))
    for model in models:
        for block in model:
            block.notes = True
    for block in models[1]:
        fully_shard(block)
    models[1][1](batch(0, rank))
    fully_shard(models[1])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    fully_shard_optimizer(optimizers[1])
    for step in range(3):
        for model in models:
            (model(batch(step, rank)).square().mean() + model[1].map.square().mean()).backward()
        for parameter in models[0].parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(models[1], dict(models[0].named_parameters()), "nested later")


def what_was_saved_before_a_write_is_not_read_after_it(rank: int, world: int) -> None:
    model = sharded(side_doors="follow")
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    first, second = task(model, batch(0, rank)), feature_alone(model, batch(1, rank), LAST)
    first.backward()
    optimizer.step()
    with pytest.raises(
        EngineStateError, match=r"blocks\.1: a backward reads a\.weight, which was written after the forward"
    ):
        second.backward()

    class Squared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).tanh()
            self.kept = y.square()
            with torch.no_grad():
                y.mul_(2)
            return y

    layers = nn.Sequential(Squared(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for layer in layers:
        fully_shard(layer, side_doors="follow")
    fully_shard(layers)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"):
        layers(batch(0, rank)).sum().backward()


def a_frozen_judge_with_hooks_is_right_or_loud(rank: int, world: int) -> None:
    """Right, unless the user asks for errors."""

    def judge() -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers).requires_grad_(False)

    expected = plain(partial(judged, judge=judge()), world)
    for options, loud in (
        ({}, False),
        ({"side_doors": "raise"}, True),
        ({"side_doors": "raise", "reshard_after_forward": False}, False),
        ({"sharding": "optim_grads"}, False),
    ):
        net = judge()
        for layer in net:
            fully_shard(layer, **options)
        fully_shard(net, **options)
        model = sharded(**options)
        if loud:
            with (
                pytest.raises(EngineStateError, match=r"^1: a backward read its weight 0\.weight"),
                around_backward(net),
            ):
                train(model, partial(judged, judge=net), rank)
        else:
            train(model, partial(judged, judge=net), rank)
            assert_equal(model, expected, options)


# -- layers of a step before its own forward -----------------------------------------------------------------------------


class Staged(Net):
    """`self(self.pre(x))` and `self(x * self.scale)`, as in a training_step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.5))

    def loss(self, x: Tensor) -> Tensor:
        if self.how == "layer":
            x = self.stem(x)
        elif self.how == "parameter":
            x = x * self.scale
        else:
            x = self.stem(x) + self.blocks[0](x)
        return self(x).square().mean()


def a_step_may_call_layers_before_its_own_forward(rank: int, world: int) -> None:
    for number, how in enumerate(("layer", "parameter", "block")):
        torch.manual_seed(0)
        reference = Staged(how)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
        for step in range(4):
            for other in range(world):
                (reference.loss(batch(step, other)) / world).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = {name: one.detach() for name, one in reference.named_parameters()}
        for sharding in in_turn(number, STRATEGIES):
            torch.manual_seed(0)
            model = Staged(how)
            for block in model.blocks:
                fully_shard(block, sharding=sharding)
            fully_shard(model, sharding=sharding)
            optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
            for step in range(4):
                with gather_root(model):
                    loss = model.loss(batch(step, rank))
                watch_backward(model, loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(model, expected, (how, sharding))


# -- backwards that reach no result --------------------------------------------------------------------------------------


class Penalized(nn.Module):
    """A block whose penalty saves no weight, so that it is differentiated whether weights are resharded or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.layer.weight.sum() + (self.layer.bias * 3).sum()
        return torch.tanh(self.layer(x))


def a_backward_that_reaches_no_result_is_reduced(rank: int, world: int) -> None:
    """Its gradients reach the step, the norm, a read and the next backward, and zero_grad clears them."""

    def program(model: nn.Sequential, optimizer: torch.optim.Optimizer, clip: Any, which: str, rows: Tensor) -> None:
        for step in range(3):
            result = model(rows * (step + 1)).square().mean()
            (model[1].penalty * (1 + step)).backward()
            if which == "clears":
                optimizer.zero_grad()
            elif which == "reads":
                assert model[1].layer.weight.grad is not None
                assert model[0].layer.weight.grad is None
            elif which == "clips":
                clip(model.parameters(), 0.1)
            if which != "steps":
                result.backward()
            optimizer.step()
            optimizer.zero_grad()

    rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))
    for number, which in enumerate(("steps", "clears", "reads", "clips", "adds")):
        torch.manual_seed(0)
        reference = nn.Sequential(*(Penalized() for _ in range(3)))
        clip = torch.nn.utils.clip_grad_norm_
        program(reference, torch.optim.SGD(reference.parameters(), lr=0.05), clip, which, rows)
        expected = {name: one.detach() for name, one in reference.named_parameters()}
        for sharding in in_turn(number, STRATEGIES):
            torch.manual_seed(0)
            model = nn.Sequential(*(Penalized() for _ in range(3)))
            for layer in model:
                fully_shard(layer, sharding=sharding)
            fully_shard(model, sharding=sharding)
            optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
            program(model, optimizer, clip_grad_norm_, which, rows)
            assert_equal(model, expected, (which, sharding))


# -- writes --------------------------------------------------------------------------------------------------------------


class Writing(nn.Module):
    """Writes to its weight between two uses of it, or keeps it."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.when = when
        self.kept: list[nn.Parameter] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:] = [self.layer.weight]
        if self.when == "before":
            with torch.no_grad():
                self.layer.weight.clamp_(-0.2, 0.2)
        x = self.layer(x.tanh())
        if self.when == "after":
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        return x


def a_write_before_use_is_kept_and_one_after_it_raises_as_in_pytorch(rank: int, world: int) -> None:
    for sharding in (SHARDED, *WHOLE):
        models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Writing("before"), Writing("before")) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        for model in models:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
        for layer in models[1]:
            fully_shard(layer, sharding=sharding)
        fully_shard(models[1], sharding=sharding)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
        fully_shard_optimizer(optimizers[1])
        rows = torch.ones(2, WIDTH)
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(models[1], {name: one.detach() for name, one in models[0].named_parameters()}, sharding)

        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Writing("after"))
        for layer in model:
            fully_shard(layer, sharding=sharding)
        fully_shard(model, sharding=sharding)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                model(rows).square().mean().backward()
            model.zero_grad()


class Center(nn.Module):
    """Its forward moves a parameter, and then something writes to another main weight of the same group."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.center = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.then: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh() + self.center.clone()
        with torch.no_grad():
            self.center.mul_(0.5)
        self.then()
        return y


def a_write_in_a_forward_is_kept_beside_one_to_another_main_weight(rank: int, world: int) -> None:
    for sharding in (SHARDED, *WHOLE):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Center(), nn.Linear(WIDTH, WIDTH))
        for layer in model:
            fully_shard(layer, sharding=sharding)
        fully_shard(model, sharding=sharding)
        held = model[1].layer.bias
        model[1].then = lambda held=held: held.clamp_(-0.01, 0.01)
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(2, WIDTH))
        assert model[1].center.full_tensor().tolist() == [0.125] * WIDTH, sharding
        assert model[1].layer.bias.full_tensor().abs().max() <= 0.0101, sharding


def what_a_kept_unit_says_after_an_evaluation(rank: int, world: int) -> None:
    model = sharded(reshard_after_forward=False, side_doors="raise")
    for between in (lambda: model(batch(0, rank)), model.state_dict):
        task(model, batch(0, rank)).backward()
        model(batch(0, rank))
        feature = model.feature
        with torch.no_grad():
            between()
        with (
            pytest.raises(EngineStateError, match="until the next backward, evaluation or state dict"),
            around_backward(model),
        ):
            feature.square().mean().backward()


def a_write_to_a_resharded_parameter_that_a_program_kept_is_refused(rank: int, world: int) -> None:
    model = nn.Sequential(*(Writing("") for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    rows = torch.ones(2, WIDTH)
    model(rows).square().mean().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        model[0].kept[0].mul_(2)
    for write in (torch.Tensor.zero_, lambda kept: setattr(kept, "data", torch.zeros(WIDTH, WIDTH))):
        with torch.no_grad():
            write(model[0].kept[0])
        with pytest.raises(EngineStateError, match=r"parameter layer\.weight was written while its unit was resharded"):
            model(rows)
        assert bool(model[0].kept[0].isnan().all())
        assert not bool(model(rows).isnan().any())


# -- what no counter sees ------------------------------------------------------------------------------------------------


class _Keeps(torch.autograd.Function):
    """Keeps its weight as an attribute: the parameter itself, or a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, as_view: bool) -> Tensor:
        ctx.weight = weight.t() if as_view else weight
        ctx.as_view = as_view
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ (ctx.weight.t() if ctx.as_view else ctx.weight), None, None


class Keeping(nn.Module):
    def __init__(self, as_view: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.as_view = as_view
        self.feature: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.feature = _Keeps.apply(x, self.weight, self.as_view)
        return self.feature.tanh()


def a_function_that_keeps_a_parameter_reads_nan_and_one_that_keeps_a_view_is_not_seen(rank: int, world: int) -> None:
    """Unless its unit is followed: then the view keeps the memory that it shows. docs/features.md says so."""

    def gradient(as_view: bool, side_doors: str | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Keeping(as_view) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if side_doors is not None:
            for layer in model:
                fully_shard(layer, side_doors=side_doors)
            fully_shard(model)
            optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        for _ in range(3):
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(2, WIDTH))
        model[1].feature.square().mean().backward()
        found = model[0].bias.grad
        return found.full_tensor() if side_doors is not None else found

    for as_view in (False, True):
        for side_doors in ("raise", "find"):
            found, expected = gradient(as_view, side_doors), gradient(as_view, None)
            assert bool(found.isnan().all()) == (not as_view)
            assert torch.allclose(found, expected) == (as_view and side_doors == "find")


def train_with_a_loss_of_its_own(rank: int, world: int) -> None:
    train(sharded(), feature_alone if rank == 0 else task_alone, rank)


def test_ranks_whose_losses_reach_other_units_get_an_error() -> None:
    with pytest.raises(RankError, match=r"Ranks that share weights have to run the same units in the same order"):
        run_distributed(train_with_a_loss_of_its_own, 2, apart=True)


CASES = (
    a_read_of_resharded_weights_names_unit_and_parameter,
    without_our_words_it_is_autograds_error_and_training_goes_on,
    equal_with_either_way_out,
    side_doors_beside_the_result_are_right,
    side_doors_alone_are_right,
    in_bfloat16_they_are_no_further_off_than_an_ordinary_loss,
    followed_weights_are_resharded_after_forward_and_backward,
    what_one_rank_alone_keeps_changes_nothing,
    what_one_rank_alone_keeps_of_a_shared_weight_changes_nothing,
    what_was_taken_of_a_followed_weight_keeps_the_values_of_then,
    a_look_at_tables_of_settings_takes_few_calls,
    memory_of_followed_weights_is_freed_with_every_reshard,
    what_no_optimizer_steps_does_not_stay,
    a_graph_that_waits_keeps_what_no_optimizer_steps,
    a_unit_that_shares_a_weight_leaves_its_memory_to_the_owner,
    a_result_is_right_beside_something_kept_of_the_same_unit,
    a_forward_that_raises_leaves_nothing_in_memory,
    a_write_to_a_parameter_of_a_unit_whose_memory_stays_is_refused,
    a_model_may_be_unsharded_while_something_kept_refers_to_its_weights,
    a_unit_that_ran_before_it_was_nested_leaves_its_memory_behind,
    a_frozen_judge_with_hooks_is_right_or_loud,
    a_step_may_call_layers_before_its_own_forward,
    a_backward_that_reaches_no_result_is_reduced,
    a_write_before_use_is_kept_and_one_after_it_raises_as_in_pytorch,
    a_write_to_a_resharded_parameter_that_a_program_kept_is_refused,
    a_write_in_a_forward_is_kept_beside_one_to_another_main_weight,
    what_a_kept_unit_says_after_an_evaluation,
    a_function_that_keeps_a_parameter_reads_nan_and_one_that_keeps_a_view_is_not_seen,
    what_was_saved_before_a_write_is_not_read_after_it,
)
WORLDS = {2: CASES, **at_night({3: CASES})}


@by_world(WORLDS)
def test_side_doors(world: int, case: Any) -> None:
    check(WORLDS, world, case)
