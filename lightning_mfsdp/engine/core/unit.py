"""Unit: what a sharded module does before and after its forward and its backward.

    pre-forward     unshard (already under way if the order was known), prefetch the next unit, register unsharded parameters
    post-forward    register sharded parameters, reshard
    pre-backward    unshard into the same buffer, prefetch the unit that comes next in backward
    post-backward   reshard; once autograd owes no gradient of its parameters, they are ready to be reduced

Hooks detect these moments (call.py). Post-backward comes with the gradients of the unit's inputs: autograd runs what was
recorded last first, so when they have arrived, everything inside the unit has run.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import nn

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import tensors_in
from lightning_mfsdp.base.errors import EngineStateError
from lightning_mfsdp.engine.core.call import (
    UNIT,
    Call,
    Shown,
    attach,
    begin_call,
    is_plain_lookup,
    refuse_own_weights,
    watch_parameters,
)
from lightning_mfsdp.engine.core.calls import Calls
from lightning_mfsdp.engine.core.group import ParameterGroup
from lightning_mfsdp.engine.core.policy import MixedPrecisionPolicy
from lightning_mfsdp.engine.core.side_doors import Choice, SideDoors, follow
from lightning_mfsdp.engine.core.storage import Slot
from lightning_mfsdp.engine.core.weights import Weights

if TYPE_CHECKING:
    from lightning_mfsdp.engine.core.context import Context

__all__ = ["Unit", "is_trained", "unit_of"]


def unit_of(module: nn.Module) -> Unit | None:
    """The unit made by `fully_shard(module)`, or `None`."""
    return module.__dict__.get(UNIT)


def is_trained(group: ParameterGroup) -> bool:
    """Whether a gradient of any of its parameters is required now."""
    for entry in group.entries:  # noqa: SIM110 - a generator and `Entry.is_trained` cost host time, in every unit
        if entry.full.requires_grad and entry.local.requires_grad:
            return True
    return False


class Unit:
    """The engine's side of one sharded module, or of several that run one after the other (`GroupedModules`).

    Attributes:
        name: Class name of the module until a root assigns its full name.
        number: Among the units of its root.
        groups: Parameters it owns.
        shared_groups: Groups of other units whose parameters this module shares (tied weights).
        context: Shared by all units of a root.
        weights: Of the groups that it owns, then of those that it shares.
        calls: Its forwards that run, and those whose backward may come.
        uses_weights: It holds a lease on each of its weights.
        shown: Whether its modules show unsharded parameters.
        reshard_after_forward: Weights do not stay between forward and backward; "auto": they may, if memory is left (planning.py).
        keeps_unsharded: Code around it is running (`gather_root`), so `reshard` only has modules show sharded parameters.
        step_buffers: Where saved tensors of the code of a step around it expect the weights, by group; that code has no call.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: list[ParameterGroup],
        policy: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool | Literal["auto"],
        side_doors: Choice = "find",
        undo: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Put hooks on the modules.

        Args:
            modules: Those that were sharded together.
            groups: Parameters it owns.
            policy: Dtypes, and whether inputs are cast.
            reshard_after_forward: As in the attributes.
            side_doors: What to do about what a forward leaves beside its result.
            undo: Callbacks that undo what else was done to the modules.
        """
        self.name, self.number = type(modules[0]).__name__, 0
        self.groups = groups
        self.shared_groups: list[ParameterGroup] = []
        self.weights = [group.weights for group in groups]
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.side_doors = SideDoors(side_doors)
        self.context: Context
        self.users: list[weakref.ref[Unit]] = [weakref.ref(self)]  # units whose modules show its parameters
        self.uses_weights = self.keeps_unsharded = False
        self.shown = Shown()
        self.step_buffers: list[Slot | None] | None = None
        self.calls = Calls()
        self._runs_without_gradients = False  # its present forward does, so that nothing of it will be recomputed
        for module in modules:
            module.__dict__[UNIT] = self
        self._modules = [weakref.ref(module) for module in modules]
        self._undo = [*(hook.remove for hook in attach(self, modules)), *undo]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise EngineStateError(
            f"{self.name}: a module that is sharded cannot be deep-copied, as its copy would belong to no unit. Copy it before fully_shard "
            "or after unshard_model, or make a second one and load full_state_dict(module) into it"
        )

    def join(self, context: Context, number: int) -> None:
        """Belong to a root from now on, as one of several units."""
        self.context, self.number = context, number

    def rename(self, names: Sequence[str]) -> None:
        """Take the full name inside a root; `names` are those of its modules."""
        self.name = name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        for index, group in enumerate(self.groups):
            group.rename(f"{name}[{index}]")

    def share(self, group: ParameterGroup) -> None:
        """Use a group that another unit owns."""
        self.shared_groups.append(group)
        self.weights.append(group.weights)

    @property
    def all_groups(self) -> list[ParameterGroup]:
        """Those it owns, and those it shares."""
        return self.groups + self.shared_groups

    @property
    def modules(self) -> list[nn.Module]:
        """Those that were sharded as this unit."""
        return [module for reference in self._modules if (module := reference()) is not None]

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The `_parameters` tables of the modules that show its parameters."""
        return [table for group in self.all_groups for entry in group.entries for table, _ in entry.sites]

    def end(self) -> None:
        """Its modules are no longer sharded, and hold no reference to it."""
        self.end_backward(keeps_graph=False)
        self.shown.unhook()
        for undo in self._undo:
            undo()
        for module in self.modules:
            module.__dict__.pop(UNIT, None)

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter it owns requires a gradient now."""
        for group in self.groups:  # noqa: SIM110 - as below
            if is_trained(group):
                return True
        return False

    @property
    def is_done(self) -> bool:
        """Whether the backward that is running will bring no further gradient of a parameter it owns.

        It is asked in the backward of a call of its own: inside that of what another unit recomputes, autograd would not know of these.
        A function in a forward (a checkpoint around a part of it) may run a backward of its own, of which autograd tells nothing outside
        of it: so each call that waits for its backward is waited for, until an optimizer has stepped. Modules of several units that
        share parameters are not asked what they recompute: gradients of these wait for the end.
        """
        calls, recomputations = self.calls, self.calls.recomputations
        if calls.waiting or recomputations.expected or recomputations.has_backward_around or len(self.users) > 1:
            return False
        for group in self.groups:  # noqa: SIM110 - as below
            if not group.gradients.are_complete():
                return False
        return True

    # -- weights -------------------------------------------------------------------------------------------------------

    def unshard(
        self,
        buffers: list[Slot | None] | None = None,
        *,
        used: bool = False,
        ahead: bool = False,
        for_backward: bool = False,
    ) -> None:
        """Start the all-gather of every group that is not gathered yet.

        Args:
            buffers: Where saved tensors expect the weights, by group.
            used: They are read now: they stay in memory, shown or not, and none of them gives way to another.
            ahead: They are not read yet; see `Weights.unshard`.
            for_backward: Gather what a backward reads, not what a forward reads.
        """
        if self.context.writes.needs_refresh:
            self.context.refresh()
        if used and not self.uses_weights:
            self.uses_weights = True
            for weights in self.weights:
                weights.leases += 1
        if buffers is None:
            for weights in self.weights:
                weights.unshard(for_backward=for_backward)
            return
        for weights, buffer in zip(self.weights, buffers, strict=True):
            weights.unshard(buffer, for_backward=for_backward, ahead=ahead)

    def register(self) -> None:
        """Wait for the all-gathers of what is used, and have modules show unsharded parameters."""
        for weights in self.weights:
            weights.register()
        self.shown.now = True

    def is_unsharded_and_current(self, group: ParameterGroup) -> bool:
        """Whether unsharded parameters of one of its groups equal the main weights and stay in place until a backward has ended."""
        weights = group.weights
        stays = not weights.is_sharded or (
            self is self.context.root() and (self.keeps_unsharded or bool(self.calls.open))
        )
        if not (stays and weights.follows_main):
            return False
        self.unshard()
        weights.wait()
        return True

    def unregister(self) -> None:
        """Have modules show sharded parameters; unsharded ones stay in memory."""
        self.shown.hide()
        shares = self.shared_groups or len(self.users) > 1
        for weights in self._shown_by_no_other() if shares else self.weights:
            weights.unregister()

    def _shown_by_no_other(self) -> list[Weights]:
        """Of its weights, those that no other unit shows which shares them."""
        return [group.weights for group in self.all_groups if not self._is_shown_by_others(group)]

    def _is_shown_by_others(self, group: ParameterGroup) -> bool:
        """Whether another unit that shares a group shows unsharded parameters of it."""
        owner = group.unit()
        if owner is None or len(owner.users) == 1:
            return False
        return any(user.shown.now for user in _users_of(group))

    def reshard(self) -> None:
        """Show sharded parameters and free memory, unless code around it is still running or a unit that shares a group uses it."""
        if self.keeps_unsharded:
            if self.shown.by is None:
                self.unregister()
            return
        if self.shown.now:
            self.shown.hide()
        if self.uses_weights:
            if self.context.schedule.trace is not None:
                self.context.schedule.trace.append(self.reshard)
            self._end_lease()
        for weights in self.weights:
            if not weights.leases:
                if weights.present:
                    weights.reshard()
            elif weights in self._shown_by_no_other():
                weights.unregister()

    def _end_lease(self) -> None:
        """It no longer uses its weights. Weights that no unit uses stay in memory until that memory is needed."""
        if self.uses_weights:
            self.uses_weights = False
            for weights in self.weights:
                weights.leases -= 1

    # -- forward -------------------------------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook."""
        ranges = self.context.lane.ranges
        if ranges.enabled:
            ranges.begin("forward", self.name)
        in_transform = compat.in_transform()
        if in_transform:
            compat.outside_transforms(self.enter)
        else:
            self.enter()
        call = self._new_call(in_transform)
        self.calls.open.append(call)
        # In a step its own layers may have computed the inputs (`self(self.pre(x))`), also as an autograd function that recomputes them.
        args, kwargs = begin_call(self, None if self.keeps_unsharded else call, args, kwargs)
        if call is not None and self.side_doors.look_at_hooks(self):
            self.follow()
        return args, kwargs

    @property
    def _is_followed(self) -> bool:
        """Whether saved weights are packed. Those of the root if asked alone: they stay until a backward has ended, and all runs inside."""
        doors = self.side_doors
        if not doors.found or doors.choice == "raise":
            return False
        if self is self.context.root() and doors.choice != "follow":
            return False
        return any(weights.is_sharded for weights in self.weights)

    def follow(self) -> None:
        """Pack the weights that the forward of one of its modules saves, from here on, if there are side doors."""
        call = self.calls.open[-1] if self.calls.open else None
        if call is not None and not call.is_recomputed and self._is_followed and call.follow(follow(self)):
            for group in self.all_groups:
                if group.weights.is_sharded and group.weights.client.home is not None:
                    self._let_lie_anywhere(group)

    def _let_lie_anywhere(self, group: ParameterGroup) -> None:
        """Weights need no certain memory once each unit that uses them packs what it saves, and has no call since a step that did not.

        So units that share weights are followed together. Not at the root, where code of a step may save them (`step_buffers`).
        """
        users = _users_of(group)
        for user in users:
            user.side_doors.found = True
        if users and all(
            user._is_followed and user.calls.latest is None and user is not self.context.root() for user in users
        ):
            self.context.lane.pool.exclude_from_plan(group.weights.client)

    def enter(self, *, shows: bool = True) -> None:
        """Unshard parameters, and prefetch the next unit's.

        Args:
            shows: Modules show them; otherwise each does during its own forward (`enter_inside`).
        """
        self._runs_without_gradients = not (torch.is_grad_enabled() or compat.in_function_forward())
        if self.shared_groups:
            self._check_owners()
        context, following = self.context, None
        if compat.backward_task() != -1:
            context.interrupt()
            context.begin_backward()  # and not in a backward inside this one, which reentrant checkpointing runs
            # If they are gathered for a backward of this unit already, what is recomputed reads the same.
            latest = None if self.uses_weights or not self.calls.waiting else self.calls.latest
            self.unshard(None if latest is None else latest.buffers, used=True)
        else:
            following = context.note_forward(self)
            self.unshard(used=True)
        if context.schedule.trace is not None:
            context.schedule.trace.append(self.enter)
        if shows:
            self.register()
        if following is not None:
            following.unshard()

    def enter_inside(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A module with parameters of this unit, the outermost one, runs outside the unit's own forward: they are shown while it does."""
        opens_call = not (self.keeps_unsharded or self.calls.open)
        if opens_call:
            try:
                args, kwargs = self.pre_forward(module, args, kwargs)
            except BaseException:  # no hook after the forward knows that it began; re-raised
                self.calls.end_forwards()
                self.abandon()
                raise
        else:
            self.unshard(used=True)  # includes what was written since
            self.register()
        self.shown.begin(module, opened_call=opens_call)
        return args, kwargs

    def leave_inside(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Its forward has ended, or raised with `output` None."""
        if self.shown.end():
            self.post_forward(module, args, output)
        else:
            self.unregister()
            self.refuse_lost_writes()

    def begin_step(self) -> None:
        """Code around it begins that calls its methods directly (`gather_root`)."""
        self.enter(shows=False)
        self.keeps_unsharded = True

    def end_step(self, *, had_backward: bool) -> None:
        """That code has ended; `had_backward`: what it computed has had its backward inside of it."""
        self.keeps_unsharded = self._runs_without_gradients = False
        if torch.is_grad_enabled():
            self.step_buffers = [weights.buffer for weights in self.weights]
        if had_backward:
            self.reshard()
        else:
            self.leave()

    def enter_again(self) -> None:
        """Gather what a forward reads: a part of it is recomputed inside a backward, and none of its hooks runs."""
        if not self.uses_weights:
            self.enter()
            return
        for weights in self.weights:
            weights.unshard()  # a codec may keep different bytes for forward and for backward
            weights.register()

    def _check_owners(self) -> None:
        for group in self.shared_groups:
            if cast("object", group.root()) is not self.context:
                raise EngineStateError(
                    f"{self.name}: it shares a parameter with {group.name}, a unit of another root, so their gradients cannot "
                    "be added up; call fully_shard on the module around both"
                )

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook; also runs when forward raised, with `output` None."""
        ranges = self.context.lane.ranges
        if ranges.open:
            ranges.end("forward", self.name)
        call = self.calls.open.pop() if self.calls.open else None  # none: the pre-hook itself raised
        if call is not None and call.following is not None:
            call.end_following()
        failed = output is None and sys.exc_info()[0] is not None
        if failed:
            if compat.backward_task() != -1:
                return  # or recomputation stopped early, because it has all it needs; the backward goes on, or ends everything
            if call is not None:
                call.fail()
            self.abandon()
            return
        self.watch_result(call, output)
        if (
            call is not None
            and isinstance(module, nn.Embedding)
            and len(self._modules) == 1
            and is_plain_lookup(module)
        ):
            call.read_no_weights()
        if call is not None and call.in_transform:
            compat.outside_transforms(self.leave)
        else:
            self.leave()

    def watch_result(self, call: Call | None, output: Any) -> None:
        """Have the backward of a call begin with the first gradient of a result, or of anything else that the forward has left."""
        results = tensors_in(output)
        for tensor in results:
            if tensor.is_leaf or tensor._base is not None:  # otherwise it was computed, so it has memory of its own
                refuse_own_weights(self, results)
                break
        if call is None:
            return
        call.watch_results(self, results)
        if call.is_recomputed and results:
            return
        if not results:  # modules may read weights in a backward that no saved tensor leads to
            watch_parameters(self)
            self.calls.hide()
        elif self.side_doors.look_at_attributes():
            watch_parameters(self)
            if not call.is_followed and self._is_followed:  # the next forward will be
                for weights in self.weights:
                    weights.stay()

    def close(self) -> None:
        """A run of several modules ended before its last."""
        self.context.lane.ranges.end("forward", self.name)
        self.calls.open.pop()
        self.leave()

    def leave(self) -> None:
        """After forward: reshard weights, unless they are needed again at once, or a backward may begin undetected."""
        self._runs_without_gradients = False
        if compat.backward_task() != -1 or self.calls.open:
            return
        context = self.context
        is_root = self is context.root()
        if is_root:
            context.interrupt()
        keeps = is_root or not self.reshard_after_forward or context.schedule.last_of_forward == self.number
        if not (self.calls.hidden or (keeps and torch.is_grad_enabled())):
            self.reshard()
        else:
            # Outside of forwards `parameters()` must yield those that have gradients and accept writes.
            self.unregister()
            if not (is_root or self.calls.hidden):
                self._end_lease()
        for weights in self.weights:
            if weights.lost_writes:
                self.refuse_lost_writes()

    def stay_unsharded(self) -> None:
        """From now on weights stay between forward and backward, in memory that no other unit uses."""
        self.reshard_after_forward = False
        for group in self.groups:
            self.context.lane.pool.unshare(group.weights.client)

    @property
    def keeps_after_forward(self) -> bool:
        """Whether its weights stay between forward and backward regardless of the option: the root's, and those backward needs first."""
        return self is self.context.root() or self.context.schedule.last_of_forward == self.number

    def refuse_lost_writes(self) -> None:
        """Raise if a forward wrote to weights that cannot adopt it; see `Weights.unregister`."""
        for weights in self.weights:
            if weights.lost_writes and not sys.exc_info()[0]:
                weights.refuse_lost_writes()

    def forget_graphs(self) -> None:
        """An optimizer has stepped parameters of it, or it moves to another root: graphs of before are out of date."""
        self.calls.forget_graphs()
        self.let_go()

    def let_go(self) -> None:
        """Weights need not stay for a backward that nothing would tell of."""
        for group in self.groups:
            if group.weights.stays:
                group.weights.let_go()
        if self.calls.hidden:
            self.calls.forget_hidden()
            if not self.calls.open:
                self.reshard()

    @property
    def is_inside_root(self) -> bool:
        """Whether the forward of a root around it, or a step of one, is running."""
        root = self.context.root()
        return root is not None and root is not self and (root.keeps_unsharded or bool(root.calls.open))

    @property
    def is_inside_forward_of_root(self) -> bool:
        """Whether the forward of a root around it is running, also in a step of one."""
        root = self.context.root()
        return root is not None and root is not self and bool(root.calls.open)

    @property
    def full_bytes(self) -> int:
        """Memory of its own gathered weights."""
        return sum(group.weights.client.size_bytes for group in self.groups if group.weights.is_sharded)

    def abandon(self) -> None:
        """Forward raised: reshard at once what it used, and at the root also what was prefetched."""
        self.keeps_unsharded = self._runs_without_gradients = False
        self.reshard()
        if self is self.context.root():
            for unit in self.context.units:
                unit.calls.forget_hidden()
                unit.reshard()
                for group in unit.groups:
                    group.weights.abandon()

    def _new_call(self, in_transform: bool) -> Call | None:
        """`None` where no backward follows: without gradients, and where a checkpoint throws the graph away that it recomputes."""
        if not torch.is_grad_enabled():
            self.note_run()
            return None
        if not self.weights:
            return None
        if compat.backward_task() == -1:
            return Call(in_transform=in_transform)
        if not self.calls.recomputations.expected:
            return None
        if compat.backward_task() != self.context.backward.task or any(
            group.gradients.are_due() for group in self.groups
        ):
            self.calls.recomputations.note_backward_around()
        return Call(is_recomputed=True, in_transform=in_transform)

    def note_run(self) -> None:
        """One of its modules runs; without gradients it may be recomputed with them, unless all of the root runs without."""
        if compat.in_function_forward():
            root = self.context.root()
            if not (root and self.is_inside_root and root._runs_without_gradients):
                self.calls.recomputations.note_run()

    # -- backward ------------------------------------------------------------------------------------------------------

    def pre_backward(self, call: Call) -> None:
        """A gradient of an output has arrived; the call's own nodes run next, unless it returned an input unchanged."""
        context = self.context
        context.begin_backward()
        if not self.calls.begin_backward(call):
            return
        if context.lane.ranges.enabled:
            context.lane.ranges.begin("backward", self.name)
        following = context.note_backward(self)
        if call.buffers is not None:
            self.unshard(call.buffers, used=True, for_backward=True)
            self.register()
        if following is not None:
            following.prefetch_for_backward()

    def post_backward(self, call: Call) -> None:
        """All gradients of the call's inputs have arrived, so nothing of it reads weights any more."""
        self.context.begin_backward()  # it may have gone undetected, if results were hidden
        if self.calls.end_backward_of(call) and self.context.lane.ranges.open:
            self.context.lane.ranges.end("backward", self.name)
        if not (self.calls.running or self.calls.hidden):
            self.reshard()
        if self.is_done:
            self.context.reductions.unit_done(self)

    def prefetch_for_backward(self) -> None:
        """Start the all-gather for a backward that is expected next, if its memory is free."""
        latest = self.calls.latest
        if latest is not None and self.calls.waiting and latest.buffers is not None:
            self.unshard(latest.buffers, ahead=True, for_backward=True)

    def end_backward(self, *, keeps_graph: bool) -> None:
        """After a backward, or after one that failed: stop waiting for any part of it."""
        calls = self.calls
        calls.end_backward(keeps_graph=keeps_graph, is_stepped=calls.hidden > 0 and self.is_trainable)
        if not (keeps_graph or calls.waiting):  # no step tells of graphs of what is frozen, or not known to be stepped
            for group in self.groups:
                if group.weights.stays and not (self.is_trainable and self.context.optimizers.hold_all):
                    group.weights.let_go()
        if not calls.open:  # otherwise the backward ran inside its forward, which goes on
            self.unregister() if calls.hidden else self.reshard()


def _users_of(group: ParameterGroup) -> list[Unit]:
    """The units whose modules show a group's parameters."""
    owner = group.unit()
    users = [] if owner is None else [user for reference in owner.users if (user := reference()) is not None]
    return [user for user in users if group in user.all_groups]
