"""Sums, means, norms and extremes of tensors with distributed rows.

Over other dims than the first every rank reduces its own rows, if they are whole. Over the first, ranks reduce what they have and
combine the results, in float32 or better; a rank without rows contributes the neutral element. Reductions that cannot be combined (a
median, the position of a maximum) are computed from the whole tensor, which every rank gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.core.rows import sharded_axes
from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor

__all__ = ["REDUCTIONS", "foreach_norms", "reduce_rows"]

# By overload packet. What is not in `_COMBINED` needs the whole tensor.
REDUCTIONS = frozenset(
    (
        *("all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "linalg_vector_norm"),
        *("logsumexp", "max", "mean", "median", "min", "nanmedian", "nansum", "norm", "prod", "std", "std_mean"),
        *("sum", "var", "var_mean"),
    )
)


def reduce_rows(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """What an operation makes of the rows here, or, if it reduces dim 0, of all rows. Collective in that case.

    Returns:
        The result, plain, and whether it is the same on every rank; otherwise it has the rows that the operand has here.
    """
    rows: ShardedTensor = args[0]
    local = rows._local_tensor
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    dims = _dims(arguments.get("dim"), rows.dim())
    if not rows.shard_spec.piece.has_whole_rows and len(dims) < rows.dim():  # parts of rows cannot be reduced alone
        return func(rows.full_tensor(), *args[1:], **kwargs), True
    if 0 not in dims:
        return func(local, *args[1:], **kwargs), False
    combine = _COMBINED.get("amax" if name == "max" else "amin" if name == "min" else name)
    positions = name in ("max", "min") and func._overloadname != "default"
    if (
        combine is None
        or positions
        or not (local.is_floating_point() or name in ("sum", "all", "any", "count_nonzero"))
    ):
        return func(rows.full_tensor(), *args[1:], **kwargs), True
    return combine(rows, arguments, dims, bool(arguments.get("keepdim", False))), True


def foreach_norms(
    tensors: Sequence[Tensor], order: Any = 2, dtype: torch.dtype | None = None, **named: Any
) -> list[Tensor]:
    """The norm of each tensor, 0-D, the same on every rank; one collective for all that are distributed over the same ranks."""
    order = float(named.get("ord", order))
    norms: list[Tensor] = []
    together: dict[tuple[Any, ...], list[int]] = {}
    axes_of: dict[tuple[Any, ...], tuple[Axis, ...]] = {}
    for number, tensor in enumerate(tensors):
        divided = isinstance(tensor, ShardedTensor) and tensor.is_divided
        axes = sharded_axes(*tensor.place) if isinstance(tensor, ShardedTensor) and divided else ()
        local = getattr(tensor, "_local_tensor", tensor)
        local = local.abs() if local.is_complex() else local
        norms.append(_power_sum(local, order, None, keep=False, dtype=_wide(dtype or local.dtype)))
        key = (*(id(axis.group) for axis in axes), norms[-1].dtype, norms[-1].device)
        together.setdefault(key, []).append(number)
        axes_of[key] = axes
    for key, numbers in together.items():
        sums = torch.stack([norms[number] for number in numbers])
        for number, total in zip(numbers, _root(sums, order, axes_of[key]).unbind(), strict=True):
            norms[number] = total
    return [total.to(dtype or tensor.dtype.to_real()) for total, tensor in zip(norms, tensors, strict=True)]


def _dims(dim: Any, count: int) -> list[int]:
    """Which dims are reduced; all if none are named."""
    if dim is None or dim == []:
        return list(range(count))
    return [item % count for item in (dim if isinstance(dim, (list, tuple)) else (dim,))]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums over ranks."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _over_ranks(value: Tensor, axes: Sequence[Axis], op: Any) -> Tensor:
    """`value` becomes the sum, or the extreme, of all ranks that hold different rows; NaN is the extreme of anything and NaN."""
    if op is not ReduceOp.SUM and value.is_floating_point():
        nan = value.isnan()
        least = -math.inf if op is ReduceOp.MAX else math.inf
        value = torch.stack((value.masked_fill(nan, least), torch.where(nan, -least, least)))
        _over_ranks_in_place(value, axes, op)
        return value[0].masked_fill(value[1] == -least, math.nan)
    value = value.contiguous()
    _over_ranks_in_place(value, axes, op)
    return value


def _over_ranks_in_place(value: Tensor, axes: Sequence[Axis], op: Any) -> None:
    for axis in axes:
        dist.all_reduce(value, op=op, group=axis.group)


def _sum(
    rows: ShardedTensor, arguments: dict[str, Any], dims: list[int], keep: bool, *, function: Any = torch.sum
) -> Tensor:
    local = rows._local_tensor
    dtype = arguments.get("dtype") or (local.dtype if local.is_floating_point() or local.is_complex() else torch.int64)
    total = function(local, dims, keepdim=keep, dtype=_wide(dtype))
    return _over_ranks(total, sharded_axes(*rows.place), ReduceOp.SUM).to(dtype)


def _mean(rows: ShardedTensor, arguments: dict[str, Any], dims: list[int], keep: bool) -> Tensor:
    dtype = arguments.get("dtype") or rows.dtype
    total = _sum(rows, {"dtype": _wide(dtype)}, dims, keep)
    return (total / math.prod(rows.shape[dim] for dim in dims)).to(dtype)


def _norm(rows: ShardedTensor, arguments: dict[str, Any], dims: list[int], keep: bool) -> Tensor:
    order = arguments.get("ord", arguments.get("p"))
    order = 2.0 if order is None else float(order)
    dtype = arguments.get("dtype") or rows.dtype
    total = _power_sum(rows._local_tensor, order, dims, keep=keep, dtype=_wide(dtype))
    return _root(total, order, sharded_axes(*rows.place)).to(dtype)


def _power_sum(local: Tensor, order: float, dims: list[int] | None, *, keep: bool, dtype: torch.dtype) -> Tensor:
    """The term from which norms of parts are combined: the sum of powers, the extreme, or the number of nonzeros."""
    every = list(range(local.dim())) if dims is None else dims
    if order < 0 and _has_nothing(local, every) and not math.isinf(order):  # of which PyTorch has no norm
        return local.new_zeros(_kept(local, every, keep), dtype=dtype)
    if math.isinf(order):
        magnitude = local.abs().to(dtype)
        return _extreme_here(magnitude, every, keep, largest=order > 0, neutral=0.0 if order > 0 else math.inf)
    norm: Tensor = torch.linalg.vector_norm(local, order, dims, keepdim=keep, dtype=dtype)
    return norm if order == 0 else norm**order


def _root(total: Tensor, order: float, axes: Sequence[Axis]) -> Tensor:
    if math.isinf(order):
        return _over_ranks(total, axes, ReduceOp.MAX if order > 0 else ReduceOp.MIN)
    total = _over_ranks(total, axes, ReduceOp.SUM)
    return total if order == 0 else total ** (1.0 / order)


def _extreme_here(local: Tensor, dims: list[int], keep: bool, *, largest: bool, neutral: float) -> Tensor:
    """Partial result of the rows here; the neutral element if there are none."""
    if _has_nothing(local, dims):
        return local.new_full(_kept(local, dims, keep), neutral)
    return torch.amax(local, dims, keepdim=keep) if largest else torch.amin(local, dims, keepdim=keep)


def _has_nothing(local: Tensor, dims: list[int]) -> bool:
    return 0 in dims and not local.shape[0]


def _kept(local: Tensor, dims: list[int], keep: bool) -> list[int]:
    """The shape of what is reduced over some dims."""
    return [1 if dim in dims else size for dim, size in enumerate(local.shape) if keep or dim not in dims]


def _extreme(rows: ShardedTensor, arguments: dict[str, Any], dims: list[int], keep: bool, *, largest: bool) -> Tensor:
    local = rows._local_tensor.to(_wide(rows.dtype))
    own = _extreme_here(local, dims, keep, largest=largest, neutral=-math.inf if largest else math.inf)
    op = ReduceOp.MAX if largest else ReduceOp.MIN
    return _over_ranks(own, sharded_axes(*rows.place), op).to(rows.dtype)


def _count_nonzero(rows: ShardedTensor, arguments: dict[str, Any], dims: list[int], keep: bool) -> Tensor:
    return _count(rows, rows._local_tensor != 0, dims, keep=False)  # PyTorch's never keeps dims


def _any(rows: ShardedTensor, arguments: dict[str, Any], dims: list[int], keep: bool) -> Tensor:
    return _count(rows, rows._local_tensor != 0, dims, keep) > 0


def _all(rows: ShardedTensor, arguments: dict[str, Any], dims: list[int], keep: bool) -> Tensor:
    return _count(rows, rows._local_tensor == 0, dims, keep) == 0


def _count(rows: ShardedTensor, counted: Tensor, dims: list[int], keep: bool) -> Tensor:
    """For how many numbers of all ranks something is true, of which `counted` says so for this rank's."""
    return _over_ranks(torch.sum(counted, dims, keepdim=keep), sharded_axes(*rows.place), ReduceOp.SUM)


_COMBINED: dict[str, Callable[[ShardedTensor, dict[str, Any], list[int], bool], Tensor]] = {
    "all": _all,
    "amax": partial(_extreme, largest=True),
    "amin": partial(_extreme, largest=False),
    "any": _any,
    "count_nonzero": _count_nonzero,
    "linalg_vector_norm": _norm,
    "mean": _mean,
    "nansum": partial(_sum, function=torch.nansum),
    "norm": _norm,
    "sum": _sum,
}
