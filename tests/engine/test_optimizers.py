"""Optimizers on sharded parameters: who steps which representation, and that every one of them trains as on one process."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.engine import (
    ELEMENTWISE_OPTIMIZERS,
    MixedPrecisionPolicy,
    ShardingError,
    fully_shard,
    fully_shard_optimizer,
    refresh_weights,
    sharded_parameters,
)
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, Chain, inputs, loss_of, plain_chain, sharded_chain, weights
from tests.helpers.nights import NIGHT, thinned
from tests.helpers.pairwise import in_turn, in_world, pairwise

STEPS = 4 if NIGHT else 3
BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


class NormScaled(torch.optim.Optimizer):
    """Layer-wise steps as in LARS: needs norms of whole tensors, so local rows would not do."""

    def __init__(self, params, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = parameter.norm() / (parameter.grad.norm() + 1e-6)
                    parameter.sub_(parameter.grad * trust * group["lr"])


def same_batch_everywhere(step: int) -> Tensor:
    return inputs(step)


def run(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, closure: bool = False, set_to_none: bool = True
) -> Tensor:
    losses = []
    for step in range(STEPS):

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model, same_batch_everywhere(step))
            loss.backward()
            return loss

        loss = optimizer.step(evaluate) if closure else evaluate()
        if not closure:
            optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def assert_like_plain(model: Chain, plain: Chain, case: str, world: int) -> None:
    """Bit-equal on one rank; on several the mean of equal gradients rounds."""
    found = weights(model)
    for name, expected in plain.named_parameters():
        tolerance = {"rtol": 0, "atol": 0} if world == 1 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(
            found[name], expected.detach(), **tolerance, msg=lambda m, name=name: f"{case} {name}: {m}"
        )


def elementwise_optimizers_step_local_rows_and_train_like_plain_pytorch(rank, world):
    for kind, sharding in in_world(world, (2, 3), ELEMENTWISE_OPTIMIZERS, ("optim_grads", "optim_grads_params")):
        case = f"{kind.__name__} {sharding}"
        plain = plain_chain()
        losses = run(plain, kind(plain.parameters(), lr=1e-2))
        model = sharded_chain(sharding=sharding)
        optimizer = fully_shard_optimizer(kind(model.parameters(), lr=1e-2))
        torch.testing.assert_close(
            run(model, optimizer), losses, rtol=1e-4, atol=1e-5, msg=lambda m, case=case: f"{case}: {m}"
        )
        assert_like_plain(model, plain, case, world)
        for view in sharded_parameters(model):
            state = optimizer.state.get(view.dtensor, {})
            assert not any(key is view.local for key in optimizer.state)
            assert (view.dtensor in optimizer.state) == (view.local in optimizer.state), "one parameter, one key"
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    assert value.to_local().shape == view.local.shape, f"{case} {key}: state of this rank's rows only"


def other_optimizers_hold_dtensors_and_see_whole_norms(rank, world):
    for sharding in in_turn(0, STRATEGIES):
        plain = plain_chain()
        losses = run(plain, NormScaled(plain.parameters()))
        model = sharded_chain(sharding=sharding)
        optimizer = fully_shard_optimizer(NormScaled(model.parameters()))
        assert all(
            isinstance(p, DTensor) == (sharding != "no_shard" and world > 1)
            for p in optimizer.param_groups[0]["params"]
        )
        torch.testing.assert_close(run(model, optimizer), losses, rtol=1e-4, atol=1e-5)
        assert_like_plain(model, plain, sharding, 2)


def the_list_is_exact_and_can_be_overruled(rank, world):
    class MyAdam(torch.optim.Adam):
        """May do anything, so it is not taken for elementwise."""

    model = sharded_chain()
    optimizer = fully_shard_optimizer(MyAdam(model.parameters()))
    assert all(isinstance(p, DTensor) == (world > 1) for p in optimizer.param_groups[0]["params"])
    optimizer = fully_shard_optimizer(MyAdam(model.parameters()), elementwise=True)
    assert not any(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    optimizer = fully_shard_optimizer(torch.optim.Adam(model.parameters()), elementwise=False)
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])


def no_step_is_taken_before_the_users_first(rank, world):
    model, plain = sharded_chain(), plain_chain()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    assert not optimizer.state
    for name, value in weights(model).items():
        assert torch.equal(value, plain.get_parameter(name).detach()), "no weight decay was applied"
    loss_of(model, inputs(0)).backward()
    optimizer.step()
    steps = [float(state["step"]) for state in optimizer.state.values()]
    assert steps, "this rank owns something"
    assert set(steps) == {1.0}


def closures_work(rank, world):
    for sharding, policy in thinned(product(in_turn(1, STRATEGIES), (None, BF16)), 3):
        runs = []
        for closure in (False, True):
            model = sharded_chain(sharding=sharding, policy=policy)
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            runs.append((run(model, optimizer, closure=closure), weights(model)))
        assert torch.equal(runs[0][0], runs[1][0]), sharding
        assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1]), sharding


def zeroed_and_removed_gradients_train_alike(rank, world):
    grads16 = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    kinds = ((None, torch.optim.AdamW), (grads16, torch.optim.AdamW), (None, NormScaled))
    for sharding, (policy, kind) in thinned(in_world(world, (2, 3), STRATEGIES, kinds), 2):
        found = []
        for set_to_none in (False, True):
            model = sharded_chain(sharding=sharding, policy=policy)
            optimizer = fully_shard_optimizer(kind(model.parameters(), lr=1e-2))
            run(model, optimizer, set_to_none=set_to_none)
            optimizer.zero_grad(set_to_none=set_to_none)
            for view in sharded_parameters(model):
                assert (view.grad is None) == set_to_none
            found.append(weights(model))
        for name, value in found[0].items():
            torch.testing.assert_close(value, found[1][name], rtol=0, atol=1e-7, msg=f"{sharding} {name}")


def optimizers_built_before_sharding_move_over(rank, world):
    """Also with state from steps already taken: the curve goes on."""
    for sharding, steps_before in thinned(product(in_turn(2, STRATEGIES), (0, 2)), 3):
        plain, model = plain_chain(), plain_chain()
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
        for _ in range(min(1, steps_before)):
            for one, optimizer in zip((plain, model), optimizers, strict=True):
                run(one, optimizer)
                optimizer.zero_grad()
        for layer in model.layers:
            fully_shard(layer, sharding=sharding)
        fully_shard(model, sharding=sharding)
        fully_shard_optimizer(optimizers[1])
        run(plain, optimizers[0])
        run(model, optimizers[1])
        assert_like_plain(model, plain, f"{sharding} {steps_before}", world)


def parameter_groups_stay_as_they_are(rank, world):
    model, plain = sharded_chain(), plain_chain()

    def groups(one: Chain):
        decayed = [p for name, p in one.named_parameters() if name.endswith("weight")]
        others = [p for name, p in one.named_parameters() if not name.endswith("weight")]
        return [{"params": decayed, "lr": 0.02, "weight_decay": 0.3}, {"params": others, "lr": 0.005, "tag": "bias"}]

    optimizer = fully_shard_optimizer(torch.optim.AdamW(groups(model), lr=1.0))
    reference = torch.optim.AdamW(groups(plain), lr=1.0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 5]
    for mine, theirs in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    run(model, optimizer)
    run(plain, reference)
    assert_like_plain(model, plain, "groups", world)


def empty_shards_do_not_disturb_kernels_for_many_tensors(rank, world):
    """Every rank has a gradient of what it has no rows of, so that all hear of it when an optimizer clears them."""
    for sharding, kernel in pairwise(STRATEGIES[1:], ("fused", "foreach"), together=1):
        plain, model = plain_chain(), sharded_chain(sharding=sharding)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, **{kernel: True}))
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        empty = [view for view in sharded_parameters(model) if not len(view.rows)]
        for step in range(2):
            loss_of(plain, inputs(step)).backward()
            reference.step()
            reference.zero_grad()
            loss_of(model, inputs(step)).backward()
            assert all(view.grad is not None and not view.local.grad.numel() for view in empty)
            optimizer.step()
            optimizer.zero_grad()
            assert all(view.grad is None and view.dtensor.grad is None for view in sharded_parameters(model))
        for name, value in weights(model).items():
            torch.testing.assert_close(value, plain.get_parameter(name), rtol=1e-5, atol=1e-6, msg=f"{kernel} {name}")


def two_optimizers_share_a_model(rank, world):
    for sharding, policy in thinned(product(in_turn(3, STRATEGIES), (None, BF16)), 3):
        model, plain = sharded_chain(sharding=sharding, policy=policy), plain_chain()

        def build(one: Chain) -> list[torch.optim.Optimizer]:
            halves = [list(one.layers[:2].parameters()), [*one.layers[2:].parameters(), *one.out.parameters()]]
            return [torch.optim.AdamW(halves[0], lr=1e-2), torch.optim.SGD(halves[1], lr=0.1)]

        mine, theirs = [fully_shard_optimizer(optimizer) for optimizer in build(model)], build(plain)
        for step in range(STEPS):
            for one, optimizers in ((model, mine), (plain, theirs)):
                for optimizer in optimizers:  # each sees the other's step, as in a GAN
                    loss_of(one, inputs(step)).backward()
                    optimizer.step()
                    one.zero_grad()
        if policy is None:
            assert_like_plain(model, plain, sharding, world)
        else:
            for name, value in weights(model).items():
                torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=0.1, atol=0.05)


def writes_by_others_are_noticed(rank, world):
    """Loading, and the documented call after any other write; with an optimizer attached and weights already gathered."""
    target = plain_chain(seed=9)
    ways = ((None, "load"), (None, "refresh"), (None, "in place"), (BF16, "refresh"))
    for sharding, (policy, way) in thinned(product(in_turn(4, STRATEGIES), ways), 3):
        model = sharded_chain(sharding=sharding, policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        run(model, optimizer)
        with torch.no_grad():
            model(inputs(0))
            source = sharded_chain(seed=9, sharding=sharding, policy=policy)
            if way == "load":
                model.load_state_dict(source.state_dict())
            else:
                for mine, theirs in zip(sharded_parameters(model), sharded_parameters(source), strict=True):
                    if way == "refresh":
                        mine.local.copy_(theirs.local)
                    else:
                        mine.dtensor.copy_(theirs.dtensor)
                if way == "refresh":
                    refresh_weights(model)
            found = model(inputs(0)).float()
            tolerance = {"rtol": 1e-6, "atol": 1e-6} if policy is None else {"rtol": 0.1, "atol": 0.05}
            torch.testing.assert_close(
                found, target(inputs(0)), **tolerance, msg=lambda m, case=(sharding, way): f"{case}: {m}"
            )


def rows_that_nobody_reports_are_read_anew_in_every_pass(rank, world):
    """Where an optimizer that was not taken over may have written to some parameters."""
    target = plain_chain(seed=9)
    for sharding, policy, known in pairwise(STRATEGIES, (None, BF16), (0, 3), together=1):
        model = sharded_chain(sharding=sharding, policy=policy)
        source = sharded_chain(seed=9, sharding=sharding, policy=policy)
        if known:
            fully_shard_optimizer(torch.optim.SGD(list(model.parameters())[:known], lr=0.1))
        with torch.no_grad():
            model(inputs(0))
            for mine, theirs in zip(sharded_parameters(model), sharded_parameters(source), strict=True):
                mine.local.copy_(theirs.local)
            found = model(inputs(0)).float()
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if policy is None else {"rtol": 0.1, "atol": 0.05}
        torch.testing.assert_close(
            found, target(inputs(0)), **tolerance, msg=lambda m, case=(sharding, policy, known): f"{case}: {m}"
        )


def what_was_said_is_kept_and_no_hook_comes_twice(rank, world):
    """A strategy calls this again for what `configure_optimizers` returns."""
    for said in (True, False):
        model = sharded_chain()
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()), elementwise=said)
        hooks = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
        fully_shard_optimizer(optimizer, grad_scaler=object())
        assert all(isinstance(p, DTensor) != said for p in optimizer.param_groups[0]["params"])
        assert [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)] == hooks
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def a_scaler_is_remembered(rank, world):
    model = sharded_chain(policy=MixedPrecisionPolicy(compute_dtype=torch.float16))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), grad_scaler=object())
    assert fully_shard_optimizer(optimizer, elementwise=True) is optimizer


def what_cannot_be_sharded_is_refused(rank, world):
    """And goes on as if nobody had asked."""
    half = sharded_chain(policy=MixedPrecisionPolicy(compute_dtype=torch.float16))
    for said, optimizer in {
        "SparseAdam": torch.optim.SparseAdam(list(sharded_chain().parameters())),
        "no parameter of a sharded module": torch.optim.SGD(plain_chain().parameters(), lr=0.1),
        "float16": torch.optim.SGD(half.parameters(), lr=0.1),
    }.items():
        before = optimizer.state_dict()
        with pytest.raises(ShardingError, match=said):
            fully_shard_optimizer(optimizer)
        assert optimizer.state_dict() == before
        optimizer.load_state_dict(before)
        optimizer.step()


CASES = (
    elementwise_optimizers_step_local_rows_and_train_like_plain_pytorch,
    other_optimizers_hold_dtensors_and_see_whole_norms,
    the_list_is_exact_and_can_be_overruled,
    no_step_is_taken_before_the_users_first,
    closures_work,
    zeroed_and_removed_gradients_train_alike,
    optimizers_built_before_sharding_move_over,
    parameter_groups_stay_as_they_are,
    empty_shards_do_not_disturb_kernels_for_many_tensors,
    two_optimizers_share_a_model,
    what_was_said_is_kept_and_no_hook_comes_twice,
    a_scaler_is_remembered,
    writes_by_others_are_noticed,
    rows_that_nobody_reports_are_read_anew_in_every_pass,
    what_cannot_be_sharded_is_refused,
)
UNEVEN = (
    elementwise_optimizers_step_local_rows_and_train_like_plain_pytorch,
    other_optimizers_hold_dtensors_and_see_whole_norms,
    zeroed_and_removed_gradients_train_alike,
    empty_shards_do_not_disturb_kernels_for_many_tensors,
)
WORLDS = {1: thinned(CASES, 3), 2: [case for case in CASES if case not in UNEVEN], 3: UNEVEN}


@by_world(WORLDS)
def test_optimizers(world, case):
    check(WORLDS, world, case)
