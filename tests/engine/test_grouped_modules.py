"""Several modules as one unit: fewer collectives, the same numbers, whatever the program does with the modules."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mfsdp.engine import (
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    fully_shard_units,
    gather_root,
    no_sync,
    sharded_parameters,
    units,
    watch_backward,
)
from tests.engine.internals import unit_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import (
    DIM,
    STRATEGIES,
    Chain,
    adamw,
    assert_same_weights,
    context,
    inputs,
    loss_of,
    plain_chain,
    sharded_chain,
    train,
    weights,
)
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn, in_world, pairwise

BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


def grouped_chain(length: int = 2, layers: int = 4, **options) -> Chain:
    """The chain of the other tests, `length` layers a unit."""
    model = plain_chain(layers=layers)
    for start in range(0, layers, length):
        fully_shard(list(model.layers[start : start + length]), **options)
    return fully_shard(model, **options)


def shown_full(model: Chain) -> list[bool]:
    return [unit_of(layer).uses_weights for layer in model.layers]


def the_numbers_are_those_of_single_units(rank, world):
    for sharding, policy, length in pairwise(STRATEGIES, (None, BF16), (2, 3, 4), together=1):
        case = f"{sharding} {policy} {length}"
        model, other = (
            grouped_chain(length, sharding=sharding, policy=policy),
            sharded_chain(sharding=sharding, policy=policy),
        )
        optimizers = adamw(model), adamw(other)
        for step in range(3):
            losses = []
            for one, optimizer in zip((model, other), optimizers, strict=True):
                with no_sync(one):
                    loss_of(one, inputs(10 * step, rank)).backward()
                losses += train(one, optimizer, [step], rank)
            assert torch.equal(*losses), case
        assert_same_weights(model, other, case)


def collectives_are_issued_once_for_each_group(rank, world):
    model = grouped_chain(2, layers=6)
    optimizer = adamw(model)
    train(model, optimizer, range(3), rank)
    before = context(model).lane.started, context(model).reductions.started
    train(model, optimizer, [3], rank)
    # Three groups and the root forward; the root and the last group keep their weights for backward.
    assert context(model).lane.started - before[0] == 4 + 2
    assert context(model).reductions.started - before[1] == 4


def recomputation_of_single_modules_is_bit_equal(rank, world):
    for sharding, policy in thinned(product(in_turn(0, STRATEGIES), (None, BF16)), 3):
        other = sharded_chain(sharding=sharding, policy=policy)
        expected = train(other, adamw(other), range(3), rank)
        for reentrant in (False, True):
            model = grouped_chain(sharding=sharding, policy=policy)
            model.wrap = lambda layer, x, reentrant=reentrant: checkpoint(layer, x, use_reentrant=reentrant)
            optimizer, losses = adamw(model), []
            for step in range(3):
                loss = loss_of(model, inputs(step, rank).requires_grad_())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                assert not any(shown_full(model)), "given back after backward"
            assert torch.equal(torch.stack(losses), torch.stack(expected)), f"{sharding} {reentrant=}"
            assert_same_weights(model, other, f"{sharding} {reentrant=}")


class Wandering(Chain):
    """Runs its layers as `paths` says, one path for each forward; the loss may hang on any of the results."""

    paths = ((0, 1, 2, 3), (0, 2), (1, 0, 3, 2), (0,), (1, 1, 2, 3), (0, 1, 0, 1), (2, 3, 0, 1))
    only_result: int | None = None
    frozen_first = False

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for index in self.paths[self.step % len(self.paths)]:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not (self.frozen_first and index == 0)):
                y = self.layers[index](x)
            x = x + torch.tanh(y)
            results.append(x)
        self.step += 1
        return self.out(x if self.only_result is None else results[self.only_result])


def any_path_through_the_modules_trains_like_plain_pytorch(rank, world):
    for sharding, settings in in_world(
        world,
        (1, 2),
        STRATEGIES,
        ({}, {"only_result": 0}, {"frozen_first": True}, {"paths": ((0, 1, 2, 3),), "only_result": 2}),
        together=1,
    ):
        torch.manual_seed(0)
        plain, model = Wandering(), Wandering()
        model.load_state_dict(plain.state_dict())
        for name, value in settings.items():
            setattr(plain, name, value)
            setattr(model, name, value)
        # In memory that is gone when it is given back; a fixed slot would still hold the right weights.
        options = {"sharding": sharding, "storage": "dynamic"}
        fully_shard_units(model, [[model.layers[0], model.layers[1]], [model.layers[2], model.layers[3]]], **options)
        optimizer, expected = adamw(model), torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(2 * len(Wandering.paths)):
            with torch.no_grad():
                torch.testing.assert_close(model(inputs(step)), plain(inputs(step)), rtol=1e-4, atol=1e-5)
                assert not any(shown_full(model))
            for one, stepper in ((model, optimizer), (plain, expected)):
                loss_of(one, inputs(step).requires_grad_()).backward()
                stepper.step()
                stepper.zero_grad()
        found = weights(model)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(
                found[name],
                parameter.detach(),
                rtol=1e-3,
                atol=1e-4,
                msg=lambda m, c=(sharding, settings, name): f"{c}: {m}",
            )


class Recomputed(nn.Module):
    """A layer that is recomputed in a backward of its own, of which autograd tells nothing before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)


