"""Optimizers on no list: any of them where tensors are whole, elementwise ones on rows, and words for the rest."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    fully_shard_optimizer,
    refresh_weights,
)
from tests.engine.worlds import at_night, by_world, check
from tests.helpers.chain import (
    DOUBLE,
    STRATEGIES,
    Chain,
    context,
    double_chain,
    inputs,
    loss_of,
    plain_chain,
    sharded_chain,
    weights,
)
from tests.helpers.nights import NIGHT, thinned
from tests.helpers.other_optimizers import ADOPT, SOAP, Adan, LowBitAdam, Prodigy, Shampoo
from tests.helpers.pairwise import in_turn, in_world, pairwise

STEPS = 4 if NIGHT else 3
SHARDED = ("optim", "optim_grads", "optim_grads_params")

Make = Callable[[Any], torch.optim.Optimizer]
LINE_SEARCH = partial(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
WHOLE: dict[str, Make] = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "LBFGS with line search": LINE_SEARCH,
    "Prodigy": Prodigy,
    "Shampoo": Shampoo,
    "SOAP": SOAP,
}
ELEMENTWISE: dict[str, Make] = {"Adan": Adan, "ADOPT": ADOPT}
BLOCKWISE: dict[str, Make] = {"LowBitAdam": LowBitAdam}
SEVERAL: dict[str, Make] = {**WHOLE, **ELEMENTWISE, **BLOCKWISE}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], world: int) -> list[float]:
    """Steps by closure; the loss is the mean over all ranks, as an optimizer that looks at it needs. Every value the closure gave."""
    seen: list[float] = []
    for step in range(STEPS):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([loss_of(model, inputs(step, rank, rows=8).double()) for rank in ranks]).mean()
            loss.backward()
            mean = loss.detach().clone()
            if len(ranks) < world:
                dist.all_reduce(mean)
                mean /= world
            seen.append(float(mean))
            return mean

        optimizer.step(evaluate)
    return seen


def trained_plainly(make: Make, world: int) -> tuple[Chain, list[float]]:
    model = double_chain(plain_chain)
    return model, train(model, make(model.parameters()), list(range(world)), world)


def assert_as_plain(case: str, make: Make, rank: int, world: int, elementwise: bool | None, **options: Any) -> None:
    plain, expected = trained_plainly(make, world)
    model = double_chain(sharded_chain, policy=DOUBLE, **options)
    optimizer = fully_shard_optimizer(make(model.parameters()), elementwise=elementwise)
    seen = train(model, optimizer, [rank], world)
    torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{case}: {text}")
    for name, value in weights(model).items():
        wanted = plain.get_parameter(name).detach()
        torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-12, msg=lambda text: f"{case} {name}: {text}")  # noqa: B023


def where_tensors_are_whole_every_optimizer_trains_like_one_process(rank, world):
    for name, make in SEVERAL.items():
        assert_as_plain(name, make, rank, world, None, sharding="no_shard")


def on_one_rank_every_optimizer_works_under_every_sharding(rank, world):
    for name, make in SEVERAL.items():
        assert_as_plain(name, make, rank, world, None)


def torchs_muon_trains_matrices_where_they_are_whole(rank, world):
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.05)

    assert_as_plain("Muon", make, rank, world, None, sharding="no_shard")


def elementwise_optimizers_train_rows_and_dtensors_alike(rank, world):
    rows = thinned(in_world(world, (2, 3), SHARDED, ELEMENTWISE.items(), (None, True)), 2)
    for sharding, (name, make), said in rows:
        assert_as_plain(f"{name} {sharding} {said}", make, rank, world, said, sharding=sharding)
    for sharding, (name, make) in in_world(world, (2, 3), SHARDED, BLOCKWISE.items()):
        assert_as_plain(f"{name} {sharding}", make, rank, world, True, sharding=sharding)


def a_closure_that_is_called_again_in_a_step_finds_the_weights_written_since(rank, world):
    """Also where forward reads copies of them in another dtype."""
    _, expected = trained_plainly(LINE_SEARCH, world)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=None, compute_dtype=torch.float32)
    model = double_chain(sharded_chain, policy=policy, sharding="no_shard")
    seen = train(model, fully_shard_optimizer(LINE_SEARCH(model.parameters())), [rank], world)
    assert len(set(seen[:4])) == 4, "the first step evaluates several times"
    torch.testing.assert_close(seen[:4], expected[:4], rtol=1e-4, atol=1e-6)


def what_needs_whole_tensors_is_refused_with_the_ways_out(rank, world):
    for sharding in SHARDED:
        model = sharded_chain(sharding=sharding)
        matrices = [one for one in model.parameters() if one.dim() == 2]
        for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon):
            for said in (None, True):
                with pytest.raises(ShardingError, match=rf'{kind.__name__} needs whole.*sharding="no_shard"'):
                    fully_shard_optimizer(kind(matrices), elementwise=said)
    model = sharded_chain(sharding="no_shard")
    with pytest.raises(ShardingError, match="SparseAdam needs sparse gradients"):
        fully_shard_optimizer(torch.optim.SparseAdam(list(model.parameters())))


def an_operation_that_mixes_rows_up_names_the_optimizer_and_the_ways_out(rank, world):
    operations = {"new_zeros": LowBitAdam, "view": Prodigy, "permute": SOAP}
    for operation, kind in operations.items():
        model = sharded_chain()
        optimizer = fully_shard_optimizer(kind(model.parameters()))
        loss_of(model, inputs(0)).backward()
        with pytest.raises(EngineStateError) as info:
            optimizer.step()
        said = str(info.value)
        assert said.startswith(f"{operation}: {kind.__name__} calls it in its step on parameter weight of unit"), said
        assert "elementwise=True" in said
        assert 'sharding="no_shard"' in said
    with torch.no_grad():
        loss_of(model, inputs(0))
        assert torch.equal(model.out.weight.view(-1), model.out.weight.full_tensor().view(-1)), "outside of a step"


class Exhausted(torch.optim.Optimizer):
    """Its step fails, and not because of the engine."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        self.param_groups[0]["params"][0].mul_(1.0)
        raise torch.OutOfMemoryError("out of memory")


