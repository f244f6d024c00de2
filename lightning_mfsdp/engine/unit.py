"""Unit: what a sharded module does before and after its forward and its backward.

    pre-forward     gather (already under way if the order was known), start the next unit's gather, show full
    parameters
    post-forward    show sharded parameters, give the slot back; listen for the backward of the outputs
    pre-backward    gather into the same slot, start the gather of the unit that comes next in backward
    post-backward   give the slot back; once no other call of the unit is outstanding, its gradients are ready to be
    reduced

Post-backward listens to the gradients of the unit's inputs: autograd runs what was recorded last first, so when they are
there, everything inside the unit has run. A unit whose inputs need no gradient, or that overwrites them, is completed at
the end of the backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.engine import compat
from lightning_mfsdp.engine.calls import (
    Call,
    cast_inputs,
    listen_to_inputs,
    listen_to_outputs,
    refuse_own_weights,
)
from lightning_mfsdp.engine.errors import EngineStateError
from lightning_mfsdp.engine.group import ParameterGroup
from lightning_mfsdp.engine.hooks import attach, is_plain_lookup
from lightning_mfsdp.engine.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.storage import Slot
from lightning_mfsdp.engine.tree import tensors_in

if TYPE_CHECKING:
    from lightning_mfsdp.engine.context import Context

__all__ = ["Unit", "unit_of"]

_UNIT = "_mfsdp_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """The unit made by `fully_shard(module)`, or `None`."""
    return module.__dict__.get(_UNIT)


def forget_unit(module: nn.Module) -> None:
    """Let a module be like any other."""
    module.__dict__.pop(_UNIT, None)


class Unit:
    """The engine's side of one sharded module, or of several that run one after the other (series.py).

    Attributes:
        name: Class name of the module until a root knows it by its full name.
        groups: Parameters it owns.
        borrowed: Groups of other units whose parameters this module shares (tied weights).
        all_groups: Both.
        context: Shared by all units of a root.
        calls: Those whose backward has not come through their inputs since the last backward ended.
        hears_end: Some call had an input that needs a gradient, so the end of its backward is noticed.
        leaf_hooks: On results that nothing computed; taken away when a backward has ended.
        live: Shows full parameters.
        may_stay: Weights stay between forward and backward if there is memory to spare (planning.py).
        hears_parameters: A backward is noticed by the gradients it leaves.
        pinned: Stays so through the end of a backward, because code around it is still running (`gather_root`).
        step_slots: Where saved tensors of such code expect the weights, by group; it has no call.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[ParameterGroup],
        policy: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool | Literal["auto"],
    ) -> None:
        self.name = type(modules[0]).__name__
        self.groups = groups
        self.borrowed: list[ParameterGroup] = []
        self.all_groups = list(groups)
        self.policy = policy
        self.reshard_after_forward = bool(reshard_after_forward)
        self.may_stay = reshard_after_forward == "auto"
        self.context: Context
        self.users: list[weakref.ref[Unit]] = [weakref.ref(self)]
        self.live = False
        self.pinned = False
        self.step_slots: list[Slot | None] | None = None
        self.next_forward: weakref.ref[Unit] | None = None
        self.previous_forward: weakref.ref[Unit] | None = None
        self.next_backward: weakref.ref[Unit] | None = None
        self.calls: list[Call] = []
        self._open_calls: list[Call | None] = []
        self._running = 0
        self._idle = False
        self._recomputed = False
        self._is_series = len(modules) > 1
        self.leaf_hooks: list[RemovableHandle] = []
        self.hears_parameters = False
        self.hears_end = False
        for module in modules:
            module.__dict__[_UNIT] = self
        self.hooks = attach(self, modules)

    def rename(self, names: Sequence[str]) -> None:
        """Take the full name inside a root; `names` are those of its modules."""
        self.name = name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        for index, group in enumerate(self.groups):
            group.name = f"{name}[{index}]"
            group.client.name = f"{group.name} weights"

    def borrow(self, group: ParameterGroup) -> None:
        """Use a group that another unit owns."""
        self.borrowed.append(group)
        self.all_groups.append(group)

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter it owns wants a gradient now."""
        return any(entry.is_trained for group in self.groups for entry in group.entries)

    @property
    def is_done(self) -> bool:
        """Whether no call of it, or of a module that shares its parameters, is waiting for its backward."""
        return all((user := reference()) is None or user.pending == 0 for reference in self.users)

    # -- weights -------------------------------------------------------------------------------------------------------

    def start_gather(
        self, slots: list[Slot | None] | None = None, *, in_advance: bool = False, for_backward: bool = False
    ) -> None:
        """Start the gather of every group that is not there yet.

        Args:
            slots: Where saved tensors expect the weights, by group.
            in_advance: Leave it for later if somebody else is in that memory.
            for_backward: What a backward reads is wanted, and not what a forward reads.
        """
        self.context.refresh()
        apart = slots is None and self.pending > 0
        for index, group in enumerate(self.all_groups):
            needed = slots[index] if slots else None
            if group.is_there(for_backward=for_backward) and (needed is None or group.slot is needed):
                continue
            if in_advance and needed is not None and needed.holder not in (None, group.client):
                continue
            if needed is not None and group.gathered and group.slot is not needed:
                group.release(keep_memory=self._recomputed)
            self.context.gather(group, needed, apart=apart, for_backward=for_backward)

    def install(self) -> None:
        """Wait for the gathers and show full parameters."""
        for group in self.all_groups:
            group.install()
            if not self.live:
                group.users_live += 1
        self.live = True

    def hide(self) -> None:
        """Show sharded parameters; full ones stay where they are."""
        for group in self.all_groups:
            group.hide()

    def release(self) -> None:
        """Show sharded parameters and give slots back, unless they are pinned or a unit that shares a group uses it."""
        if self.pinned:
            return
        if not self.live:
            for group in self.all_groups:
                if group.users_live == 0:
                    group.release()
            return
        self.live = False
        if self.context.trace is not None:
            self.context.trace.events.append(self.release)
        for group in self.all_groups:
            group.users_live -= 1
            if group.users_live == 0:
                group.release(keep_memory=self._recomputed and self.pending > 0)

    # -- forward -------------------------------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook."""
        self.context.ranges.begin("forward", self.name)
        self.enter()
        args, kwargs = cast_inputs(self, args, kwargs)
        call = Call() if torch.is_grad_enabled() and self.all_groups and not self._is_recomputed() else None
        self._open_calls.append(call)
        if call is not None:
            args, kwargs = listen_to_inputs(self, call, args, kwargs)
        return args, kwargs

    def enter(self) -> None:
        """Have full parameters there, and the next unit's on their way."""
        self._idle = False
        if self.borrowed:
            self._check_owners()
        self.context.interrupt()
        if self.context.trace is not None:
            self.context.trace.events.append(self.enter)
        if compat.backward_task() != -1:
            self._recomputed = True
            self.start_gather(self._latest_slots())
        else:
            self.context.note_forward(self)
            self.start_gather()
        self.install()
        following = self.next_forward() if self.next_forward is not None else None
        if following is not None and compat.backward_task() == -1:
            following.start_gather()

    def enter_again(self) -> None:
        """Have there what a forward reads: a part of it is computed again inside a backward, and no hook of it runs."""
        if not self.live:
            self.enter()
            return
        for group in self.all_groups:
            self.context.gather(group)  # a codec may keep other bytes for forward than for backward
            group.install()

    def _check_owners(self) -> None:
        for group in self.borrowed:
            if group.context is not self.context:
                raise EngineStateError(
                    f"{self.name}: it shares a parameter with {group.name}, a unit of another root, so their gradients cannot "
                    "be added up; call fully_shard on the module around both"
                )

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook; also runs when forward raised, with `output` None."""
        self.context.ranges.end("forward", self.name)
        call = self._open_calls.pop() if self._open_calls else None  # none: the pre-hook itself raised
        if call is not None:
            call.reads_weights = self._is_series or not is_plain_lookup(module)
        outputs = self.listen_to_result(call, output)
        if output is None and sys.exc_info()[0] is not None and compat.backward_task() == -1:
            self.abandon()
        else:
            self.leave(reshard=call is None or (bool(outputs) and not call.hides))

    @property
    def open_call(self) -> Call | None:
        """The call that is running; `None` without gradients."""
        return self._open_calls[-1] if self._open_calls else None

    def listen_to_result(self, call: Call | None, output: Any) -> list[Tensor]:
        """Check what a forward returned, and have the backward of its call begin with the gradients of that."""
        outputs = tensors_in(output)
        refuse_own_weights(self, outputs)
        if call is not None:
            listen_to_outputs(self, call, outputs)
        return outputs

    def close(self) -> None:
        """A run of several modules ended before its last."""
        self.context.ranges.end("forward", self.name)
        call = self._open_calls.pop()
        self.leave(reshard=call is None or not call.hides)

    def leave(self, *, reshard: bool) -> None:
        """After forward: give weights back, unless they are needed again at once.

        Args:
            reshard: False where a backward may come that nobody would notice: the module returned no tensor to listen to.
        """
        if compat.backward_task() != -1 or self._open_calls:
            return
        context = self.context
        if self is context.root:
            context.interrupt()
        if not torch.is_grad_enabled() or (
            reshard and self.reshard_after_forward and not context.keeps_after_forward(self)
        ):
            self.release()
        else:
            self._idle = self is not context.root
        if not (self.pinned or self.is_inside_root):
            # Between forward and backward `parameters()` are those that have gradients: someone may clear them now.
            for unit in context.units if self is context.root else (self,):
                unit.hide()

    @property
    def is_inside_root(self) -> bool:
        """Whether the forward of a root around it, or a step of one, is running."""
        root = self.context.root
        return root is not None and root is not self and (root.pinned or bool(root._open_calls))

    @property
    def full_bytes(self) -> int:
        """Memory of its own gathered weights."""
        return sum(group.client.size_bytes for group in self.groups if group.placement.weight)

    def abandon(self) -> None:
        """Forward raised: give back at once what it used, and at the root also what it had gathered in advance."""
        self.pinned = False
        self.release()
        if self is self.context.root:
            for unit in self.context.units:
                unit.release()

    def _is_recomputed(self) -> bool:
        """Whether this call, inside a backward, repeats one that still waits for its backward.

        That is activation recomputation without reentrance: the recomputed graph is thrown away, so nothing may listen
        to it. Under reentrant checkpointing the original call ran without gradients and the recomputed graph counts.
        """
        return compat.backward_task() != -1 and self.pending > 0

    # -- backward ------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Calls since the last backward whose own backward has not come through the unit's inputs.

        Counted by the program and not by which graphs are still alive: that differs from rank to rank, and what is gathered
        in advance must not.
        """
        return len(self.calls)

    def pre_backward(self, call: Call) -> None:
        """A gradient of an output is there; the call's own nodes run next, unless it returned an input as it was."""
        if torch.is_grad_enabled() and any(group.placement.weight for group in self.all_groups):
            raise EngineStateError(
                f"{self.name}: backward with create_graph=True needs these weights again later, when they are sharded; "
                'use sharding="optim_grads" (weights stay whole) for gradients of gradients'
            )
        self.context.begin_backward()
        if call.begun_in == self.context.backwards_finished or call.ended_in == compat.backward_task():
            return
        call.begun_in = self.context.backwards_finished
        self.context.ranges.begin("backward", self.name)
        self._running += call.has_end
        self._idle = False
        self.context.note_backward(self)
        if call.reads_weights:
            self.start_gather(call.slots, for_backward=True)
            self.install()
        reference = self.next_backward or self.previous_forward
        following = reference() if reference is not None else None
        if following is not None:
            following.prefetch_for_backward()

    def post_backward(self, call: Call) -> None:
        """All gradients of the call's inputs are there, so its share of the parameters' gradients is."""
        call.ended_in = compat.backward_task()
        if call in self.calls:
            self.calls.remove(call)
        if call.begun_in == self.context.backwards_finished:
            call.begun_in = -1
            self.context.ranges.end("backward", self.name)
            self._running -= 1
        if self._running == 0:
            self.release()
        if not self.calls:
            self.context.reductions.unit_done(self)

    def prefetch_for_backward(self) -> None:
        """Start the gather for a backward that is expected next, if its memory is free."""
        slots = self._latest_slots()
        if slots is not None and self.calls[-1].reads_weights:
            self.start_gather(slots, in_advance=True, for_backward=True)

    def _latest_slots(self) -> list[Slot | None] | None:
        """Where the last call that waits for its backward left saved tensors; `None` if no call waits."""
        return self.calls[-1].slots if self.calls else None

    def rest(self) -> None:
        """After a backward, or after one that failed: nothing of it is waited for any more."""
        self._running = 0
        self._recomputed = False
        for handle in self.leaf_hooks:
            handle.remove()
        self.leaf_hooks.clear()
        self.calls.clear()
        self.release()

    def release_if_idle(self) -> bool:
        """Give weights back that were only kept because their backward was thought to come next."""
        if self._idle:
            self.release()
        return self._idle
