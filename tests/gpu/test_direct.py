"""Direct weight gradients on GPUs: products in float32 straight into the bucket, nearer to the truth than rounded ones."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, no_sync, sharded_parameters
from tests.engine.test_direct import counted, poisoned
from tests.helpers.distributed import needs_gpus, run_distributed

WIDTH = 2904  # squared, just above what "auto" writes directly


def _gradient(rank, policy, rows, microbatches=4, held=(0, 1)):
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)).cuda(), policy=policy)
    generator = torch.Generator("cuda").manual_seed(rank)
    for micro in range(microbatches):
        x = torch.randn(rows, WIDTH, device="cuda", generator=generator)
        with no_sync(model) if micro in held else nullcontext():
            model(x).float().square().sum().backward()
    return sharded_parameters(model)[0].local.grad.clone()


def writes_what_the_product_is(rank, world):
    """The error that rounding to bfloat16 makes is gone; microbatches and gaps are right in poisoned memory."""
    found = {}
    for direct in ("auto", True, False):
        for reduce in (torch.float32, torch.bfloat16):
            policy = MixedPrecisionPolicy(
                compute_dtype=torch.bfloat16, grad_comm_dtype=reduce, direct_weight_gradients=direct
            )
            with poisoned(), counted() as written:
                found[direct, reduce] = _gradient(rank, policy, 64)
            assert len(written) == {"auto": 4, True: 8, False: 0}[direct]
    exact = _gradient(rank, MixedPrecisionPolicy(compute_dtype=torch.bfloat16, direct_weight_gradients=False), 64)
    torch.testing.assert_close(found[False, torch.float32], exact, rtol=0, atol=0)
    for (direct, reduce), grad in found.items():
        scale = exact.abs().max()
        assert (grad - exact).abs().max() < 0.02 * scale, f"{direct} {reduce}"
    rounded, wide = found[False, torch.float32], found["auto", torch.float32]
    assert not torch.equal(wide, rounded), "the product was not rounded"


def keeps_float32_where_bfloat16_would_round(rank, world):
    """1 + 2**-12 is no bfloat16 number; one row of ones times it is exact in float32."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
    model = fully_shard(layer, policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16))
    x = torch.ones(2, WIDTH, device="cuda", dtype=torch.bfloat16)
    weights = torch.tensor([[1.0], [2.0**-12]], device="cuda", dtype=torch.bfloat16)
    with poisoned():
        (model(x) * weights).sum().backward()
    (view,) = sharded_parameters(model)
    assert view.local.grad.eq(1 + 2.0**-12).all()


def everything(rank, world):
    writes_what_the_product_is(rank, world)
    keeps_float32_where_bfloat16_would_round(rank, world)


@pytest.mark.gpu
@pytest.mark.gpus2
@needs_gpus(2)
def test_layers_write_gradients_on_two_gpus():
    run_distributed(everything, 2, backend="nccl")
