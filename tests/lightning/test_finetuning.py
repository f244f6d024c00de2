"""Freezing and unfreezing: by Lightning's callbacks, by hooks, and before training; against one process without sharding."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn

from lightning_mfsdp import MFSDPStrategy, ShardingError, fully_shard, fully_shard_optimizer, sharded_parameters
from lightning_mfsdp.callbacks import ShardedBackboneFinetuning, ShardedEMA, ShardedFinetuning
from tests.helpers.distributed import run_distributed
from tests.helpers.optimizer_state import state_of_rows
from tests.lightning.models import (
    FOREIGN_WARNINGS,
    Block,
    Classifier,
    full_state,
    loader,
    make_trainer,
    seeded,
    strict_warnings,
)

EPOCHS = 4
EPOCH = 16  # samples

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]


class Transfer(Classifier):
    """A backbone with batch norms, of which only the head is in the optimizer at first. Equal values in several biases."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(self.inputs, nn.BatchNorm1d(12), *self.blocks, nn.BatchNorm1d(12), Block(12))
        del self.inputs, self.blocks
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.zeros_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) * self.scale + self.shift)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([*self.head.parameters(), self.scale], lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Step(BaseFinetuning):
    """Lightning's own: one part of the backbone after the other."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[4:], optimizer, lr=0.01, train_bn=False)
        if epoch == 3:
            self.unfreeze_and_add_param_group(module.backbone[:4], optimizer, train_bn=True)


class ShardedStep(ShardedFinetuning):
    freeze_before_training = Step.freeze_before_training
    finetune_function = Step.finetune_function


class ByHand(Transfer):
    """Hooks of the module freeze and unfreeze, and add the group with a generator of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda parameter: parameter.requires_grad, self.parameters()), lr=0.05)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)
            self.optimizers().add_param_group({"params": self.backbone.parameters(), "lr": 0.02})
        if self.current_epoch == 2:
            self.backbone[0].requires_grad_(False)


