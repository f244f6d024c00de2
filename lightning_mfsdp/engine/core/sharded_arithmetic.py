"""What operations on the rows of sharded tensors compute. Which functions come here is in sharded_functions.py.

    elementwise        on this rank's rows; operands whose rows are on other ranks, or are repeated along dim 0, are fetched
    reductions         over other dims than the first: on this rank's rows; over the first: the same number on every rank
    random numbers     every rank draws the whole tensor and keeps its rows, so ranks with equal seeds match a single process
    everything else    refused by name

DTensor would assume equal parts, so nothing sharded is left to it. What is fetched is fetched by all ranks, also by those
that have no rows: whether that is necessary follows from layouts, and never from what one rank holds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.rows_exchange import fetch_rows, sharded_alike
from lightning_mfsdp.engine.core.sharded_reductions import REDUCTIONS, foreach_norms, reduce_rows
from lightning_mfsdp.engine.core.sharded_tensor import OPTIMIZER_ADVICE, LayoutError, Role, ShardedTensor, Taken
from lightning_mfsdp.engine.core.whole_tensor import WholeTensor, in_memory_of

__all__ = ["assign_data", "run"]

# Elementwise operations that PyTorch does not tag as such.
_ELEMENTWISE = frozenset(
    (
        *("_to_copy", "alias", "copy_", "detach", "empty_like", "fill_", "full_like", "isclose", "lift_fresh"),
        *("masked_fill", "masked_fill_", "ones_like", "zero_", "zeros_like"),
    )
)
_ELEMENTWISE_FAMILIES = ("_foreach_", "_fused_adam", "_fused_adagrad", "_fused_sgd")
_NOT_ELEMENTWISE = frozenset(("_foreach_max", "_foreach_norm", "_foreach_mm", "_foreach_powsum"))
# Operations that return views.
_VIEWS = frozenset(("alias", "detach"))


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[ShardedTensor]) -> Any:
    """An operation on `operands`. Collective where rows have to be fetched, or reduced.

    Raises:
        EngineStateError: It addresses rows by their position; names the first parameter.
    """
    name = func.overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _draw(func, name, args, kwargs, operands)
    first = next((operand for operand in operands if operand.is_divided), operands[0])
    if name == "equal":  # which PyTorch tags as elementwise
        return _equal(args[0], args[1], first) if first.is_divided else _on_whole(func, args, kwargs, operands)
    if _is_elementwise(func):
        return _elementwise(func, name, args, kwargs, first)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _by_dtensor(func, args, kwargs)
    if not first.is_divided:
        return _on_whole(func, args, kwargs, operands)
    if name in REDUCTIONS:
        result, everywhere = reduce_rows(func, name, args, kwargs)
        return map_tensors(lambda tensor: _result(tensor, None if everywhere else first), result)
    if name == "_foreach_norm":
        return [WholeTensor.of(norm) for norm in foreach_norms(*args, **kwargs)]
    if name == "is_same_size":
        return args[0].shape == args[1].shape
    return first.refuse(name)


def assign_data(target: ShardedTensor, value: Any) -> None:
    """`target.data = value`: the values are copied into this rank's rows, which stay in place. Collective.

    What was taken of a weight before (`backup = parameter.data`) keeps its values, as of any tensor whose memory is exchanged.

    Args:
        target: A parameter or its gradient.
        value: Of its shape and dtype; a plain tensor is whole, and the same on every rank.

    Raises:
        EngineStateError: Another shape, dtype or device, or the memory of another parameter, which would be shared from then on.
    """
    if not isinstance(value, Tensor) or (value.shape, value.dtype, value.device.type) != (
        target.shape,
        target.dtype,
        target.device.type,
    ):
        got = f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value)
        what = ""
        why = "because it is part of a buffer"
        if target.role is Role.CONVERTED:
            why = "which a conversion of its module (module.to(dtype), half() or cpu()) has left it"
        elif target.role is not Role.WEIGHT:
            what = "gradient or optimizer state of "
            why = "or put another tensor in its place: parameter.grad = value, optimizer.state[parameter][name] = value"
        raise EngineStateError(
            f"{what}parameter {target.described}: .data can only be set to a tensor of its own shape {tuple(target.shape)}, "
            f"{target.dtype} on {target.device.type}, {why}; got {got}. Give it values like that, or call unshard_model(module) before; "
            "the next fit, or fully_shard, shards it in its new shape"
        )
    source = value.source if isinstance(value, WholeTensor) else value
    if isinstance(source, ShardedTensor) and source.role is Role.WEIGHT and source.place != target.place:
        raise EngineStateError(
            f"parameter {target.described}: .data = that of parameter {source.described} would make both one memory, and "
            "each is part of its unit's buffer; copy the values (.data.copy_(other)), or tie the parameters before fully_shard"
        )
    with torch.inference_mode(False), torch.no_grad():
        if target.role in (Role.WEIGHT, Role.CONVERTED):
            if isinstance(value, ShardedTensor) and target.role is value.role is Role.WEIGHT:
                return  # it lies there
            if isinstance(value, WholeTensor):
                value = value.full_tensor().clone()  # a view may lie there in another order
            target.let_taken_keep_values()
        elif isinstance(value, WholeTensor):
            value = value.full_tensor()
        run(torch.ops.aten.copy_.default, (target, value), {}, [target])


@functools.cache
def _is_elementwise(func: Any) -> bool:
    """Whether an operation treats every number by itself. PyTorch tags some overloads of such a one and not its `out=`."""
    name = func.overloadpacket.__name__
    if name in _ELEMENTWISE or (name.startswith(_ELEMENTWISE_FAMILIES) and name not in _NOT_ELEMENTWISE):
        return True
    overloads = compat.overloads_of(func.overloadpacket) if "out" in func._overloadname else [func]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


# -- elementwise -------------------------------------------------------------------------------------------------------

# Where a tensor stands in a call: the argument (position or name), and the place in it if that is a list.
_Place = tuple[int | str, int | None]


def _elementwise(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: ShardedTensor) -> Any:
    """On this rank's rows. The n-th tensors of a foreach operation's lists are combined."""
    arguments = _arguments(args, kwargs)
    tensors_by_place = _tensors_by_place(arguments)
    written = [key for key in _written(func) if key in arguments]
    meeting: dict[int | None, dict[_Place, Tensor]] = {}
    for place, tensor in tensors_by_place.items():
        meeting.setdefault(place[1], {})[place] = tensor
    for tensors in meeting.values():
        _settle(tensors, written)
    numbers = meeting.pop(None) if len(meeting) > 1 and None in meeting else {}
    models = {at: _model(name, tensors, written) for at, tensors in meeting.items()}
    operands = {place: _whole(tensor) for place, tensor in numbers.items()}
    to_fetch: dict[_Place, tuple[ShardedTensor, ShardedTensor]] = {}
    for at, tensors in meeting.items():
        like, shape = models[at]
        if like is not None and like.is_divided and not like.shard_spec.piece.has_whole_rows and shape != like.shape:
            like.refuse(name)
        for place, tensor in tensors.items():
            if like is None:
                operands[place] = _whole(tensor)
            elif tensor is like or _is_sharded_as(tensor, like, shape):
                operands[place] = cast("ShardedTensor", tensor)._local_tensor
            else:
                if place[0] in written:
                    _refuse_written(name, tensor, like)
                if _is_divided(tensor) and (tensor.shape == like.shape or _has_rows_of(tensor, like, shape)):
                    to_fetch[place] = tensor, like
                else:
                    operands[place] = _cut(_whole(tensor), like, shape)
    operands.update(zip(to_fetch, fetch_rows(list(to_fetch.values())), strict=True))
    result = func(
        *(_replaced(value, key, operands) for key, value in enumerate(args)),
        **{key: _replaced(value, key, operands) for key, value in kwargs.items()},
    )
    if func._schema.is_mutable:
        return _written_to(arguments, written, result)
    if isinstance(result, (list, tuple)) and None not in models:
        return [_result(tensor, models[at][0]) for at, tensor in enumerate(result)]
    like = models[None][0]
    role = like.role if like is not None and name in _VIEWS else Role.OTHER
    return map_tensors(lambda tensor: _result(tensor, like, role), result)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """By position and by name."""
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    return arguments


def _tensors_by_place(arguments: dict[int | str, Any]) -> dict[_Place, Tensor]:
    tensors: dict[_Place, Tensor] = {}
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            tensors[key, None] = _as_sharded(value)
        elif isinstance(value, (list, tuple)):
            tensors.update(((key, at), _as_sharded(item)) for at, item in enumerate(value) if isinstance(item, Tensor))
    return tensors


def _as_sharded(tensor: Tensor) -> Tensor:
    """A DTensor that the user made of a parameter's rows and its `placements`, as one of ours."""
    if isinstance(tensor, DTensor) and not isinstance(tensor, ShardedTensor):
        for placement in tensor.placements:
            if isinstance(placement, compat.OwnShard) and (group := placement.owner[0]()) is not None:
                return _sharded_as(tensor._local_tensor, group.entries[placement.owner[1]].sharded)
    return tensor


