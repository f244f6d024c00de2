"""Tensors whose rows are shared out as a layout says, and not in the equal parts that DTensor assumes.

    Rows               parameters, their gradients, and what elementwise operations make of them
    ShardedParameter   what `module.parameters()` shows

Elementwise operations and reductions to one number need no positions and are left to DTensor. Whatever would move rows, or look at
them by their index, is refused: DTensor would silently take the wrong ones.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.errors import EngineStateError
from lightning_mfsdp.engine.tree import tensors_in

if TYPE_CHECKING:
    from lightning_mfsdp.engine.group import ParameterGroup

__all__ = ["Rows", "ShardedParameter"]

_OWNER = "_owner"
# Of local results, these give the result of the whole, also where a rank has no rows.
_REDUCTIONS = {"all", "any", "linalg_vector_norm", "norm", "sum", "vector_norm"}
# These would move rows, or stop at a rank without any, before a wrong result could be seen.
_MOVING = {
    *(
        "amax",
        "amin",
        "argmax",
        "argmin",
        "argsort",
        "cumprod",
        "cumsum",
        "flip",
        "kthvalue",
        "log_softmax",
        "logsumexp",
        "max",
        "median",
    ),
    *(
        "min",
        "mode",
        "quantile",
        "roll",
        "softmax",
        "sort",
        "std",
        "std_mean",
        "topk",
        "unique",
        "flatten",
        "ravel",
        "reshape",
        "view",
        "var",
        "var_mean",
    ),
}
# In-place operators whose names do not end in one underscore.
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


class Rows(DTensor):
    """This rank's rows of a tensor of a parameter's shape. Rows are whole; their number may differ between ranks or be zero."""

    _owner: tuple[weakref.ref[ParameterGroup], int]

    @classmethod
    def over(cls, local: Tensor, like: Rows) -> Rows:
        """Rows `local` of a tensor that is shared out as `like` is; no copy, no history."""
        plain = _as_dtensor(local, like.shape, like.device_mesh, like.placements)
        made = cls(local, plain._spec, requires_grad=False)
        made._owner = like._owner
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
            return self._group("full_tensor").gather_rows(self._owner[1], self._local_tensor.detach())

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: rows cannot be moved as DTensor would."""
        _refuse_layout("redistribute", self)

    # -- saving and copying --------------------------------------------------------------------------------------------

    def _first_row(self) -> torch.Size:
        group = self._group("checkpoint")
        rows = group.layout.owned_rows(self._owner[1], group.main_extent.start, len(group.main_extent))
        return torch.Size([rows.start, *[0] * (self.dim() - 1)] if self.dim() else [])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """For torch.distributed.checkpoint: where these rows lie."""
        if not self._local_tensor.numel():
            return []
        return [ChunkStorageMetadata(offsets=self._first_row(), sizes=self._local_tensor.shape)]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """For torch.distributed.checkpoint: what this rank writes."""
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """For torch.distributed.checkpoint: the memory it reads from and writes to."""
        return self._local_tensor

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
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            _weights_changed(args)
        tensors = tensors_in((args, kwargs or {}))
        if any(tensor.dim() > 0 for tensor in tensors if not isinstance(tensor, DTensor)):
            _refuse_mixing(name, tensors)
        first = next((tensor for tensor in tensors if isinstance(tensor, Rows)), None)
        if name in _MOVING and first is not None and len(tensors) == 1:
            _refuse_layout(name, first)
        with compat.without_torch_function():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, (list, tuple)) and args and isinstance(args[0], (list, tuple)):
                operands = [operand if isinstance(operand, Rows) else None for operand in args[0]]
                if len(operands) == len(result):  # a foreach operation
                    return type(result)(map(_as_rows, [name] * len(result), result, operands))
            if isinstance(result, tuple):
                for item in result:
                    _as_rows(name, item, first)
                return result
            return _as_rows(name, result, first)


def _as_rows(name: str, value: Any, operand: Rows | None) -> Any:
    """A result of an operation on `operand`: if it has its shape, it is shared out as it is."""
    if operand is None or not isinstance(value, DTensor) or isinstance(value, Rows):
        return value
    if not any(placement.is_shard() for placement in operand.placements):
        return value
    like = (value.shape, value._local_tensor.shape, value.placements)
    if like == (operand.shape, operand._local_tensor.shape, operand.placements):
        value.__class__ = Rows  # keeps its history, unlike a new one
        setattr(value, _OWNER, operand._owner)
        return value
    if value.dim() == 0 and (name.removeprefix("_foreach_") in _REDUCTIONS or operand.dim() == 0):
        return value
    return _refuse_layout(name, operand)


def _refuse_gradient(reference: weakref.ref[ShardedParameter], _: Tensor) -> NoReturn:
    parameter = reference()
    described = parameter.described if parameter is not None else "of a deleted module"
    raise EngineStateError(
        f"parameter {described}: a loss was computed from its sharded rows, outside its unit's forward, and the gradient would be lost. "
        "Compute penalties on weights in the forward of the module that owns them, or use the optimizer's weight_decay; to look at "
        "values, use torch.no_grad()"
    )


def _refuse_layout(name: str, operand: Rows) -> NoReturn:
    raise EngineStateError(
        f"{name}: parameter {operand.described} is sharded by rows in parts that differ in length, which this operation would mix up; "
        "call it on value.full_tensor(), the whole tensor, on all ranks, or use the weight inside its unit's forward"
    )


