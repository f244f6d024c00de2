"""What operations on tensors with distributed rows (sharded_tensor.py) compute.

    elementwise        on the rows here; operands whose rows lie elsewhere, or are repeated along dim 0, are fetched
    reductions         over other dims than the first: on the rows here; over the first: the same number on every rank
    random numbers     every rank draws the whole tensor and keeps its rows, so ranks with equal seeds match a single process
    everything else    refused by name

DTensor would assume equal parts, so nothing sharded is left to it. What is fetched is fetched by all ranks, also by those
that have no rows: whether that is necessary follows from layouts, and never from what one rank holds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import map_tensors, tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.number import Number
from lightning_mfsdp.engine.core.placed_tensor import PlacedTensor
from lightning_mfsdp.engine.core.rows_exchange import lie_alike, rows_where
from lightning_mfsdp.engine.core.sharded_reductions import REDUCTIONS, foreach_norms, reduce_rows
from lightning_mfsdp.engine.core.whole_view import WholeView, in_memory_of

__all__ = ["LayoutError", "assign_data", "refuse_gradient", "refuse_layout", "run"]

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


_OPTIMIZER_ADVICE = (
    "An optimizer that treats every number by itself works on plain rows: call fully_shard_optimizer(optimizer, elementwise=True), under "
    'Lightning in configure_optimizers. One that needs whole tensors works where they are whole: sharding="no_shard" without offload and '
    "without a tensor axis"
)


class LayoutError(EngineStateError):
    """An operation addresses rows by their position."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[PlacedTensor]) -> Any:
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
        return map_tensors(lambda one: _number(one) if everywhere else _rows(one, first), result)
    if name == "_foreach_norm":
        return [_number(norm) for norm in foreach_norms(*args, **kwargs)]
    if name == "is_same_size":
        return args[0].shape == args[1].shape
    return refuse_layout(name, first)


def assign_data(target: PlacedTensor, value: Any) -> None:
    """`target.data = value`: the values are copied into this rank's rows, which stay in place. Collective.

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
        why = "because it is part of a buffer"
        if not target.shows_weight:
            why = "or put another tensor in its place: parameter.grad = value, optimizer.state[parameter][name] = value"
        raise EngineStateError(
            f"{'' if target.shows_weight else 'gradient or optimizer state of '}parameter {target.described}: .data can only be set to a "
            f"tensor of its own shape {tuple(target.shape)}, {target.dtype} on {target.device.type}, {why}; got {got}. "
            "Give it values like that"
        )
    shown = value.source if isinstance(value, WholeView) else value
    if isinstance(shown, PlacedTensor) and shown.shows_weight and shown.place != target.place:
        raise EngineStateError(
            f"parameter {target.described}: .data = that of parameter {shown.described} would make both one memory, and "
            "each is part of its unit's buffer; copy the values (.data.copy_(other)), or tie the parameters before fully_shard"
        )
    if isinstance(value, WholeView):
        value = value.full_tensor()
    with torch.no_grad():
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


def _elementwise(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: PlacedTensor) -> Any:
    """On the rows here. The n-th tensors of a foreach operation's lists are combined."""
    given = _arguments(args, kwargs)
    found = _tensors_by_place(given)
    written = [key for key in _written(func) if key in given]
    meeting: dict[int | None, dict[_Place, Tensor]] = {}
    for place, tensor in found.items():
        meeting.setdefault(place[1], {})[place] = tensor
    for tensors in meeting.values():
        _settle(tensors, written)
    numbers = meeting.pop(None) if len(meeting) > 1 and None in meeting else {}
    models = {at: _model(name, tensors, written) for at, tensors in meeting.items()}
    here = {place: _whole(tensor) for place, tensor in numbers.items()}
    away: dict[_Place, tuple[PlacedTensor, PlacedTensor]] = {}
    for at, tensors in meeting.items():
        like, shape = models[at]
        if like is not None and like.is_divided and not like.lies.piece.has_whole_rows and shape != like.shape:
            refuse_layout(name, like)
        for place, tensor in tensors.items():
            if like is None:
                here[place] = _whole(tensor)
            elif tensor is like or _lies_as(tensor, like, shape):
                here[place] = cast("PlacedTensor", tensor)._local_tensor
            else:
                if place[0] in written:
                    _refuse_written(name, tensor, like)
                if _is_divided(tensor) and (tensor.shape == like.shape or _has_rows_of(tensor, like, shape)):
                    away[place] = tensor, like
                else:
                    here[place] = _cut(_whole(tensor), like, shape)
    here.update(zip(away, rows_where(list(away.values())), strict=True))
    result = func(
        *(_replaced(value, key, here) for key, value in enumerate(args)),
        **{key: _replaced(value, key, here) for key, value in kwargs.items()},
    )
    if func._schema.is_mutable:
        return _written_to(given, written, result)
    if isinstance(result, (list, tuple)) and None not in models:
        return [_shared_out(one, models[at][0]) for at, one in enumerate(result)]
    like = models[None][0]
    shown = like is not None and name in _VIEWS and like.shows_weight
    return map_tensors(lambda one: _shared_out(one, like, shows_weight=shown), result)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """By position and by name."""
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    return given


