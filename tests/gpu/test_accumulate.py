"""Sums of float32 and 16-bit numbers on GPUs: the kernel against PyTorch, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_mfsdp import MixedPrecisionPolicy, fully_shard
from lightning_mfsdp.base.accumulate import KERNEL_NUMEL, accumulate_
from tests.helpers.distributed import needs_gpus, run_distributed

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

POISON = 64  # numbers before and after the sum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_have_the_bits_of_pytorch_and_nothing_else_is_written(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numel = KERNEL_NUMEL + 37
    memory = torch.randn(POISON + numel + POISON, device="cuda") * 1e-3
    memory[POISON : POISON + 4] = torch.tensor([float("inf"), float("nan"), -0.0, 1e-45])
    expected = memory.clone()
    addend = torch.randn(1 + numel, device="cuda").to(dtype)[1:]  # begins between two words
    expected[POISON : POISON + numel].add_(addend)
    total = memory[POISON : POISON + numel]
    version = total._version
    accumulate_([total], [addend])
    assert torch.equal(memory.view(torch.int32), expected.view(torch.int32))
    assert total._version == version + 1, "a graph that saved the sum has to know"


def test_tensors_that_the_kernel_does_not_take_are_added_as_well() -> None:
    cases = [
        (torch.ones(8, device="cuda"), torch.ones(8, device="cuda", dtype=torch.bfloat16)),
        (torch.ones(KERNEL_NUMEL, device="cuda"), torch.ones(KERNEL_NUMEL, device="cuda", dtype=torch.bfloat16)),
        (torch.ones(4, KERNEL_NUMEL, device="cuda").t(), torch.ones(KERNEL_NUMEL, 4, device="cuda").bfloat16()),
        (torch.ones(KERNEL_NUMEL, device="cuda").bfloat16(), torch.ones(KERNEL_NUMEL, device="cuda")),
    ]
    accumulate_(*map(list, zip(*cases, strict=True)))
    assert all(bool((total == 2).all()) for total, _ in cases)


def accumulated(rank: int, world: int) -> None:
    features = 4096  # more weights than the kernel needs
    module = nn.Sequential(nn.Linear(features, features, bias=False)).cuda()
    reference = copy.deepcopy(module).bfloat16()
    fully_shard(module, policy=MixedPrecisionPolicy(compute_dtype=torch.bfloat16))
    expected = torch.zeros(features, features, device="cuda")
    for inputs in torch.randn(3, 32, features, device="cuda"):
        module(inputs).float().square().sum().backward()
        reference(inputs.bfloat16()).float().square().sum().backward()
        expected += reference[0].weight.grad
        reference.zero_grad()
    assert torch.equal(module[0].weight.grad.to_local(), expected)


def test_microbatches_add_up_to_the_sum_of_their_gradients() -> None:
    run_distributed(accumulated, 1, backend="nccl")
