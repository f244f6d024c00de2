"""Transformer Engine's FusedAdam on GPUs, over bfloat16 main weights: their other 16 bits, and gradients in float32."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from lightning_mfsdp.engine import sharded_parameters
from lightning_mfsdp.te import library
from tests.engine.cases import run_cases
from tests.gpu.test_te import WithFusedAdam, needs_engine, resumed_to_the_bit, trained
from tests.helpers.fused_adam import joined
from tests.te.test_training import fp8

BF16 = torch.bfloat16
WHOLE = MixedPrecisionPolicy(compute_dtype=BF16)
HALVES = MixedPrecisionPolicy(main_params_dtype=BF16, compute_dtype=BF16)
OPTIONS: dict[str, Any] = {"master_weights": True, "store_param_remainders": True, "use_decoupled_grad": True}
LAYERS = {"replace_layers": True}


class WithHalves(WithFusedAdam):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.fused_adam(**OPTIONS)


class WithHalvesAndLowMoments(WithFusedAdam):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.fused_adam(exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16, **OPTIONS)


def stepped(world: int, policy: MixedPrecisionPolicy, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Five steps with the same inputs on all ranks, from weights that bfloat16 has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 33)).cuda().to(BF16).float()
    for layer in model[::2]:
        fully_shard(layer, policy=policy)
    fully_shard(model, policy=policy)
    kind = library.load("pytorch.optimizers").FusedAdam
    optimizer = fully_shard_optimizer(kind(model.parameters(), lr=0.01, weight_decay=0.1, **options))
    x = torch.randn(48, 64, device="cuda", dtype=BF16)
    for _ in range(5):
        for _ in range(2):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def halves_are_the_whole_weight(rank: int, world: int) -> None:
    """Both update rules compute in float32, in kernels of their own: the same up to the last bits."""
    whole, _ = stepped(world, WHOLE)
    split, optimizer = stepped(world, HALVES, **OPTIONS)
    expected = {view.name: view.main for view in sharded_parameters(whole)}
    lower: dict[str, Tensor] = {
        view.name: optimizer.state[view.local]["master_param"] for view in sharded_parameters(split)
    }
    for view in sharded_parameters(split):
        assert view.main.dtype is BF16
        assert lower[view.name].dtype is torch.int16
        torch.testing.assert_close(joined(view.main, lower[view.name]), expected[view.name], rtol=1e-4, atol=1e-6)
    assert sum(int(value.ne(0).sum()) for value in lower.values()) > 100
    kept = [view.grad for view in sharded_parameters(split) if view.grad is not None]
    assert not kept, "zero_grad of the library clears what the engine shows"


def it_trains_in_fp8(rank: int, world: int) -> None:
    usual, _ = trained(rank, world, fp8("current", **LAYERS, policy=WHOLE), WithFusedAdam, steps=60)
    model, _ = trained(rank, world, fp8("current", **LAYERS, policy=HALVES), WithHalves, steps=60)
    expected, found = (torch.stack(one.losses).float() for one in (usual, model))
    torch.testing.assert_close(found[:6], expected[:6], rtol=0.05, atol=0.05)
    assert found[-10:].mean() < 0.7 * found[:10].mean()


CASES: dict[str, Any] = {
    "halves are the whole weight": halves_are_the_whole_weight,
    "trains in FP8": it_trains_in_fp8,
    **{
        f"resumed: {build.__name__}, {kind}": partial(
            resumed_to_the_bit, "current", build=build, kind=kind, policy=HALVES, **LAYERS
        )
        for build in (WithHalves, WithHalvesAndLowMoments)
        for kind in ("sharded", "full")
    },
}


@cache
def outcomes(world: int) -> dict[str, str]:
    return run_cases(CASES, world, backend="nccl")


@pytest.mark.gpu
@needs_engine()
@pytest.mark.parametrize("case", CASES)
def test_on_one_gpu(case: str) -> None:
    assert not outcomes(1)[case], outcomes(1)[case]


@pytest.mark.gpus2
@needs_engine()
@pytest.mark.parametrize("case", CASES)
def test_on_two_gpus(case: str) -> None:
    assert not outcomes(2)[case], outcomes(2)[case]
