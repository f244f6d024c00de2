"""Sharded modules that are moved, converted, or made plain again."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from lightning_mfsdp import full_state_dict
from lightning_mfsdp.engine import (
    AveragedWeights,
    EngineStateError,
    MixedPrecisionPolicy,
    ShardingError,
    broadcast_buffers,
    fully_shard,
    fully_shard_optimizer,
    gather_root,
    sharded_parameters,
    unshard,
    unshard_model,
)
from tests.engine.cases import device_type
from tests.engine.worlds import by_world, check
from tests.helpers.nights import thinned
from tests.helpers.pairwise import in_turn

SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Model(nn.Module):
    """Units inside a root with weights of its own, a recurrent layer, a tied and a frozen weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.recurrent = nn.LSTM(6, 6)
        self.last = nn.Linear(6, 4)
        self.again = self.last
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.recurrent(self.block(self.first(x))[None])[0][0]
        return self.again(hidden) * self.scale


def plain() -> Model:
    torch.manual_seed(3)
    return Model()


def sharded(sharding: str = "optim_grads_params", **options: Any) -> Model:
    model = plain()
    fully_shard(model.block, sharding=sharding, **options)
    return fully_shard(model, sharding=sharding, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[Tensor]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
        for name, value in model.state_dict().items()
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert list(found) == list(expected), what
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, (what, name)
        assert torch.equal(found[name].cpu(), value.cpu()), (what, name)


# -- moved and converted -----------------------------------------------------------------------------------------------


def conversions_to_what_it_is_already_change_nothing(rank: int, world: int) -> None:
    for sharding in in_turn(0, SHARDINGS):
        model = sharded(sharding)
        optimizer = fully_shard_optimizer(adam(model))
        train(model, optimizer)
        before, shown = values(model), list(model.parameters())
        for convert in (
            nn.Module.float,
            getattr(nn.Module, device_type()),
            lambda one: one.to(torch.float32),
            lambda one: one.to(device_type()),
        ):
            assert convert(model) is model
            assert convert(model.block) is model.block
        around = nn.ModuleDict({"inner": model, "other": nn.Linear(2, 2)})
        around.to(device_type()).float()
        assert all(one is other for one, other in zip(model.parameters(), shown, strict=True))
        assert_equal(values(model), before, sharding)
        train(model, optimizer)
        straight = sharded(sharding)
        train_on = fully_shard_optimizer(adam(straight))
        for _ in range(2):
            train(straight, train_on)
        assert_equal(values(model), values(straight), f"{sharding}, trained on")


def shards_are_converted_and_come_back_as_in_plain_pytorch(rank: int, world: int) -> None:
    for sharding in in_turn(1, SHARDINGS):
        model, reference = sharded(sharding), plain()
        optimizer = fully_shard_optimizer(adam(model))
        for there, back in ((nn.Module.half, nn.Module.float), (nn.Module.double, nn.Module.float)):
            there(model)
            there(reference)
            assert {one.dtype for one in model.parameters()} == {one.dtype for one in reference.parameters()}
            assert all(isinstance(one, DTensor) and isinstance(one, nn.Parameter) for one in model.parameters())
            assert model.last.weight is model.again.weight
            assert_equal(values(model), values(reference), f"{sharding} {there.__name__}")
            dtype = str(model.last.weight.dtype).removeprefix("torch.")
            with pytest.raises(
                EngineStateError, match=f"got its rows in {dtype} on {device_type()}.*conversion such as half"
            ):
                model(torch.ones(3, 4))
            back(model)
            back(reference)
            assert_equal(values(model), values(reference), f"{sharding} {back.__name__}")
        theirs = adam(reference)
        for one, other in zip(train(model, optimizer), train(reference, theirs), strict=True):
            torch.testing.assert_close(one, other)


def what_a_conversion_computes_is_written(rank: int, world: int) -> None:
    model = sharded()
    expected = {name: value * 2 for name, value in values(model).items()}
    model._apply(lambda value: value * 2)
    assert_equal(values(model), expected, "doubled in place")
    assert all(type(one).__name__ == "ShardedParameter" for one in model.parameters())


def a_part_may_be_converted_alone(rank: int, world: int) -> None:
    model = sharded()
    model.block.to(torch.bfloat16)
    assert model.block[0].weight.dtype is torch.bfloat16
    assert model.first.weight.dtype is torch.float32
    model.block.float()
    model(torch.ones(3, 4))


def what_is_said_of_a_converted_parameter_holds(rank: int, world: int) -> None:
    for there, back in ((nn.Module.half, nn.Module.float), (nn.Module.double, lambda one: one.to(torch.float32))):
        model = sharded()
        assert [one.requires_grad for one in there(model).parameters()] == [
            one.requires_grad for one in plain().parameters()
        ]
        model.first.requires_grad_(False)
        model.last.weight.requires_grad = False
        model.block[0].weight.mark = "noted"
        with pytest.raises(
            EngineStateError, match=r"^parameter 0\.weight of unit block.*which a conversion of its module"
        ):
            model.block[0].weight.data = plain().block[0].weight.detach()
        back(model)
        frozen = [model.first.weight, model.first.bias, model.last.weight]
        assert not any(one.requires_grad for one in frozen)
        assert model.last.bias.requires_grad
        assert model.block[0].weight.mark == "noted"
        before = [one.full_tensor() for one in (*frozen, model.last.bias)]
        train(model, fully_shard_optimizer(adam(model)))
        after = [one.full_tensor() for one in (*frozen, model.last.bias)]
        assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, True, True, False]