def what_is_recomputed_is_waited_for_wherever_an_evaluation_was(rank, world):
    """A module that is recomputed in a backward of its own ran without gradients, as in an evaluation."""
    for through_root, evaluates, recomputed in product((True, False), ("model", "method", "layer"), (0, 1)):
        models = [plain_chain(), grouped_chain()]
        results = []
        for model in models:
            model.wrap = lambda layer, x, first=model.layers[recomputed]: (
                checkpoint(layer, x, use_reentrant=True) if layer is first else layer(x)
            )
            sharded = model is models[1]
            optimizer = adamw(model) if sharded else torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(2):
                with gather_root(model) if sharded else nullcontext():
                    for micro in range(3):
                        x = inputs(3 * step + micro).requires_grad_()
                        result = model(x) if through_root else model.forward(x)
                        result.square().mean().backward()
                        with torch.no_grad():
                            evaluate = {"model": model, "method": model.forward, "layer": model.layers[recomputed]}
                            results.append(evaluate[evaluates](x))
                optimizer.step()
                optimizer.zero_grad()
        half = len(results) // 2
        for expected, found in zip(results[:half], results[half:], strict=True):
            torch.testing.assert_close(found, expected, msg=f"{through_root} {evaluates} {recomputed}")


def two_calls_go_back_twice(rank, world):
    """The first backward keeps the graph, so in the second all calls of the unit end again."""
    for length, first in product((1, 2), ("all", "one call", "the other")):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(DIM, DIM), Recomputed(), Recomputed())
        model = copy.deepcopy(plain)
        for unit in [model[1:]] if length == 2 else model[1:]:
            fully_shard(list(unit) if length == 2 else unit)
        fully_shard(model)
        for one in (plain, model):
            for step in range(2):
                losses = [one(inputs(step, number)).square().sum() for number in range(2)]
                kept = losses[("one call", "the other").index(first)] if first != "all" else sum(losses)
                kept.backward(retain_graph=True)
                sum(losses).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=f"{length}, {first}")


def a_failure_inside_or_between_modules_does_no_harm(rank, world):
    expected_model = sharded_chain()
    expected = train(expected_model, adamw(expected_model), range(3), rank)
    for place in ("inside", "between"):
        model = grouped_chain()
        optimizer = adamw(model)

        def failing(layer: nn.Module, x: Tensor, model=model, place=place) -> Tensor:
            if layer is model.layers[1] and place == "between":
                raise ValueError("made up")
            return layer(x if layer is not model.layers[1] else x[:, :3])

        model.wrap = failing
        with pytest.raises((ValueError, RuntimeError), match=r"made up|shapes"):
            loss_of(model, inputs(9, rank))
        assert not any(shown_full(model))
        model.wrap = lambda layer, x: layer(x)
        assert torch.equal(torch.stack(train(model, optimizer, range(3), rank)), torch.stack(expected))