def a_step_that_raised_is_over_when_its_frame_is_gone_or_the_next_forward_begins(rank, world):
    model = sharded_chain()
    optimizer = fully_shard_optimizer(Exhausted(model.parameters()))
    for closure in ({}, {"closure": lambda: None}):
        loss_of(model, inputs(0)).backward()
        with contextlib.suppress(torch.OutOfMemoryError):
            optimizer.step(**closure)
        with torch.no_grad():
            if not closure:
                with pytest.raises(EngineStateError, match="view: Exhausted calls it in its step on parameter"):
                    model.out.weight.view(-1)
                loss_of(model, inputs(0))
            assert torch.equal(model.out.weight.view(-1), model.out.weight.full_tensor().view(-1))


class Stubborn(torch.optim.Optimizer):
    """Goes on where an operation is refused."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.refused = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for parameter in self.param_groups[0]["params"]:
            try:
                parameter.view(-1)
            except EngineStateError:
                self.refused += 1


def what_a_step_must_not_do_is_refused_every_time_and_not_in_hooks_before_it(rank, world):
    model = sharded_chain()
    optimizer = fully_shard_optimizer(Stubborn(model.parameters()))
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.out.weight.detach().view(-1)))
    optimizer.step(lambda: None)
    assert torch.equal(seen[0], model.out.weight.full_tensor().view(-1))
    assert optimizer.refused == len(list(model.parameters()))


def an_operation_in_a_closure_is_not_said_to_be_the_optimizers(rank, world):
    for offload in (None, "optimizer"):
        model = sharded_chain(offload=offload)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def evaluate(model: Chain = model) -> None:
            weight = model.out.weight.data
            weight.map_(torch.zeros_like(weight), lambda one, other: other)

        with pytest.raises(EngineStateError, match=r"^map_: parameter out\.weight of unit Chain is .*full_tensor"):
            optimizer.step(evaluate)


class Remade(torch.optim.SGD):
    """Makes its state of the rows of its parameters, as torchao's optimizers do.

    Attributes:
        placements: With which; those of the parameter if there are none.
    """

    placements: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            rows = torch.ones_like(parameter.to_local())
            place = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            placements = self.placements or parameter.placements
            parameter.sub_(DTensor.from_local(rows, parameter.device_mesh, placements, **place))


def dtensors_of_a_users_own_meet_parameters_where_they_are_of_equal_parts(rank, world):
    model = sharded_chain()
    weight = model.layers[0].weight
    own = distribute_tensor(torch.ones(weight.shape), weight.device_mesh, [Shard(0)])
    with torch.no_grad():
        expected = weight.full_tensor() + 1
        weight.add_(own)
    assert torch.equal(weight.full_tensor(), expected)
    before = weights(model)
    optimizer = fully_shard_optimizer(Remade(model.parameters(), lr=0.1))
    loss_of(model, inputs(0)).backward()
    optimizer.step()
    for name, value in weights(model).items():
        assert torch.equal(value, before[name] - 1), name
    optimizer.placements = [
        Shard(0)
    ]  # as results of DTensor have them: sizes tell where rows lie that are not of equal parts
    optimizer.step()
    for name, value in weights(model).items():
        assert torch.equal(value, before[name] - 1 - 1), name


def dtensors_that_no_parameter_of_the_operation_explains_are_refused(rank, world):
    model = sharded_chain()
    weight = model.layers[0].weight
    rows = torch.ones(2 * rank + 1, *weight.shape[1:])
    place = {"shape": weight.shape, "stride": weight.stride(), "run_check": False}
    strange = DTensor.from_local(rows, weight.device_mesh, [Shard(0)], **place)
    with torch.no_grad(), pytest.raises(EngineStateError, match=r"has other rows than DTensor gives each rank"):
        weight.add_(strange)


class Compiled(torch.optim.SGD):
    """Its arithmetic is compiled, as that of torchao's optimizers is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        def rule(parameter: Tensor, grad: Tensor) -> None:
            parameter.copy_(parameter.float() - 0.1 * grad.float())

        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                torch.compile(rule, backend="eager", fullgraph=True, dynamic=True)(parameter.detach(), parameter.grad)


