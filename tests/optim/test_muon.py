"""Muon on sharded matrices: what torch.optim.Muon does in one process, to the bit, whatever the placement."""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_mfsdp import MixedPrecisionPolicy, ShardingError, fully_shard, fully_shard_optimizer, sharded_parameters
from lightning_mfsdp.moe import GroupedExperts, expert_parallel
from lightning_mfsdp.optim import Muon
from tests.checkpoint.internals import (
    ParameterIndex,
    Ranks,
    full_model_state,
    full_optimizer_state,
    lightning_io,
    locate,
)
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, sharded_chain, weights
from tests.helpers.models import batch, build, loss_of
from tests.helpers.nights import NIGHT
from tests.helpers.pairwise import in_turn
from tests.optim.linear import linear_loss

# Rows that no number of ranks divides, fewer rows than ranks, a single number, wide, tall and square ones.
SHAPES = ((7, 3), (2, 9), (1, 1), (16, 5), (5, 16), (6, 6))
EXACT = MixedPrecisionPolicy(grad_reduce="sum")
MANY_BATCHES = 150


class Matrices(nn.Module):
    """Matrices and a bias."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES)
        self.bias = nn.Parameter(torch.randn(5, generator=generator))

    def forward(self, step: int) -> Tensor:
        return linear_loss(self.parameters(), step)


class Model(nn.Module):
    """Two units and a root with matrices of its own; one matrix is frozen and one is used in even steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.sometimes = Matrices(0), Matrices(1), nn.Linear(4, 6, bias=False)
        self.own = nn.Parameter(torch.linspace(-1, 1, 40).reshape(10, 4))
        self.first.weights[3].requires_grad_(False)
        with torch.no_grad():
            self.sometimes.weight.copy_(torch.linspace(-2, 1, 24).reshape(6, 4))

    def forward(self, step: int) -> Tensor:
        loss = self.first(step) + self.second(step + 50) + (self.own * (step + 2)).sum()
        return loss + self.sometimes(torch.ones(4)).sum() if step % 2 == 0 else loss