class Query(nn.Module):
    """Adds a parameter of the model around it, and returns it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x + query)), query


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList(Query() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, query = layer(x, self.query)
        return x + query


class Lookup(nn.Module):
    """A linear layer, then an embedding that knows nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.tanh() * 1.0)
        return x + self.table((x > 0).sum(-1).clamp(max=4))


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxing(nn.Linear):
    def forward(self, x: Tensor) -> Box:
        return Box(super().forward(x))


class Boxes(nn.Module):
    """The first result hides its tensor, and the second module sometimes does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.steps = Boxing(8, 8), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.first(x).value
        return self.second(x) if self.steps % 2 else x


def unusual_modules_train_like_plain_pytorch(rank, world):
    """A unit must know all results of a run and all modules of it, not the last ones."""
    for build, members in ((Queries, "layers"), (Lookup, ""), (Boxes, "")):
        torch.manual_seed(0)
        plain, model = build(), build()
        model.load_state_dict(plain.state_dict())
        fully_shard_units(model, [list(model.get_submodule(members).children())], storage="dynamic")
        optimizer, expected = adamw(model), torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(4):
            for one, stepper in ((model, optimizer), (plain, expected)):
                loss_of(one, inputs(step).requires_grad_()).backward()
                stepper.step()
                stepper.zero_grad()
            for parameter in plain.parameters():
                parameter.grad = None
        found = weights(model)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(
                found[name], parameter.detach(), rtol=1e-4, atol=1e-5, msg=f"{build.__name__} {name}"
            )
        leaves = [entry.full for unit in context(model).units for group in unit.groups for entry in group.entries]
        assert not any(leaf._backward_hooks for leaf in leaves), "hooks pile up"


def modules_called_by_themselves_leave_nothing_gathered(rank, world):
    model, alone = grouped_chain(), sharded_chain()
    with torch.no_grad():
        x = model.layers[0](inputs(0))
        assert not any(shown_full(model))
        model.load_state_dict(model.state_dict())
        assert torch.equal(model.layers[1](x), alone.layers[1](alone.layers[0](inputs(0))))
    x = model.layers[1](model.layers[0](inputs(0)))
    x.square().sum().backward()
    alone.layers[1](alone.layers[0](inputs(0))).square().sum().backward()
    for name, parameter in model.layers[:2].named_parameters():
        other = alone.layers.get_parameter(name)
        assert torch.equal(parameter.grad.full_tensor(), other.grad.full_tensor()), name


def a_step_sees_sharded_weights_after_every_module_of_a_run(rank, world):
    """A run may go on, and until then the step looks at weights and clears gradients."""
    model, plain = grouped_chain(), plain_chain()
    for step in range(3):
        with gather_root(model):
            x = model.layers[1](model.layers[0](inputs(step)))
            x = model.layers[0](x)
            assert not any(unit_of(layer).shown.now for layer in model.layers)
            model.zero_grad()
            loss = x.square().sum()
        watch_backward(model, loss)
        loss.backward()
        plain.zero_grad()
        plain.layers[0](plain.layers[1](plain.layers[0](inputs(step)))).square().sum().backward()
        for name, parameter in model.layers[:2].named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), plain.layers.get_parameter(name).grad)


def float32_patterns_name_what_they_name_in_single_units(rank, world):
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, fp32_modules=("own",))
    blocks = [Holder(), Holder()]
    fully_shard(blocks, policy=policy)
    dtypes = {view.name: view.compute_dtype for view in sharded_parameters(nn.ModuleList(blocks))}
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {
        f"{index}.own.{kind}" for index in range(2) for kind in ("weight", "bias")
    }


def units_that_are_not_inside_are_refused(rank, world):
    model = plain_chain()
    for wrong in (
        [[model.layers[0], nn.Linear(2, 2)]],
        [[model, model.layers[0]]],
        [model.layers[:2], [model.layers[1]]],
    ):
        with pytest.raises(ShardingError, match=r"expected different modules inside Chain, got"):
            fully_shard_units(model, wrong)


class Holder(nn.Module):
    """One of grouped modules, with a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.own = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(torch.tanh(self.inner(x)))


