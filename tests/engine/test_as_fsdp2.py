"""What users of FSDP2 do with sharded parameters: hooks after the reduction, gradients that all ranks see alike, FSDP2's dtypes."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    reduce_pending,
)
from tests.engine.cases import Problems, device_type
from tests.engine.worlds import by_world, check, in_turns
from tests.helpers.chain import STRATEGIES, adamw, inputs, loss_of, plain_chain, sharded_chain, train, weights
from tests.helpers.pairwise import in_turn


class NormScaled(torch.optim.Optimizer):
    """Divides by the norm of each gradient: on a rank without rows, too."""

    def __init__(self, parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1), alpha=group["lr"])


def optimizers_step_in_hooks_after_the_reduction(rank, world):
    """One optimizer for each parameter, stepped and cleared by its hook, as in PyTorch's tutorial."""
    problems = Problems()
    for sharding in in_turn(0, STRATEGIES):
        plain, model = plain_chain(), sharded_chain(sharding=sharding)
        order: list[str] = []
        for net, wrap in ((plain, lambda o: o), (model, fully_shard_optimizer)):
            optimizers = {p: wrap(torch.optim.AdamW([p], lr=1e-2)) for p in net.parameters()}
            names = {p: name for name, p in net.named_parameters()}

            def hook(p: Tensor, optimizers=optimizers, names=names, order=order if net is model else None) -> None:
                assert p.grad is not None
                if order is not None:
                    order.append(f"{names[p]} {p.grad.norm().item():.4f}")
                optimizers[p].step()
                optimizers[p].zero_grad()

            for p in net.parameters():
                p.register_post_accumulate_grad_hook(hook)
            for step in range(3):
                loss_of(net, inputs(step)).backward()
        everyone = [None] * world
        torch.distributed.all_gather_object(everyone, order)
        problems.expect(all(one == order for one in everyone), "ranks run hooks in different orders")
        problems.expect(len(order) == 3 * len(list(plain.parameters())), f"{sharding}: {len(order)} calls")
        for name, value in weights(model).items():
            problems.close(value, plain.get_parameter(name).detach(), f"{sharding} {name}", rtol=1e-4, atol=1e-5)
    problems.finish()


def hooks_run_when_gradients_are_reduced_and_not_before(rank, world):
    model, calls = sharded_chain(), []
    parameter = model.out.weight
    handle = parameter.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.full_tensor()))
    with no_sync(model):
        loss_of(model, inputs(0)).backward()
    assert len(calls) == (1 if world == 1 else 0), "without communication there is nothing to see yet"
    loss_of(model, inputs(0)).backward()
    assert torch.allclose(calls[-1], 2 * plain_gradient(), atol=1e-6)
    with no_sync(model):
        loss_of(model, inputs(0)).backward()
    before = len(calls)
    reduce_pending(model)
    assert len(calls) == before + (world > 1)
    handle.remove()
    loss_of(model, inputs(0)).backward()
    assert len(calls) == before + (world > 1)
    model.layers[0].weight.requires_grad_(False)
    with pytest.raises(EngineStateError, match=r"register_post_accumulate_grad_hook on parameter .*it is frozen"):
        model.layers[0].weight.register_post_accumulate_grad_hook(print)


def plain_gradient() -> Tensor:
    plain = plain_chain()
    loss_of(plain, inputs(0)).backward()
    return plain.out.weight.grad


def gradients_are_there_on_all_ranks_or_on_none(rank, world):
    """Frozen in mid-run, cleared to zero, and read by an optimizer that communicates: a rank without rows must not stand aside."""
    problems = Problems()
    for sharding in in_turn(1, STRATEGIES):
        plain, model = plain_chain(), sharded_chain(sharding=sharding)
        optimizers = NormScaled(plain.parameters()), fully_shard_optimizer(NormScaled(model.parameters()))
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            for step in range(4):
                loss_of(net, inputs(step)).backward()
                optimizer.step()
                if step == 1:
                    net.out.requires_grad_(False)
                optimizer.zero_grad(set_to_none=step == 2)
        there = {name: p.grad is not None for name, p in model.named_parameters()}
        expected = {name: p.grad is not None for name, p in plain.named_parameters()}
        problems.expect(there == expected, f"{sharding}: {there}, expected {expected}")
        for name, value in weights(model).items():
            problems.close(value, plain.get_parameter(name).detach(), f"{sharding} {name}", rtol=1e-4, atol=1e-5)
    problems.finish()


