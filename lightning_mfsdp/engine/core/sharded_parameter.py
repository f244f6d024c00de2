"""ShardedParameter: what `module.parameters()` shows of a parameter while it is sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.gradient_hooks import add_gradient_hook
from lightning_mfsdp.engine.core.piece import Piece
from lightning_mfsdp.engine.core.rows_exchange import sharded_alike
from lightning_mfsdp.engine.core.sharded_collectives import communicate
from lightning_mfsdp.engine.core.sharded_functions import operate
from lightning_mfsdp.engine.core.sharded_tensor import (
    Role,
    ShardedTensor,
    ShardSpec,
    Taken,
    as_dtensor,
    refuse_gradient,
)
from lightning_mfsdp.engine.core.whole_tensor import WholeTensor

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = ["SHARDED", "ShardedParameter"]

SHARDED = "_sharded"  # where local rows have a weak reference to what the module shows of them

# How dictionaries compare their keys.
_EQUAL = (Tensor.__eq__, Tensor.eq)


class ShardedParameter(ShardedTensor):
    """This rank's rows of a main weight, in the global shape. Their number may differ between ranks or be zero.

    Rows are whole, unless ranks compute with parts of them (base/part.py). It can be used in elementwise arithmetic and optimizers like any
    DTensor. Mixed with plain tensors, as in a forward outside its unit, it is gathered, with a warning for large parameters.
    """

    _local: nn.Parameter
    _unsharded: Callable[[], nn.Parameter | None]  # weak: an optimizer may outlive the module
    _name: str
    gradient_rows: ShardedTensor | None  # over a gradient that is not the engine's: assigned by the user, or held back
    _shown_gradient: Callable[[], ShardedTensor | None]  # over the engine's, which keeps it
    # What programs have of it in its memory: `data`, `detach()`, views; by identity.
    taken: weakref.WeakValueDictionary[int, Taken]
    # Itself, or what it is converted from. PyTorch refuses to swap in another tensor (`module.half()`) while there is a weak reference.
    _original: weakref.ref[ShardedParameter]

    @classmethod
    def wrap(
        cls,
        group: ParameterGroup,
        index: int,
        name: str,
        local: nn.Parameter,
        full: nn.Parameter,
        piece: Piece,
        placements: Sequence[Placement],
    ) -> ShardedParameter:
        """Parameter `index` of a group, over `local` (rows of dim 0, main dtype), which lie where `piece` says."""
        plain = as_dtensor(local.detach(), piece.shape, group.mesh.device_mesh, placements)
        parameter = cls(local.detach(), plain._spec, requires_grad=full.requires_grad)
        parameter.__dict__.update(vars(local))  # what users mark parameters with, for their optimizer's groups
        parameter._is_param = True
        parameter._owner = (weakref.ref(group), index)
        split = group.placement.main, group.placement.outer_main
        parameter.shard_spec = ShardSpec(piece, group.layout.rows_by_shard[index], group.mesh, split)
        parameter._local, parameter._unsharded, parameter._name = local, weakref.ref(full), name
        parameter.gradient_rows, parameter._shown_gradient = None, _nothing
        parameter.taken = weakref.WeakValueDictionary()
        parameter._original = weakref.ref(parameter)
        setattr(local, SHARDED, parameter._original)
        if full.requires_grad:
            Tensor.register_hook(parameter, partial(_refuse_gradient, parameter._original))
        return parameter

    def __hash__(self) -> int:
        # Optimizers hold the local one, and others (torch.distributed.checkpoint) look up what the module shows.
        return id(self._local)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _EQUAL and args[0] is not args[1] and _represent_same(*args):
            return True
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def role(self) -> Role:
        """What the module shows after a conversion shares all attributes with the original, which knows itself."""
        return Role.WEIGHT if self._original() is self else Role.CONVERTED

    @property
    def described(self) -> str:
        """Name and unit, for messages."""
        group = self._owner[0]()
        unit_name = group.unit_name if group is not None else ""
        return f"{self._name} of unit {unit_name}" if unit_name else self._name

    @property
    def grad(self) -> DTensor | None:
        """The reduced gradient of these rows; `None` until a synchronized backward. Empty, and not `None`, on a rank without rows."""
        full = self._unsharded()
        if full is not None and full._grad is not None:  # not in a function: every `zero_grad` comes here
            self._take_unnoticed()
        grad = self._local.grad
        if grad is None:
            self._refuse_in_recording()
            return None
        shown = self._shown_gradient()
        if shown is not None and shown._local_tensor is grad:
            return shown
        if self.gradient_rows is None or self.gradient_rows._local_tensor is not grad:
            self.gradient_rows = ShardedTensor.over(grad, self, role=Role.GRADIENT)
        return self.gradient_rows

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        full = self._unsharded()
        if full is not None and full._grad is not None:
            self._take_unnoticed()
        if self._local.grad is None:  # as all are while a forward is recorded
            self._refuse_in_recording()
        if value is None:
            self._local.grad = self.gradient_rows = None
            return
        rows = value if isinstance(value, ShardedTensor) and sharded_alike(value, self) else self._rows_of(value)
        if rows._local_tensor is not self._local.grad:
            rows.before_use()
        if rows.role is Role.OTHER:
            rows.become_gradient(self)
        self._local.grad = rows._local_tensor
        self.gradient_rows = None if rows is self._shown_gradient() else rows

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _take_unnoticed(self) -> None:
        """Reduce what a backward left of which no unit was notified. Collective: ranks on which it left nothing do not join."""
        group = self._owner[0]()
        if group is not None:
            group.reduce_held_back()

    def show_gradient(self, rows: Tensor) -> ShardedTensor:
        """From now on `.grad` is the result whenever the local representation's is `rows`, and lives as long as that."""
        gradient = ShardedTensor.over(rows, self, role=Role.GRADIENT)
        self._shown_gradient = weakref.ref(gradient)
        return gradient

    def _refuse_in_recording(self) -> None:
        """Raise while a forward is recorded: gradients are stored elsewhere meanwhile, and replays would not read them again."""
        group = self._owner[0]()
        if group is not None and group.hides_gradients:
            raise EngineStateError(
                f"{self.described}: .grad is read or set in a step whose forward is recorded as a CUDA graph; do it after backward "
                "(on_after_backward in Lightning), or train without CUDA graphs"
            )

    def _rows_of(self, value: Tensor) -> ShardedTensor:
        """This rank's rows of a gradient that is whole on every rank, or lies elsewhere."""
        if isinstance(value, (DTensor, WholeTensor)):
            value = value.full_tensor()
        if value.shape != self.shape:
            raise EngineStateError(
                f"{self.described}: its gradient was set to a tensor of shape {tuple(value.shape)}; expected {tuple(self.shape)}, the "
                "shape of the whole parameter, with the same values on every rank"
            )
        return ShardedTensor.over(self.of_whole(value).detach().to(self._local).clone(), self)

    def let_taken_keep_values(self) -> None:
        """Its memory is about to be exchanged, as far as a program can tell."""
        for tensor in list(self.taken.values()):
            tensor.keep_values()
        self.taken.clear()

    def note_write(self) -> None:
        """Main weights were written: forward must read them, and graphs that saved the parameter are out of date, as in plain PyTorch."""
        super().note_write()
        group, index = self.place
        group.outdate_graphs(index)

    def forget_former_gradient(self) -> None:
        """Drop the sharded tensor over a gradient that was cleared, or was held back before; it would keep memory alive."""
        grad, shown = self._local.grad, self._shown_gradient()
        if grad is None or (shown is not None and shown._local_tensor is grad):
            self.gradient_rows = None

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of its gradient, from the policy."""
        return self._local.grad_dtype

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        if value != self._local.grad_dtype:
            raise EngineStateError(
                f"{self.described}: grad_dtype was set to {value} after fully_shard, and gradients are reduced and kept as "
                f"{self._local.grad_dtype}; use MixedPrecisionPolicy(main_grads_dtype=...)"
            )

    @property
    def requires_grad(self) -> bool:
        """Whether forward and backward compute a gradient."""
        full = self._unsharded()
        return self._local.requires_grad if full is None else full.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Turn gradients on or off in every representation.

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
        if (full := self._unsharded()) is not None:
            full.requires_grad_(requires_grad)
        self._local.requires_grad_(requires_grad)
        # In arithmetic on rows, autograd reads the flag of the tensor itself.
        with compat.without_torch_function():
            Tensor.requires_grad_(self, requires_grad)
        return self

    def let_go_of_unsharded(self) -> None:
        """The module's own parameter is plain again. PyTorch would refuse to replace it while there is a weak reference."""
        self._unsharded = _nothing

    @classmethod
    def converted(cls, rows: ShardedTensor, original: ShardedParameter) -> ShardedParameter:
        """What a module shows of a parameter whose rows were moved elsewhere, or converted to another dtype.

        All else is the original parameter's: a converted `nn.Parameter` is the same object. Whether it is trainable, its gradient (where
        and in the dtype that it has), what it is equal to, attributes that users set.
        """
        parameter = cls(rows._local_tensor.detach(), rows._spec, requires_grad=False)
        parameter.__dict__ = original.__dict__
        return parameter

    def before_use(self, *, zeroed: bool = False) -> None:
        """Copy what was assigned to the `data` of the local representation to where the rows belong."""
        if self.role is Role.CONVERTED:  # its rows are not the local representation's
            return
        if self._local.data_ptr() != self._local_tensor.data_ptr() and (group := self._owner[0]()) is not None:
            group.weights.take_assigned()
            group.note_write()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copy("deep-copied")

    def __copy__(self) -> NoReturn:
        self._refuse_copy("copied")

    def _refuse_copy(self, done: str) -> NoReturn:
        raise EngineStateError(
            f"{self._name}: a sharded parameter cannot be {done}, because the copy would belong to no unit. Copy "
            "the module before fully_shard or after unshard_model, or make a second module and load full_state_dict(module) into it; of an "
            "optimizer copy state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.is_whole:
            return super().__reduce_ex__(protocol)
        return nn.Parameter(self._as_plain().clone(), requires_grad=self.requires_grad).__reduce_ex__(protocol)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call `hook(gradient)` in each backward that reaches the parameter in a forward of its module, as under DDP.

        `gradient` is that of this rank's loss before it is reduced: a plain tensor of the shape and dtype in which the module computes,
        whole where weights are sharded too. A tensor that the hook returns is reduced in its place. A rank may register hooks by itself,
        to log. `register_post_accumulate_grad_hook` sees the reduced gradient.

        Raises:
            EngineStateError: The module is gone, or no longer sharded.
            RuntimeError: The parameter is frozen.
        """
        full = self._unsharded()
        if full is None:
            raise EngineStateError(
                f"register_hook on parameter {self.described}: the module that has it is gone or was made plain by unshard_model; take the "
                "parameter from the module again"
            )
        handle: RemovableHandle = full.register_hook(hook)
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call `hook(parameter)` at the end of each backward that reduced its gradient; `.grad` is set then, and may be cleared.

        Raises:
            EngineStateError: The parameter is frozen.
        """
        if not self.requires_grad:
            raise EngineStateError(
                f"register_post_accumulate_grad_hook on parameter {self.described}: it is frozen and gets no gradient; unfreeze it first"
            )
        return add_gradient_hook(*self.place, hook)

    def share_memory_(self) -> NoReturn:
        """Refused: its memory is part of a buffer."""
        raise EngineStateError(
            f"share_memory_ on parameter {self.described}: shards lie in buffers of the engine; share the module before fully_shard or "
            "after unshard_model"
        )


# A sharded tensor computes by functions that make sharded tensors: each needs the other, and this file, which has both, joins them.
ShardedTensor.operate, ShardedTensor.communicate = staticmethod(operate), staticmethod(communicate)


def _nothing() -> None:
    return None


def _represent_same(a: Any, b: Any) -> bool:
    """Whether they are representations of one parameter, none of them unsharded: as keys of a dictionary they are the same."""
    a, b = (tensor._local if isinstance(tensor, ShardedParameter) else tensor for tensor in (a, b))
    return a is b


def _refuse_gradient(reference: weakref.ref[ShardedParameter], _: Tensor) -> NoReturn:
    parameter = reference()
    described = parameter.described if parameter is not None else "of a deleted module"
    refuse_gradient(described)