def units_inside_grouped_modules_are_their_own(rank, world):
    models = []
    for together in (False, True):
        torch.manual_seed(0)
        model = plain_chain(layers=2)
        model.layers = nn.ModuleList(Holder() for _ in range(2))
        for layer in model.layers:
            fully_shard(layer.inner)
        for unit in [list(model.layers)] if together else model.layers:
            fully_shard(unit)
        fully_shard(model)
        train(model, adamw(model), range(3), rank)
        models.append(model)
    assert_same_weights(*models)
    assert [view.name for view in units(models[1])][1:] == ["layers.0..layers.1", "layers.0.inner", "layers.1.inner"]


def grouped_modules_keep_names_and_show_as_one_unit(rank, world):
    model = grouped_chain(2)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain_chain().named_parameters()]
    assert [(view.name, view.module_class) for view in units(model)][1:] == [
        ("layers.0..layers.1", "2 x Linear"),
        ("layers.2..layers.3", "2 x Linear"),
    ]
    assert {view.unit for view in sharded_parameters(model.layers)} == {"layers.0..layers.1", "layers.2..layers.3"}


def grouped_modules_built_on_meta_equal_real_ones(rank, world):
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Chain()
    fully_shard_units(model, [list(model.layers[:3]), model.layers[3]])
    assert_same_weights(model, sharded_chain(3))


def what_cannot_be_grouped_is_refused(rank, world):
    a, b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))
    for wrong in ([], [a, a], [b, b[0]]):
        with pytest.raises(ShardingError, match="modules that run one after the other"):
            fully_shard(wrong)
    with pytest.raises(ShardingError, match=r"expected a module or a list of modules, got Tensor"):
        fully_shard([a, torch.ones(1)])
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, fp32_modules=(nn.LayerNorm,))
    with pytest.raises(ShardingError, match=r"keeps some of \['LayerNorm', 'Linear'\] in float32 and not all"):
        fully_shard([nn.LayerNorm(8), a], policy=policy)
    fully_shard([a, b])
    with pytest.raises(ShardingError, match="sharded already"):
        fully_shard([nn.Linear(8, 8), a])


CASES = (
    the_numbers_are_those_of_single_units,
    recomputation_of_single_modules_is_bit_equal,
    any_path_through_the_modules_trains_like_plain_pytorch,
    what_is_recomputed_is_waited_for_wherever_an_evaluation_was,
    two_calls_go_back_twice,
    a_failure_inside_or_between_modules_does_no_harm,
    units_inside_grouped_modules_are_their_own,
    grouped_modules_keep_names_and_show_as_one_unit,
    grouped_modules_built_on_meta_equal_real_ones,
    unusual_modules_train_like_plain_pytorch,
    a_step_sees_sharded_weights_after_every_module_of_a_run,
    modules_called_by_themselves_leave_nothing_gathered,
    float32_patterns_name_what_they_name_in_single_units,
    units_that_are_not_inside_are_refused,
)
WORLDS = {
    1: (any_path_through_the_modules_trains_like_plain_pytorch,),
    2: (*CASES, collectives_are_issued_once_for_each_group, what_cannot_be_grouped_is_refused),
}


@by_world(WORLDS)
def test_grouped_modules(world, case):
    check(WORLDS, world, case)