def a_converted_parameter_has_its_gradient_and_its_optimizer_state(rank: int, world: int) -> None:
    for sharding in in_turn(2, SHARDINGS):
        model = sharded(sharding)
        optimizer = fully_shard_optimizer(adam(model))
        train(model, optimizer)
        expected = get_optimizer_state_dict(model, optimizer)["state"]
        model.half()
        found = get_optimizer_state_dict(model, optimizer)["state"]
        assert found.keys() == expected.keys()
        for name, state in expected.items():
            assert torch.equal(found[name]["exp_avg"].full_tensor(), state["exp_avg"].full_tensor()), (sharding, name)
        for one in model.parameters():
            assert (one.grad is not None) == one.requires_grad
        assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
        torch.testing.assert_close(
            nn.utils.get_total_norm([one.grad for one in model.parameters() if one.requires_grad]).full_tensor(),
            torch.tensor(1e-3),
        )
        model.zero_grad()
        model.float()
        assert all(one.grad is None for one in model.parameters())


def a_converted_model_is_not_stepped(rank: int, world: int) -> None:
    for built in ("before", "after"):
        model, reference = sharded(), sharded()
        optimizers = [fully_shard_optimizer(adam(one)) for one in (model, reference)]
        for one in (model, reference):
            one(torch.ones(3, 4)).sum().backward()
        model.block.half()
        if built == "after":
            optimizers[0] = fully_shard_optimizer(adam(model))
        with pytest.raises(
            ShardingError, match=rf"AdamW\.step: the module shows parameter 0\.weight .*float16 on {device_type()}"
        ):
            optimizers[0].step()
        with pytest.raises(ShardingError, match="unshard: the module shows"), unshard(model):
            pass
        model.block.float()
        reference.block.half().float()
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(values(model), values(reference), built)


def memory_that_is_shared_with_processes_is_still_refused(rank: int, world: int) -> None:
    with pytest.raises(EngineStateError, match="share_memory_ on parameter"):
        sharded().share_memory()


def modules_are_freed_at_once(rank: int, world: int) -> None:
    gc.collect()
    gc.disable()
    try:
        model = sharded()
        reference = weakref.ref(model.first)
        del model
        assert reference() is None
    finally:
        gc.enable()


# -- plain again -------------------------------------------------------------------------------------------------------


def an_unsharded_model_is_a_plain_one(rank: int, world: int) -> None:
    for sharding in in_turn(3, SHARDINGS):
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(direct_weight_gradients=True)):
            model = sharded(sharding, policy=policy)
            old = fully_shard_optimizer(adam(model))
            train(model, old)
            expected = values(model)
            assert unshard_model(model) is model
            assert all(type(one) is nn.Parameter for one in model.parameters())
            assert model.last.weight is model.again.weight
            assert not model.scale.requires_grad
            assert_equal({name: value.detach() for name, value in model.state_dict().items()}, expected, sharding)
            reference = plain()
            reference.load_state_dict(expected)
            assert_same_training(model, reference)
            assert not sharded_parameters(model)
            for child in model.modules():
                assert not child._forward_hooks
                assert not child._forward_pre_hooks
                assert "forward" not in vars(child)
                assert not {"_apply", "_ddp_params_and_buffers_to_ignore"} & vars(child).keys()
            state = reference_state(expected)
            for use in (old.step, old.state_dict, partial(old.load_state_dict, state)):
                with pytest.raises(ShardingError, match="build a new optimizer"):
                    use()


def assert_same_training(model: nn.Module, reference: nn.Module) -> None:
    losses = [train(one, adam(one)) for one in (model, reference)]
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other)
    model.half().float()
    torch.save(model.state_dict(), "/dev/null")


def reference_state(weights: dict[str, Tensor]) -> dict[str, Any]:
    """Of an optimizer over a plain model, after a step."""
    reference = plain()
    reference.load_state_dict(weights)
    optimizer = adam(reference)
    train(reference, optimizer, steps=1)
    return optimizer.state_dict()