def a_compiled_step_works_on_rows_and_says_so_where_it_meets_dtensors(rank, world):
    model, plain = sharded_chain(layers=1), plain_chain(layers=1)
    optimizer = fully_shard_optimizer(Compiled(model.parameters(), lr=0.1))
    loss_of(model, inputs(0)).backward()
    with pytest.raises(
        Exception,
        match=r"torch.compile traces the sharded rows .* An optimizer whose step is compiled .*elementwise=True",
    ):
        optimizer.step()
    torch._dynamo.reset()
    for one, stepped in (
        (model, fully_shard_optimizer(optimizer, elementwise=True)),
        (plain, torch.optim.SGD(plain.parameters(), lr=0.1)),
    ):
        stepped.zero_grad()
        loss_of(one, inputs(0)).backward()
        stepped.step()
    for name, value in weights(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


class Restless(torch.optim.SGD):
    """Writes to weights outside of its steps, as schedule-free optimizers do in `train()` and `eval()`."""

    @torch.no_grad()
    def halve(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.5)


class Sharpness(torch.optim.Optimizer):
    """SAM (Foret and others, 2021) around plain gradient descent, by two calls or by one with a closure."""

    def __init__(self, params: Any, lr: float = 0.1, distance: float = 0.2) -> None:
        super().__init__(params, {"lr": lr, "distance": distance})
        self.rule = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.rule.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=group["distance"])
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["old"]
        self.rule.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.climb()
        with torch.enable_grad():
            closure()
        self.descend()


def assert_forward_sees(model: Chain, case: object) -> None:
    seen = loss_of(model, inputs(1))
    refresh_weights(model)
    assert torch.equal(seen, loss_of(model, inputs(1))), case


