"""The representations of one parameter: unsharded inside its unit, sharded everywhere else.

    full      the module's own `nn.Parameter` object, a view of gathered memory; forward and autograd see it
    sharded   a `DTensor` over this rank's rows of the main weight; `parameters()`, `state_dict()` and checkpoints see
    it
    local     the same rows as a plain `nn.Parameter`; elementwise optimizers step it

`sharded.grad` is a window on `local.grad`: there is only one gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.comm.collectives import Axis
from lightning_mfsdp.engine.core.codec import WeightCodec, marks_of
from lightning_mfsdp.engine.core.piece import Piece
from lightning_mfsdp.engine.core.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.group import ParameterGroup

__all__ = [
    "OWNER",
    "Entry",
    "UnshardedParameter",
    "is_left_behind",
    "leave_behind",
    "mark_owner",
]

OWNER = "_owner"  # where a parameter stores its group and its index in it
_LEFT_BEHIND = "_left_behind"


class UnshardedParameter(nn.Parameter):
    """The module's own parameter, which records whether its `data` was read or replaced, and refuses to be trained from elsewhere.

    What is written through `data` leaves no trace in the version counter. The engine itself uses `_grad`, PyTorch's other name of `grad`
    for classes that override it.
    """

    data_was_asked_for = False

    @property
    def data(self) -> Tensor:
        """As of any parameter."""
        self.data_was_asked_for = True
        return compat.get_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.data_was_asked_for = True
        compat.set_data(self, value)

    @property
    def grad(self) -> Tensor | None:
        """What autograd has left here in the backward that is running; of one process what earlier ones have left, too.

        Raises:
            EngineStateError: The parameter has a gradient, which this object does not show: an optimizer has it from before sharding, or
                it is read in a backward, and other ranks have a part in it.
        """
        grad = self._grad
        if compat.is_traced():  # a compiler describes parameters, in what is recomputed too
            return grad
        if (group := self._group_in_backward()) is not None:
            return self._read_in_backward(group, grad)
        if grad is None:
            self._refuse_where_nothing_shows_it(written=False)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._refuse_where_nothing_shows_it(written=value is not None)
        self._grad = value

    def _place(self) -> tuple[ParameterGroup | None, int]:
        """Its group, `None` where that is gone, and its index there."""
        reference, index = getattr(self, OWNER, (None, 0))
        return (None if reference is None else reference()), index

    def _group_in_backward(self) -> ParameterGroup | None:
        """Its group, if a backward is running."""
        if compat.backward_task() == -1:
            return None
        group, _ = self._place()
        context = group.root() if group is not None else None
        return group if context is not None and context.backward.is_running else None

    def _read_in_backward(self, group: ParameterGroup, grad: Tensor | None) -> Tensor | None:
        """What a hook reads while a backward runs: of one process the gradient so far, of several this rank's of this backward."""
        _, index = self._place()
        entry = group.entries[index]
        earlier: Tensor | None = entry.local.grad
        if earlier is None and index not in group.gradients.held:
            return grad
        if grad is not None or group.mesh.process_groups:
            raise EngineStateError(
                f"the gradient of parameter {entry.sharded.described} is read while a backward runs, and this object does not have all of "
                "it: ranks have reduced it already, or earlier backwards have left some. Take it after the backward, or in a hook "
                "of register_post_accumulate_grad_hook"
            )
        return earlier

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """As of the sharded parameter that modules show, while there is one."""
        group, index = self._place()
        register = (
            super().register_post_accumulate_grad_hook
            if group is None
            else group.entries[index].sharded.register_post_accumulate_grad_hook
        )
        handle: RemovableHandle = register(hook)
        return handle

    def _refuse_where_nothing_shows_it(self, *, written: bool) -> None:
        group, index = self._place()
        if group is None or self._group_in_backward() is not None:
            return
        entry = group.entries[index]
        if (entry.local.grad is None and not written) or any(table.get(key) is self for table, key in entry.sites):
            return
        raise EngineStateError(
            f"the gradient of parameter {entry.sharded.described} is read or written through an object that no module shows now, as that "
            "from before it was sharded, so an optimizer would train nothing. Under Lightning return it from configure_optimizers and step "
            "what self.optimizers() returns; in your own loop make it after fully_shard, or pass it to fully_shard_optimizer. Take "
            "parameters from module.parameters(), in a hook the one it is given"
        )


@dataclass(eq=False, kw_only=True)
class Entry:
    """One parameter of a group.

    Attributes:
        name: Inside the module given to `fully_shard`; the first one when it is tied.
        full: The module's own parameter: the whole, or this rank's part of it.
        sites: Every place that holds it: the `_parameters` table of a module and the key in it. Tied names are several
            sites.
        piece: Where the rows of the main weight lie in the whole parameter.
        part_axes: Along which ranks compute with different parts of it, one for each of `piece.parts`.
        sharded: Rows of the main weight as a DTensor of the global shape.
        local: The same rows, plain.
        at_rest: What the module shows when its unit is not running: `sharded`, or a stand-in under `unshard`.
    """

    name: str
    full: UnshardedParameter
    sites: list[tuple[dict[str, Any], str]]
    piece: Piece
    part_axes: tuple[Axis, ...]
    sharded: ShardedParameter
    local: nn.Parameter
    at_rest: Any = field(init=False)

    def __post_init__(self) -> None:
        self.at_rest = self.sharded

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.piece.shape

    @property
    def is_trained(self) -> bool:
        """Whether a gradient is required now. What an optimizer holds may be frozen by itself (`toggle_optimizer`)."""
        return self.full.requires_grad and self.local.requires_grad

    def as_plain(self, whole: Tensor, codec: WeightCodec | None) -> nn.Parameter:
        """`full`, over memory of its own and without traces of the engine; with a codec, an equal parameter of an ordinary dtype."""
        with torch.inference_mode(False):
            if codec is not None:
                parameter = nn.Parameter(whole, requires_grad=self.full.requires_grad)
                parameter.__dict__.update(marks_of(self.full, codec))
                return parameter
            full: Any = self.full
            plain: Any = nn.Parameter
            full._grad = None
            compat.set_data(full, whole)
            if type(full) is UnshardedParameter:
                full.__class__ = plain
            for mark in (OWNER, "data_was_asked_for"):
                full.__dict__.pop(mark, None)
            return cast("nn.Parameter", full)

    def show(self, parameter: Any) -> None:
        """Show `parameter` under all names."""
        for table, key in self.sites:
            table[key] = parameter


def mark_owner(parameter: Tensor, group: ParameterGroup, index: int) -> None:
    """Store which group manages a parameter and its index there, without keeping the group alive."""
    setattr(parameter, OWNER, (weakref.ref(group), index))


def leave_behind(entry: Entry) -> None:
    """Mark what optimizers hold as replaced by another parameter of the module, and free its memory."""
    nothing = entry.local.detach().new_empty(0)
    entry.local.grad = entry.sharded.grad = None
    entry.sharded.let_go_of_unsharded()
    compat.set_data(entry.local, nothing)
    entry.sharded._local_tensor = nothing
    for parameter in (entry.local, entry.sharded):
        setattr(parameter, _LEFT_BEHIND, True)


def is_left_behind(parameter: Tensor) -> bool:
    """Whether `leave_behind` marked it."""
    return bool(getattr(parameter, _LEFT_BEHIND, False))