def an_unsharded_model_has_the_parameters_that_it_was_built_with(rank: int, world: int) -> None:
    for main in (torch.float32, torch.float64):
        policy, model, called = MixedPrecisionPolicy(main_params_dtype=main), plain(), []
        before = list(model.parameters())
        before[1].mark = "kept"
        before[1].register_hook(lambda gradient, called=called: called.append(gradient.shape))
        fully_shard(model.block, policy=policy)
        fully_shard(model, policy=policy)
        train(model, fully_shard_optimizer(adam(model)))
        assert len(called) == 2
        unshard_model(model)
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert {one.dtype for one in before if one.requires_grad} == {main}
        model.float()
        assert vars(before[1]).keys() == {"mark"}
        model(torch.ones(3, 4)).sum().backward()
        assert len(called) == 3
        assert all(one is getattr(model.recurrent, one_name) for one_name, one in flat_weights(model.recurrent))


def flat_weights(recurrent: nn.LSTM) -> list[tuple[str, Any]]:
    """What the layer computes with."""
    return list(zip(recurrent._flat_weights_names, recurrent._flat_weights, strict=True))


def what_was_put_where_a_shard_was_stays(rank: int, world: int) -> None:
    model = sharded()
    new = model.first.weight = nn.Parameter(torch.full((6, 4), 3.0))
    model.last = nn.Linear(6, 4)
    unshard_model(model)
    assert model.first.weight is new
    assert torch.equal(new, torch.full((6, 4), 3.0))
    assert model.again.weight is not model.last.weight
    model(torch.ones(3, 4))


def what_was_put_where_a_shard_was_is_named(rank: int, world: int) -> None:
    model, other = sharded(), sharded()
    own = model.first.weight
    for new, named in (
        (other.first.weight, r"parameter first\.weight of unit \w+"),
        (model.last.weight, r"parameter last\.weight of unit \w+"),  # tied since
        (nn.Parameter(torch.zeros(6, 4)), "Parameter"),
    ):
        model.first._parameters["weight"] = new
        with pytest.raises(EngineStateError, match=rf"first\.weight was replaced .*, got {named}\)"):
            model(torch.ones(3, 4))
    model.first._parameters["weight"] = own
    model(torch.ones(3, 4))


def a_model_in_use_is_not_unsharded(rank: int, world: int) -> None:
    model = sharded()
    within = pytest.raises(ShardingError, match="Model is in use")
    with gather_root(model), within:
        unshard_model(model)
    with unshard(model), within:
        unshard_model(model)
    hook = model.last.register_full_backward_hook(lambda *_: unshard_model(model))
    loss = model(torch.ones(3, 4)).sum()
    with within:
        loss.backward()
    hook.remove()
    unshard_model(model)
    assert all(type(one) is nn.Parameter for one in model.parameters())


def an_unsharded_model_can_be_exported_and_sharded_again(rank: int, world: int) -> None:
    model = sharded()
    model.eval()
    expected = model(torch.ones(3, 4)).detach()
    unshard_model(model, device=device_type())
    exported = torch.export.export(model, (torch.ones(3, 4),))
    torch.testing.assert_close(exported.module()(torch.ones(3, 4)), expected)
    fully_shard(model)
    torch.testing.assert_close(model(torch.ones(3, 4)).detach(), expected)
    model.train()
    train(model, fully_shard_optimizer(adam(model)))


def a_converted_model_is_unsharded_as_it_is(rank: int, world: int) -> None:
    model, reference = sharded(), plain()
    model.to(torch.bfloat16)
    reference.to(torch.bfloat16)
    unshard_model(model)
    assert_equal(dict(model.state_dict()), dict(reference.state_dict()), "bf16")


def only_whole_roots_are_unsharded(rank: int, world: int) -> None:
    with pytest.raises(ShardingError, match="nothing in Model is sharded"):
        unshard_model(plain())
    model = sharded()
    for part in (model.block, model.first):
        with pytest.raises(ShardingError, match="is part of a sharded module"):
            unshard_model(part)
    first = sharded().first
    with pytest.raises(ShardingError, match="and while it is alive"):
        unshard_model(first)
    around = nn.ModuleList([model, sharded()])
    unshard_model(around)
    assert all(type(one) is nn.Parameter for one in around.parameters())


def an_average_is_hidden_before_the_sharding_ends_and_ends_with_it(rank: int, world: int) -> None:
    model = sharded()
    average = AveragedWeights(model)
    average.update(0.5)
    train(model, fully_shard_optimizer(adam(model)))
    own = values(model)
    average.update(0.5)
    average.show()
    shown = values(model)
    with pytest.raises(ShardingError, match="unshard_model of Model: the model shows an average"):
        unshard_model(model)
    with pytest.raises(ShardingError, match=r"converting parameter first\.weight: the model shows an average"):
        model.half()
    assert_equal(values(model), shown, "refused")
    average.hide()
    assert_equal(values(model), own, "hidden")
    model.half()
    with pytest.raises(ShardingError, match=r"AveragedWeights\.show: the module shows"):
        average.show()
    expected = values(model.float())
    unshard_model(model)
    for _ in range(2):
        for use in (partial(average.update, 0.5), average.show, average.rows):
            with pytest.raises(EngineStateError, match="unshard_model made it plain"):
                use()
        average.release()
    assert_equal(dict(model.state_dict()), expected, "plain")