def _is_foreign(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor that is not ours, and is not whole on every rank."""
    return (
        isinstance(tensor, DTensor)
        and not isinstance(tensor, ShardedTensor)
        and not all(placement.is_replicate() for placement in tensor.placements)
    )


def _settle(tensors: dict[_Place, Tensor], written: Sequence[int | str]) -> None:
    """Find out where the DTensors that are not ours lie, of the operands that meet. Collective if there are any."""
    for place, tensor in tensors.items():
        if _is_foreign(tensor):
            partners = (other for other in tensors.values() if _is_divided(other) and other.dim() == tensor.dim())
            like = next((other for other in partners if other.device_mesh == tensor.device_mesh), None)
            tensors[place] = _settled(tensor, like, is_written=place[0] in written)


def _settled(tensor: DTensor, like: ShardedTensor | None, *, is_written: bool = False) -> DTensor:
    """A DTensor that is not ours: one of ours if its parts must be those of `like`, and as it is if DTensor distributed it.

    What DTensor computes with rows of a parameter does not tell that they are such rows (from torch 2.14 on, not even `zeros_like` does),
    but their sizes do where DTensor would have made other parts. Tensors of one number are right wherever they lie. Collective.

    Args:
        tensor: The DTensor. Where its maker did not tell DTensor the shape, it differs between ranks.
        like: The operand that it meets, divided, of its mesh and number of dims, if there is one.
        is_written: The operation writes to it.

    Raises:
        LayoutError: On all ranks. Its parts are neither, or, in the step of an optimizer, may be either.
    """
    mesh, local = tensor.device_mesh, tensor._local_tensor
    shape, offset = compat.equal_part(tensor)
    flags = [local.shape != shape, True, False, False, False]
    if like is not None:
        places = [box.offsets for box in like.shard_spec.piece.boxes]
        flags[1:] = [
            (local.shape, tensor.placements) != (like._local_tensor.shape, like._spec.placements),
            tensor.shape != like.shape,
            len(places) > 1,  # of several sections: they do not follow those of the rank before
            local.numel() > 0 and places != [offset],
        ]
    anywhere = torch.tensor(flags, dtype=torch.int32, device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    is_unequal, does_not_fit, is_untold, is_strips, lies_elsewhere = map(bool, anywhere.tolist())
    stepping, is_refused = "" if like is None else like.stepping, is_unequal
    if like is not None and not does_not_fit:
        is_of_rows = is_unequal or is_untold
        is_refused = is_of_rows or (lies_elsewhere and bool(stepping))
        if (is_of_rows and not is_strips) or (is_refused and not is_written and _is_one_number(local, mesh)):
            return _sharded_as(local, like)
    if is_refused:
        where = f" in the step of {stepping}" if stepping else ""
        raise LayoutError(
            f"a DTensor of shape {tuple(tensor.shape)}{where} has other rows than DTensor gives each rank, or may have; make it by "
            f"torch.zeros_like(parameter). {OPTIMIZER_ADVICE}"
        )
    return tensor


def _is_one_number(local: Tensor, mesh: DeviceMesh) -> bool:
    """Whether a DTensor, of which this rank has `local`, has the same number everywhere, as `zeros_like` makes it. Collective."""
    if local.is_complex():
        return False
    ends = torch.full((2,), -torch.inf, dtype=torch.float64, device=mesh.device_type)
    if local.numel():
        numbers = local.detach().to(ends)
        ends = torch.stack((numbers.max(), -numbers.min())).nan_to_num(torch.inf, torch.inf, -torch.inf)
    for dim in range(mesh.ndim):
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return bool(ends[0] == -ends[1])


def _replaced(value: Any, key: int | str, operands: dict[_Place, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return operands[key, None]
    if isinstance(value, (list, tuple)):
        return [operands.get((key, at), item) for at, item in enumerate(value)]
    return value


def _model(
    name: str, tensors: dict[_Place, Tensor], written: Sequence[int | str]
) -> tuple[ShardedTensor | None, torch.Size]:
    """The common layout of the tensors of one operation, and the shape of all together; `None`: whole on every rank."""
    for key in written:
        for place, tensor in tensors.items():
            if place[0] == key:
                if isinstance(tensor, ShardedTensor):
                    return tensor, tensor.shape
                rows = [other for other in tensors.values() if _is_divided(other)]
                if rows and tensor.dim():
                    rows[0].refuse(name)
                return None, tensor.shape
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
    fit = [
        tensor
        for tensor in tensors.values()
        if isinstance(tensor, ShardedTensor) and tensor.dim() == len(shape) and tensor.shape[:1] == shape[:1]
    ]
    return next((tensor for tensor in fit if tensor.is_divided), fit[0] if fit else None), shape


def _is_sharded_as(tensor: Tensor, like: ShardedTensor, shape: torch.Size) -> bool:
    """Whether every rank has what meets its numbers of `like` in an operation whose operands together have a shape."""
    return _is_divided(tensor) and tensor.dim() == len(shape) and sharded_alike(tensor, like)


def _has_rows_of(tensor: Tensor, like: ShardedTensor, shape: torch.Size) -> bool:
    """Whether ranks have whole rows of `like`, which meet rows of the tensor, and not the same numbers several times."""
    return like.shard_spec.piece.has_whole_rows and 0 < tensor.dim() == len(shape) and tensor.shape[0] == shape[0]


def _whole(tensor: Tensor) -> Tensor:
    """All rows, plain; collective where they are distributed."""
    if not isinstance(tensor, DTensor):
        return tensor
    if all(placement.is_replicate() for placement in tensor.placements):
        return tensor._local_tensor
    if not isinstance(tensor, ShardedTensor):
        # Torch 2.11 would detach what needs a gradient in place, which DTensor does not support.
        return cast("DTensor", tensor.detach()).full_tensor()
    return tensor.full_tensor()


def _cut(whole: Tensor, like: ShardedTensor, shape: torch.Size) -> Tensor:
    """What of a whole tensor meets the numbers that this rank has of `like`; all of it where it is the same for all rows."""
    if not like.is_divided:
        return whole
    piece = like.shard_spec.piece
    if piece.has_whole_rows:
        return piece.rows_of(whole) if _has_rows_of(whole, like, shape) else whole
    return piece.of(whole.expand(piece.shape)) if whole.dim() else whole


@functools.cache
def _written(func: Any) -> tuple[int | str, ...]:
    """Arguments that an operation writes to, by position and by name."""
    arguments = [
        (at, argument.name) for at, argument in enumerate(func._schema.arguments) if argument.alias_info is not None
    ]
    writes = {name for at, name in arguments if func._schema.arguments[at].alias_info.is_write}
    return tuple(key for at, name in arguments if name in writes for key in (at, name))


def _written_to(arguments: dict[int | str, Any], written: Sequence[int | str], result: Any) -> Any:
    """What an operation in place returns, once all ranks have noted the write."""
    for key in written:
        for tensor in tensors_in(arguments[key]):
            if isinstance(tensor, ShardedTensor):
                tensor.note_write()
    return arguments[written[0]] if isinstance(result, Tensor) else result


def _equal(a: Tensor, b: Tensor, like: ShardedTensor) -> bool:
    if a.shape != b.shape:
        return False
    same = run(torch.ops.aten.eq.Tensor, (a, b), {}, [like])
    return bool(run(torch.ops.aten.all.default, (same,), {}, [same]))


# -- random numbers ----------------------------------------------------------------------------------------------------


def _draw(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[ShardedTensor]
) -> Any:
    """The whole tensor's numbers, of which this rank keeps its rows: distinct from other ranks' rows, with equal or different seeds."""
    like = operands[0]
    if len(operands) > 1 or args[0] is not like or not (name.endswith("_like") or func._schema.is_mutable):
        return like.refuse(name)
    whole = torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device)
    drawn = func(whole, *args[1:], **kwargs)
    own = like.of_whole(drawn)
    if func._schema.is_mutable:
        like._local_tensor.copy_(own)
        like.note_write()
        return like
    return _sharded_as(own.clone(), like)


# -- results -----------------------------------------------------------------------------------------------------------


def _is_divided(tensor: Tensor) -> TypeGuard[ShardedTensor]:
    return isinstance(tensor, ShardedTensor) and tensor.is_divided


def _by_dtensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that DTensor makes the ranks agree on by itself, in place."""
    result = func(*map_tensors(_as_plain, args), **map_tensors(_as_plain, kwargs))
    arguments = _arguments(args, kwargs)
    return _written_to(arguments, [key for key in _written(func) if key in arguments], result)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[ShardedTensor]) -> Any:
    """An operation on tensors that are whole on every rank."""
    for tensor in tensors_in((args, kwargs)):
        if _is_foreign(tensor):
            _settled(tensor, None)
    result = func(*map_tensors(_whole, args), **map_tensors(_whole, kwargs))
    if func._schema.is_mutable:
        arguments = _arguments(args, kwargs)
        return _written_to(arguments, [key for key in _written(func) if key in arguments], result)
    first = operands[0]
    role = first.role if func.overloadpacket.__name__ in _VIEWS else Role.OTHER

    def placed(tensor: Tensor) -> Any:
        if tensor.shape == first.shape:
            result = _result(tensor, first, role)
            if in_memory_of(tensor, first._local_tensor):  # a transposed one, too
                first.note_taken(cast("Taken", result))
            return result
        return WholeTensor.of(
            tensor, next((operand for operand in operands if in_memory_of(tensor, operand._local_tensor)), None)
        )

    return map_tensors(placed, result)