def _tensors_by_place(given: dict[int | str, Any]) -> dict[_Place, Tensor]:
    found: dict[_Place, Tensor] = {}
    for key, value in given.items():
        if isinstance(value, Tensor):
            found[key, None] = _placed(value)
        elif isinstance(value, (list, tuple)):
            found.update(((key, at), _placed(one)) for at, one in enumerate(value) if isinstance(one, Tensor))
    return found


def _placed(tensor: Tensor) -> Tensor:
    """A DTensor that the user made of a parameter's rows and its `placements`, as one of ours."""
    if isinstance(tensor, DTensor) and not isinstance(tensor, PlacedTensor):
        for placement in tensor.placements:
            if isinstance(placement, compat.OwnShard) and (group := placement.owner[0]()) is not None:
                made: PlacedTensor = _rows(tensor._local_tensor, group.entries[placement.owner[1]].sharded)
                return made
    return tensor


def _is_foreign(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor that is not ours, and is not whole on every rank."""
    return (
        isinstance(tensor, DTensor)
        and not isinstance(tensor, PlacedTensor)
        and not all(placement.is_replicate() for placement in tensor.placements)
    )


def _settle(tensors: dict[_Place, Tensor], written: Sequence[int | str]) -> None:
    """Find out where the DTensors that are not ours lie, of the operands that meet. Collective if there are any."""
    for place, tensor in tensors.items():
        if _is_foreign(tensor):
            partners = (one for one in tensors.values() if _is_divided(one) and one.dim() == tensor.dim())
            like = next((one for one in partners if one.device_mesh == tensor.device_mesh), None)
            tensors[place] = _settled(tensor, like, is_written=place[0] in written)


def _settled(tensor: DTensor, like: PlacedTensor | None, *, is_written: bool = False) -> DTensor:
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
        places = [box.offsets for box in like.lies.piece.boxes]
        flags[1:] = [
            (local.shape, tensor.placements) != (like._local_tensor.shape, like._spec.placements),
            tensor.shape != like.shape,
            len(places) > 1,  # of several sections: they do not follow those of the rank before
            local.numel() > 0 and places != [offset],
        ]
    found = torch.tensor(flags, dtype=torch.int32, device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    is_unequal, does_not_fit, is_untold, is_strips, lies_elsewhere = map(bool, found.tolist())
    stepping, is_refused = "" if like is None else like.stepping, is_unequal
    if like is not None and not does_not_fit:
        is_of_rows = is_unequal or is_untold
        is_refused = is_of_rows or (lies_elsewhere and bool(stepping))
        if (is_of_rows and not is_strips) or (is_refused and not is_written and _is_one_number(local, mesh)):
            made: PlacedTensor = _rows(local, like)
            return made
    if is_refused:
        where = f" in the step of {stepping}" if stepping else ""
        raise LayoutError(
            f"a DTensor of shape {tuple(tensor.shape)}{where} has other rows than DTensor gives each rank, or may have; make it by "
            f"torch.zeros_like(parameter). {_OPTIMIZER_ADVICE}"
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


def _replaced(value: Any, key: int | str, here: dict[_Place, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return here[key, None]
    if isinstance(value, (list, tuple)):
        return [here.get((key, at), one) for at, one in enumerate(value)]
    return value


def _model(
    name: str, tensors: dict[_Place, Tensor], written: Sequence[int | str]
) -> tuple[PlacedTensor | None, torch.Size]:
    """The common layout of the tensors of one operation, and the shape of all together; `None`: whole on every rank."""
    for key in written:
        for place, tensor in tensors.items():
            if place[0] == key:
                if isinstance(tensor, PlacedTensor):
                    return tensor, tensor.shape
                rows = [one for one in tensors.values() if _is_divided(one)]
                if rows and tensor.dim():
                    refuse_layout(name, rows[0])
                return None, tensor.shape
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
    fit = [
        tensor
        for tensor in tensors.values()
        if isinstance(tensor, PlacedTensor) and tensor.dim() == len(shape) and tensor.shape[:1] == shape[:1]
    ]
    return next((tensor for tensor in fit if tensor.is_divided), fit[0] if fit else None), shape


def _lies_as(tensor: Tensor, like: PlacedTensor, shape: torch.Size) -> bool:
    """Whether every rank has what meets its numbers of `like` in an operation whose operands together have a shape."""
    return _is_divided(tensor) and tensor.dim() == len(shape) and lie_alike(tensor, like)


def _has_rows_of(tensor: Tensor, like: PlacedTensor, shape: torch.Size) -> bool:
    """Whether ranks have whole rows of `like`, which meet rows of the tensor, and not the same numbers several times."""
    return like.lies.piece.has_whole_rows and 0 < tensor.dim() == len(shape) and tensor.shape[0] == shape[0]


def _whole(tensor: Tensor) -> Tensor:
    """All rows, plain; collective where they are distributed."""
    if not isinstance(tensor, DTensor):
        return tensor
    if all(placement.is_replicate() for placement in tensor.placements):
        return tensor._local_tensor
    if not isinstance(tensor, PlacedTensor):
        # Torch 2.11 would detach what needs a gradient in place, which DTensor does not support.
        return cast("DTensor", tensor.detach()).full_tensor()
    return tensor.full_tensor()


def _cut(whole: Tensor, like: PlacedTensor, shape: torch.Size) -> Tensor:
    """What of a whole tensor meets the numbers that this rank has of `like`; all of it where it is the same for all rows."""
    if not like.is_divided:
        return whole
    piece = like.lies.piece
    if piece.has_whole_rows:
        return piece.rows_of(whole) if _has_rows_of(whole, like, shape) else whole
    return piece.of(whole.expand(piece.shape)) if whole.dim() else whole


@functools.cache
def _written(func: Any) -> tuple[int | str, ...]:
    """Arguments that an operation writes to, by position and by name."""
    arguments = [(at, one.name) for at, one in enumerate(func._schema.arguments) if one.alias_info is not None]
    writes = {name for at, name in arguments if func._schema.arguments[at].alias_info.is_write}
    return tuple(key for at, name in arguments if name in writes for key in (at, name))


def _written_to(given: dict[int | str, Any], written: Sequence[int | str], result: Any) -> Any:
    """What an operation in place returns, once all ranks have noted the write."""
    for key in written:
        for one in tensors_in(given[key]):
            if isinstance(one, PlacedTensor):
                one.note_write()
    return given[written[0]] if isinstance(result, Tensor) else result


def _equal(one: Tensor, other: Tensor, like: PlacedTensor) -> bool:
    if one.shape != other.shape:
        return False
    same = run(torch.ops.aten.eq.Tensor, (one, other), {}, [like])
    return bool(run(torch.ops.aten.all.default, (same,), {}, [same]))


# -- random numbers ----------------------------------------------------------------------------------------------------


def _draw(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[PlacedTensor]) -> Any:
    """The whole tensor's numbers, of which this rank keeps its rows: distinct from other ranks' rows, with equal or different seeds."""
    like = operands[0]
    if len(operands) > 1 or args[0] is not like or not (name.endswith("_like") or func._schema.is_mutable):
        return refuse_layout(name, like)
    whole = torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device)
    drawn = func(whole, *args[1:], **kwargs)
    own = like.of_whole(drawn)
    if func._schema.is_mutable:
        like._local_tensor.copy_(own)
        like.note_write()
        return like
    return _rows(own.clone(), like)


# -- results -----------------------------------------------------------------------------------------------------------


def _is_divided(tensor: Tensor) -> TypeGuard[PlacedTensor]:
    return isinstance(tensor, PlacedTensor) and tensor.is_divided


def _by_dtensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that DTensor makes the ranks agree on by itself, in place."""
    result = func(*map_tensors(_as_plain, args), **map_tensors(_as_plain, kwargs))
    given = _arguments(args, kwargs)
    return _written_to(given, [key for key in _written(func) if key in given], result)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[PlacedTensor]) -> Any:
    """An operation on tensors that are whole on every rank."""
    for tensor in tensors_in((args, kwargs)):
        if _is_foreign(tensor):
            _settled(tensor, None)
    result = func(*map_tensors(_whole, args), **map_tensors(_whole, kwargs))
    if func._schema.is_mutable:
        given = _arguments(args, kwargs)
        return _written_to(given, [key for key in _written(func) if key in given], result)
    first = operands[0]
    shown = func.overloadpacket.__name__ in _VIEWS and first.shows_weight

    def shared_out(one: Tensor) -> Any:
        if one.shape == first.shape:
            return _shared_out(one, first, shows_weight=shown)
        source = next((operand for operand in operands if in_memory_of(one, operand._local_tensor)), None)
        return _number(one) if source is None else WholeView.of(one, source, None)

    return map_tensors(shared_out, result)


