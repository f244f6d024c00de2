"""Layers that come into a model between two fits are sharded when the next one begins; those that come later are named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy, ShardingError, sharded_parameters, units, unshard_model
from lightning_mfsdp.callbacks import ShardedEMA
from lightning_mfsdp.engine import AveragedWeights, fully_shard, no_sync, shard_added
from tests.engine.worlds import by_world, check
from tests.helpers.nights import NIGHT
from tests.lightning.models import (
    CLASSES,
    DIM,
    Block,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    train_plainly,
)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2)
        self.adds = False

    def on_train_start(self) -> None:
        if self.adds:
            self.head = nn.Sequential(self.head, nn.Linear(2, 2))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.head(self.body(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Model, **options: Any) -> None:
    strategy = MFSDPStrategy(ignored_parameters=["frozen.*"], **options)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, torch.ones(2, 2, 4))


def of_a_replaced_head_where_layers_are_compiled(rank: int, world: int) -> None:
    model = Model()
    fit(model)
    fit(model)
    model.head = nn.Linear(4, 2)
    model.body.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(
        ValueError, match=r"Model: body\.extra, head\.weight, head\.bias came into the model after it was sharded"
    ):
        fit(model, compile=True)
    fit(unshard_model(model))
    names = {name for name, _ in model.named_parameters() if not name.startswith("frozen")}
    assert {view.name for view in sharded_parameters(model)} == names


def of_a_layer_wrapped_when_training_starts(rank: int, world: int) -> None:
    model = Model()
    model.adds = True
    with pytest.raises(
        ValueError, match=r"Model: head\.1\.weight, head\.1\.bias came into the model after it was sharded"
    ):
        fit(model)


WORLDS = {1: (of_a_replaced_head_where_layers_are_compiled, of_a_layer_wrapped_when_training_starts)}


@by_world(WORLDS)
def test_parameters_are_named(world, case):
    check(WORLDS, world, case)


# -- between two fits -----------------------------------------------------------------------------------------------------


class Tied(Classifier):
    """The table of a unit is shown by a module of the root, too, and by another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].linear.weight = self.blocks[0].linear.weight
        self.after = nn.Linear(DIM, DIM)
        self.after.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.after(x) * self.scale + self.shift)


def a_new_head(model: Any) -> list[str]:
    """More rows than before, so that rows of the other parameters of the root move to other ranks."""
    model.head = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, CLASSES))
    return []


def a_new_block(model: Any) -> list[str]:
    model.blocks.append(Block())
    return ["blocks.2"]


def another_block_in_place_of_one(model: Any) -> list[str]:
    model.blocks[1] = Block()
    return ["blocks.1"]


def a_layer_in_a_block(model: Any) -> list[str]:
    model.blocks[0].linear = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    return []


def a_parameter_in_place_of_one(model: Any) -> list[str]:
    model.scale = nn.Parameter(torch.full((DIM,), 1.5))
    model.blocks[0].norm.weight = nn.Parameter(torch.full((DIM,), 0.5))
    return []


def layers_made_of_former_weights(model: Any) -> list[str]:
    head = nn.Linear(DIM, CLASSES)
    head.weight = nn.Parameter(model.head.weight.detach().clone())
    with torch.no_grad():
        head.bias[:2].copy_(model.head.bias[1:3])
    model.head = head
    model.blocks[0].norm.weight = model.blocks[1].norm.weight = nn.Parameter(model.blocks[0].norm.weight.detach() * 0.5)
    model.scale = nn.Parameter(model.scale.data + 1, requires_grad=False)
    return []


