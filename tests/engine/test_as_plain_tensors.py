"""Small things that programs do with parameters, gradients and state outside of forwards, with the results of whole tensors."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mfsdp.engine import fully_shard, fully_shard_optimizer
from tests.engine.worlds import by_world, check

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.scale = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() * self.scale


def trained(sharding: str) -> tuple[Scaled, Scaled]:
    plain, module = Scaled(), fully_shard(Scaled(), sharding=sharding)
    for one in (plain, module):
        one(torch.ones(2, 3)).sum().backward()
    return plain, module


def results_are_written_where_they_are_asked_for(rank, world):
    """Also into a single number, and into a view of a parameter."""
    for sharding in STRATEGIES:
        numbers, rows = [], []
        for module in trained(sharding):
            outs = [torch.zeros(()) for _ in range(3)]
            with torch.no_grad():
                torch.norm(module.weight, out=outs[0])
                torch.sum(module.weight, (0, 1), out=outs[1])
                torch.norm(module.weight.grad, out=outs[2])
                torch.sum(module.weight.detach() * 2, 0, keepdim=True, out=module.weight.data[:1])
            numbers.append(torch.stack(outs))
            rows.append(module.weight.detach())
        torch.testing.assert_close(numbers[1], numbers[0], msg=sharding)
        torch.testing.assert_close(rows[1].full_tensor(), rows[0], msg=sharding)


def numbers_are_shown_as_those_of_plain_tensors(rank, world):
    for sharding in STRATEGIES:
        shown = [
            (
                f"{module.scale.grad:.3f}",
                f"{module.scale.detach():.2f}",
                module.scale.tolist(),
                len(module.weight.tolist()),
            )
            for module in trained(sharding)
        ]
        assert shown[0] == shown[1], sharding


def a_parameter_is_compared_with_itself_number_by_number(rank, world):
    for sharding in STRATEGIES:
        _, module = trained(sharding)
        with torch.no_grad():
            module.weight[0, 0] = torch.nan
        equal = module.weight == module.weight
        assert int(equal.sum()) == 14, sharding
        assert module.weight in {module.weight: 1}
        assert module.weight in [module.weight]


def a_gradient_may_be_deleted(rank, world):
    for sharding in STRATEGIES:
        _, module = trained(sharding)
        del module.weight.grad
        assert module.weight.grad is None
        module(torch.ones(2, 3)).sum().backward()
        assert module.weight.grad is not None


# Of a matrix and of a single number.
REDUCTIONS = {
    "norm": lambda tensor: tensor.norm(2.0),
    "norm of data": lambda tensor: tensor.data.norm(1.0),
    "vector_norm": torch.linalg.vector_norm,
    "sum": lambda tensor: tensor.sum(),
    "mean": lambda tensor: tensor.mean(),
    "largest": lambda tensor: tensor.abs().max(),
    "any": lambda tensor: tensor.isnan().any(),
    "prod": lambda tensor: tensor.prod(),
    "logsumexp": lambda tensor: tensor.logsumexp(tuple(range(tensor.dim()))) if tensor.dim() else tensor.logsumexp(0),
}


def single_numbers_are_reduced_as_others_and_put_into_new_tensors(rank, world):
    for sharding in STRATEGIES:
        results = []
        for module in trained(sharding):
            operands = [module.weight.detach(), module.weight.grad, module.scale.detach(), module.scale.grad]
            results.append([float(reduce(operand)) for reduce in REDUCTIONS.values() for operand in operands])
            for operand in operands:
                norms = torch.tensor([operand.norm(), torch.tensor(2.0)])
                results[-1] += norms.tolist()
            results[-1] += torch.tensor([module.scale.detach(), module.scale.grad]).tolist()
            results[-1].append(float(torch.as_tensor(module.scale.detach())))
            results[-1] += [float(norm) for norm in lightning_grad_norm(module, 2).values()]
        torch.testing.assert_close(results[1], results[0], msg=sharding)


def a_rank_reads_a_single_number_by_itself(rank, world):
    """`if rank == 0: print(model.scale.item())`, as under DDP: each rank has it."""
    for sharding in STRATEGIES:
        _, module = trained(sharding)
        if rank == 0:
            assert module.scale.item() == float(module.scale) == 1.5


def rows_of_results_with_other_columns_are_written_in_place(rank, world):
    """A view of a sum over columns is written; what it does not show stays, on ranks that have rows of it and on others."""
    results = (
        lambda w: w.sum(1),
        lambda w: w.norm(dim=1, keepdim=True),
        lambda w: w.clone()[:, 0],
        lambda w: w[:, :2].clone(),
    )
    for sharding, result in product(STRATEGIES, results):
        found = []
        for module in trained(sharding):
            with torch.no_grad():
                rows = result(module.weight.detach())
                rows[1:3].fill_(7.0)
            found.append(rows.full_tensor() if isinstance(rows, DTensor) else rows.clone())
        torch.testing.assert_close(found[1], found[0], msg=sharding)


WRITES = {
    "mul_": lambda weight: weight.mul_(2),
    "copy_": lambda weight: weight.copy_(torch.zeros(4, 4)),
    "a row": lambda weight: weight[:1].zero_(),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2.0),
    "out": lambda weight: torch.add(weight, 1.0, out=weight),
}


def a_weight_that_a_graph_has_saved_is_not_written_unnoticed(rank, world):
    """The backward would read other numbers than the forward: as in PyTorch it is an error."""
    for sharding, (kind, write) in product(STRATEGIES, WRITES.items()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for layer in (model[0], model[2], model):
            fully_shard(layer, sharding=sharding)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        with torch.no_grad():
            write(model[2].weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(torch.ones(2, 4)).sum().backward()  # and training goes on
        assert model[0].weight.grad is not None, (sharding, kind)


CASES = (
    a_rank_reads_a_single_number_by_itself,
    single_numbers_are_reduced_as_others_and_put_into_new_tensors,
    results_are_written_where_they_are_asked_for,
    numbers_are_shown_as_those_of_plain_tensors,
    a_parameter_is_compared_with_itself_number_by_number,
    a_gradient_may_be_deleted,
    rows_of_results_with_other_columns_are_written_in_place,
)
WRITTEN = a_weight_that_a_graph_has_saved_is_not_written_unnoticed
WORLDS = {1: (*CASES, WRITTEN), 2: (*CASES, WRITTEN), 3: CASES}


@by_world(WORLDS)
def test_as_plain_tensors(world, case):
    check(WORLDS, world, case)