def forward_sees_what_an_optimizer_writes_to_rows_outside_of_its_step(rank, world):
    half = MixedPrecisionPolicy(main_params_dtype=torch.float32, compute_dtype=torch.bfloat16)
    for sharding in in_turn(0, STRATEGIES):
        for policy in (MixedPrecisionPolicy(), half):
            said = None if sharding == "no_shard" or world == 1 else True
            case = (sharding, policy.compute_dtype)
            model = sharded_chain(sharding=sharding, policy=policy)
            optimizer = fully_shard_optimizer(Restless(model.parameters(), lr=0.1), elementwise=said)
            for _ in range(2):
                loss_of(model, inputs(0, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.halve()
                assert_forward_sees(model, case)
                before = loss_of(model, inputs(1))
                optimizer.halve()
                assert not torch.equal(loss_of(model, inputs(1)), before), case
                with torch.no_grad():
                    before = loss_of(model, inputs(1))
                    optimizer.halve()
                    assert not torch.equal(loss_of(model, inputs(1)), before), case


def a_backward_refuses_weights_that_an_optimizer_wrote_outside_of_its_step(rank, world):
    """As plain PyTorch does, also where another forward came in between."""
    for sharding in in_turn(0, STRATEGIES):
        for passes in (0, 1):
            said = None if sharding == "no_shard" or world == 1 else True
            model = sharded_chain(sharding=sharding)
            optimizer = fully_shard_optimizer(Restless(model.parameters(), lr=0.1), elementwise=said)
            loss = loss_of(model, inputs(0, rank))
            optimizer.halve()
            for _ in range(passes):
                loss_of(model, inputs(1, rank))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            loss_of(model, inputs(0, rank)).backward()
            optimizer.step()


class TwoNetworks(nn.Module):
    """In one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, name: str) -> Tensor:
        return getattr(self, name)(x)


def two_networks(sharding: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = TwoNetworks()
    return model if sharding is None else fully_shard(model, sharding=sharding)


def an_optimizer_that_clips_its_rows_leaves_graphs_of_other_parameters_alone(rank, world):
    """A critic's weights after its step, the network that it judges having a graph: as in Wasserstein GANs."""
    for sharding in in_turn(1, STRATEGIES):
        gradients = []
        for kind in (None, sharding):
            model = two_networks(kind)
            optimizer: Any = Restless(model.critic.parameters(), lr=0.1)
            if kind is not None:
                fully_shard_optimizer(optimizer, elementwise=True)
                fully_shard_optimizer(Restless(model.generator.parameters(), lr=0.1), elementwise=True)
            made = model(torch.ones(2, 4), "generator")
            model(made.detach(), "critic").mean().backward()
            optimizer.step()
            optimizer.halve()
            model(made, "critic").mean().backward()
            gradients.append(whole(model.generator.weight.grad))
        assert torch.allclose(*gradients), sharding


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def what_a_graph_does_not_read_may_be_written(rank, world):
    """Biases, and what is assigned to `data`, which PyTorch does not count either."""
    for sharding in in_turn(2, STRATEGIES):
        for assigns in (False, True):
            model = sharded_chain(sharding=sharding)
            optimizer = fully_shard_optimizer(Restless(model.parameters(), lr=0.1), elementwise=True)
            loss = loss_of(model, inputs(0, rank))
            for rows in optimizer.param_groups[0]["params"]:
                if assigns:
                    halve_by_assignment(rows)
                elif rows.dim() == 1:
                    halve_in_place(rows)
            loss.backward()
            assert_forward_sees(model, (sharding, assigns))


def what_was_written_is_noted_before_a_step_and_beside_what_nobody_steps(rank, world):
    for sharding, what in product(in_turn(3, STRATEGIES), ("step", "no optimizer")):
        model = two_networks(sharding)
        optimizer = fully_shard_optimizer(Restless(model.critic.parameters(), lr=0.1), elementwise=True)
        if what == "step":
            fully_shard_optimizer(Restless(model.generator.parameters(), lr=0.1), elementwise=True)
        x = torch.ones(2, 4, requires_grad=True)
        loss = model(x, "critic").mean()
        optimizer.halve()
        if what == "step":
            optimizer.step()  # no parameter has a gradient
        else:
            model(x, "generator")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def what_is_assigned_to_rows_is_read_by_the_next_forward_and_by_no_graph(rank, world):
    """A graph goes on with what it saved, as in plain PyTorch."""
    for sharding in in_turn(3, STRATEGIES):
        gradients = []
        for kind in (None, sharding):
            model = two_networks(kind)
            optimizer: Any = Restless(model.parameters(), lr=0.1)
            if kind is not None:
                optimizer = fully_shard_optimizer(optimizer, elementwise=True)
            loss = model(model(torch.ones(2, 4), "generator"), "critic").mean()
            for rows in optimizer.param_groups[0]["params"]:
                rows.data = rows.data * 3 + 1
            loss.backward()
            gradients.append(whole(model.generator.weight.grad))
            gradients.append(model(torch.ones(2, 4), "generator").detach())
        assert torch.allclose(gradients[0], gradients[2]), sharding
        assert torch.allclose(gradients[1], gradients[3]), sharding


def a_step_that_raises_halfway_has_written_what_the_next_forward_reads(rank, world):
    half = MixedPrecisionPolicy(main_params_dtype=torch.float32, compute_dtype=torch.bfloat16)
    for sharding in in_turn(0, STRATEGIES):
        model = sharded_chain(sharding=sharding, policy=half)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": parameters[:6]}, {"params": parameters[6:]}], lr=0.05)
        fully_shard_optimizer(optimizer)
        loss_of(model, inputs(0, rank)).backward()
        optimizer.param_groups[1]["lr"] = "bad"
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[1]["lr"] = 0.05
        optimizer.zero_grad()
        assert_forward_sees(model, sharding)


def ranks_may_write_different_rows_before_a_backward_that_saved_none_of_them(rank, world):
    """A clamp that only some ranks need; it is seen in the next pass."""
    for sharding in in_turn(0, STRATEGIES):
        model = sharded_chain(sharding=sharding)
        optimizer = fully_shard_optimizer(Restless(model.parameters(), lr=0.1), elementwise=True)
        loss = loss_of(model, inputs(0, rank))
        if rank == 0:
            for rows in optimizer.param_groups[0]["params"]:
                if rows.dim() == 1:
                    halve_in_place(rows)
        loss.backward()
        optimizer.step()
        assert_forward_sees(model, sharding)


def halve_in_place(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def halve_by_assignment(parameter: Tensor) -> None:
    parameter.data = parameter.data * 0.5


def forward_sees_what_somebody_writes_to_rows_that_an_optimizer_of_torch_holds(rank, world):
    """Between two steps, over `optimizer.param_groups`; so do kept views of what is written in place, and whoever reads a parameter."""
    half = MixedPrecisionPolicy(main_params_dtype=torch.float32, compute_dtype=torch.bfloat16)
    for sharding, policy, write in pairwise(
        STRATEGIES, (MixedPrecisionPolicy(), half), (halve_in_place, halve_by_assignment), together=1
    ):
        case = (sharding, policy.compute_dtype, write.__name__)
        model = sharded_chain(sharding=sharding, policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for _ in range(2):
            loss_of(model, inputs(0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for is_stepped in (True, False):
                if not is_stepped:
                    loss_of(model, inputs(1))
                parameter = next(model.parameters())
                view, before = parameter.data[:2], parameter.full_tensor().clone()
                for group in optimizer.param_groups:
                    for rows in group["params"]:
                        write(rows)
                assert torch.equal(parameter.detach().full_tensor(), before * 0.5), case
                assert torch.equal(view.clone(), before[:2] * (0.5 if write is halve_in_place else 1)), case
                assert_forward_sees(model, case)


def forward_sees_what_is_written_to_local_rows_of_any_representation(rank, world):
    half = MixedPrecisionPolicy(main_params_dtype=torch.float32, compute_dtype=torch.bfloat16)
    ways: list[Callable[[Tensor], Any]] = [
        lambda parameter: parameter.to_local(),
        lambda parameter: parameter.data.to_local(),
        lambda parameter: parameter.detach().to_local(),
    ]
    for sharding, (number, way) in product(in_turn(2, STRATEGIES), enumerate(ways)):
        model = sharded_chain(sharding=sharding, policy=half)
        fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(model, inputs(0))
        for parameter in model.parameters():
            halve_in_place(way(parameter))
        assert_forward_sees(model, (sharding, number))


def an_optimizer_without_hooks_is_refused_with_the_ways_out(rank, world):
    """Lookahead as many repositories have it."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    model = sharded_chain()
    with pytest.raises(ShardingError, match=r"Lookahead has none of the hooks.*or pass the optimizer that it wraps"):
        fully_shard_optimizer(Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)))


def rows_that_no_optimizer_steps_are_not_written_in_silence(rank, world):
    """A rank without rows of a parameter writes none: a gather because of that would wait for it. All of them can say that they wrote."""
    half = MixedPrecisionPolicy(main_params_dtype=torch.float32, compute_dtype=torch.bfloat16)
    for sharding in STRATEGIES:
        model = plain_chain()
        model.scale = nn.Parameter(torch.full((1,), 2.0), requires_grad=False)  # one rank has it
        model.wrap = lambda layer, x, model=model: layer(x) * model.scale
        for layer in model.layers:
            fully_shard(layer, sharding=sharding, policy=half)
        fully_shard(model, sharding=sharding, policy=half)
        optimizer = fully_shard_optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))
        said, losses = [], []
        for step in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                losses.append(loss_of(model, inputs(0)))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            said += [str(one.message) for one in caught if "local rows of scale" in str(one.message)]
            rows = model.scale.to_local().detach()
            if rows.numel() and step < 2:
                rows.mul_(0.5)
        is_seen = not torch.equal(losses[0], losses[2])
        assert is_seen == (sharding == "optim_grads_params"), "where a gather casts the main weights"
        assert len(said) == (2 if rows.numel() and not is_seen else 0), (sharding, said)
        assert all("until refresh_weights(module) is called on all ranks" in message for message in said)
        refresh_weights(model)
        assert_forward_sees(model, sharding)


def sharpness_of_one_process(one_call: bool, world: int) -> dict[str, Tensor]:
    model = double_chain(plain_chain)
    sharpen(model, Sharpness(model.parameters()), list(range(world)), one_call)
    return weights_of_plain(model)


def weights_of_plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sharpen(model: nn.Module, optimizer: Any, ranks: list[int], one_call: bool) -> None:
    for step in range(3):

        def evaluate(step: int = step) -> None:
            torch.stack([loss_of(model, inputs(step, rank).double()) for rank in ranks]).mean().backward()

        evaluate()
        if one_call:
            optimizer.step(evaluate)
        else:
            optimizer.climb()
            evaluate()
            optimizer.descend()


def an_optimizer_that_climbs_first_trains_rows_like_one_process(rank, world):
    """It assigns the weights it has kept to `data`."""
    for one_call in (False, True):
        expected = sharpness_of_one_process(one_call, world)
        for sharding in in_turn(1 + one_call, STRATEGIES):
            model = double_chain(sharded_chain, policy=DOUBLE, sharding=sharding)
            optimizer = fully_shard_optimizer(Sharpness(model.parameters()), elementwise=True)
            sharpen(model, optimizer, [rank], one_call)
            for name, value in weights(model).items():
                case = f"{sharding} {one_call} {name}"
                assert torch.allclose(value, expected[name], rtol=1e-11, atol=1e-12), case


def a_closure_finds_weights_that_a_step_wrote_before_it(rank, world):
    """Also where the first module that it runs is not the one that a pass began with."""
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, compute_dtype=torch.bfloat16)
    model = sharded_chain(sharding="no_shard", policy=policy)
    seen: list[Tensor] = []

    class Climbs(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)
            closure()

    optimizer = fully_shard_optimizer(Climbs(model.parameters(), lr=0.1))

    def evaluate() -> None:
        seen.append(model.layers[1](inputs(0)).detach())

    loss_of(model, inputs(0, rank)).backward()
    evaluate()
    optimizer.step(evaluate)
    assert not torch.equal(*seen)


def what_no_optimizer_wrote_is_not_gathered_again(rank, world):
    """Steps and gathers write to the buffers of main weights as well, and are no writes of somebody."""
    for sharding in in_turn(2, STRATEGIES):
        counts = []
        for kind in (torch.optim.SGD, Restless):
            model = sharded_chain(sharding=sharding)
            optimizer = fully_shard_optimizer(kind(model.parameters(), lr=0.1), elementwise=True)
            for step in range(3):
                for microbatch in range(3):
                    loss_of(model, inputs(3 * step + microbatch, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            counts.append(context(model).lane.started)
        assert counts[0] == counts[1], (sharding, counts)


TWO = (
    forward_sees_what_an_optimizer_writes_to_rows_outside_of_its_step,
    a_backward_refuses_weights_that_an_optimizer_wrote_outside_of_its_step,
    an_optimizer_that_clips_its_rows_leaves_graphs_of_other_parameters_alone,
    what_a_graph_does_not_read_may_be_written,
    what_was_written_is_noted_before_a_step_and_beside_what_nobody_steps,
    what_is_assigned_to_rows_is_read_by_the_next_forward_and_by_no_graph,
    a_step_that_raises_halfway_has_written_what_the_next_forward_reads,
    ranks_may_write_different_rows_before_a_backward_that_saved_none_of_them,
    forward_sees_what_somebody_writes_to_rows_that_an_optimizer_of_torch_holds,
    forward_sees_what_is_written_to_local_rows_of_any_representation,
    an_optimizer_without_hooks_is_refused_with_the_ways_out,
    rows_that_no_optimizer_steps_are_not_written_in_silence,
    an_optimizer_that_climbs_first_trains_rows_like_one_process,
    a_closure_finds_weights_that_a_step_wrote_before_it,
    what_no_optimizer_wrote_is_not_gathered_again,
    where_tensors_are_whole_every_optimizer_trains_like_one_process,
    torchs_muon_trains_matrices_where_they_are_whole,
    a_closure_that_is_called_again_in_a_step_finds_the_weights_written_since,
    what_needs_whole_tensors_is_refused_with_the_ways_out,
    an_operation_that_mixes_rows_up_names_the_optimizer_and_the_ways_out,
    a_step_that_raised_is_over_when_its_frame_is_gone_or_the_next_forward_begins,
    what_a_step_must_not_do_is_refused_every_time_and_not_in_hooks_before_it,
    an_operation_in_a_closure_is_not_said_to_be_the_optimizers,
    dtensors_of_a_users_own_meet_parameters_where_they_are_of_equal_parts,
    dtensors_that_no_parameter_of_the_operation_explains_are_refused,
    a_compiled_step_works_on_rows_and_says_so_where_it_meets_dtensors,
)
THREE = (
    where_tensors_are_whole_every_optimizer_trains_like_one_process,
    elementwise_optimizers_train_rows_and_dtensors_alike,
    an_optimizer_that_climbs_first_trains_rows_like_one_process,
)
WORLDS = {
    1: (
        on_one_rank_every_optimizer_works_under_every_sharding,
        forward_sees_what_an_optimizer_writes_to_rows_outside_of_its_step,
        a_backward_refuses_weights_that_an_optimizer_wrote_outside_of_its_step,
        an_optimizer_that_clips_its_rows_leaves_graphs_of_other_parameters_alone,
        what_a_graph_does_not_read_may_be_written,
        what_was_written_is_noted_before_a_step_and_beside_what_nobody_steps,
        what_is_assigned_to_rows_is_read_by_the_next_forward_and_by_no_graph,
        a_step_that_raises_halfway_has_written_what_the_next_forward_reads,
        forward_sees_what_somebody_writes_to_rows_that_an_optimizer_of_torch_holds,
    ),
    2: TWO,
    3: (elementwise_optimizers_train_rows_and_dtensors_alike,),
    **at_night({3: THREE}),
}


@by_world(WORLDS)
def test_other_optimizers(world, case):
    check(WORLDS, world, case)