class FrozenFeatures(LightningModule):
    """Frozen by LightningModule.freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 12), nn.BatchNorm1d(12), Block())
        self.freeze()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class OnFrozen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = FrozenFeatures()


def backbone_callback(kind: type[BackboneFinetuning]) -> BackboneFinetuning:
    return kind(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, lambda_func=lambda epoch: 1.5, train_bn=False)


CASES: dict[str, tuple[type[LightningModule], Any, Any]] = {
    "backbone": (
        Transfer,
        lambda: backbone_callback(BackboneFinetuning),
        lambda: backbone_callback(ShardedBackboneFinetuning),
    ),
    "base": (Transfer, Step, ShardedStep),
    "Lightning's backbone": (
        Transfer,
        lambda: backbone_callback(BackboneFinetuning),
        lambda: backbone_callback(BackboneFinetuning),
    ),
    "Lightning's base": (Transfer, Step, Step),
    "by hand": (ByHand, None, None),
    "module.freeze": (OnFrozen, None, None),
}


def fit(model: Any, world_size: int, rank: int, callback: Any, *, strategy: Any, **options: Any) -> Trainer:
    callbacks = options.pop("callbacks", [])
    trainer = make_trainer(
        "",
        world_size,
        **{"max_epochs": EPOCHS, "strategy": strategy, "callbacks": [*callbacks, *([callback()] if callback else [])]}
        | {key: value for key, value in options.items() if key != "ckpt_path"},
    )
    trainer.fit(model, loader(8 // world_size, EPOCH, rank, world_size), ckpt_path=options.get("ckpt_path"))
    return trainer


def described(trainer: Trainer, model: LightningModule) -> dict[str, Any]:
    """What can be compared with one process: options of groups, number of parameters in each, what is trained; statistics."""
    return {
        "groups": [
            {key: value for key, value in group.items() if key != "params"} | {"count": len(group["params"])}
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ],
        "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "tracking": [
            name
            for name, part in model.named_modules()
            if isinstance(part, nn.BatchNorm1d) and part.track_running_stats
        ],
    }


def plain_and_sharded(rank: int, world_size: int) -> dict[str, Any]:
    """Each case without sharding, in this process alone, and with."""
    strict_warnings()
    warnings.filterwarnings("ignore", message="Found .* in eval mode")  # what LightningModule.freeze does
    found: dict[Any, Any] = {}
    for name, (model_class, plain_callback, sharded_callback) in CASES.items():
        plain = seeded(model_class)
        if world_size == 1:
            trainer = fit(plain, 1, 0, plain_callback, strategy="auto")
            expected = {name: value.detach().clone() for name, value in plain.named_parameters()}
            found[name, "plain"] = described(trainer, plain) | {"weights": expected}
        model = seeded(model_class)
        trainer = fit(model, world_size, rank, sharded_callback, strategy=MFSDPStrategy(units=["Block"]))
        state = state_of_rows(trainer.optimizers[0])
        found[name, "sharded"] = described(trainer, model) | {
            "weights": full_state(model),
            "local": all(type(stepped) is nn.Parameter for stepped in state),
            "shown": {id(one) for group in trainer.optimizers[0].param_groups for one in group["params"]}
            <= {id(one) for one in model.parameters()},
            "state": {view.name for view in sharded_parameters(model) if view.local in state},
        }
    return found


def on_one_rank(rank: int, world_size: int) -> dict[Any, Any]:
    return plain_and_sharded(rank, world_size) | {"twice": refusals()}


def refusals() -> str:
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW([model.weight], lr=0.1))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.weight]})
    optimizer.add_param_group({"params": [model.bias]})
    optimizer.param_groups[1]["params"].append(model.weight)
    with pytest.raises(ShardingError) as twice:
        optimizer.step()
    with pytest.warns(UserWarning, match="1 of 1 parameters to be unfrozen are in the optimizer already"):
        assert ShardedFinetuning.filter_on_optimizer(optimizer, iter([model.bias])) == []
    return str(twice.value)


def test_a_parameter_in_two_groups_is_refused(on_one: dict[Any, Any]) -> None:
    assert "holds parameter weight twice" in on_one["twice"]


@pytest.fixture(scope="module")
def on_one() -> dict[Any, Any]:
    return run_distributed(on_one_rank, 1)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_one_rank_trains_to_the_bit_like_lightning_without_sharding(on_one: dict[Any, Any], case: str) -> None:
    plain, sharded = on_one[case, "plain"], on_one[case, "sharded"]
    assert sharded["groups"] == plain["groups"]
    assert sharded["trained"] == plain["trained"]
    assert sharded["tracking"] == plain["tracking"]
    assert_same(sharded["buffers"], plain["buffers"])
    assert_same(sharded["weights"], plain["weights"])


@pytest.mark.parametrize("case", CASES)
def test_what_is_added_later_is_stepped_as_plain_rows_and_what_is_frozen_has_no_state(
    on_one: dict[Any, Any], case: str
) -> None:
    sharded = on_one[case, "sharded"]
    assert sharded["local"]
    assert sharded["shown"]
    never = {"inputs.layers.0.weight"} if case == "module.freeze" else set()
    assert not sharded["state"] & never
    if case == "base":
        assert sharded["state"] >= {"backbone.0.weight", "backbone.1.weight", "backbone.5.linear.weight"}
        assert "backbone.4.weight" not in sharded["state"]  # a batch norm that is not trained
        assert [group["count"] for group in sharded["groups"]] == [3, 4, 12]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# -- resuming ----------------------------------------------------------------------------------------------------------


def straight_and_resumed(rank: int, world_size: int, folder: str) -> dict[Any, Any]:
    """To the end, and from each epoch's checkpoint to the end."""
    strict_warnings()
    warnings.filterwarnings("ignore", message="Found .* in eval mode")
    found: dict[Any, Any] = {}
    for kind in ("sharded", "full"):
        strategy = {"units": ["Block"], "state_dict_type": kind}
        saver = ModelCheckpoint(dirpath=f"{folder}/{kind}", filename="{epoch}", save_top_k=-1)
        ema = ShardedEMA(0.5)
        model = seeded(Transfer)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver, ema]}
        trainer = fit(model, world_size, rank, ShardedStep, strategy=MFSDPStrategy(**strategy), **options)  # type: ignore[arg-type]
        found[kind, "straight"] = state_of(trainer, model, ema)
        # After epoch 0 only the head is trained, after epoch 1 a part of the backbone too.
        for epoch in (0, 1) if kind == "sharded" else (1,):
            model, ema = seeded(Transfer), ShardedEMA(0.5)
            path = f"{folder}/{kind}/epoch={epoch}.ckpt"
            options = {"callbacks": [ema], "ckpt_path": path}
            trainer = fit(model, world_size, rank, ShardedStep, strategy=MFSDPStrategy(units=["Block"]), **options)
            found[kind, epoch] = state_of(trainer, model, ema)
    model = seeded(OnFrozen)
    fit(model, world_size, rank, None, strategy="mfsdp")
    found["module.freeze"] = full_state(model)
    return found


def state_of(trainer: Trainer, model: LightningModule, ema: ShardedEMA) -> dict[str, Any]:
    state = state_of_rows(trainer.optimizers[0])
    return described(trainer, model) | {
        "weights": {view.name: view.main.clone() for view in sharded_parameters(model)},
        "state": {
            f"{view.name}.{key}": value.clone()
            for view in sharded_parameters(model)
            for key, value in state.get(view.local, {}).items()
        },
        "average": {name: value.clone() for name, value in ema.parameter_state.rows().items()},
    }


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_distributed(straight_and_resumed, 2, str(tmp_path_factory.mktemp("finetuning")))


@pytest.mark.parametrize("resumed", [("sharded", 0), ("sharded", 1), ("full", 1)], ids=str)
def test_a_run_resumed_in_the_middle_ends_like_a_straight_one_to_the_bit(
    on_two: list[dict[Any, Any]], resumed: tuple[str, int]
) -> None:
    for found in on_two:
        actual, expected = found[resumed], found[resumed[0], "straight"]
        for key in ("groups", "trained", "tracking"):
            assert actual[key] == expected[key]
        for key in ("weights", "state", "average"):
            assert_same(actual[key], expected[key])


def test_unfrozen_parameters_join_an_average(on_two: list[dict[Any, Any]]) -> None:
    average = on_two[0]["sharded", "straight"]["average"]
    assert {"scale", "backbone.0.weight", "backbone.5.linear.weight"} <= set(average)


def test_two_ranks_train_on_frozen_features_like_one(on_one: dict[Any, Any], on_two: list[dict[Any, Any]]) -> None:
    for name, value in on_one["module.freeze", "plain"]["weights"].items():
        torch.testing.assert_close(on_two[0]["module.freeze"][name], value, rtol=1e-4, atol=1e-5)
