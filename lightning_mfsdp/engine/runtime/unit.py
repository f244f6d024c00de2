"""Unit: what a sharded module does before and after its forward and its backward.

    pre-forward     gather (already under way if the order was known), start the next unit's gather, show full
    parameters
    post-forward    show sharded parameters, give the slot back; listen for the backward of the outputs
    pre-backward    gather into the same slot, start the gather of the unit that comes next in backward
    post-backward   give the slot back; once no other call of the unit is outstanding, its gradients are ready to be
    reduced

Post-backward listens to the gradients of the unit's inputs: autograd runs what was recorded last first, so when they are there,
everything inside the unit has run. A unit whose inputs need no gradient, or that overwrites them, is completed at the end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.comm.collectives import Mesh
from lightning_mfsdp.engine.comm.ranges import Ranges
from lightning_mfsdp.engine.memory.storage import Slot, SlotPool
from lightning_mfsdp.engine.params.group import ParameterGroup
from lightning_mfsdp.engine.params.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.runtime.call import Awaited, Call
from lightning_mfsdp.engine.runtime.hooked_unit import HookedRoot
from lightning_mfsdp.engine.runtime.hooks import (
    UNIT,
    Shown,
    attach,
    attach_inside,
    cast_inputs,
    is_plain_lookup,
    listen_to_inputs,
    listen_to_outputs,
    refuse_forgotten,
    refuse_own_weights,
)

__all__ = ["Root", "Unit", "owner_of_group", "unit_of"]


def unit_of(module: nn.Module) -> Unit | None:
    """The unit made by `fully_shard(module)`, or `None`."""
    return module.__dict__.get(UNIT)


def owner_of_group(group: ParameterGroup) -> Unit | None:
    """The unit that owns a group; `None` once it is gone."""
    return cast("Unit | None", group.unit())


class Reductions(Protocol):
    """When the gradients of which unit are reduced; see `ReductionSchedule`."""

    def unit_done(self, unit: Unit) -> None:
        """All its gradients of this backward are there."""


class Root(HookedRoot, Protocol):
    """What a unit asks of the root it shares with others, and tells it; see `Context`.

    Attributes:
        trace: Of the step that is running, if somebody will repeat its gathers.
    """

    trace: list[Callable[[], object]] | None

    @property
    def root(self) -> Unit | None:
        """The outermost unit."""

    @property
    def units(self) -> list[Unit]:
        """All units, in the order they were sharded."""

    mesh: Mesh
    ranges: Ranges
    pool: SlotPool

    @property
    def reductions(self) -> Reductions:
        """Of gradients."""

    backwards_finished: int
    keeps_graph: bool

    def refresh(self) -> None:
        """Bring compute shards up to date with main weights."""

    def gather(
        self,
        group: ParameterGroup,
        needed: Slot | None = None,
        *,
        apart: bool = False,
        for_backward: bool = False,
    ) -> None:
        """Start a group's gather."""

    def interrupt(self) -> None:
        """Something else than the next module of a series comes."""

    def note_forward(self, unit: Unit) -> None:
        """A forward begins outside any backward."""

    def note_backward(self, unit: Unit) -> None:
        """The backward of a call begins."""

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether weights of a unit stay between forward and backward."""


class Unit:
    """The engine's side of one sharded module, or of several that run one after the other (`Series`).

    Attributes:
        name: Class name of the module until a root knows it by its full name.
        groups: Parameters it owns.
        borrowed: Groups of other units whose parameters this module shares (tied weights).
        all_groups: Both.
        context: Shared by all units of a root.
        awaited: Calls from which gradients may still come.
        hears_end: Some call had an input that needs a gradient: the end of its backward is noticed.
        leaf_hooks: On results that nothing computed; taken away when a backward has ended.
        live: Uses unsharded parameters.
        shown: Whether its modules show them.
        may_stay: Weights stay between forward and backward if there is memory to spare (planning.py).
        pinned: Stays so through the end of a backward: code around it is still running (`gather_root`).
        outside_for: Parameters of it were used outside of a forward that has a call: by themselves (outside.py), or by modules in a step of
            the root. Their gradients may come at any time of so many backwards.
        step_slots: Where saved tensors of such code expect the weights, by group; it has no call.
        undo: What else `fully_shard` did to its modules is taken back by these.
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
        self.context: Root
        self.users: list[weakref.ref[Unit]] = [weakref.ref(self)]
        self.live = self.pinned = False
        self.outside_for = 0
        self.shown = Shown()
        self.step_slots: list[Slot | None] | None = None
        self.next_forward: weakref.ref[Unit] | None = None
        self.previous_forward: weakref.ref[Unit] | None = None
        self.next_backward: weakref.ref[Unit] | None = None
        self.awaited = Awaited()
        self._open_calls: list[Call | None] = []
        self._running = 0
        self._recomputed = 0  # forwards that ran inside this backward, and whose own backward is not over
        self._idle = self._runs_without_gradients = self._is_called_inside = False
        self._is_series = len(modules) > 1
        self.leaf_hooks: list[RemovableHandle] = []
        self.undo: list[Callable[[], None]] = []
        self.hears_end = False
        for module in modules:
            module.__dict__[UNIT] = self
        self._modules = [weakref.ref(module) for module in modules]
        self._inside: list[RemovableHandle] = []
        self._hooks = attach(self, modules)

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
    def tables(self) -> list[dict[str, Any]]:
        """The `_parameters` tables of the modules that show its parameters."""
        return [table for group in self.all_groups for entry in group.entries for table, _ in entry.sites]

    def hook_inside(self) -> None:
        """Have modules inside the outermost unit show its parameters where they are called by themselves."""
        self.unhook_inside()
        for reference in self._modules:
            module = reference()
            if module is not None:
                self._inside += attach_inside(self, self.shown, self.tables, module)

    def end(self) -> None:
        """Its modules are sharded no more, and do not hold it."""
        self.rest(keeps_graph=False)
        self.unhook_inside()
        for handle in self._hooks:
            handle.remove()
        for undo in self.undo:
            undo()
        for reference in self._modules:
            module = reference()
            if module is not None:
                module.__dict__.pop(UNIT, None)

    def unhook_inside(self) -> None:
        """It is no outermost unit any more."""
        for handle in self._inside:
            handle.remove()
        self._inside.clear()

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter it owns wants a gradient now."""
        return any(entry.is_trained for group in self.groups for entry in group.entries)

    @property
    def is_done(self) -> bool:
        """Whether no gradient comes any more of a call of it, or of a module that shares its parameters."""
        if self.outside_for:
            return False
        return all((user := reference()) is None or user.awaited.is_over() for reference in self.users)

    def use_outside(self) -> None:
        """Parameters of it are used in grad mode where no call tells when gradients come: in the next two backwards, as those of calls."""
        self.outside_for = 2

    def use_borrowed(self) -> None:
        """A step of the root reads, or goes on reading, what other units own, which cannot know of it."""
        for group in self.borrowed:
            if (owner := group.unit()) is not None:
                owner.use_outside()

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
                if in_advance and group.users_live:
                    continue  # a unit that shares it reads it where it is
                group.release(keep_memory=self._recomputed > 0)
            self.context.gather(group, needed, apart=apart, for_backward=for_backward)

    def install(self) -> None:
        """Wait for the gathers and show unsharded parameters."""
        for group in self.all_groups:
            group.install()
        self.shown.now = True
        self.hold()

    def has_at_hand(self, group: ParameterGroup) -> bool:
        """Whether unsharded parameters of one of its groups equal the main weights and stay where they are until a backward has ended."""
        spec = group.spec
        stays = not group.placement.weight or (self is self.context.root and (self.pinned or bool(self._open_calls)))
        if not stays or spec.codec is not None or spec.main_dtype != spec.compute_dtype:
            return False
        self.start_gather()
        group.wait()
        return True

    def hold(self) -> None:
        """Keep the memory of unsharded parameters, shown or not."""
        if not self.live:
            self.live = True
            for group in self.all_groups:
                group.users_live += 1

    def hide(self) -> None:
        """Show sharded parameters; unsharded ones stay where they are."""
        self.shown.now, self.shown.by = False, None
        for group in self.all_groups:
            self._hide(group)

    def _hide(self, group: ParameterGroup) -> None:
        """Show sharded parameters of a group, unless another unit that shares it shows the others."""
        owner = owner_of_group(group)
        if owner is not None and len(owner.users) > 1:
            users = [user for reference in owner.users if (user := reference()) is not None]
            if any(user.shown.now and group in user.all_groups for user in users):
                return
        group.hide()

    def release(self) -> None:
        """Show sharded parameters and give slots back, unless they are pinned or a unit that shares a group uses it."""
        if self.pinned:
            if self.shown.by is None:
                self.hide()
            return
        self.shown.now, self.shown.by = False, None
        if not self.live:
            for group in self.all_groups:
                if group.users_live == 0:
                    group.release()
            return
        self.live = False
        if self.context.trace is not None:
            self.context.trace.append(self.release)
        for group in self.all_groups:
            group.users_live -= 1
            if group.users_live == 0:
                group.release(keep_memory=self._recomputed > 0 and self.pending > 0)
            else:
                self._hide(group)

    # -- forward -------------------------------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook."""
        self.context.ranges.begin("forward", self.name)
        self.enter()
        args, kwargs = cast_inputs(self, args, kwargs)
        call = self._new_call()
        self._open_calls.append(call)
        if call is not None:
            args, kwargs = listen_to_inputs(self, call, args, kwargs)
        return args, kwargs

    def enter(self, *, shows: bool = True) -> None:
        """Have unsharded parameters there, and the next unit's on their way.

        Args:
            shows: Modules show them; else each does during its own forward (`enter_inside`).
        """
        self._idle = False
        self._runs_without_gradients = not (torch.is_grad_enabled() or compat.in_function_forward())
        if self.borrowed:
            self._check_owners()
        self.context.interrupt()
        if self.context.trace is not None:
            self.context.trace.append(self.enter)
        if compat.backward_task() != -1:
            self.context.begin_backward()  # and not in a backward inside this one, by which reentrant checkpointing goes on
            self._recomputed += 1
            # Where a backward of this unit has them already, what is computed again reads them, too.
            self.start_gather(None if self.live else self._latest_slots())
        else:
            self.context.note_forward(self)
            self.start_gather(self.awaited.hidden_slots())
        if shows:
            self.install()
        else:
            self.hold()
        following = self.next_forward() if self.next_forward is not None else None
        if following is not None and compat.backward_task() == -1:
            following.start_gather()

    def enter_inside(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A module with parameters of this unit, the outermost one, runs outside the unit's own forward: they are shown while it does."""
        self._is_called_inside = not (self.pinned or self._open_calls)
        if self._is_called_inside:
            args, kwargs = self.pre_forward(module, args, kwargs)
        else:
            self.start_gather()  # takes in what was written since
            self.install()
        self.shown.by, self.shown.depth = module, 1
        return args, kwargs

    def leave_inside(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Its forward has ended, or raised with `output` None."""
        self.shown.by = None
        if self._is_called_inside:
            self._is_called_inside = False
            self.post_forward(module, args, output)
        else:
            self.hide()
            self.refuse_lost_writes()

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
            if cast("object", group.context) is not self.context:
                raise EngineStateError(
                    f"{self.name}: it shares a parameter with {group.name}, a unit of another root, so their gradients cannot "
                    "be added up; call fully_shard on the module around both"
                )

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook; also runs when forward raised, with `output` None."""
        self.context.ranges.end("forward", self.name)
        call = self._open_calls.pop() if self._open_calls else None  # none: the pre-hook itself raised
        failed = output is None and sys.exc_info()[0] is not None
        if failed and compat.backward_task() != -1:
            return  # or stopped early, because all that is computed again is there; the backward goes on, or ends everything
        if call is not None:
            call.reads_weights = self._is_series or not is_plain_lookup(module)
            if failed:
                call.inputs = None  # hooks of the inputs hold the call, and it would hold the graph
        outputs = self.listen_to_result(None if failed else call, output)
        if failed:
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
        keeps = not (reshard and self.reshard_after_forward) or context.keeps_after_forward(self)
        unnoticed = self.reads_unnoticed
        if not (unnoticed or (keeps and torch.is_grad_enabled())):
            self.release()
        else:
            self._idle = self is not context.root and not unnoticed
            # Outside of forwards `parameters()` are those that have gradients and take what is written.
            self.hide()
        self.refuse_lost_writes()

    def refuse_lost_writes(self) -> None:
        """Raise where a forward wrote to weights that cannot take it over; see `ParameterGroup.hide`."""
        for group in self.all_groups:
            if group.lost_writes and not sys.exc_info()[0]:
                group.refuse_lost_writes()

    @property
    def reads_unnoticed(self) -> bool:
        """Whether a backward may begin with a hidden result of it, so that weights are read before anybody hears of it."""
        awaited = self.awaited
        hidden = [call for call in awaited.spent if call.hides and call.outlasts_pass] if awaited.spent else None
        if not hidden:
            return awaited.hides_calls
        root = self.context.root
        is_heard = root is not None and root is not self and not root.reads_unnoticed
        return self.awaited.hides_calls or not (is_heard and all(call.is_inside_root for call in hidden))

    def share_no_memory(self) -> None:
        """Nobody knows when its weights are read."""
        for group in self.all_groups:
            if group.placement.weight:
                self.context.pool.keep_alone(group.client)

    @property
    def is_inside_root(self) -> bool:
        """Whether the forward of a root around it, or a step of one, is running."""
        root = self.context.root
        return root is not None and root is not self and (root.pinned or bool(root._open_calls))

    @property
    def is_inside_forward_of_root(self) -> bool:
        """Whether the forward of a root around it is running, also in a step of one."""
        root = self.context.root
        return root is not None and root is not self and bool(root._open_calls)

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

    def _new_call(self) -> Call | None:
        if not torch.is_grad_enabled():
            self.note_run()
            return None
        call = self.awaited.new_call() if self.all_groups else None
        if call is not None:
            call.is_inside_root = self.is_inside_root
        return call

    def note_run(self) -> None:
        """One of its modules runs; without gradients it may be computed again with them, unless all of the root runs without."""
        if compat.in_function_forward():
            root = self.context.root
            if not (root and self.is_inside_root and root._runs_without_gradients):
                self.awaited.note_run()

    # -- backward ------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Calls since the last backward whose own backward has not come through the unit's inputs."""
        return len(self.awaited.calls)

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
        self.awaited.came(call)
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
        self.context.begin_backward()  # nobody may have noticed, if results were hidden
        call.ended_in = compat.backward_task()
        self.awaited.ended(call)
        self._recomputed = max(0, self._recomputed - 1)
        if call.hides and not call.is_recomputed and call.begun_in != self.context.backwards_finished:
            refuse_forgotten(self)
        if call.begun_in == self.context.backwards_finished:
            call.begun_in = -1
            self.context.ranges.end("backward", self.name)
            self._running -= 1
        if self._running == 0 and not (call.hides and self.context.keeps_graph):
            self.release()
        if self.awaited.is_over():
            self.context.reductions.unit_done(self)

    def prefetch_for_backward(self) -> None:
        """Start the gather for a backward that is expected next, if its memory is free."""
        slots = self._latest_slots()
        if slots is not None and self.awaited.calls and self.awaited.calls[-1].reads_weights:
            self.start_gather(slots, in_advance=True, for_backward=True)

    def _latest_slots(self) -> list[Slot | None] | None:
        """Where the last call that waits for its backward, or else for another one, left saved tensors; `None` if no call waits."""
        waiting = self.awaited.calls or self.awaited.spent
        return waiting[-1].slots if waiting else None

    def show_for_hidden_calls(self) -> None:
        """A backward begins: weights that calls with hidden results read are there until all of these have ended, or it ends."""
        slots = self.awaited.hidden_slots()
        if slots is not None:
            self._running += self.awaited.begin_hidden(self.context.backwards_finished)
            self.start_gather(slots, for_backward=True)
            self.install()

    def rest(self, *, keeps_graph: bool) -> None:
        """After a backward, or after one that failed: nothing of it is waited for any more."""
        self._running = 0
        self._recomputed = 0
        for handle in self.leaf_hooks:
            handle.remove()
        self.leaf_hooks.clear()
        self.awaited.end_backward(self.context.backwards_finished, keeps_graph=keeps_graph)
        self.outside_for = max(0, self.outside_for - (not keeps_graph))
        if not self._open_calls:  # else the backward ran inside its forward, which goes on
            self.hide() if self.reads_unnoticed else self.release()

    def release_if_idle(self) -> bool:
        """Give weights back that were only kept because their backward was thought to come next."""
        if self._idle:
            self.release()
        return self._idle
