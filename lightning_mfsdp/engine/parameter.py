"""The two faces of one parameter: full inside its unit, sharded everywhere else.

    full      the module's own `nn.Parameter` object, a view of gathered memory; forward and autograd see it
    sharded   a `DTensor` over this rank's rows of the main weight; `parameters()`, `state_dict()` and checkpoints see
    it
    local     the same rows as a plain `nn.Parameter`; elementwise optimizers hold it

`sharded.grad` is a window on `local.grad`: there is one gradient, whoever looks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.errors import EngineStateError
from lightning_mfsdp.engine.tree import tensors_in

if TYPE_CHECKING:
    from lightning_mfsdp.engine.group import ParameterGroup

__all__ = ["Entry", "ShardedParameter", "mark_owner", "owner_of", "place_of"]

_OWNER = "_owner"


@dataclass(eq=False, kw_only=True)
class Entry:
    """One parameter of a group.

    Attributes:
        name: Inside the module given to `fully_shard`; the first one when it is tied.
        full: The module's own parameter, `shape`.
        sites: Every place that holds it: the `_parameters` table of a module and the key in it. Tied names are several
            sites.
        sharded: Rows of the main weight as a DTensor of the global shape.
        local: The same rows, plain.
        resting: What the module shows when its unit is not running: `sharded`, or a stand-in under `unshard`.
    """

    name: str
    full: nn.Parameter
    sites: list[tuple[dict[str, Any], str]]
    shape: torch.Size
    sharded: ShardedParameter
    local: nn.Parameter
    resting: Any = field(init=False)

    def __post_init__(self) -> None:
        self.resting = self.sharded

    @property
    def is_trained(self) -> bool:
        """Whether a gradient is wanted now. What an optimizer holds may be frozen by itself (`toggle_optimizer`)."""
        return self.full.requires_grad and self.local.requires_grad

    def install(self, parameter: Any) -> None:
        """Show `parameter` under all names."""
        for table, key in self.sites:
            table[key] = parameter


def mark_owner(parameter: Tensor, group: ParameterGroup, index: int) -> None:
    """Remember which group manages a parameter and where in it, without keeping the group alive."""
    setattr(parameter, _OWNER, (weakref.ref(group), index))


def place_of(parameter: Tensor) -> tuple[ParameterGroup, int] | None:
    """Group of a parameter and its index in it, whichever of its faces is given; `None` if the engine does not manage it."""
    reference, index = getattr(parameter, _OWNER, (None, 0))
    group = reference() if reference is not None else None
    return None if group is None else (group, index)


def owner_of(parameter: Tensor) -> tuple[ParameterGroup, Entry] | None:
    """Group and entry of a parameter, whichever of its faces is given; `None` if the engine does not manage it."""
    place = place_of(parameter)
    return None if place is None else (place[0], place[0].entries[place[1]])


class _Rows(DTensor):
    """Rows of a tensor, shared out as a layout says and not in equal parts, which DTensor's own gather would assume."""

    _owner: tuple[weakref.ref[ParameterGroup], int]

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, plain and without history. Collective."""
        group = self._owner[0]()
        if group is None:
            raise EngineStateError(f"full_tensor: the module of this {tuple(self.shape)} tensor is gone; keep it alive")
        with torch.no_grad(), compat.without_torch_function():
            return group.gather_rows(self._owner[1], self._local_tensor.detach())


class ShardedParameter(_Rows):
    """This rank's rows of a main weight, in the global shape. Rows are whole; their number may differ between ranks or be zero.

    It takes part in elementwise arithmetic and optimizers like any DTensor. Mixed with plain tensors, as in a forward
    outside its unit, it says so.
    """

    _local_face: nn.Parameter
    _full_face: nn.Parameter
    _name: str
    _grad_face: _Rows | None
    # Where this rank has no rows the local face never has a gradient (fused optimizers), and this says what other ranks' say.
    has_empty_grad: bool

    @classmethod
    def wrap(
        cls, group: ParameterGroup, index: int, name: str, local: nn.Parameter, full: nn.Parameter
    ) -> ShardedParameter:
        """Parameter `index` of a group, over `local` (rows of dim 0, main dtype); `full` still has the global shape."""
        mesh, placements = group.mesh.device_mesh, group.dtensor_placements
        plain = _as_dtensor(local.detach(), full.shape, mesh, placements)
        made = cls(local.detach(), plain._spec, requires_grad=full.requires_grad)
        made._is_param = True
        made._owner = (weakref.ref(group), index)
        made.has_empty_grad = False
        made._local_face, made._full_face, made._name, made._grad_face = local, full, name, None
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
            plain = _as_dtensor(grad, self.shape, self.device_mesh, self.placements)
            self._grad_face = _Rows(grad, plain._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            self._grad_face._owner = self._owner
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
        self._grad_face = value if isinstance(value, _Rows) else None

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

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            _weights_changed(args)
        tensors = tensors_in((args, kwargs or {}))
        if any(tensor.dim() > 0 for tensor in tensors if not isinstance(tensor, DTensor)):
            _refuse_mixing(func, tensors)
        with compat.without_torch_function():
            return func(*args, **(kwargs or {}))


# In-place operators whose names do not end in one underscore.
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def _weights_changed(args: tuple[Any, ...]) -> None:
    """Main weights are written through their DTensors: forward must see it."""
    written = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    for parameter in written:
        if isinstance(parameter, ShardedParameter):
            group = parameter._owner[0]()
            context = group.context if group is not None else None
            if context is not None:
                context.weights_changed()


def _refuse_mixing(func: Any, tensors: list[Tensor]) -> None:
    names = ", ".join(tensor.described for tensor in tensors if isinstance(tensor, ShardedParameter))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    raise EngineStateError(
        f"{getattr(func, '__name__', func)} on rank {rank}: parameter {names} is sharded and was used outside its "
        "unit's forward, where only this rank's rows "
        "are there. Call the module that fully_shard was given (not its weight), use the weight inside that module's "
        "forward, or read it "
        "under unshard(module)"
    )


def _as_dtensor(local: Tensor, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
