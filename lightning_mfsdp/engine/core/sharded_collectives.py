"""What collectives of torch.distributed do with sharded tensors: what they do with whole ones, which are equal on all ranks.

    all_reduce      a sum is so many times the tensor as the group has ranks; a mean, a minimum or a maximum is the tensor
    broadcast       nothing
    all_gather      each output is the whole tensor, or sharded alike
    others          refused by name

They come here as operators: most functions of torch.distributed call no `__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.sharded_arithmetic import run
from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor

__all__ = ["communicate"]

_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def communicate(func: Any, args: tuple[Any, ...]) -> Any:
    """An operator of torch.distributed with sharded tensors among its arguments.

    Raises:
        EngineStateError: It is none of the above.
    """
    name = func.overloadpacket.__name__
    with torch.no_grad():
        if name == "allreduce_":
            size, op = compat.group_of(args[1]).size(), compat.reduce_op_of(args[2])
            for tensor in args[0]:
                if op == dist.ReduceOp.SUM:
                    _write(torch.ops.aten.mul_.Tensor, tensor, size)
                elif op not in _SAME:
                    _refuse("all_reduce with another operation than SUM, AVG, MIN and MAX", args)
        elif name == "allgather_":
            for outputs, value in zip(args[0], args[1], strict=True):
                _fill(outputs, value, args)
        elif name == "_allgather_base_":
            _fill(args[0].view(compat.group_of(args[2]).size(), *args[1].shape).unbind(), args[1], args)
        elif name != "broadcast_":
            _refuse(name.strip("_"), args)
    return args[0], compat.finished_work()


def _write(func: Any, tensor: Any, value: Any) -> None:
    for one in tensors_in((tensor, value)):
        if isinstance(one, ShardedTensor):
            one.before_use()
    run(func, (tensor, value), {}, [tensor])


def _fill(outputs: Sequence[Tensor], value: Tensor, args: tuple[Any, ...]) -> None:
    if not isinstance(value, ShardedTensor):
        _refuse("all_gather of a plain tensor", args)
    plain = [output for output in outputs if not isinstance(output, ShardedTensor)]
    if plain:
        whole = value.full_tensor()
        for output in plain:
            output.copy_(whole)
    for output in outputs:
        if isinstance(output, ShardedTensor):
            _write(torch.ops.aten.copy_.default, output, value)


def _refuse(name: str, args: tuple[Any, ...]) -> NoReturn:
    sharded = next(tensor for tensor in tensors_in(args) if isinstance(tensor, ShardedTensor))
    raise EngineStateError(
        f"torch.distributed.{name}: the tensor is parameter {sharded.described}, its gradient or one like these, of which each rank has "
        "rows of its own; pass value.full_tensor(), which is the same on all ranks"
    )
