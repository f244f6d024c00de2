"""Models with parameters that are parts along a tensor axis, divided along any dim and in several strips, and how they are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mfsdp.base.part import mark_part
from lightning_mfsdp.engine import fully_shard, fully_shard_optimizer, is_sharded
from lightning_mfsdp.tensor_parallel import Part
from tests.engine.cases import Problems

# The shape of each parameter, and along which dim and in which sections it is divided; no sections: every rank has all of it.
SHAPES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = {
    "rows": ((8, 6), 0, (8,)),
    "packed_rows": ((6, 6), 0, (2, 4)),
    "columns": ((6, 6), 1, (6,)),
    "packed_columns": ((3, 12, 2), 1, (4, 8)),
    "last": ((2, 1, 4), 2, (4,)),
    "bias": ((6,), 0, (4, 2)),
    "whole": ((7, 6), 0, ()),
    "scale": ((), 0, ()),
}
# The same shapes, divided otherwise.
OTHERWISE = SHAPES | {
    "rows": ((8, 6), 1, (6,)),
    "packed_rows": ((6, 6), 0, (6,)),
    "columns": ((6, 6), 1, (4, 2)),
    "packed_columns": ((3, 12, 2), 2, (2,)),
    "whole": ((7, 6), 1, (2, 4)),
}
# For four ranks along the tensor axis.
FOURS = SHAPES | {"packed_rows": ((6, 6), 0, ()), "columns": ((6, 6), 1, ()), "bias": ((6,), 0, ())}
UNPACKED = {name: (shape, dim, (shape[dim],) if sections else ()) for name, (shape, dim, sections) in SHAPES.items()}
WHOLE = {name: (shape, 0, ()) for name, (shape, _, _) in SHAPES.items()}
DIVISIONS = {"alike": SHAPES, "divided otherwise": OTHERWISE, "whole": WHOLE}
ANYHOW = (*DIVISIONS, None)
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FEW = ("no_shard", "optim_grads_params")


def two_axes(first: str = "data", second: str = "tensor") -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(first, second))


def values(seed: int = 1) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=numbers) for name, (shape, _, _) in SHAPES.items()}


def own_part(value: Tensor, dim: int, sections: tuple[int, ...], mesh: DeviceMesh) -> nn.Parameter:
    """A rank's part of a whole value, marked."""
    axis = mesh["tensor"]
    part = Part(dim=dim, sections=sections, size=axis.size(), rank=axis.get_local_rank())
    parameter = nn.Parameter(part.own(value))
    mark_part(parameter, part)
    return parameter


class Net(nn.Module):
    """Its loss is a sum over all numbers: each rank computes that over its parts. Without a mesh, it is whole."""

    def __init__(self, seed: int = 1, mesh: DeviceMesh | None = None, shapes: Any = SHAPES) -> None:
        super().__init__()
        self.parts: dict[str, Part] = {}
        for name, value in values(seed).items():
            _, dim, sections = shapes[name]
            is_part = mesh is not None and sections
            parameter = own_part(value, dim, sections, mesh) if is_part else nn.Parameter(value)
            if is_part:
                self.parts[name] = parameter._tensor_part
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: one number."""
        loss = x.new_zeros(())
        for name, factors in values(7).items():
            own = self.parts[name].own(factors) if name in self.parts else factors
            parameter = self.get_parameter(name)
            loss = loss + (parameter * own * x + 0.5 * parameter.square()).sum()
        return loss


def sharded(mesh: DeviceMesh, seed: int = 1, shapes: Any = SHAPES, **options: Any) -> Net:
    return fully_shard(Net(seed, mesh, shapes), mesh, **options)


def lying(mesh: DeviceMesh, division: str | None, sharding: str, seed: int = 1) -> Net:
    """A model that is divided and sharded in a way; without a division it is plain and whole."""
    return Net(seed) if division is None else sharded(mesh, seed, DIVISIONS[division], sharding=sharding)


def on_this_rank(model: Net, plain: Net, x: Tensor) -> Tensor:
    """What the forward of a divided model computes on this rank if its weights are those of a plain one."""
    same = copy.deepcopy(plain)
    same.parts = model.parts
    for name, part in model.parts.items():
        same.register_parameter(name, nn.Parameter(part.own(plain.get_parameter(name).detach())))
    return same(x)


def adopted(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return fully_shard_optimizer(optimizer) if is_sharded(model) else optimizer


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(torch.tensor(0.1 * step)).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- comparisons -------------------------------------------------------------------------------------------------------


def whole(value: Any) -> Any:
    """As one process has it; collective."""
    if isinstance(value, (list, tuple)):
        return [whole(one) for one in value]
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def compare(problems: Problems, found: Any, expected: Any, what: str, atol: float = 1e-6) -> None:
    """Through containers: shown shapes, dtypes and numbers. `None` is what raised (`attempt`)."""
    if found is None and expected is not None:
        return
    if isinstance(expected, dict):
        problems.expect(list(found) == list(expected), f"{what}: {list(found)}, expected {list(expected)}")
        for key in expected:
            if key in found:
                compare(problems, found[key], expected[key], f"{what} {key}", atol)
    elif isinstance(expected, (list, tuple)):
        for number, (one, wanted) in enumerate(zip(found, expected, strict=True)):
            compare(problems, one, wanted, f"{what} {number}", atol)
    elif isinstance(expected, Tensor):
        problems.expect(found.shape == expected.shape, f"{what}: shows shape {tuple(found.shape)}")
        problems.expect(found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}")
        found, expected = whole(found).detach(), expected.detach()
        if expected.is_floating_point() and not expected.isfinite().all():  # a deviation of one number
            found, expected = found.nan_to_num(), expected.nan_to_num()
        problems.close(found, expected, what, atol=atol)
    else:
        problems.expect(found == expected, f"{what}: {found}, expected {expected}")


def attempt(problems: Problems, what: str, compute: Callable[[], Any]) -> Any:
    """What it returns. All ranks raise alike, so a failure does not end the case."""
    try:
        return compute()
    except Exception as error:
        problems.expect(False, f"{what}: {type(error).__name__}: {str(error)[:300]}")
        return None
