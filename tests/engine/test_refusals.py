"""What cannot be right is refused with a message, and what looks alike is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lightning_mfsdp.engine import (
    EngineStateError,
    MixedPrecisionPolicy,
    ShardingError,
    around_backward,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    fully_shard_units,
    no_sync,
    sharded_parameters,
)
from tests.engine.cases import device_type
from tests.engine.internals import context_of
from tests.engine.worlds import by_world, check
from tests.helpers.chain import STRATEGIES, adamw, inputs, loss_of, plain_chain, sharded_chain, train, weights


class ReturnsItsWeight(nn.Linear):
    """A unit whose result is a view of its own memory, or a copy."""

    copies = False

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.clone() if self.copies else self.weight[:2]


def gradients_of_gradients_need_whole_weights(rank: int, world: int) -> None:
    x = inputs(0, rank).requires_grad_()
    model = sharded_chain()
    (slope,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    with (
        pytest.raises(EngineStateError, match=r'create_graph=True.*sharding="optim_grads"'),
        around_backward(model),
    ):
        slope.square().sum().backward()
    reference, whole = plain_chain(), sharded_chain(sharding="optim_grads")
    expected = torch.autograd.grad(loss_of(reference, x), x, create_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss_of(whole, x), x, create_graph=True)[0], expected)


def two_parameters_over_one_memory_are_refused_by_name(rank: int, world: int) -> None:
    def tied(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        change(module)
        return module

    def by_data(module: nn.Sequential) -> None:
        module[1].weight.data = module[0].weight.data

    def overlapping(module: nn.Sequential) -> None:
        memory = torch.randn(100)
        module[0].weight.data, module[1].weight.data = memory[:64].view(8, 8), memory[36:].view(8, 8)

    def side_by_side(module: nn.Sequential) -> None:
        memory = torch.randn(128)
        module[0].weight.data, module[1].weight.data = memory[:64].view(8, 8), memory[64:].view(8, 8)

    for change in (by_data, overlapping):
        for shard in (fully_shard, lambda module: fully_shard_units(module, [module[0]])):
            with pytest.raises(
                ShardingError,
                match=r"parameters 0\.weight and 1\.weight of Sequential are two objects over the same memory",
            ):
                shard(tied(change))
    assert fully_shard(tied(side_by_side))
    columns = torch.randn(8, 16)  # of one projection: they lie between each other
    fused = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fused[0].weight, fused[1].weight = nn.Parameter(columns[:, :8]), nn.Parameter(columns[:, 8:])
    assert fully_shard(fused)
    constants = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in constants:
        layer.frequencies = nn.Parameter(columns[0], requires_grad=False)
    assert fully_shard(constants)
    one = tied(lambda module: setattr(module[1], "weight", module[0].weight))
    assert fully_shard(one)[1].weight is one[0].weight
    with torch.device("meta"):
        meta = tied(lambda _: None)
    assert fully_shard(meta)


def other_tensors_in_the_memory_of_a_parameter_are_told(rank: int, world: int) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].kept = module[0].weight.detach()[:2]
    with pytest.warns(
        UserWarning, match=r"1\.kept of Sequential lies in the memory of parameter 0\.weight, which sharding moves"
    ):
        fully_shard(module)
    sparse = nn.Sequential(nn.Linear(8, 8))
    sparse.adjacent = torch.eye(8).to_sparse()
    assert fully_shard(sparse)
    normed = nn.utils.spectral_norm(nn.Linear(8, 8))  # it keeps the weight's data until its first forward
    assert fully_shard(nn.Sequential(normed))


def a_unit_may_not_return_its_own_memory(rank: int, world: int) -> None:
    module = fully_shard(ReturnsItsWeight(8, 8))
    with pytest.raises(EngineStateError, match=r"returned one of its own parameters.*clone"):
        module(inputs(0, rank))
    copying = ReturnsItsWeight(8, 8)
    copying.copies = True
    fully_shard(copying)(inputs(0, rank)).sum().backward()
    weight = sharded_parameters(copying)[0]
    assert len(weight.rows) == 0 or weight.grad.eq(1).all()


def weights_tied_across_roots_are_refused(rank: int, world: int) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    fully_shard(first)
    fully_shard(second)
    with pytest.raises(EngineStateError, match=r"a unit of another root.*module around both"):
        second(inputs(0, rank))


def an_embedding_that_rescales_its_rows_is_refused(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Embedding(5, 8, max_norm=1.0), nn.Linear(8, 8))
    with pytest.raises(
        ShardingError, match=r"parameter 0\.weight of Sequential belongs to an embedding with max_norm=1\.0"
    ):
        fully_shard(model)


def gradients_of_a_frozen_optimizers_unit_do_not_reach_the_next_step(rank: int, world: int) -> None:
    """As `LightningModule.toggle_optimizer` freezes: what the optimizer holds, from the very first step on."""
    for sharding in STRATEGIES:
        models = plain_chain(), sharded_chain(sharding=sharding)
        optimizers = [
            [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.layers[:2], model.layers[2:])]
            for model in models
        ]
        for optimizer in optimizers[1]:
            fully_shard_optimizer(optimizer)
        for step in range(3):
            for model, pair in zip(models, optimizers, strict=True):
                for active, idle in (pair, pair[::-1]):
                    for parameter in idle.param_groups[0]["params"]:
                        parameter.requires_grad = False
                    loss_of(model, inputs(step)).backward()
                    for parameter in idle.param_groups[0]["params"]:
                        parameter.requires_grad = True
                    active.step()
                    active.zero_grad()
        found = weights(models[1])
        for name, parameter in models[0].named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=f"{sharding} {name}")


def replaced_parameters_are_noticed(rank: int, world: int) -> None:
    model = sharded_chain()
    model.layers[0]._parameters["weight"] = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(EngineStateError, match=r"weight was replaced after fully_shard"):
        model(inputs(0, rank))


def a_frozen_half_precision_parameter_cannot_be_trained_later(rank: int, world: int) -> None:
    layer = nn.Linear(8, 8).bfloat16().requires_grad_(False)
    fully_shard(layer)
    with pytest.raises(EngineStateError, match=r"frozen when fully_shard was called.*unfreeze it before"):
        layer.weight.requires_grad = True


def cleared_gradients_stay_cleared_where_dtypes_differ(rank: int, world: int) -> None:
    """The optimizer's gradient is a copy of the accumulated one; what is done to the copy counts."""
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    norms = []
    for waits in (False, True):
        model = sharded_chain(policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(model, inputs(0, rank)).backward()
        optimizer.zero_grad(set_to_none=False)
        if waits:
            with no_sync(model):
                (0.0 * loss_of(model, inputs(1, rank))).backward()
        loss_of(model, inputs(2, rank)).backward()
        norms.append(clip_grad_norm_(model, 1e9))
    torch.testing.assert_close(norms[0], norms[1], rtol=0.02, atol=0)


def a_forgotten_optimizer_is_slower_and_not_wrong(rank: int, world: int) -> None:
    """Steps of an optimizer that nobody registered are seen, also after a forward without backward and beside a registered one."""
    for strategy in ("optim", "optim_grads_params"):
        model, reference = sharded_chain(sharding=strategy), plain_chain()
        half = len(list(model.parameters())) // 2
        made = [
            [torch.optim.SGD(part, lr=0.1) for part in (parameters[:half], parameters[half:])]
            for parameters in (list(model.parameters()), list(reference.parameters()))
        ]
        fully_shard_optimizer(made[0][0])
        for step in range(3):
            model(inputs(9, rank))
            loss_of(model, inputs(step)).backward()
            loss_of(reference, inputs(step)).backward()
            for optimizer in (*made[0], *made[1]):
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(model(inputs(3)), reference(inputs(3)), rtol=1e-5, atol=1e-6)


def wrappers_that_reduce_by_themselves_are_refused(rank: int, world: int) -> None:
    """What a model may bring along from FSDPStrategy or DDP."""
    for wrap in (DistributedDataParallel, partial(FullyShardedDataParallel, device_id=torch.device(device_type()))):
        name = getattr(wrap, "func", wrap).__name__
        model = plain_chain()
        model.layers[1] = wrap(model.layers[1])
        with pytest.raises(ShardingError, match=rf"layers\.1 of Chain is wrapped in {name}.*Leave the wrapper out"):
            fully_shard(model)
        with pytest.raises(ShardingError, match=f"the module of {name} is wrapped"):
            fully_shard(model.layers[1])


def ignored_parameters_may_be_a_generator(rank: int, world: int) -> None:
    model = plain_chain()
    fully_shard_units(model, list(model.layers), ignored_parameters=model.out.parameters())
    assert {view.name for view in sharded_parameters(model)} == {
        f"layers.{index}.{key}" for index in range(4) for key in ("weight", "bias")
    }


def a_unit_that_is_kept_in_fp32_casts_by_itself(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, fp32_modules=(nn.LayerNorm, nn.Linear))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for made in (nn.LayerNorm(8), nn.Linear(8, 8)):
        expected = made(x).bfloat16()
        assert torch.equal(fully_shard(made, policy=policy)(x), expected)
    cast = fully_shard(nn.LayerNorm(8), policy=replace(policy, fp32_modules=()))
    assert torch.equal(cast(x), F.layer_norm(x.bfloat16(), (8,)))


def norms_of_parameters_that_lie_elsewhere_agree_on_a_dtype(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float64)
    model = nn.Sequential(nn.Linear(8, 1, bias=False), nn.Linear(1, 4)).double()
    fully_shard(model, policy=policy)
    model(inputs(0, rank).double()).sum().backward()
    norms = [clip_grad_norm_([parameter], 1e9) for parameter in model.parameters()]
    assert all(norm.dtype is torch.float64 for norm in norms)


def passes_without_backward_leave_no_record(rank: int, world: int) -> None:
    """Evaluation, and steps that are like the last one, change neither the plan nor the memory behind it."""
    model = sharded_chain()
    optimizer = adamw(model)
    pool = context_of(model).lane.pool
    with torch.no_grad():
        for step in range(3):
            model(inputs(step, rank))
    assert not pool._conflicts
    train(model, optimizer, range(2), rank)
    fixed = [slot.memory.data_ptr() for slot in pool._fixed]
    for step in range(3):
        with torch.no_grad():
            model(inputs(step, rank))
        (loss_of(model, inputs(step, rank)) + loss_of(model, inputs(step + 1, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            fixed = [slot.memory.data_ptr() for slot in pool._fixed]
    assert [slot.memory.data_ptr() for slot in pool._fixed] == fixed


def an_optimizer_from_before_sharding_is_refused_at_its_first_use(rank: int, world: int) -> None:
    """It would step objects that the module has no longer, and train nothing without a word."""
    for strategy in STRATEGIES:
        for use in ("step", "zero_grad"):
            model = plain_chain()
            optimizer = torch.optim.AdamW(model.parameters())
            fully_shard(model, sharding=strategy)
            optimizer.zero_grad()  # there is none
            loss_of(model, inputs(0)).backward()
            with pytest.raises(EngineStateError, match=r"layers\.0\.weight .*make it after fully_shard"):
                getattr(optimizer, use)()
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    model.to("cpu").zero_grad()  # the tied weight is shown as it was until the module around it is sharded
    fully_shard(model)
    assert [parameter.grad for parameter in model.parameters()] == [None]
    model = plain_chain()
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    optimizer = fully_shard_optimizer(optimizer)
    optimizer.zero_grad()
    before = model.layers[0].weight.full_tensor()
    loss_of(model, inputs(0)).backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].weight.full_tensor(), before)


CASES = tuple(
    value for name, value in list(globals().items()) if getattr(value, "__code__", None) and name[0].islower()
)
CASES = tuple(
    case for case in CASES if case.__module__ == __name__ and case.__code__.co_varnames[:2] == ("rank", "world")
)
WORLDS = {2: CASES}


@by_world(WORLDS)
def test_refusals(world, case):
    check(WORLDS, world, case)
