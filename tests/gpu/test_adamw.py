"""AdamW with moments in bfloat16 on GPUs: the kernel against its reference, to the bit, bytes, and no host synchronization."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn

from lightning_mfsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, sharded_parameters, unshard
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


def codes(numel, dtype, generator):
    """Of all kinds."""
    limits = torch.iinfo(dtype)
    low = -limits.max if dtype is torch.int8 else limits.min  # no moment has the lowest code
    return torch.randint(low, limits.max + 1, (numel,), generator=generator).to(dtype)


def poisoned(value, start):
    """The value inside memory of other bytes, `start` numbers after the beginning of an allocation."""
    memory = torch.empty(start + value.numel() + POISON, dtype=value.dtype, device="cuda")
    memory.view(torch.uint8).fill_(0x7F)
    inside = memory[start : start + value.numel()]
    inside.copy_(value)
    return memory, inside


@pytest.mark.parametrize(
    ("weight_dtype", "moments", "has_remainder"),
    [
        *product((torch.float32, torch.bfloat16, torch.float16), ("bfloat16", "float32", "8bit"), (False,)),
        *product((torch.bfloat16,), ("bfloat16", "float32", "8bit"), (True,)),
    ],
    ids=str,
)
def test_the_kernel_computes_the_references_bits_and_writes_nowhere_else(weight_dtype, moments, has_remainder):
    generator = torch.Generator().manual_seed(0)
    for numel, start in ((1, POISON), (41, POISON + 1), (1024, POISON), (1025, POISON + 3), (100_003, POISON)):
        for step in (1, 2, 70_000):
            weight, gradient = (values(numel, scale, generator).to(weight_dtype) for scale in (1.0, 1e-3))
            if has_remainder and step == 2:
                gradient = values(numel, 1e-3, generator)  # as use_decoupled_grad has it
            if moments == "8bit":
                mean, variance = (codes(numel, dtype, generator) for dtype in (torch.int8, torch.uint8))
            else:
                mean = values(numel, 1e-3, generator).to(getattr(torch, moments))
                variance = values(numel, 1e-6, generator).abs().to(getattr(torch, moments))
            remainder = [codes(numel, torch.int16, generator)] if has_remainder else []
            rule = Rule.of(options(maximize=step == 2), 2e-3, step)
            tensors = (weight, gradient, mean, variance, *remainder)
            parts = [poisoned(value, start) for value in tensors]
            before = [memory.clone() for memory, _ in parts]
            found = [inside for _, inside in parts]
            kernel()(*found[:4], rule, *found[4:])
            step_(weight, gradient, mean, variance, rule, *remainder)
            assert torch.equal(parts[1][0].view(torch.uint8), before[1].view(torch.uint8)), "the gradient stays"
            for name, (memory, inside), old, wanted in zip("wgmvr", parts, before, tensors, strict=False):
                case, here = f"{name} {numel} {step}", inside.cpu()
                different = ~((here == wanted) | ((here != here) & (wanted != wanted)))
                assert not different.any(), (case, here[different][:5], wanted[different][:5])
                for outside in (slice(None, start), slice(start + numel, None)):
                    assert torch.equal(memory[outside].view(torch.uint8), old[outside].view(torch.uint8)), case


def test_the_kernel_is_chosen_where_it_can_be():
    dense, gaps = torch.ones(4, 4, device="cuda"), torch.ones(4, 8, device="cuda")[:, ::2]
    assert function_for(dense, dense, dense, dense) is kernel()
    for place in range(5):
        assert function_for(*(gaps if number == place else dense for number in range(5))) is step_
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
    lean = {"state_dtype": "8bit", "store_param_remainders": True}
    for dtype, own_options, state_bytes in (
        (torch.float32, {}, 4),
        (torch.float32, {"state_dtype": "8bit"}, 2),
        (torch.bfloat16, lean, 4),
    ):
        train_beside_one_process(dtype, own_options, state_bytes)


def train_beside_one_process(dtype, own_options, state_bytes):
    """With two moments, and a remainder where weights have bfloat16."""
    plain, model = made(LAYERS).to(dtype), made(LAYERS).to(dtype)
    policy = MixedPrecisionPolicy() if dtype is torch.float32 else MixedPrecisionPolicy(main_params_dtype=None)
    for layer in model:
        fully_shard(layer, policy=policy)
    fully_shard(model, policy=policy)
    reference = AdamW(plain.parameters(), lr=0.01, **own_options)
    optimizer = fully_shard_optimizer(AdamW(model.parameters(), lr=0.01, **own_options))
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
        stats, wanted = torch.cuda.memory_stats(), state_bytes * own if number == 0 else 0
        assert stats["requested_bytes.all.current"] - before == wanted, own_options
        assert stats["requested_bytes.all.peak"] - before <= wanted + 1024, own_options
        optimizer.zero_grad()
    with unshard(model):
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other), own_options


def test_alone_it_trains_as_unsharded_in_less_memory():
    run_distributed(trains_as_one_process_in_less_memory, 1, backend="nccl")


@pytest.mark.gpus2
@needs_gpus(2)
def test_on_two_gpus_it_trains_as_one_process_in_less_memory():
    run_distributed(trains_as_one_process_in_less_memory, 2, backend="nccl")