def two_fits(
    model: Any, change: Callable[[Any], list[str]], rank: int, world: int, strategy: Callable[[], Any]
) -> list[str]:
    """A fit, a change of the model, and another fit."""
    for step in range(2):
        if step:
            torch.manual_seed(5)
            new_units = change(model)
        trainer = make_trainer("", world, strategy=strategy(), max_epochs=1)
        trainer.fit(model, loader(8 // world, 16, rank, world))
    trainer.validate(model, loader(8 // world, 16, rank, world), verbose=False)
    return new_units


SHARDINGS = ("optim_grads_params", "optim_grads", "no_shard")


def _trains_as_one_process(
    kind: type[LightningModule], change: Callable[[Any], list[str]], rank: int, world: int, turn: int
) -> None:
    """Under each sharding at night, on a push under the one whose turn it is."""
    plain = seeded(kind)
    for step in range(2):
        if step:
            torch.manual_seed(5)
            change(plain)
        train_plainly(plain, 8, 2)
    for sharding in SHARDINGS if NIGHT else [SHARDINGS[turn]]:
        model = seeded(kind)
        new_units = two_fits(model, change, rank, world, lambda: MFSDPStrategy(units=["Block"], sharding=sharding))  # noqa: B023
        names = [unit.name for unit in units(model)]
        assert set(new_units) <= set(names), names
        assert len(names) == 1 + len(model.blocks), names
        assert {name for view in sharded_parameters(model) for name in view.names} == {
            name for name, _ in model.named_parameters(remove_duplicate=False)
        }
        weights = full_state(model)
        for name, value in plain.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-6, msg=f"{sharding} {name}")


def a_head_is_replaced(rank: int, world: int) -> None:
    _trains_as_one_process(Classifier, a_new_head, rank, world, 0)


def a_block_is_added(rank: int, world: int) -> None:
    _trains_as_one_process(Classifier, a_new_block, rank, world, 1)


def a_block_is_replaced(rank: int, world: int) -> None:
    _trains_as_one_process(Classifier, another_block_in_place_of_one, rank, world, 2)


def a_layer_of_a_block_is_replaced(rank: int, world: int) -> None:
    _trains_as_one_process(Classifier, a_layer_in_a_block, rank, world, 0)


def parameters_are_replaced(rank: int, world: int) -> None:
    _trains_as_one_process(Classifier, a_parameter_in_place_of_one, rank, world, 1)


def layers_are_made_of_former_weights(rank: int, world: int) -> None:
    _trains_as_one_process(Classifier, layers_made_of_former_weights, rank, world, 0)


def a_head_is_replaced_where_units_share_a_weight(rank: int, world: int) -> None:
    _trains_as_one_process(Tied, a_new_head, rank, world, 2)


def parameters_are_replaced_where_units_share_a_weight(rank: int, world: int) -> None:
    _trains_as_one_process(Tied, a_parameter_in_place_of_one, rank, world, 0)


def ranks_with_other_layers_are_told(rank: int, world: int) -> None:
    model = seeded()
    options = {"strategy": MFSDPStrategy(units=["Block"]), "max_epochs": 1}
    make_trainer("", world, **options).fit(model, loader(4, 16, rank, world))
    model.head = nn.Linear(DIM, CLASSES, bias=bool(rank))
    with pytest.raises(
        ShardingError, match=r"since Classifier was sharded, other parameters came into it on this rank"
    ):
        make_trainer("", world, strategy=MFSDPStrategy(units=["Block"])).fit(model, loader(4, 16, rank, world))


def new_layers_are_cast_and_old_optimizers_told(rank: int, world: int) -> None:
    model = seeded()
    options: dict[str, Any] = {"precision": "bf16-true", "max_epochs": 1}
    trainer = make_trainer("", world, strategy=MFSDPStrategy(units=["Block"]), **options)
    trainer.fit(model, loader(4, 16, rank, world))
    former = trainer.optimizers[0]
    a_new_head(model)
    make_trainer("", world, strategy=MFSDPStrategy(units=["Block"]), **options).fit(model, loader(4, 16, rank, world))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ShardingError):
        former.step()


def an_average_and_gradients_of_ones_own_loop_begin_again(rank: int, world: int) -> None:
    """Nothing is averaged of rows that are no longer the model's, and no gradient is that of one microbatch and half of another."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fully_shard(model[0])
    fully_shard(model)
    average = AveragedWeights(model, dtype=torch.float32)
    average.update(0.5)
    with no_sync(model):
        model(torch.ones(2, 3)).sum().backward()
    model.append(nn.Linear(3, 3))
    shard_added(model, [])
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    with (
        pytest.warns(UserWarning, match=r"the average of 1\.weight, 1\.bias begins again")
        if rank == 0
        else nullcontext()
    ):
        average.update(0.5)
    assert set(average.rows()) == {view.name for view in sharded_parameters(model)}
    for name, rows in average.rows().items():
        assert name.startswith("0.") or torch.equal(rows, torch.full_like(rows, 2.0)), name
    model(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def hooks_and_attributes_of_parameters_that_are_sharded_again_stay(rank: int, world: int) -> None:
    for sharding in ("no_shard", "optim_grads_params"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3))
        model[2].bias.group = "before"
        fully_shard(model[1], sharding=sharding)
        fully_shard(model, sharding=sharding)
        calls: list[str] = []
        handles = {}
        for name, parameter in model.named_parameters():
            parameter.mark = name
            handles[name] = parameter.register_post_accumulate_grad_hook(
                lambda parameter, calls=calls: calls.append(parameter.mark if parameter.grad is not None else "")
            )
            parameter.register_hook(lambda gradient: gradient * 2)
        model[2].bias.group = "changed"
        model[1].append(nn.Linear(3, 3))
        model[0].weight = nn.Parameter(torch.ones(3, 3))
        shard_added(model, [], sharding=sharding)
        names = sorted(handles.keys() - {"0.weight"})
        assert [getattr(model.get_parameter(name), "mark", None) for name in names] == names
        assert model[2].bias.group == "changed"
        assert not hasattr(model[0].weight, "mark"), "another parameter is there"
        model(torch.ones(2, 3)).sum().backward()
        assert sorted(calls) == names
        assert model[2].bias.grad.full_tensor().tolist() == [4.0] * 3, "twice the number of rows"
        handles["0.bias"].remove()
        calls.clear()
        model(torch.ones(2, 3)).sum().backward()
        assert sorted(calls) == names[1:]
        unshard_model(model)
        assert vars(model[2].bias) == {"group": "changed", "mark": "2.bias"}


def an_average_of_weights_that_were_sharded_again_begins_again(rank: int, world: int) -> None:
    model, ema = seeded(), ShardedEMA(0.5)
    make_trainer("", world, strategy=MFSDPStrategy(units=["Block"]), callbacks=[ema]).fit(
        model, loader(4, 16, rank, world)
    )
    blocks = {name: rows.clone() for name, rows in ema.parameter_state.rows().items() if name.startswith("blocks")}
    a_new_head(model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = make_trainer(
            "", world, strategy=MFSDPStrategy(units=["Block"]), callbacks=[ema], limit_train_batches=1
        )
        trainer.fit(model, loader(4, 16, rank, world))
    said = [str(each.message) for each in warned if "begins again" in str(each.message)]
    assert len(said) == (rank == 0), said
    rows = ema.parameter_state.rows()
    views = {view.name: view for view in sharded_parameters(model)}
    assert rows.keys() == views.keys()
    for name, view in views.items():
        expected = view.main if name not in blocks else (blocks[name] + view.main) / 2
        torch.testing.assert_close(rows[name], expected)


CASES = (
    a_head_is_replaced,
    a_block_is_added,
    a_block_is_replaced,
    a_layer_of_a_block_is_replaced,
    parameters_are_replaced,
    a_head_is_replaced_where_units_share_a_weight,
    parameters_are_replaced_where_units_share_a_weight,
    new_layers_are_cast_and_old_optimizers_told,
    layers_are_made_of_former_weights,
    an_average_of_weights_that_were_sharded_again_begins_again,
    an_average_and_gradients_of_ones_own_loop_begin_again,
    hooks_and_attributes_of_parameters_that_are_sharded_again_stay,
)
BETWEEN = {1: (a_head_is_replaced,), 2: (*CASES, ranks_with_other_layers_are_told)}


@by_world(BETWEEN)
def test_what_is_added_between_two_fits_is_sharded(world, case):
    check(BETWEEN, world, case)
