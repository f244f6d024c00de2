"""Float8Linear under the engine and under the Trainer, beside one process and beside the same layers chosen by hand."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mfsdp import (
    MFSDPPrecision,
    MFSDPStrategy,
    MixedPrecisionPolicy,
    Recompute,
    fully_shard,
    fully_shard_optimizer,
    unshard,
)
from lightning_mfsdp.fabric import MFSDPFabricPrecision, MFSDPFabricStrategy
from lightning_mfsdp.float8 import Float8Linear, float8_linear, replace_linear_layers
from tests.helpers.distributed import run_distributed
from tests.lightning.models import make_trainer

WIDE = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def stack(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(width), Block(width), nn.Linear(width, 16))


# -- the engine --------------------------------------------------------------------------------------------------------


def trains_as_replicas(rank: int, world: int) -> None:
    for sharding in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        replica, model = stack(), stack()
        for each in (replica, model):
            assert len(replace_linear_layers(each, keep_high_precision=["2"], least_size=16)) == 4
        for block in (model[0], model[1], model):
            fully_shard(block, sharding=sharding)
        reference = torch.optim.AdamW(replica.parameters(), lr=0.01)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(4):
            x = torch.randn(6, 5, 32, generator=torch.Generator().manual_seed(10 * step + rank))
            losses = [each(x).square().mean() for each in (replica, model)]
            assert torch.equal(*losses), (sharding, step)
            for loss in losses:
                loss.backward()
            for parameter in replica.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            for each in (reference, optimizer):
                each.step()
                each.zero_grad()
        with unshard(model):
            for (name, one), other in zip(replica.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(one, other), (sharding, name)


def test_sharded_layers_train_to_the_bits_of_replicas():
    run_distributed(trains_as_replicas, 2)


def layers_are_called_by_themselves(rank: int, world: int) -> None:
    """Outside of the forward of their unit, where their weights are sharded."""
    for trained in (True, False):
        model, parts = stack(), stack()
        for each in (model, parts):
            replace_linear_layers(each, keep_high_precision=["2"], least_size=16)
            each[1].requires_grad_(trained)
            for part in (each[0], each[1], each):
                fully_shard(part)
        optimizers = [fully_shard_optimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, parts)]
        for step in range(3):
            x = torch.randn(6, 5, 32, generator=torch.Generator().manual_seed(10 * step + rank))
            block = parts[1]
            hidden = parts[0](x)
            hidden = hidden + block.down(torch.nn.functional.silu(block.up(block.norm(hidden))))
            losses = [model(x).square().mean(), parts[2](hidden).square().mean()]
            assert torch.equal(*losses), (trained, step)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()


def test_layers_that_are_called_by_themselves_compute_in_8_bits_as_well():
    run_distributed(layers_are_called_by_themselves, 2)


# -- the Trainer -------------------------------------------------------------------------------------------------------


class Model(LightningModule):
    def __init__(self, chosen_by_hand: bool = False) -> None:
        super().__init__()
        self.net = stack(WIDE)
        self.chosen_by_hand = chosen_by_hand
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.chosen_by_hand:
            replace_linear_layers(self.net, keep_high_precision=["2"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        assert output.dtype is torch.bfloat16
        loss = output.float().square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def fit(model: Model, world: int, precision: Any, steps: int = 3, **options: Any) -> Any:
    rows = torch.randn(2, WIDE, generator=torch.Generator().manual_seed(1)).repeat(8, 1)  # each batch is the same
    how = {"plugins": [precision]} if isinstance(precision, MFSDPPrecision) else {"precision": precision}
    strategy = options.pop("strategy", None) or MFSDPStrategy(units=["Block"])
    trainer = make_trainer(tempfile.gettempdir(), world, strategy=strategy, max_steps=steps, max_epochs=9, **how)
    with mock.patch.dict(replace_linear_layers.__kwdefaults__, least_size=16):
        trainer.fit(model, DataLoader(TensorDataset(rows), batch_size=2), **options)
    return trainer


def the_plugin_chooses_layers(rank: int, world: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    rank_zero.log.setLevel(logging.INFO)
    precision = MFSDPPrecision("fp8", keep_high_precision=["net.2"])
    ours, by_hand, plain = Model(), Model(chosen_by_hand=True), Model()
    fit(ours, world, precision)
    fit(by_hand, world, "bf16-mixed")
    fit(plain, world, "bf16-mixed")
    assert ours.losses == by_hand.losses
    assert ours.losses != plain.losses
    assert all(abs(one - other) < 0.02 * other for one, other in zip(ours.losses, plain.losses, strict=True))
    assert isinstance(ours.net[0].up, Float8Linear)
    assert not isinstance(ours.net[2], Float8Linear)
    # Recomputed blocks compute the same, and a second run of the model says nothing new.
    recomputed = Model()
    fit(
        recomputed,
        world,
        precision,
        strategy=MFSDPStrategy(units=["Block"], recompute=Recompute(method="uniform", modules=["net.*"])),
    )
    assert recomputed.losses == ours.losses
    return said


def test_the_precision_fp8_computes_what_layers_chosen_by_hand_do_and_says_which():
    said = run_distributed(the_plugin_chooses_layers, 2)[0]
    wanted = "FP8: 4 linear layers, net.0.up, net.0.down, net.1.up, net.1.down"
    assert [line for line in said if line.startswith("FP8")] == [wanted] * 2, said
    assert any(
        "4 linear layers of class Float8Linear compute in FP8 in any precision: net.0.up" in line for line in said
    )


def checkpoints_are_those_of_other_precisions(rank: int, world: int, folder: str) -> None:
    whole, first = Model(), Model()
    fit(whole, world, MFSDPPrecision("fp8", keep_high_precision=["net.2"]), steps=4)
    path = str(Path(folder, "first"))
    fit(first, world, MFSDPPrecision("fp8", keep_high_precision=["net.2"]), steps=2).save_checkpoint(path)
    rest, other = Model(), Model()
    fit(rest, world, MFSDPPrecision("fp8", keep_high_precision=["net.2"]), steps=4, ckpt_path=path)
    assert first.losses + rest.losses == whole.losses
    fit(other, world, "bf16-mixed", steps=4, ckpt_path=path)
    assert len(other.losses) == 2
    assert other.losses != rest.losses


def test_a_run_resumes_to_the_bit_and_in_another_precision(tmp_path):
    run_distributed(checkpoints_are_those_of_other_precisions, 2, str(tmp_path))


def a_model_is_used_again(rank: int, world: int) -> None:
    """Also where the engine gives layers a forward that writes gradients, and where layers of parts add their bias after the sum."""
    direct = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, direct_weight_gradients=True)
    plan = {"net.*.up": "colwise", "net.*.down": "rowwise"}
    for kept, options in (("net.2", {"policy": direct}), ("net.*.down", {"tensor": 2, "tensor_plan": plan})):
        precision, model = MFSDPPrecision("fp8", keep_high_precision=[kept]), Model()
        strategy = lambda options=options: MFSDPStrategy(units=["Block"], **options)  # noqa: E731
        fit(model, world, precision, strategy=strategy())
        kinds = [type(layer) for layer in model.modules()]
        fit(model, world, precision, strategy=strategy())
        assert kinds == [type(layer) for layer in model.modules()]
        with pytest.raises(
            ValueError, match=r"was sharded with keep_high_precision=\['net.*'\] for FP8, and layers cannot change"
        ):
            fit(model, world, MFSDPPrecision("fp8"), strategy=strategy())
        other = Model()
        fit(other, world, "bf16-mixed", strategy=strategy())
        with pytest.raises(ValueError, match="Model was sharded without FP8, and layers cannot change"):
            fit(other, world, precision, strategy=strategy())
        with pytest.raises(ValueError, match=r"net\.0\.up is sharded already"):
            replace_linear_layers(other, least_size=16)


def test_a_model_is_used_again_with_the_layers_of_its_first_run():
    run_distributed(a_model_is_used_again, 2)


def other_strategies_compute_in_8_bits(rank: int, world: int) -> None:
    model, by_hand = Model(), Model(chosen_by_hand=True)
    fit(model, world, MFSDPPrecision("fp8", keep_high_precision=["net.2"]), strategy="ddp")
    fit(by_hand, world, "bf16-mixed", strategy="ddp")
    assert isinstance(model.net[0].up, Float8Linear)
    assert model.losses == by_hand.losses
    with pytest.raises(ValueError, match="'nothing' matches no linear layer"):
        fit(Model(), world, MFSDPPrecision("fp8", keep_high_precision=["nothing"]), strategy="ddp")


def test_other_strategies_compute_in_8_bits_as_well():
    run_distributed(other_strategies_compute_in_8_bits, 2)


def a_fabric_loop_computes_as_the_trainer(rank: int, world: int) -> None:
    trained, module = Model(), Model()
    fit(trained, world, MFSDPPrecision("fp8", keep_high_precision=["net.2"]))
    strategy, precision = (
        MFSDPFabricStrategy(units=["Block"]),
        MFSDPFabricPrecision("fp8", keep_high_precision=["net.2"]),
    )
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[precision])
    fabric.launch()
    module.configure_model()
    with mock.patch.dict(replace_linear_layers.__kwdefaults__, least_size=16):
        model, optimizer = fabric.setup(module, module.configure_optimizers())
    model.mark_forward_method("training_step")
    rows = torch.randn(2, WIDE, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        fabric.backward(model.training_step([rows], 0))
        optimizer.step()
        optimizer.zero_grad()
    assert module.losses == trained.losses


def test_a_fabric_loop_computes_as_the_trainer():
    run_distributed(a_fabric_loop_computes_as_the_trainer, 2)


def tensor_ranks_multiply_parts_in_8_bits(rank: int, world: int) -> None:
    plan = {"net.*.up": "colwise", "net.*.down": "rowwise"}
    precision = MFSDPPrecision("fp8", keep_high_precision=["net.2"])
    whole, parts, plain = Model(), Model(), Model()
    fit(whole, world, precision)
    for _ in range(2):  # the second time its layers are divided already
        parts.losses.clear()
        parts.load_state_dict(Model().state_dict())
        options = {"tensor": 2, "tensor_plan": plan}
        fit(parts, world, precision, strategy=MFSDPStrategy(units=["Block"], **options))
        assert all(layer.multiply is float8_linear for layer in (parts.net[0].down, parts.net[1].down))
        assert isinstance(parts.net[0].up, Float8Linear)
    fit(plain, world, "bf16-mixed")
    distance = [abs(one - two) / two for one, two in zip(parts.losses, whole.losses, strict=True)]
    assert max(distance) < 0.02, (parts.losses, whole.losses)
    assert parts.losses != plain.losses


def test_tensor_ranks_multiply_their_parts_in_8_bits():
    run_distributed(tensor_ranks_multiply_parts_in_8_bits, 2)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MFSDPPrecision, MFSDPFabricPrecision])
def test_options_that_are_not_of_a_precision_are_refused(kind):
    with pytest.raises(ValueError, match="about FP8 by Transformer Engine"):
        kind("fp8", fp8_weights=True)
    with pytest.raises(ValueError, match="keep_high_precision is about FP8"):
        kind("bf16-mixed", keep_high_precision=["head"])


def test_a_device_without_such_products_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    precision = MFSDPPrecision("fp8")
    precision.connect_device("cuda")
    with pytest.raises(RuntimeError, match="NVIDIA A100 has no products of 8-bit matrices"):
        precision._choose_float8_layers(stack(WIDE))


def test_a_model_without_large_layers_is_refused():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    with pytest.raises(ValueError, match="2 linear layers, and none to compute in 8 bits"):
        MFSDPPrecision("fp8")._choose_float8_layers(model)
