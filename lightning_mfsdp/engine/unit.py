"""Unit: what a sharded module does before and after its forward and its backward.

    pre-forward     gather (already under way if the order was known), start the next unit's gather, show full
    parameters
    post-forward    show sharded parameters, give the slot back; listen for the backward of the outputs
    pre-backward    gather into the same slot, start the gather of the unit that comes next in backward
    post-backward   give the slot back; once no other call of the unit is outstanding, its gradients are ready to be
    reduced

Post-backward is an autograd node on the unit's inputs, so it runs when everything inside the unit has run. A unit whose
inputs need no gradient has no such node; the end of the backward completes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.group import ParameterGroup
from lightning_mfsdp.engine.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.storage import Slot
from lightning_mfsdp.engine.tree import map_tensors, tensors_in

if TYPE_CHECKING:
    from lightning_mfsdp.engine.context import Context

__all__ = ["Unit", "unit_of"]

_UNIT = "_mfsdp_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit made by `fully_shard(module)`, or `None`."""
    return module.__dict__.get(_UNIT)


class Unit:
    """The engine's side of one sharded module.

    Attributes:
        name: Class name of the module until a root knows it by its full name.
        groups: Parameters it owns.
        borrowed: Groups of other units whose parameters this module shares (tied weights).
        context: Shared by all units of a root.
        live: Shows full parameters.
        pinned: Stays so through the end of a backward, because code around it is still running (`gather_root`).
        pending: Calls in grad mode whose backward has not come through the unit's inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: list[ParameterGroup],
        policy: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool,
    ) -> None:
        self.name = type(module).__name__
        self.groups = groups
        self.borrowed: list[ParameterGroup] = []
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.context: Context
        self.users: list[weakref.ref[Unit]] = [weakref.ref(self)]
        self.pending = 0
        self.live = False
        self.pinned = False
        self.next_forward: weakref.ref[Unit] | None = None
        self.previous_forward: weakref.ref[Unit] | None = None
        self.next_backward: weakref.ref[Unit] | None = None
        self._slots: list[Slot | None] = []
        module.__dict__[_UNIT] = self
        this = weakref.ref(self)
        module.register_forward_pre_hook(_calling(this, Unit.pre_forward), with_kwargs=True)
        module.register_forward_hook(_calling(this, Unit.post_forward), always_call=True)
        module.register_state_dict_pre_hook(lambda *_: _rest(this))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(lambda *_: _rest(this))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(lambda *_: _weights_changed(this))  # type: ignore[no-untyped-call]

    def rename(self, name: str) -> None:
        """Take the full name inside a root."""
        self.name = name
        for index, group in enumerate(self.groups):
            group.name = f"{name}[{index}]"
            group.client.name = f"{group.name} weights"

    @property
    def all_groups(self) -> list[ParameterGroup]:
        """Groups it needs: its own and the borrowed ones."""
        return self.groups + self.borrowed

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter it owns wants a gradient now."""
        return any(entry.full.requires_grad for group in self.groups for entry in group.entries)

    @property
    def is_done(self) -> bool:
        """Whether no call of it, or of a module that shares its parameters, is waiting for its backward."""
        return all((user := reference()) is None or user.pending == 0 for reference in self.users)

    # -- weights -------------------------------------------------------------------------------------------------------

    def start_gather(self, slots: list[Slot | None] | None = None) -> None:
        """Start the gather of every group that is not there yet. `slots`: where saved tensors expect the weights."""
        self.context.refresh()
        for index, group in enumerate(self.all_groups):
            needed = slots[index] if slots else None
            if needed is not None and group.gathered and group.slot is not needed:
                group.release()
            if group.start_gather(self.context.weights_ready, needed):
                self.context.gathers_started += 1

    def install(self) -> None:
        """Wait for the gathers and show full parameters."""
        for group in self.all_groups:
            group.install()
            if not self.live:
                group.users_live += 1
        self.live = True

    def release(self) -> None:
        """Show sharded parameters and give slots back, unless another unit that shares a group still uses it."""
        if not self.live:
            for group in self.all_groups:
                if group.users_live == 0:
                    group.release()
            return
        self.live = False
        for group in self.all_groups:
            group.users_live -= 1
            if group.users_live == 0:
                group.release()

    # -- forward -------------------------------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook."""
        self.enter()
        dtype = self.policy.compute_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = map_tensors(lambda tensor: _cast(tensor, dtype), (args, kwargs))
        if torch.is_grad_enabled() and not self._is_recomputed():
            args, kwargs = self._listen_to_inputs(args, kwargs)
        return args, kwargs

    def enter(self) -> None:
        """Have full parameters there, and the next unit's on their way."""
        recomputing = compat.backward_task() != -1
        if not recomputing:
            self.context.note_forward(self)
        self.start_gather(self._slots if recomputing and self.pending else None)
        if not recomputing:
            _prefetch(self.next_forward)
        self.install()

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook; also runs when forward raised, with `output` None."""
        recomputed = self._is_recomputed()
        heard = torch.is_grad_enabled() and not recomputed and self.listen_to_outputs(tensors_in(output))
        self.leave(reshard=heard or not torch.is_grad_enabled())

    def leave(self, *, reshard: bool) -> None:
        """After forward: give weights back, unless they are needed again at once or nobody would bring them back for backward."""
        if compat.backward_task() != -1:
            return
        keep = torch.is_grad_enabled() and (
            not self.reshard_after_forward or not reshard or self.context.keeps_after_forward(self)
        )
        if not keep:
            self.release()

    def _is_recomputed(self) -> bool:
        """Inside a backward, a call whose original one still waits for its backward: activation recomputation without reentrance.

        The recomputed graph is thrown away, so nothing may listen to it. Under reentrant checkpointing the original
        call ran without gradients and the recomputed graph is the one that counts.
        """
        return compat.backward_task() != -1 and self.pending > 0

    def _listen_to_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not tensors or not self.all_groups:
            return args, kwargs
        this = weakref.ref(self)
        marked = iter(_PostBackward.apply(lambda: _run(this, Unit.post_backward), *tensors))  # type: ignore[no-untyped-call]
        return map_tensors(lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs))  # type: ignore[no-any-return]

    def listen_to_outputs(self, outputs: list[Tensor]) -> bool:
        """Have `pre_backward` run when the backward of this call begins; returns whether any output can tell."""
        differentiable = [tensor for tensor in outputs if tensor.requires_grad]
        if not differentiable or not self.all_groups:
            return not self.all_groups
        slots = [group.slot for group in self.all_groups]
        self._slots = slots
        self.pending += 1
        this = weakref.ref(self)

        def begin(_: Tensor) -> None:
            unit = this()
            if unit is not None:
                unit.pre_backward(slots)

        for tensor in differentiable:
            tensor.register_hook(begin)  # type: ignore[no-untyped-call]
        return True

    # -- backward ------------------------------------------------------------------------------------------------------

    def pre_backward(self, slots: list[Slot | None] | None = None) -> None:
        """A gradient of an output is there; the unit's own nodes run next."""
        self.context.begin_backward()
        self.context.note_backward(self)
        self.start_gather(slots)
        successor = self.next_backward or self.previous_forward
        _prefetch(successor, for_backward=True)
        self.install()

    def post_backward(self) -> None:
        """All gradients of the unit's inputs are there, so all of its parameters' are."""
        self.pending = max(0, self.pending - 1)
        if self.pending:
            return
        self.release()
        self.context.unit_done(self)

    def prefetch_for_backward(self) -> None:
        """Start the gather for a backward that is expected next."""
        if self.pending:
            self.start_gather(self._slots)


class _PostBackward(torch.autograd.Function):
    """Identity; its backward runs once gradients of all given inputs are there."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.callback()
        return (None, *grads)


def _prefetch(reference: weakref.ref[Unit] | None, *, for_backward: bool = False) -> None:
    unit = reference() if reference is not None else None
    if unit is None:
        return
    if for_backward:
        unit.prefetch_for_backward()
    else:
        unit.start_gather()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _calling(this: weakref.ref[Unit], method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that does not keep the unit alive: module -> unit is the only strong reference."""

    def hook(*args: Any) -> Any:
        unit = this()
        return None if unit is None else method(unit, *args)

    return hook


def _run(this: weakref.ref[Unit], method: Callable[[Unit], None]) -> None:
    unit = this()
    if unit is not None:
        method(unit)


def _rest(this: weakref.ref[Unit]) -> None:
    unit = this()
    if unit is not None:
        unit.release()


def _weights_changed(this: weakref.ref[Unit]) -> None:
    unit = this()
    if unit is not None:
        unit.context.weights_changed()