def _as_plain(tensor: Tensor) -> Tensor:
    """As DTensor itself sees it; the same memory."""
    if not isinstance(tensor, PlacedTensor):
        return tensor
    return DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)


def _rows(local: Tensor, like: PlacedTensor) -> Any:
    """What this rank has of a tensor that is distributed as `like`: with its rows, or, if ranks have parts of those, with its shape."""
    whole_rows = like.lies.piece.has_whole_rows
    return like.over(local, like, torch.Size([*like.shape[:1], *local.shape[1:]]) if whole_rows else None)


def _number(value: Tensor) -> Number:
    """The same on every rank, plain so that it may join a loss."""
    return value.as_subclass(Number)


def _shared_out(value: Tensor, like: PlacedTensor | None, *, shows_weight: bool = False) -> Any:
    """A result of operands laid out as `like`."""
    if like is None:
        return _number(value)
    made = _rows(value, like)
    made.shows_weight = shows_weight
    return made


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refuse_written(name: str, tensor: Tensor, like: PlacedTensor) -> None:
    """Raise if an operation that computes with pieces that lie as `like` would write to a tensor that lies otherwise."""
    if not tensor.dim() or not (like.is_divided or _is_divided(tensor)):
        return
    if not isinstance(tensor, PlacedTensor):
        refuse_layout(name, like)
    described = ", ".join(dict.fromkeys(partner.described for partner in (tensor, like)))
    raise EngineStateError(
        f"{name}: parameters {described} have their rows on different ranks, because their shapes or units differ, and this operation "
        "would write to both; go through full_tensor(), or shard both models alike"
    )


def refuse_layout(name: str, operand: PlacedTensor) -> NoReturn:
    """Raise: the operation addresses rows by their position."""
    if operand.stepping:
        raise LayoutError(
            f"{name}: {operand.stepping} calls it in its step on parameter {operand.described}, whose rows are sharded in parts "
            f"that differ in length, and it would mix them up. {_OPTIMIZER_ADVICE}"
        )
    raise LayoutError(
        f"{name}: parameter {operand.described} is sharded by rows in parts that differ in length, which this operation would mix up; "
        "call it on value.full_tensor(), the whole tensor, on all ranks, use the weight inside its unit's forward, or change it under "
        "unshard(module, writeback=True)"
    )


def refuse_gradient(described: str) -> NoReturn:
    """Raise: a backward reached sharded rows, which autograd does not track."""
    raise EngineStateError(
        f"parameter {described}: a loss was computed from its sharded rows, outside its unit's forward, and the gradient would be lost. "
        "Compute penalties on weights in the forward of the module that owns them, or use the optimizer's weight_decay; to inspect "
        "values, use torch.no_grad()"
    )
