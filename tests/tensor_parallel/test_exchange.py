"""Collectives of a tensor axis: values, gradients and second gradients, for permuted tensors and several dtypes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp import ShardingError
from lightning_mfsdp.tensor_parallel import TensorGroup
from lightning_mfsdp.tensor_parallel.exchange import (
    copied,
    gathered,
    own_part,
    sequence_gathered,
    sequence_summed,
    summed,
)
from tests.helpers.distributed import run_distributed

SHAPE = (2, 8, 12)
Program = Callable[[list[Tensor]], list[Tensor]]


def divided(tensor: Tensor, dim: int, ranks: int) -> list[Tensor]:
    return list(tensor.chunk(ranks, dim))


# What each does, written for the tensors of all ranks in one process.
def on_all(name: str, dim: int, tensors: list[Tensor]) -> list[Tensor]:
    ranks = len(tensors)
    total = torch.stack(tensors).sum(0)
    return {
        "summed": lambda: [total] * ranks,
        "sequence_gathered": lambda: [torch.cat(tensors, dim)] * ranks,
        "sequence_summed": lambda: divided(total, dim, ranks),
    }[name]()


FUNCTIONS = {"sequence_gathered": sequence_gathered, "sequence_summed": sequence_summed}


def inputs_of(ranks: int, dtype: torch.dtype, *, permuted: bool) -> list[Tensor]:
    torch.manual_seed(1)
    made = [torch.randint(-4, 5, SHAPE).to(dtype) for _ in range(ranks)]
    return [tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in made] if permuted else made


def true_collectives(rank: int, world: int) -> None:
    """Those whose gradient is the adjoint of what they compute: autograd of one process has it, too."""
    group = TensorGroup.of(dist.group.WORLD)
    for name, function in FUNCTIONS.items():
        for dim in (0, 1, 2, -1):
            if SHAPE[dim] % world:
                continue
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                all_inputs = inputs_of(world, dtype, permuted=dim == 1)
                for tensor in all_inputs:
                    tensor.requires_grad_()
                want = on_all(name, dim, all_inputs)
                weights = [
                    torch.arange(value.numel()).view(value.shape).remainder(5 + r) for r, value in enumerate(want)
                ]
                torch.stack([(w * value).sum() for w, value in zip(weights, want, strict=True)]).sum().backward()
                own = all_inputs[rank].detach().clone(memory_format=torch.preserve_format).requires_grad_()
                found = function(own, group, dim)
                assert found.is_contiguous()
                (weights[rank] * found).sum().backward()
                assert torch.equal(found, want[rank]), (name, dim, dtype)
                assert torch.equal(own.grad, all_inputs[rank].grad), (name, dim, dtype)


def pairs(rank: int, world: int) -> None:
    """Those that state what is equal on all ranks, or complete: the backward of one is the other."""
    group = TensorGroup.of(dist.group.WORLD)
    for dtype, permuted in product((torch.float64, torch.bfloat16), (False, True)):
        parts = inputs_of(world, dtype, permuted=permuted)
        total = torch.stack(parts).sum(0)
        own = parts[rank].clone().requires_grad_()
        before = own.detach().clone()
        assert torch.equal(summed(own, group), total)
        assert torch.equal(own, before)
        assert torch.equal(torch.autograd.grad(summed(own, group), own, parts[rank])[0], parts[rank])
        assert torch.equal(copied(own, group), own)
        assert torch.equal(torch.autograd.grad(copied(own, group), own, parts[rank])[0], total)
        whole = torch.cat(parts, 2)
        assert torch.equal(gathered(own, group), whole)
        assert torch.equal(torch.autograd.grad(gathered(own, group), own, whole)[0], parts[rank])
        leaf = whole.clone().requires_grad_()
        assert torch.equal(own_part(leaf, group), parts[rank])
        assert torch.equal(torch.autograd.grad(own_part(leaf, group), leaf, parts[rank])[0], whole)


def second_gradients(rank: int, world: int) -> None:
    """Of x -> sum over ranks of (rank + 1) x^3, with equal x."""
    group = TensorGroup.of(dist.group.WORLD)
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    y = summed((rank + 1) * copied(x, group) ** 3, group)
    factor = world * (world + 1) / 2
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(first, 3 * factor * x**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * factor * x)


def uneven(rank: int, world: int) -> list[str]:
    group, told = TensorGroup.of(dist.group.WORLD), []
    for function in (own_part, sequence_summed):
        with pytest.raises(ShardingError) as error:
            function(torch.zeros(2, 3), group, 1)
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("program", [true_collectives, pairs, second_gradients])
def test_values_and_gradients(program: Callable[[int, int], None], world: int) -> None:
    run_distributed(program, world)


def test_sizes_that_do_not_divide_are_refused() -> None:
    for told in run_distributed(uneven, 2)[0]:
        assert told == "dim 1 of a tensor of shape [2, 3] cannot be divided over 2 tensor ranks; pad it"
