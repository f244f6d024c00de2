"""Differentiable collectives of a tensor axis: each is the backward of another one.

    forward                          backward
    copied      nothing              all-reduce
    copied_end  nothing              all-reduce of the last numbers
    summed      all-reduce           nothing
    gathered    all-gather           own part
    own_part    own part             all-gather
    sequence_gathered  all-gather    reduce-scatter
    sequence_summed    reduce-scatter  all-gather

All ranks of a group must make the same calls in the same order, in forward and in backward. Buffers are contiguous by construction, as
in context parallelism: a collective reads and writes memory in its order, and gradients are permuted often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base.compat import all_gather_flat, reduce_scatter_flat
from lightning_mfsdp.base.errors import ShardingError

__all__ = [
    "TensorGroup",
    "copied",
    "copied_end",
    "gathered",
    "own_part",
    "sequence_gathered",
    "sequence_summed",
    "summed",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorGroup:
    """The ranks that divide weights among themselves.

    Attributes:
        group: Their process group.
        size: How many they are.
        rank: This one's place among them.
    """

    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TensorGroup:
        """The ranks of a process group, of which this rank is a member."""
        return cls(group=group, size=dist.get_world_size(group), rank=dist.get_rank(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        """The same object: a copy of a model communicates with the same ranks."""
        return self


def copied(tensor: Tensor, group: TensorGroup) -> Tensor:
    """A tensor equal on all ranks, before each computes with a part of a weight. Backward sums the gradients of all ranks."""
    result: Tensor = _applied(_Copied, tensor, group)
    return result


def copied_end(tensor: Tensor, group: TensorGroup, length: int) -> Tensor:
    """As `copied`, for the last `length` numbers of the last dim alone."""
    result: Tensor = _applied(_CopiedEnd, tensor, group, length)
    return result


def summed(tensor: Tensor, group: TensorGroup) -> Tensor:
    """The sum of a tensor of each rank, after each computed with a part of a weight. Backward passes the gradient on."""
    result: Tensor = _applied(_Summed, tensor, group)
    return result


def gathered(tensor: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """The whole tensor from the parts of all ranks along `dim`. Backward takes this rank's part of the gradient.

    That is right where all ranks then compute the same with the result.
    """
    result: Tensor = _applied(_Gathered, tensor, group, dim % tensor.ndim)
    return result


def own_part(tensor: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """This rank's part along `dim` of a tensor equal on all ranks. Backward gathers the gradients of all ranks.

    Raises:
        ShardingError: The dim is not divisible by the number of ranks.
    """
    _check(tensor, group, dim)
    result: Tensor = _applied(_OwnPart, tensor, group, dim % tensor.ndim)
    return result


def sequence_gathered(tensor: Tensor, group: TensorGroup, dim: int = 1) -> Tensor:
    """Whole sequences from consecutive parts of all ranks along `dim`, before each computes with a part of a weight.

    Backward sums the gradients of all ranks, each of which keeps its part: `copied` for divided sequences.
    """
    result: Tensor = _applied(_SequenceGathered, tensor, group, dim % tensor.ndim)
    return result


def sequence_summed(tensor: Tensor, group: TensorGroup, dim: int = 1) -> Tensor:
    """This rank's part along `dim` of the sum over all ranks: `summed` for divided sequences. Backward gathers.

    Raises:
        ShardingError: The dim is not divisible by the number of ranks.
    """
    _check(tensor, group, dim)
    result: Tensor = _applied(_SequenceSummed, tensor, group, dim % tensor.ndim)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _check(tensor: Tensor, group: TensorGroup, dim: int) -> None:
    if tensor.shape[dim] % group.size:
        raise ShardingError(
            f"dim {dim % tensor.ndim} of a tensor of shape {list(tensor.shape)} cannot be divided over {group.size} tensor ranks;"
            " pad it"
        )


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _Summed.apply(gradients[0], ctx.group), None


class _CopiedEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, length: int) -> Tensor:
        ctx.group, ctx.length = group, length
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        begin, end = torch.split(gradients[0], [gradients[0].shape[-1] - ctx.length, ctx.length], dim=-1)
        return torch.cat([begin, summed(end, ctx.group)], dim=-1), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)  # others may keep the tensor itself
        dist.all_reduce(total, group=group.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _Copied.apply(gradients[0], ctx.group), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _OwnPart.apply(gradients[0], ctx.group, ctx.dim), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return tensor.chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _Gathered.apply(gradients[0], ctx.group, ctx.dim), None, None


class _SequenceGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _SequenceSummed.apply(gradients[0], ctx.group, ctx.dim), None, None


class _SequenceSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        source = torch.stack(tensor.chunk(group.size, dim)).contiguous()
        reduced = source.new_empty(source.shape[1:])
        reduce_scatter_flat(reduced.view(-1), source.view(-1), dist.ReduceOp.SUM, group.group)
        return reduced

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _SequenceGathered.apply(gradients[0], ctx.group, ctx.dim), None, None


def _all_gather(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    sent = tensor.contiguous()
    received = sent.new_empty(group.size, *sent.shape)
    all_gather_flat(received.view(-1), sent.view(-1), group.group)
    return torch.cat(received.unbind(), dim=dim).contiguous() if dim else received.flatten(0, 1)