def made(mesh: Any = None, **options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    options.setdefault("policy", EXACT)
    for unit in (model.first, model.second):
        fully_shard(unit, mesh, **options)
    return fully_shard(model, mesh, **options)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two of matrices with options of their own, and what AdamW gets."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [
        {"params": matrices[:5], "lr": 0.3, "momentum": 0.9},
        {"params": matrices[5:], "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {"params": others, "use_muon": False, "lr": 0.01, "weight_decay": 0.2, "betas": (0.8, 0.9)},
    ]


def reference(model: nn.Module, world: int, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and momentum of one process with torch's own optimizers."""
    *matrices, others = groups(model)
    others.pop("use_muon")
    optimizers = [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW([others])]
    for step in range(steps):
        (model(step) * world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    names = {parameter: name for name, parameter in model.named_parameters()}
    momenta = {names[parameter]: state["momentum_buffer"] for parameter, state in optimizers[0].state.items()}
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, momenta


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model: nn.Module, optimizer: torch.optim.Optimizer, expected: Any, case: object) -> None:
    found = weights(model)
    for name, value in expected[0].items():
        assert torch.equal(found[name], value), f"{case}: {name} differs by {(found[name] - value).abs().max()}"
    for view in sharded_parameters(model):
        momentum = optimizer.state.get(view.local, {}).get("momentum_buffer")
        if view.name in expected[1]:
            momentum = momentum.to_local() if isinstance(momentum, DTensor) else momentum
            assert torch.equal(momentum, expected[1][view.name][view.rows.start : view.rows.stop]), (
                f"{case} {view.name}"
            )
        else:
            assert momentum is None, f"{case} {view.name}: state of what had no gradient"


def placements(world: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from ((sharding, {"sharding": sharding}) for sharding in in_turn(world, STRATEGIES))
    if world == 4:
        layouts = ((("outer", "shard"), (2, 2)), (("shard", "outer"), (2, 2)), (("outer", "shard"), (4, 1)))
        for number, (names, shape) in enumerate(layouts):
            mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
            combinations = tuple(product(("optim", "optim_grads_params"), ("no_shard", "optim")))
            for sharding, outer in combinations if NIGHT else combinations[-1 - number :][:1]:
                yield (
                    f"{names} {shape} {sharding} {outer}",
                    {"mesh": mesh, "sharding": sharding, "outer_sharding": outer},
                )


def trains_like_torch_to_the_bit(rank, world):
    expected = reference(Model(), world, 3)
    for case, options in placements(world):
        model = made(**options)
        optimizer = fully_shard_optimizer(Muon(groups(model), lr=0.05, exchange_bytes=MANY_BATCHES))
        train(model, optimizer, range(3))
        assert_equal(model, optimizer, expected, case)


@contextmanager
def counted() -> Iterator[list[tuple[int, int]]]:
    """Bytes that this rank sends and receives, of every all-to-all."""
    calls: list[tuple[int, int]] = []
    function = dist.all_to_all_single

    def counting(received: Tensor, sent: Tensor, *args: Any, **options: Any) -> Any:
        assert received.dtype is sent.dtype is torch.bfloat16
        calls.append((sent.nbytes, received.nbytes))
        return function(received, sent, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        yield calls


def two_exchanges_a_batch_and_bounded_bytes(rank, world):
    """Every byte goes out and comes back once; what a rank keeps for itself is part of the call."""
    for limit, sharding in product((10**9, MANY_BATCHES), in_turn(0, STRATEGIES)):
        model = made(sharding=sharding)
        optimizer = fully_shard_optimizer(Muon(groups(model)[:2], exchange_bytes=limit))
        model(0).backward()
        with counted() as calls:
            optimizer.step()
        if sharding == "no_shard":
            assert calls == [], "every rank has all rows"
            continue
        assert len(calls) == 4 if limit == 10**9 else len(calls) > 8
        own = sum(
            2 * one.to_local().numel()
            for group in optimizer.param_groups
            for one in group["params"]
            if one.grad is not None
        )
        assert sum(sent for sent, _ in calls) == sum(received for _, received in calls)
        everyones = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
        dist.all_gather(everyones, torch.tensor(sum(sent for sent, _ in calls)))
        trained = [one for group in groups(Model())[:2] for one in group["params"] if one.requires_grad]
        assert sum(map(int, everyones)) == 2 * sum(2 * one.numel() for one in trained)
        assert sum(sent for sent, _ in calls) >= own
        largest = max(2 * one.numel() for one in trained)
        assert limit == 10**9 or max(max(call) for call in calls) <= max(limit, largest)


def clearing_and_missing_gradients_are_agreed_on(rank, world):
    """A rank without rows has no gradient to look at, and must not wait for the others or leave them waiting."""
    for sharding in in_turn(1, STRATEGIES):
        model = made(sharding=sharding)
        optimizer = fully_shard_optimizer(Muon(groups(model), lr=0.05))
        before = weights(model)
        optimizer.step()
        assert not optimizer.state
        train(model, optimizer, range(1))
        after = weights(model)
        assert not torch.equal(before["own"], after["own"])
        optimizer.step()  # gradients were cleared
        model.second.requires_grad_(False)
        model(2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        found = weights(model)
        for name, value in found.items():
            assert torch.equal(value, after[name]) == (name.startswith("second") or name == "first.weights.3"), name


def a_closure_and_loss_scaling_change_nothing(rank, world):
    """Also a lower precision of accumulated gradients, and a rate in a tensor, which a captured schedule would write to."""
    expected = reference(Model(), world, 3)
    model = made()
    optimizer = fully_shard_optimizer(Muon(groups(model), lr=0.05))
    for step in range(3):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(step)
            loss.backward()
            return loss.detach()

        assert optimizer.step(evaluate) is not None
    assert_equal(model, optimizer, expected, "closure")
    model = made(policy=MixedPrecisionPolicy(grad_reduce="sum", main_grads_dtype=torch.bfloat16))
    tensor_rate = [{**group, "lr": torch.tensor(group.get("lr", 0.05), dtype=torch.float64)} for group in groups(model)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = fully_shard_optimizer(Muon(tensor_rate), grad_scaler=scaler)
    for step in range(3):
        scaler.scale(model(step)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_equal(model, optimizer, expected, "scaled")


def a_decoder_trains_like_one_process(rank, world):
    def split(model: nn.Module) -> list[list[Tensor]]:
        hidden = [one for name, one in model.named_parameters() if one.dim() == 2 and name.startswith("blocks")]
        return [hidden, [one for one in model.parameters() if not any(one is other for other in hidden)]]

    plain, model = build(), build()
    for unit in (*model.blocks, model):
        fully_shard(unit)
    theirs = split(plain)
    optimizers = [torch.optim.Muon(theirs[0], lr=0.02), torch.optim.AdamW(theirs[1], lr=0.01, weight_decay=0.1)]
    hidden, rest = split(model)
    optimizer = Muon([{"params": hidden}, {"params": rest, "use_muon": False, "lr": 0.01}], lr=0.02)
    fully_shard_optimizer(optimizer)
    for step in range(3):
        ids, targets = batch(step, 2 * world)
        loss_of(plain, ids, targets).backward()
        loss_of(model, ids[2 * rank : 2 * rank + 2], targets[2 * rank : 2 * rank + 2]).backward()
        for one in (*optimizers, optimizer):
            one.step()
            one.zero_grad()
    found = weights(model)
    for name, value in plain.named_parameters():
        # Newton-Schulz in bfloat16 turns the last bits of a gradient into the last bits of bfloat16.
        tolerance = {"rtol": 0.0, "atol": 0.0} if world == 1 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(found[name], value.detach(), **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def an_optimizer_from_before_sharding_moves_over(rank, world):
    expected = reference(Model(), 1, 2)
    model = Model()
    optimizer = Muon(groups(model), lr=0.05)
    train(model, optimizer, range(1))
    for unit in (model.first, model.second):
        fully_shard(unit, policy=EXACT)
    fully_shard(model, policy=EXACT)
    fully_shard_optimizer(optimizer)
    if world == 1:
        train(model, optimizer, range(1, 2))
        assert_equal(model, optimizer, expected, "moved")


def copies_and_states_of_torchs_own_go_on(rank, world):
    """One process: `torch.optim.Muon` -> saved -> ours -> copied and pickled."""
    plain, theirs = Matrices(0), Matrices(0)
    theirs.bias.requires_grad_(False)
    plain.bias.requires_grad_(False)
    before = torch.optim.Muon(theirs.weights, lr=0.05)
    ours = Muon(plain.weights, lr=9.0, exchange_bytes=MANY_BATCHES)
    train(theirs, before, range(2))
    with torch.no_grad():
        for one, other in zip(plain.weights, theirs.weights, strict=True):
            one.copy_(other)
    ours.load_state_dict(copy.deepcopy(before.state_dict()))
    train(plain, ours, range(2, 3))
    train(theirs, before, range(2, 3))
    for copied, moved in (copy.deepcopy((plain, ours)), pickle.loads(pickle.dumps((plain, ours)))):
        assert moved.exchange_bytes == MANY_BATCHES
        train(copied, moved, range(3, 4))
        for one, other in zip(copied.weights, after_one_more(theirs, before), strict=True):
            assert torch.equal(one, other)


def after_one_more(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    copied, moved = copy.deepcopy((model, optimizer))
    train(copied, moved, range(3, 4))
    return list(copied.weights)


def raised(error: type[Exception], function: Callable[[], Any]) -> str:
    with pytest.raises(error) as info:
        function()
    return str(info.value)


def misuse_is_named(rank, world):
    model = sharded_chain()
    parameters = list(model.parameters())
    matrices = [one for one in parameters if one.dim() == 2]
    message = raised(ValueError, lambda: Muon(parameters))
    assert "parameter bias of shape (8,) and dtype torch.float32: expected matrices" in message
    optimizer = Muon(matrices)
    assert "parameter bias" in raised(ValueError, lambda: optimizer.add_param_group({"params": parameters[1]}))
    assert len(optimizer.param_groups) == 1
    for option, value in (
        ("lr", -1.0),
        ("momentum", -0.1),
        ("weight_decay", -0.1),
        ("ns_steps", 100),
        ("ns_coefficients", (1.0, 2.0)),
        ("adjust_lr_fn", "other"),
        ("betas", (0.9, 1.0)),
        ("exchange_bytes", 0),
    ):
        made_so = {option: value}
        assert f"Muon: option {option}={value!r}: expected" in raised(
            ValueError, lambda made_so=made_so: Muon(matrices, **made_so)
        )
    stack = nn.Parameter(torch.ones(2, 3, 4))
    assert "shape (2, 3, 4) and dtype torch.float32: expected matrices of real numbers. Put stacks" in raised(
        ValueError, lambda: Muon([stack])
    )
    assert "expected stacks of matrices (3-D) of real" in raised(
        ValueError, lambda: Muon([{"params": matrices, "stacked": True}])
    )
    named = [("scale", nn.Parameter(torch.ones(3)))]
    assert "parameter scale of shape (3,)" in raised(ValueError, lambda: Muon(named))
    model(torch.ones(2, 8)).sum().backward()
    assert "call fully_shard_optimizer(optimizer) first" in raised(ShardingError, optimizer.step)
    if world > 1:  # where matrices are divided
        message = raised(ShardingError, lambda: fully_shard_optimizer(torch.optim.Muon(matrices)))
        assert "use lightning_mfsdp.optim.Muon" in message


def saved_and_gone_on(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    model = made()
    optimizer = fully_shard_optimizer(Muon(groups(model), lr=0.05))
    train(model, optimizer, range(2))
    index = ParameterIndex(model)
    parts = {"state_dict": model.state_dict(), "optimizer_states": [lightning_io.optimizer_state(index, optimizer)]}
    content = lightning_io.ShardedContent.of(index, {**parts, "global_step": 2}, Ranks())
    lightning_io.save(locate(f"{folder}/sharded.ckpt"), content, ranks=Ranks())
    states = [full_optimizer_state(optimizer, keep=rank == 0)]
    whole = {"state_dict": full_model_state(model.state_dict(), keep=rank == 0), "optimizer_states": states}
    lightning_io.save(locate(f"{folder}/full.ckpt"), lightning_io.FullContent(checkpoint=whole), ranks=Ranks())
    # As many gradients in the sum as on the ranks that load.
    for step in range(2, 4):
        (model(step) * (2 / world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def loaded_and_gone_on(folder: str) -> Iterator[dict[str, Tensor]]:
    for kind in ("sharded", "full"):
        model = made(sharding="optim")
        optimizer = fully_shard_optimizer(Muon(groups(model), lr=9.0, exchange_bytes=MANY_BATCHES))
        lightning_io.load(locate(f"{folder}/{kind}.ckpt"), model, [optimizer], strict=True, weights_only=True)
        assert optimizer.param_groups[1]["lr"] == 0.05
        train(model, optimizer, range(2, 4))
        yield weights(model)


def a_checkpoint_of_three_ranks_goes_on_on_two_to_the_bit(rank, world):
    """The process group is replaced by one of the first two ranks, and then by one of all again."""
    shared: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    folder = shared[0]
    expected = saved_and_gone_on(rank, world, folder)
    dist.barrier()
    dist.destroy_process_group()
    wrong = []
    if rank < 2:
        dist.init_process_group("gloo", init_method=f"file://{folder}/two", rank=rank, world_size=2)
        for loaded in loaded_and_gone_on(folder):
            wrong += [name for name, value in expected.items() if not torch.equal(loaded[name], value)]
        dist.barrier()
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/all", rank=rank, world_size=world)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    assert wrong == []


def experts_of_several_ranks_are_no_matrix(rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("shard", "expert"))
    experts = GroupedExperts(num_experts=2 * world, hidden_size=8, intermediate_size=8, flat_weights=True)
    fully_shard(expert_parallel(experts, mesh), mesh)
    optimizer = fully_shard_optimizer(Muon(experts.parameters(), lr=0.01))
    experts(torch.randn(3, 8), torch.tensor([[0], [1], [3]]), torch.ones(3, 1)).sum().backward()
    with pytest.raises(ShardingError, match=rf"weight_in of shape \(32, 8\) is one of {world} parts .*expected whole"):
        optimizer.step()


class Stacks(nn.Module):
    """Stacks of matrices, fewer than ranks, more, wide and tall, and a matrix beside them; the loss is linear."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((5, 3, 4), (2, 6, 2), (7, 4, 4), (1, 9, 3))
        self.stacks = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)
        self.matrix = nn.Parameter(torch.randn(6, 5, generator=generator))

    def forward(self, step: int) -> Tensor:
        return linear_loss(self.parameters(), step)


def stacks_step_like_each_of_their_matrices_without_communication(rank, world):
    options = {"lr": 0.3, "adjust_lr_fn": "match_rms_adamw", "momentum": 0.9}
    plain = Stacks()
    alone = [nn.Parameter(matrix.clone()) for stack in plain.stacks for matrix in stack.detach()]
    theirs = torch.optim.Muon(alone, **options)
    for step in range(3):
        plain.zero_grad()
        (plain(step) * world).backward()
        for parameter, gradient in zip(alone, [one for stack in plain.stacks for one in stack.grad], strict=True):
            parameter.grad = gradient.clone()
        theirs.step()
    for (case, placed), limit in product(placements(world), (1, 10**9)):
        model = Stacks()
        fully_shard(model, policy=EXACT, **placed)
        held = [{"params": list(model.stacks), "stacked": True}]
        optimizer = fully_shard_optimizer(Muon(held, **options, exchange_bytes=limit))
        with counted() as calls:
            train(model, optimizer, range(3))
        assert calls == [], case
        found = weights(model)
        wanted = iter(alone)
        for number, stack in enumerate(model.stacks):
            for matrix in found[f"stacks.{number}"]:
                assert torch.equal(matrix, next(wanted)), (case, limit, stack.shape)


def a_stack_is_stepped_as_its_matrices_whatever_number_is_stepped_at_once(rank, world):
    """PyTorch rounds the product of a batch of one otherwise; also after a state without the word, such as that of an older program."""
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 300, 77))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    gradients = torch.randn(2, 3, 300, 77)
    reference = torch.optim.Muon(alone, lr=0.1)
    for gradient in gradients:
        for parameter, own in zip(alone, gradient, strict=True):
            parameter.grad = own.clone()
        reference.step()
    for limit in (1, 2 * 2 * 300 * 77, 1e9):
        model = nn.Parameter(stack.detach().clone())
        optimizer = Muon([{"params": [model], "stacked": True}], lr=0.1, exchange_bytes=limit)
        assert "stacked" not in optimizer.param_groups[0]
        for gradient in gradients:
            model.grad = gradient.clone()
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(torch.equal(one, other) for one, other in zip(model, alone, strict=True)), limit


def experts_of_several_ranks_are_stacks(rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("shard", "expert"))
    generator = torch.Generator().manual_seed(0)
    tokens, chosen = torch.randn(4 * world, 8, generator=generator), torch.arange(4 * world).remainder(2 * world)
    results = []
    for divided in (False, True):
        torch.manual_seed(0)
        experts = GroupedExperts(num_experts=2 * world, hidden_size=8, intermediate_size=4)
        if divided:
            fully_shard(expert_parallel(experts, mesh), mesh, policy=EXACT)
        optimizer = Muon([{"params": experts.parameters(), "stacked": True}], lr=0.1)
        if divided:
            fully_shard_optimizer(optimizer)
        own = slice(4 * rank, 4 * rank + 4) if divided else slice(None)
        for _ in range(2):
            experts(tokens[own], chosen[own, None], torch.ones(len(chosen[own]), 1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(
            weights(experts) if divided else {name: one.detach() for name, one in experts.named_parameters()}
        )
    for name, value in results[0].items():
        own_experts = value[2 * rank : 2 * rank + 2] if len(results[1][name]) == 2 else value
        torch.testing.assert_close(results[1][name], own_experts, rtol=0.02, atol=0.01)


CASES = (
    trains_like_torch_to_the_bit,
    clearing_and_missing_gradients_are_agreed_on,
    a_decoder_trains_like_one_process,
    an_optimizer_from_before_sharding_moves_over,
)
WORLDS = {
    1: (
        *CASES,
        a_closure_and_loss_scaling_change_nothing,
        copies_and_states_of_torchs_own_go_on,
        misuse_is_named,
        stacks_step_like_each_of_their_matrices_without_communication,
        a_stack_is_stepped_as_its_matrices_whatever_number_is_stepped_at_once,
    ),
    3: (
        *CASES,
        two_exchanges_a_batch_and_bounded_bytes,
        experts_of_several_ranks_are_no_matrix,
        experts_of_several_ranks_are_stacks,
        stacks_step_like_each_of_their_matrices_without_communication,
        a_closure_and_loss_scaling_change_nothing,
        a_checkpoint_of_three_ranks_goes_on_on_two_to_the_bit,
    ),
    4: CASES[:1],
}


@by_world(WORLDS)
def test_muon(world, case):
    check(WORLDS, world, case)