def an_average_is_shown_on_ranks_without_rows_too(rank: int, world: int) -> None:
    model = fully_shard(nn.Linear(4, 1, bias=False))
    average = AveragedWeights(model)
    average.update(0.5)
    average.show()
    assert average.is_shown
    with pytest.raises(ShardingError, match="the model shows an average"):
        unshard_model(model)
    average.hide()
    unshard_model(model)


def full_state_dicts_are_plain_and_whole(rank: int, world: int) -> None:
    for sharding in in_turn(4, SHARDINGS):
        state = full_state_dict(sharded(sharding))
        assert bool(state) == (rank == 0)
        everywhere = full_state_dict(sharded(sharding), rank0_only=False)
        assert_equal(everywhere, dict(plain().state_dict()), sharding)
        assert all(type(value) is Tensor for value in everywhere.values())
        assert everywhere["last.weight"] is everywhere["again.weight"]


def what_cannot_be_done_while_sharded_says_how_to_go_on(rank: int, world: int) -> None:
    model = sharded()
    for use in (copy.deepcopy, saved, nn.Module.share_memory, exported, nn.parallel.DistributedDataParallel):
        if use is saved and world == 1:  # which has whole tensors
            continue
        for part in (model, model.block):
            with pytest.raises((EngineStateError, ShardingError), match="unshard_model"):
                use(part)
    unshard_model(model)
    for use in (copy.deepcopy, saved, exported, nn.parallel.DistributedDataParallel, nn.Module.share_memory):
        use(model)


def what_ddp_was_told_to_ignore_is_kept_and_ddp_refused_all_the_same(rank: int, world: int) -> None:
    names = ["1.running_mean"]
    for where in ("instance", "class"):
        block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) if where == "instance" else Ignoring()
        if where == "instance":
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, names)
        fully_shard(block)
        block[1].running_mean.fill_(rank)
        block[1].running_var.fill_(rank + 1)
        broadcast_buffers(block)
        assert torch.equal(block[1].running_mean, torch.full((6,), float(rank)))
        assert torch.equal(block[1].running_var, torch.ones(6))
        with pytest.raises(ShardingError, match="DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(block)
        unshard_model(block)
        assert block._ddp_params_and_buffers_to_ignore is (
            names if where == "instance" else Ignoring._ddp_params_and_buffers_to_ignore
        )
        nn.parallel.DistributedDataParallel(block)


class Ignoring(nn.Sequential):
    """Says in its class what DistributedDataParallel shall leave alone."""

    _ddp_params_and_buffers_to_ignore = ("1.running_mean",)

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6))


def saved(module: nn.Module) -> None:
    torch.save(module.state_dict(), io.BytesIO())


def exported(module: nn.Module) -> None:
    torch.export.export(module.eval(), (torch.ones(3, 4 if isinstance(module, Model) else 6),))


CASES = [
    conversions_to_what_it_is_already_change_nothing,
    shards_are_converted_and_come_back_as_in_plain_pytorch,
    what_a_conversion_computes_is_written,
    a_part_may_be_converted_alone,
    what_is_said_of_a_converted_parameter_holds,
    a_converted_parameter_has_its_gradient_and_its_optimizer_state,
    a_converted_model_is_not_stepped,
    memory_that_is_shared_with_processes_is_still_refused,
    modules_are_freed_at_once,
    an_unsharded_model_is_a_plain_one,
    an_unsharded_model_has_the_parameters_that_it_was_built_with,
    what_was_put_where_a_shard_was_stays,
    what_was_put_where_a_shard_was_is_named,
    a_model_in_use_is_not_unsharded,
    an_unsharded_model_can_be_exported_and_sharded_again,
    a_converted_model_is_unsharded_as_it_is,
    only_whole_roots_are_unsharded,
    an_average_is_hidden_before_the_sharding_ends_and_ends_with_it,
    an_average_is_shown_on_ranks_without_rows_too,
    full_state_dicts_are_plain_and_whole,
    what_cannot_be_done_while_sharded_says_how_to_go_on,
    what_ddp_was_told_to_ignore_is_kept_and_ddp_refused_all_the_same,
]
WORLDS = {1: thinned(CASES, 3), 2: CASES}


@by_world(WORLDS)
def test_conversion(world: int, case: Any) -> None:
    check(WORLDS, world, case)
