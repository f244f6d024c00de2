"""Precision strings under Fabric: dtypes, autocast, loss scaling that all ranks agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import FSDPPrecision
from torch import Tensor, nn

from lightning_mfsdp import DistributedGradScaler, MFSDPPrecision, MixedPrecisionPolicy, fully_shard, sharded_parameters
from lightning_mfsdp.fabric import MFSDPFabricPrecision, MFSDPFabricStrategy
from tests.engine.worlds import by_world, check
from tests.fabric.loops import batches, launched, train, whole
from tests.lightning.models import Classifier, seeded

# precision: main weight, compute weight, matrix product under autocast or not, gradient of the main weight
DTYPES = {
    "32-true": (torch.float32, torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16, torch.float16, torch.float16),
    "64-true": (torch.float64, torch.float64, torch.float64, torch.float64),
}


class Watched(Classifier):
    """Notes what a linear layer inside a unit computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []
        linear = self.blocks[0].linear
        linear.register_forward_hook(lambda layer, _, output: self.seen.append((layer.weight.dtype, output.dtype)))


def every_string_gives_its_dtypes(rank: int, world_size: int) -> None:
    for name, (main, compute, product, gradient) in DTYPES.items():
        fabric = launched(world_size, precision=name)
        module = seeded(Watched)
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        output = model(torch.ones(2, 3))
        assert output.dtype == torch.float32, name
        fabric.backward(output.sum())
        assert module.seen == [(compute, product)], name
        (view,) = (view for view in sharded_parameters(module) if view.name == "blocks.0.linear.weight")
        assert (view.dtype, view.grad.dtype) == (main, gradient), name
        with fabric.autocast():
            made = torch.ones(2, 2)
            assert (made @ made).dtype == product, name
        with fabric.init_tensor():
            assert torch.ones(1).dtype == (product if name.endswith("true") else torch.float32)
        optimizer.step()
        assert all(torch.isfinite(value).all() for value in whole(model).values()), name
        # Norms keep float32 weights under autocast, and only there.
        norms = {view.compute_dtype for view in sharded_parameters(module) if ".norm." in view.name}
        assert norms == {torch.float32 if name.endswith("mixed") else compute}, name


def a_policy_alone_decides_beside_32_true(rank: int, world_size: int) -> None:
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16)
    fabric = launched(world_size, {"units": [nn.Linear]}, plugins=[MFSDPFabricPrecision("32-true", policy=policy)])
    assert fabric.strategy.precision.policy is policy
    model = fabric.setup(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert model(torch.ones(2, 3)).dtype == torch.bfloat16


def modules_sharded_by_hand_keep_their_units(rank: int, world_size: int) -> None:
    fabric = launched(world_size, {"units": "auto"}, precision="bf16-true")
    module = seeded().to(torch.bfloat16)
    for block in module.blocks:
        fully_shard(block, fabric.strategy.device_mesh, policy=fabric.strategy.precision.policy)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    train(fabric, model, optimizer, batches(rank, world_size, 1))
    assert {value.dtype for value in whole(model).values()} == {torch.bfloat16}


def scaled_loop(rank: int, world_size: int, overflows: bool) -> tuple[dict[str, Tensor], float]:
    """Two steps in float16 autocast; in the first, float16 overflows on rank 1 alone if asked for."""
    precision = MFSDPFabricPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=128.0))
    fabric = launched(world_size, plugins=[precision])
    assert type(fabric.strategy.precision.scaler) is DistributedGradScaler
    module = seeded(optimizer="sgd")
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for index, batch in enumerate(batches(rank, world_size, 2)):
        if index == 0 and not overflows:
            continue
        factor = 1e30 if overflows and index == 0 and rank == 1 else 1.0
        fabric.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]) * factor)
        fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
    assert precision.scaler is not None
    return whole(model), precision.scaler.get_scale()


def an_overflow_on_one_rank_skips_the_step_on_all(rank: int, world_size: int) -> None:
    skipped, scale = scaled_loop(rank, world_size, overflows=True)
    expected, unchanged = scaled_loop(rank, world_size, overflows=False)
    assert (scale, unchanged) == (64.0, 128.0)
    for key, value in skipped.items():
        torch.testing.assert_close(value, expected[key], rtol=2e-3, atol=2e-3, msg=key)
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, skipped)
    assert all(torch.equal(everyones[0][key], other[key]) for other in everyones for key in skipped)


def what_cannot_work_is_refused(rank: int, world_size: int) -> None:
    fabric = launched(world_size, plugins=[MFSDPFabricPrecision("16-mixed")])
    module = seeded()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), fused=True))
    fabric.backward(model(torch.ones(2, 3)).sum())
    with pytest.raises(RuntimeError, match=r"AdamW\(fused=True\) under loss scaling"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match=r"fabric.backward\(loss\)"):
        model(torch.ones(2, 3)).sum().backward()
    fabric = launched(world_size)
    module = seeded()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    fabric.backward(model(torch.ones(2, 3)).sum() * torch.inf)
    with pytest.raises(RuntimeError, match="so it cannot be clipped"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


WORLDS = {
    1: (every_string_gives_its_dtypes, a_policy_alone_decides_beside_32_true, modules_sharded_by_hand_keep_their_units),
    2: (an_overflow_on_one_rank_skips_the_step_on_all, what_cannot_work_is_refused),
}


@by_world(WORLDS)
def test_precision(world, case):
    check(WORLDS, world, case)


def test_plugins_of_the_trainer_are_translated_and_others_refused() -> None:
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    strategy = MFSDPFabricStrategy(precision=MFSDPPrecision("bf16-mixed", policy=policy))
    assert type(strategy.precision) is MFSDPFabricPrecision
    assert (strategy.precision.precision, strategy.precision.policy) == ("bf16-mixed", policy)
    with pytest.raises(TypeError, match=r"FSDPPrecision.*plugins=\[MFSDPFabricPrecision"):
        MFSDPFabricStrategy(precision=FSDPPrecision("32-true"))
    with pytest.raises(ValueError, match="two policies"):
        MFSDPFabricStrategy(policy=MixedPrecisionPolicy(), precision=MFSDPFabricPrecision("32-true", policy=policy))
    with pytest.raises(ValueError, match=r"MFSDPFabricPrecision\(precision='fp4'\): expected one of '32-true'"):
        MFSDPFabricPrecision("fp4")  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_under_another_strategy_it_is_the_precision_of_that_name(precision: Any) -> None:
    found = []
    for settings in ({"plugins": [MFSDPFabricPrecision(precision)]}, {"precision": precision}):
        fabric = Fabric(accelerator="cpu", devices=1, **settings)
        torch.manual_seed(0)
        plain = nn.Linear(4, 3)
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        output = model(torch.linspace(-1, 1, 8).view(2, 4))
        fabric.backward(output.square().mean())
        optimizer.step()
        found.append((output.detach(), model.weight.detach().clone()))
    for own, theirs in zip(*found, strict=True):
        assert own.dtype is theirs.dtype
        assert torch.equal(own, theirs)
