"""Tensors whose rows are shared out as a layout says, and not in the equal parts that DTensor assumes.

Parameters at rest are such tensors (sharded_parameter.py), and so are their gradients and what elementwise operations make of them.

Elementwise operations and reductions to one number need no positions and are left to DTensor. Everything else is refused before it
runs: DTensor would silently take the wrong rows, or wait for ranks that have none.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.errors import EngineStateError
from lightning_mfsdp.engine.rows import gather_rows
from lightning_mfsdp.engine.tree import map_tensors, tensors_in

if TYPE_CHECKING:
    from lightning_mfsdp.engine.group import ParameterGroup

__all__ = ["Rows", "as_dtensor", "own_rows"]

# Elementwise operations that PyTorch does not tag as such.
_ELEMENTWISE = frozenset(
    (
        *(
            "_to_copy",
            "alias",
            "copy_",
            "detach",
            "empty_like",
            "equal",
            "fill_",
            "full_like",
            "is_same_size",
            "isclose",
        ),
        *(
            "lift_fresh",
            "masked_fill",
            "masked_fill_",
            "ones_like",
            "zero_",
            "zeros_like",
            "_amp_foreach_non_finite_check_and_unscale_",
        ),
    )
)
_ELEMENTWISE_FAMILIES = ("_foreach_", "_fused_adam", "_fused_adagrad", "_fused_sgd")
# To one number, of all rows: right also where a rank has none.
_REDUCTIONS = frozenset(("all", "any", "linalg_vector_norm", "norm", "sum", "_foreach_norm"))


class Rows(DTensor):
    """This rank's rows of a tensor of a parameter's shape. Rows are whole; their number may differ between ranks or be zero."""

    _owner: tuple[weakref.ref[ParameterGroup], int]
    _rows: range  # of dim 0, that lie here

    @classmethod
    def over(cls, local: Tensor, like: Rows) -> Rows:
        """Rows `local` of a tensor that is shared out as `like` is; no copy, no history."""
        plain = as_dtensor(local, like.shape, like.device_mesh, like._spec.placements)
        made = cls(local, plain._spec, requires_grad=False)
        made._owner, made._rows = like._owner, like._rows
        return made

    def _group(self, what: str) -> ParameterGroup:
        group = self._owner[0]()
        if group is None:
            raise EngineStateError(f"{what}: the module of this {tuple(self.shape)} tensor is gone; keep it alive")
        return group

    @property
    def described(self) -> str:
        """Name and unit, for messages."""
        group = self._owner[0]()
        if group is None:
            return f"of shape {tuple(self.shape)}"
        unit = group.unit()
        name = group.entries[self._owner[1]].name
        return f"{name} of unit {unit.name}" if unit is not None else name

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, plain and without history: a loss computed from it has no gradient. Collective."""
        with torch.no_grad(), compat.without_torch_function():
            group, rows = self._group("full_tensor"), self._local_tensor.detach()
            return gather_rows(group, self._owner[1], rows.to(group.device)).to(rows.device)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """As of any DTensor; those that split it know which rows are here."""
        found, is_first = [], True
        for placement in self._spec.placements:
            splits = placement.is_shard()
            found.append(compat.OwnRows(self._rows, is_first) if splits else placement)
            is_first = is_first and not splits
        return tuple(found)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """The whole tensor on every rank, without history; collective. Other placements are refused: DTensor would move wrong rows."""
        same_mesh = device_mesh is None or device_mesh == self.device_mesh
        if not same_mesh or not placements or not all(placement.is_replicate() for placement in placements):
            _refuse_layout("redistribute", self)
        return DTensor.from_local(self.full_tensor(), self.device_mesh, list(placements), run_check=False)

    # -- saving and copying --------------------------------------------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """For torch.distributed.checkpoint: where these rows lie."""
        if not self._local_tensor.numel():
            return []
        offsets = torch.Size([self._rows.start, *[0] * (self.dim() - 1)] if self.dim() else [])
        return [ChunkStorageMetadata(offsets=offsets, sizes=self._local_tensor.shape)]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """For torch.distributed.checkpoint: what this rank writes."""
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__() or self._nothing()
        ]

    def _nothing(self) -> list[ChunkStorageMetadata]:
        """All of a tensor without elements, which no rank has rows of; every rank offers it, and PyTorch takes it from one."""
        return [] if self.numel() else [ChunkStorageMetadata(offsets=torch.Size([0] * self.dim()), sizes=self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """For torch.distributed.checkpoint: the memory it reads from and writes to."""
        return self._local_tensor

    def data_ptr(self) -> int:
        """0: the memory is that of `to_local()`. PyTorch would say how far into it these rows begin."""
        return 0

    def new_empty(self, *size: Any, **options: Any) -> Tensor:
        """A tensor of this shape, shared out as this one; other shapes are refused."""
        wanted = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if tuple(wanted) != tuple(self.shape):
            _refuse_layout("new_empty", self)
        return Rows.over(self._local_tensor.new_empty(self._local_tensor.shape, **options), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        return Rows.over(copy.deepcopy(self._local_tensor.detach(), memo), self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise EngineStateError(
            f"parameter {self.described}: sharded tensors cannot be pickled (torch.save), because each rank has rows of its own; "
            "save value.full_tensor(), called on all ranks, or use torch.distributed.checkpoint"
        )

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if compat.sets_data(func):
            raise EngineStateError(
                f"parameter {args[0].described}: its data cannot be replaced, because it is part of a buffer; copy values in place"
            )
        tensors = tensors_in((args, kwargs or {}))
        if any(tensor.dim() > 0 for tensor in tensors if not isinstance(tensor, DTensor)):
            _refuse_mixing(getattr(func, "__name__", str(func)), tensors)
        with compat.without_torch_function(), _Checked():  # type: ignore[no-untyped-call]
            return func(*args, **(kwargs or {}))

    def _note_write(self) -> None:
        """Main weights may have been written: forward must see it."""
        group = self._owner[0]()
        context = group.context if group is not None else None
        if context is not None:
            context.weights_changed()

    @property
    def _is_sharded(self) -> bool:
        return any(placement.is_shard() for placement in self._spec.placements)


class _Checked(compat.DispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every operation on rows is checked before it runs, also those that a larger function is made of.

    A mode and not `Rows.__torch_dispatch__`, which DTensor's own dispatch in torch 2.11 passes by.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args = _align(func, args, kwargs)
        operands = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Rows)]
        if not operands:
            return func(*args, **kwargs)
        reduces = _check_operation(func, func.overloadpacket.__name__, args, kwargs, operands)
        result = func(*map_tensors(_as_plain, args), **map_tensors(_as_plain, kwargs))
        if func._schema.is_mutable:
            for operand in operands:
                operand._note_write()
            return kwargs.get("out", args[0]) if isinstance(result, DTensor) else result
        if reduces:
            return map_tensors(_on_every_rank, result)
        if isinstance(result, (list, tuple)) and len(result) == len(operands):  # a foreach operation
            return type(result)(_as_rows(value, like) for value, like in zip(result, operands, strict=True))
        return map_tensors(lambda value: _as_rows(value, operands[0]), result)


def _check_operation(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Rows]
) -> bool:
    """Whether an operation gives one number for all rows; refuses those that would look at rows by their position."""
    sharded = [operand for operand in operands if operand._is_sharded]
    if not sharded:
        return False
    for partners in _partners(args, kwargs, sharded):
        if len({(partner.shape[0], partner._rows) for partner in partners}) > 1:
            _refuse_partners(name, partners)
    if name in _REDUCTIONS:
        order = args[1] if len(args) > 1 and name != "sum" else kwargs.get("ord", 2)
        of_all = (
            func._overloadname in ("default", "Scalar") and not (len(args) > 2 and args[2]) and not kwargs.get("dim")
        )
        finite = isinstance(order, Tensor) or name in ("all", "any", "sum") or math.isfinite(order)
        if of_all and finite:
            return True
    elif torch.Tag.pointwise in func.tags or name in _ELEMENTWISE or name.startswith(_ELEMENTWISE_FAMILIES):
        return False
    return _refuse_layout(name, sharded[0])


def _partners(args: tuple[Any, ...], kwargs: dict[str, Any], sharded: Sequence[Rows]) -> list[list[Rows]]:
    """Tensors whose elements meet: all operands, or those at the same place of a foreach operation's lists."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and tensors_in(value)]
    if not lists:
        return [list(sharded)]
    return [[one for one in met if isinstance(one, Rows) and one._is_sharded] for met in zip(*lists, strict=False)]


def _align(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Operands that are DTensors of equal parts get their rows from where the others have theirs. Collective if there are any."""
    strangers = [one for one in args if isinstance(one, DTensor) and not isinstance(one, Rows) and _is_split(one)]
    like = next((one for one in args if isinstance(one, Rows)), None) if strangers else None
    if like is None:
        return args
    if func._schema.is_mutable and any(args[0] is one for one in strangers):
        _refuse_layout(func.overloadpacket.__name__, like)
    return tuple(_aligned(one, like) if any(one is other for other in strangers) else one for one in args)


def _is_split(tensor: DTensor) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)


def _aligned(tensor: DTensor, like: Rows) -> Tensor:
    if tensor.shape != like.shape:
        _refuse_layout("broadcasting", like)
    return Rows.over(own_rows(tensor.full_tensor(), like), like)


def own_rows(whole: Tensor, like: Rows) -> Tensor:
    """This rank's rows of a whole tensor that is shared out as `like` is; a copy."""
    local = like._local_tensor
    if not whole.dim():
        return whole.reshape(1)[: local.numel()].reshape(local.shape).clone()
    return whole[like._rows.start : like._rows.stop].clone() if like._is_sharded else whole.clone()


def _as_plain(tensor: Tensor) -> Tensor:
    """As DTensor itself sees it; the same memory."""
    if not isinstance(tensor, Rows):
        return tensor
    return DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _as_rows(value: Any, like: Rows) -> Any:
    """A result of the operand's shape is shared out as the operand is."""
    if isinstance(value, DTensor) and (value.shape, value._spec.placements) == (like.shape, like._spec.placements):
        return Rows.over(value._local_tensor, like)
    return value


def _on_every_rank(value: Tensor) -> Tensor:
    """A number of which each rank has its part becomes the same on all."""
    if isinstance(value, DTensor):
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value


def _refuse_partners(name: str, partners: Sequence[Rows]) -> NoReturn:
    described = ", ".join(dict.fromkeys(partner.described for partner in partners))
    raise EngineStateError(
        f"{name}: parameters {described} have their rows on different ranks, because their shapes or units differ; go through "
        "full_tensor(), or shard both models alike"
    )


def _refuse_layout(name: str, operand: Rows) -> NoReturn:
    raise EngineStateError(
        f"{name}: parameter {operand.described} is sharded by rows in parts that differ in length, which this operation would mix up; "
        "call it on value.full_tensor(), the whole tensor, on all ranks, use the weight inside its unit's forward, or change it under "
        "unshard(module, writeback=True)"
    )


def _refuse_mixing(name: str, tensors: Sequence[Tensor]) -> NoReturn:
    names = ", ".join(tensor.described for tensor in tensors if isinstance(tensor, Rows))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    raise EngineStateError(
        f"{name} on rank {rank}: parameter {names} is sharded and was used outside its "
        "unit's forward, where only this rank's rows "
        "are there. Call the module that fully_shard was given (not its weight), use the weight inside that module's "
        "forward, or read it "
        "under unshard(module); to go on without sharding (strategy auto or ddp, torch.export, plain PyTorch), call "
        "unshard_model(module) first"
    )


def as_dtensor(local: Tensor, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor of the global shape; its rows need not be what DTensor would compute."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
