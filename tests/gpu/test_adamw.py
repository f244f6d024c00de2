"""AdamW with moments in bfloat16 on GPUs: the kernel against its reference, to the bit, bytes, and no host synchronization."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn

from lightning_mfsdp import fully_shard, fully_shard_optimizer, sharded_parameters, unshard
from lightning_mfsdp.optim import AdamW
from tests.gpu.linear import made
from tests.helpers.distributed import needs_gpus, run_distributed
from tests.optim.internals import Rule, function_for, kernel, step_

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

LAYERS = 8
POISON = 64  # numbers before and after each tensor


def options(**others):
    return {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False, **others}


def values(numel, scale, generator):
    """Of many magnitudes, with zeros, the smallest numbers there are, infinities and NaN."""
    found = torch.randn(numel, generator=generator) * torch.exp(6 * torch.randn(numel, generator=generator)) * scale
    for at, special in enumerate((0.0, -0.0, 1e-45, -1e-39, 1e-38, 3e38, float("inf"), float("nan"))):
        found[at * 5 : at * 5 + 1] = special
    return found


def poisoned(value, start):
    """The value inside memory that is NaN elsewhere, `start` numbers after the beginning of an allocation."""
    memory = torch.full((start + value.numel() + POISON,), float("nan"), dtype=value.dtype, device="cuda")
    inside = memory[start : start + value.numel()]
    inside.copy_(value)
    return memory, inside


@pytest.mark.parametrize(
    ("weight_dtype", "moment_dtype"),
    list(product((torch.float32, torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32))),
    ids=str,
)
def test_the_kernel_computes_the_references_bits_and_writes_nowhere_else(weight_dtype, moment_dtype):
    generator = torch.Generator().manual_seed(0)
    for numel, start in ((1, POISON), (41, POISON + 1), (1024, POISON), (1025, POISON + 3), (100_003, POISON)):
        for step in (1, 2, 70_000):
            weight, gradient = (values(numel, scale, generator).to(weight_dtype) for scale in (1.0, 1e-3))
            mean = values(numel, 1e-3, generator).to(moment_dtype)
            variance = values(numel, 1e-6, generator).abs().to(moment_dtype)
            rule = Rule.of(options(maximize=step == 2), 2e-3, step)
            parts = [poisoned(value, start) for value in (weight, gradient, mean, variance)]
            before = parts[1][1].clone()
            kernel()(*(inside for _, inside in parts), rule)
            step_(weight, gradient, mean, variance, rule)
            assert torch.equal(parts[1][1].view(torch.uint8), before.view(torch.uint8)), "the gradient stays"
            for name, (memory, found), wanted in zip("wgmv", parts, (weight, gradient, mean, variance), strict=True):
                case = f"{name} {numel} {step}"
                different = ~((found.cpu() == wanted) | (found.cpu().isnan() & wanted.isnan()))
                assert not different.any(), (case, found.cpu()[different][:5], wanted[different][:5])
                assert memory[:start].isnan().all(), case
                assert memory[start + numel :].isnan().all(), case


def test_the_kernel_is_chosen_where_it_can_be():
    dense, gaps = torch.ones(4, 4, device="cuda"), torch.ones(4, 8, device="cuda")[:, ::2]
    assert function_for(dense, dense, dense, dense) is kernel()
    for place in range(4):
        assert function_for(*(gaps if number == place else dense for number in range(4))) is step_
    assert function_for(*(dense.double() for _ in range(4))) is step_


def test_moments_that_lie_otherwise_than_the_weight_are_those_of_its_numbers():
    """A checkpoint of a model in channels_last, loaded into one that is not."""
    before = nn.Parameter(torch.randn(4, 3, 3, 3, device="cuda").to(memory_format=torch.channels_last))
    first, gradient = AdamW([before]), torch.randn(4, 3, 3, 3, device="cuda")
    before.grad = gradient.to(memory_format=torch.channels_last)
    first.step()
    after = nn.Parameter(before.detach().contiguous())
    second = AdamW([after])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert not second.state[after]["exp_avg"].is_contiguous()
    for parameter, optimizer in ((before, first), (after, second)):
        parameter.grad = gradient.clone(memory_format=torch.preserve_format)
        optimizer.step()
    assert torch.equal(before, after)


def trains_as_one_process_in_less_memory(rank, world):
    plain, model = made(LAYERS), made(LAYERS)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    reference = AdamW(plain.parameters(), lr=0.01)
    optimizer = fully_shard_optimizer(AdamW(model.parameters(), lr=0.01))
    own = sum(view.local.numel() for view in sharded_parameters(model))
    for number in range(4):
        plain(number).backward()
        model(number).backward()
        reference.step()
        reference.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        assert stats["requested_bytes.all.current"] - before == (4 * own if number == 0 else 0), (
            "two moments of 2 bytes"
        )
        assert stats["requested_bytes.all.peak"] - before <= (4 * own if number == 0 else 0) + 1024
        optimizer.zero_grad()
    with unshard(model):
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)


def test_alone_it_trains_as_unsharded_in_less_memory():
    run_distributed(trains_as_one_process_in_less_memory, 1, backend="nccl")


@pytest.mark.gpus2
@needs_gpus(2)
def test_on_two_gpus_it_trains_as_one_process_in_less_memory():
    run_distributed(trains_as_one_process_in_less_memory, 2, backend="nccl")