def _as_plain(tensor: Tensor) -> Tensor:
    """As DTensor itself sees it; the same memory."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    return DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)


def _result(local: Tensor, like: ShardedTensor | None, role: Role = Role.OTHER) -> Tensor:
    """What an operation returns: distributed as `like`, or, for `None`, the same on every rank."""
    return WholeTensor.of(local) if like is None else _sharded_as(local, like, role)


def _sharded_as(local: Tensor, like: ShardedTensor, role: Role = Role.OTHER) -> ShardedTensor:
    """What this rank has of a tensor that is distributed as `like`: with its rows, or, if ranks have parts of those, with its shape."""
    whole_rows = like.shard_spec.piece.has_whole_rows
    shape = torch.Size([*like.shape[:1], *local.shape[1:]]) if whole_rows else None
    return ShardedTensor.over(local, like, shape, role)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refuse_written(name: str, tensor: Tensor, like: ShardedTensor) -> None:
    """Raise if an operation that computes with pieces that lie as `like` would write to a tensor that lies otherwise."""
    if not tensor.dim() or not (like.is_divided or _is_divided(tensor)):
        return
    if not isinstance(tensor, ShardedTensor):
        like.refuse(name)
    described = ", ".join(dict.fromkeys(partner.described for partner in (tensor, like)))
    raise EngineStateError(
        f"{name}: parameters {described} have their rows on different ranks, because their shapes or units differ, and this operation "
        "would write to both; go through full_tensor(), or shard both models alike"
    )