def gradients_may_follow_the_main_weights(rank, world):
    """`main_grads_dtype=None`: bfloat16 main weights have bfloat16 gradients, float32 ones float32."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        plain = plain_chain().to(dtype)
        model = fully_shard(
            plain_chain().to(dtype), policy=MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None)
        )
        for net in (plain, model):
            loss_of(net, inputs(0).to(dtype)).backward()
        for name, parameter in plain.named_parameters():
            grad = model.get_parameter(name).grad
            assert grad.dtype is dtype
            assert torch.allclose(grad.full_tensor(), parameter.grad, rtol=0.02 if dtype is torch.bfloat16 else 1e-5)
    mixed = fully_shard(plain_chain(), policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16, main_grads_dtype=None))
    loss_of(mixed, inputs(0)).backward()
    assert mixed.out.weight.grad.dtype is torch.float32


def numpy_says_what_to_call(rank, world):
    model = sharded_chain()
    for convert in (lambda t: t.numpy(force=True), lambda t: t.detach().cpu().numpy(), np.asarray):
        if world > 1:
            with pytest.raises(EngineStateError, match=r"numpy\(\) of parameter .*full_tensor\(\)\.numpy\(\)"):
                convert(model.out.weight)


def where_every_rank_has_all_of_a_weight_numpy_reads_and_pickles_keep_it(rank, world):
    model, plain = sharded_chain(sharding="no_shard"), plain_chain()
    optimizers = adamw(model), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for net, optimizer in zip((model, plain), optimizers, strict=True):
        train(net, optimizer, [0])
    array = model.out.weight.numpy(force=True)
    if device_type() == "cpu":
        assert np.array_equal(array, model.out.weight.detach().numpy())
        assert np.array_equal(array, np.asarray(model.out.weight.detach()))
    assert np.allclose(array, plain.out.weight.numpy(force=True), atol=1e-6)
    with pytest.raises(ValueError, match="read-only"):
        array[:] = 0
    kind, words = (RuntimeError, "detach") if device_type() == "cpu" else (TypeError, "cuda")
    with pytest.raises(kind, match=words):
        model.out.weight.numpy()
    for saved, expected in (
        (model.state_dict(), plain.state_dict()),
        (dict(model.named_parameters()), plain.state_dict()),
        (optimizers[0].state_dict()["state"][9], optimizers[1].state_dict()["state"][9]),
    ):
        file = io.BytesIO()
        torch.save(saved, file)
        assert file.tell() < 20_000, "no memory of others in the buffer is saved"
        file.seek(0)
        for name, value in torch.load(file, weights_only=True).items():
            assert type(value) in (Tensor, torch.nn.Parameter)
            assert value.requires_grad == getattr(saved[name], "requires_grad", False)
            torch.testing.assert_close(value.detach(), expected[name], rtol=1e-5, atol=1e-6)
    model.out.weight.requires_grad_(False)
    copied = pickle.loads(pickle.dumps([model.out.weight, model.layers[0].weight]))
    assert [(type(value), value.requires_grad) for value in copied] == [
        (torch.nn.Parameter, False),
        (torch.nn.Parameter, True),
    ]
    with pytest.raises(EngineStateError, match=r"out\.weight: a sharded parameter cannot be copied"):
        copy.copy(model.out.weight)


def a_shallow_copy_lies_in_the_same_memory(rank, world):
    problems = Problems()
    for sharding in STRATEGIES:
        nets = plain_chain(), sharded_chain(sharding=sharding)
        results = []
        for net in nets:
            loss_of(net, inputs(0)).backward()
            weight, own = net.out.weight, net.layers[0].weight.detach().clone().requires_grad_()
            copies = [copy.copy(tensor) for tensor in (weight.detach(), weight.grad, own)]
            with torch.no_grad():
                for number, tensor in enumerate(copies):
                    tensor.fill_(number)
            assert [tensor.requires_grad for tensor in copies] == [False, False, True]
            results.append((weight.detach(), weight.grad, own.detach(), loss_of(net, inputs(1)).detach()))
        for expected, found in zip(*results, strict=True):
            problems.close(full(found), expected, sharding)
    problems.finish()


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def a_backward_to_chosen_parameters_gives_these_a_gradient_and_no_others(rank, world):
    problems = Problems()
    for sharding, chosen in in_turn(
        0, [(s, c) for c in ("out", "layers.1", "layers.0.weight", "") for s in STRATEGIES]
    ):
        plain, model = plain_chain(), sharded_chain(sharding=sharding)
        for step in range(3):
            for net in (plain, model):
                wanted = [p for name, p in net.named_parameters() if name.startswith(chosen)]
                loss_of(net, inputs(step)).backward(inputs=wanted if step < 2 else None)  # added up, and among others
            for name, p in plain.named_parameters():
                gradient = model.get_parameter(name).grad
                problems.expect((gradient is None) == (p.grad is None), f"{sharding} {chosen} {step}: {name}")
                if gradient is not None and p.grad is not None:
                    problems.close(gradient.full_tensor(), p.grad, f"{sharding} {chosen} {step}: {name}")
    problems.finish()


def containers_without_a_forward_are_no_units(rank, world):
    for container in (nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleDict({"a": nn.Linear(4, 4)})):
        with pytest.raises(ShardingError, match=rf"{type(container).__name__} has no forward.*fully_shard\(list"):
            fully_shard(container)
    fully_shard(nn.ModuleList([fully_shard(nn.Linear(4, 4))]))  # of which every weight is gathered by a unit

    class Stack(nn.ModuleList):
        def forward(self, x):
            return self[0](x)

    fully_shard(Stack([nn.Linear(4, 4)]))(torch.ones(1, 4)).sum().backward()


def a_dtype_of_gradients_that_would_have_no_effect_is_refused(rank, world):
    weight = sharded_chain().out.weight
    assert weight.grad_dtype is torch.float32
    weight.grad_dtype = torch.float32
    with pytest.raises(EngineStateError, match=r"out\.weight.*grad_dtype was set to torch\.float64.*main_grads_dtype"):
        weight.grad_dtype = torch.float64


CASES = (
    a_backward_to_chosen_parameters_gives_these_a_gradient_and_no_others,
    a_dtype_of_gradients_that_would_have_no_effect_is_refused,
    containers_without_a_forward_are_no_units,
    a_shallow_copy_lies_in_the_same_memory,
    where_every_rank_has_all_of_a_weight_numpy_reads_and_pickles_keep_it,
    gradients_are_there_on_all_ranks_or_on_none,
    gradients_may_follow_the_main_weights,
    hooks_run_when_gradients_are_reduced_and_not_before,
    numpy_says_what_to_call,
    optimizers_step_in_hooks_after_the_reduction,
)
WORLDS = {1: CASES, **in_turns((2, 3), CASES)}


@by_world(WORLDS)
def test_as_under_fsdp2(world, case):
    check(WORLDS, world, case)