def _weights_changed(args: tuple[Any, ...]) -> None:
    """Main weights are written through their DTensors: forward must see it."""
    written = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    for parameter in written:
        if isinstance(parameter, ShardedParameter):
            group = parameter._owner[0]()
            context = group.context if group is not None else None
            if context is not None:
                context.weights_changed()


def _refuse_mixing(name: str, tensors: Sequence[Tensor]) -> NoReturn:
    names = ", ".join(tensor.described for tensor in tensors if isinstance(tensor, Rows))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    raise EngineStateError(
        f"{name} on rank {rank}: parameter {names} is sharded and was used outside its "
        "unit's forward, where only this rank's rows "
        "are there. Call the module that fully_shard was given (not its weight), use the weight inside that module's "
        "forward, or read it "
        "under unshard(module)"
    )


def _as_dtensor(local: Tensor, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class ShardedParameter(Rows):
    """This rank's rows of a main weight, in the global shape. Rows are whole; their number may differ between ranks or be zero.

    It takes part in elementwise arithmetic and optimizers like any DTensor. Mixed with plain tensors, as in a forward
    outside its unit, it says so.
    """

    _local_face: nn.Parameter
    _full_face: nn.Parameter
    _name: str
    _grad_face: Rows | None
    # Where this rank has no rows the local face never has a gradient (fused optimizers), and this says what other ranks' say.
    has_empty_grad: bool
    # Whoever wants to put another tensor in its place (`module.half()`) finds that a weak reference forbids it.
    _unswappable: weakref.ref[ShardedParameter]

    @classmethod
    def wrap(
        cls, group: ParameterGroup, index: int, name: str, local: nn.Parameter, full: nn.Parameter
    ) -> ShardedParameter:
        """Parameter `index` of a group, over `local` (rows of dim 0, main dtype); `full` still has the global shape."""
        mesh, placements = group.mesh.device_mesh, group.dtensor_placements
        plain = _as_dtensor(local.detach(), full.shape, mesh, placements)
        made = cls(local.detach(), plain._spec, requires_grad=full.requires_grad)
        made.__dict__.update(vars(full))  # what users mark parameters with, for their optimizer's groups
        made._is_param = True
        made._owner = (weakref.ref(group), index)
        made.has_empty_grad = False
        made._local_face, made._full_face, made._name, made._grad_face = local, full, name, None
        made._unswappable = weakref.ref(made)
        if full.requires_grad:
            Tensor.register_hook(made, partial(_refuse_gradient, made._unswappable))  # type: ignore[no-untyped-call]
        return made

    @property
    def described(self) -> str:
        """Name and unit, for messages."""
        group = self._owner[0]()
        unit = group.unit() if group is not None else None
        return f"{self._name} of unit {unit.name}" if unit is not None else self._name

    @property
    def grad(self) -> DTensor | None:
        """The reduced gradient of these rows; `None` until a synchronised backward."""
        grad = self._local_face.grad
        if grad is None:
            if not (self.has_empty_grad and self.requires_grad):
                return None
            grad = self._local_face.detach()
        if self._grad_face is None or self._grad_face._local_tensor is not grad:
            self._grad_face = Rows.over(grad, self)
        return self._grad_face

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, DTensor):
            raise EngineStateError(
                f"{self._name}.grad: expected a DTensor of shape {tuple(self.shape)} or None, got a plain tensor of "
                f"shape {tuple(value.shape)}"
            )
        self._local_face.grad = None if value is None or not value._local_tensor.numel() else value._local_tensor
        self.has_empty_grad = value is not None and not value._local_tensor.numel()
        self._grad_face = value if isinstance(value, Rows) else None

    def forget_grad_face(self) -> None:
        """Do not keep a cleared gradient's memory alive for its DTensor."""
        if self._local_face.grad is None:
            self._grad_face = None

    @property
    def requires_grad(self) -> bool:
        """Whether forward and backward compute a gradient."""
        return self._full_face.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Turn gradients on or off for every face.

        Raises:
            EngineStateError: It was frozen when it was sharded, so it has no main weight of the policy's dtype.
        """
        group = self._owner[0]()
        wanted = group.policy.main_params_dtype if group is not None else None
        if (
            requires_grad
            and group is not None
            and not group.spec.trainable
            and wanted not in (None, group.spec.main_dtype)
        ):
            raise EngineStateError(
                f"{self.described}: it was frozen when fully_shard was called, so its main weight is {group.spec.main_dtype} "
                f"and not {wanted}; unfreeze it before fully_shard, and freeze it afterwards if need be"
            )
        self._full_face.requires_grad_(requires_grad)
        self._local_face.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        raise EngineStateError(
            f"{self._name}: a sharded parameter cannot be deep-copied, because the copy would belong to no unit. Copy "
            "the module before fully_shard, "
            "or copy values with unshard(module)"
        )

    def register_hook(self, hook: Any) -> NoReturn:
        """Refused: autograd never sees this tensor."""
        self._refuse_hook("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Refused: autograd never sees this tensor."""
        self._refuse_hook("register_post_accumulate_grad_hook")

    def _refuse_hook(self, what: str) -> NoReturn:
        raise EngineStateError(
            f"{what} on parameter {self.described}: it would never run, because gradients are computed for full parameters and reduced "
            "into shards. Look at gradients after backward (on_after_backward in Lightning), or register the hook before fully_shard"
        )

    def share_memory_(self) -> NoReturn:
        """Refused: its memory is part of a buffer."""
        raise EngineStateError(
            f"share_memory_ on parameter {self.described}: shards lie in buffers of the engine; share the module before fully_shard"
        )
