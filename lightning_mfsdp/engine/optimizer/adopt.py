"""Adopts optimizers: gives them what they step, rows or DTensors of main weights, and has compute weights refreshed after a step.

An elementwise optimizer does to each number what it would do to it in the whole tensor, so it can work on plain local
rows: no DTensor dispatch, and fused kernels. So can one that fetches what it needs from other ranks itself (local_rows.py), and
any optimizer at all where every rank has all rows (`no_shard`, one rank). Others (LARS, LAMB: norms of the whole tensor) keep DTensors
of sharded parameters; those that need whole matrices (torch's Muon, Shampoo, Adafactor) are refused there, by name or by the operation.

The user's program reads `param_groups`, too: it takes norms, clips gradients, sets them to None. So an optimizer that is known to use
its parameters in `step` alone has rows in `param_groups` for as long as its own code runs there; at all other times, the closure's
included, they hold what the module shows. For other optimizers it is unknown which methods read `param_groups`, so one that works
on rows always has them there. The optimizer's own code begins where its closure has been called: all of PyTorch's call it first.

Alternatives considered: rows at all times, which made `clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)` scale every rank's
gradients by another number.

Source of the list: the update rules in `torch.optim`; a class counts only if it is exactly one of these, since a
subclass may do anything. `OptimizerSupport` (driver.py) handles other optimizers, and steps that need more.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.containers import are_same
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.core.context import Context
from lightning_mfsdp.engine.core.conversion import refuse_moved
from lightning_mfsdp.engine.core.group import ParameterGroup, as_local, as_sharded, owner_of
from lightning_mfsdp.engine.core.parameter import Entry
from lightning_mfsdp.engine.core.rows import sharded_axes
from lightning_mfsdp.engine.core.writes import OwnCode, RowsOf
from lightning_mfsdp.engine.optimizer.driver import OptimizerDriver, OptimizerSupport
from lightning_mfsdp.engine.optimizer.local_rows import ElementwiseOptimizer, LocalRowsOptimizer
from lightning_mfsdp.engine.optimizer.norm import GradientPlaces
from lightning_mfsdp.engine.optimizer.representations import Representations, hold
from lightning_mfsdp.engine.optimizer.shown_state import ShownState
from lightning_mfsdp.engine.optimizer.state import refuse_left_behind, show_state, take_state, taken

__all__ = ["ELEMENTWISE_OPTIMIZERS", "adopt_optimizer", "gradient_places", "steps_rows"]

ELEMENTWISE_OPTIMIZERS: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)

# LBFGS takes all parameters as one vector, Muon products of whole matrices, Adafactor their means.
_WHOLE_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.Muon, torch.optim.Adafactor)


def adopt_optimizer(
    optimizer: Optimizer, elementwise: bool | None, grad_scaler: object | None, support: Callable[[], OptimizerSupport]
) -> None:
    """What `fully_shard_optimizer` (engine/api/optimizer.py) does, with `support` for optimizers beyond `torch.optim`."""
    step = next((hook for hook in compat.step_pre_hooks(optimizer) if isinstance(hook, _ShardedStep)), None)
    if step is not None:
        step.adopt(optimizer, elementwise, grad_scaler)
        return
    step = _ShardedStep(support())
    step.adopt(optimizer, elementwise, grad_scaler)
    optimizer.register_state_dict_pre_hook(step.begin_state)
    optimizer.register_state_dict_post_hook(show_state)
    optimizer.register_load_state_dict_pre_hook(step.begin_load)
    optimizer.register_load_state_dict_post_hook(step.end_load)
    optimizer.register_step_pre_hook(step)
    # Other hooks then see weights and gradients as after any step.
    compat.before_other_hooks(optimizer.register_step_post_hook(step.end))


def steps_rows(optimizer: Optimizer) -> bool:
    """Whether an optimizer was adopted, and steps plain local rows."""
    return any(isinstance(hook, _ShardedStep) and hook.steps_rows for hook in compat.step_pre_hooks(optimizer))


def gradient_places(optimizer: Optimizer, held: Sequence[Tensor]) -> GradientPlaces:
    """Where the gradients of some of an optimizer's parameters are; for one that was adopted, as it was known in the last step."""
    step = next((hook for hook in compat.step_pre_hooks(optimizer) if isinstance(hook, _ShardedStep)), None)
    return GradientPlaces(held) if step is None else step.gradient_places(held)


class _ShardedStep:
    """What is done around the steps of one optimizer, and the options passed for it. The optimizer's own hooks keep it alive.

    Attributes:
        steps_rows: It works on plain local rows.
    """

    def __init__(self, support: OptimizerSupport) -> None:
        self.steps_rows = False
        self._support = support
        self._drivers: Sequence[OptimizerDriver] = ()
        self._elementwise: bool | None = None
        self._grad_scaler: object | None = None
        self._groups: list[tuple[weakref.ref[ParameterGroup], list[int]]] = []
        self._held = Representations()
        self._places: GradientPlaces | None = None
        self._writes_elsewhere = self._may_assign = False
        self._is_due = False  # a step has begun, and the optimizer's own code has not
        self._running_in: list[Context] = []
        self._own_code: OwnCode | None = None  # of a step without closure, which would hold it
        self._optimizer: Callable[[], Optimizer | None] = lambda: None

    def adopt(self, optimizer: Optimizer, elementwise: bool | None, grad_scaler: object | None) -> None:
        """Adopt the parameters that the optimizer holds. `None` leaves earlier options."""
        if elementwise is not None:
            self._elementwise = elementwise
        if grad_scaler is not None:
            self._grad_scaler = grad_scaler
        self._held.end_unfinished(optimizer)
        self._take_over(optimizer)
        if not self._groups:
            raise ShardingError(
                f"fully_shard_optimizer: {type(optimizer).__name__} holds no parameter of a sharded module, so it was made before "
                "the module was sharded, or from other parameters; make it of module.parameters() after fully_shard(module), under "
                "Lightning in configure_optimizers"
            )

    def _take_over(self, optimizer: Optimizer) -> None:
        has_known_steps = _is_elementwise(optimizer) or isinstance(optimizer, LocalRowsOptimizer)
        writes_in_steps_alone = has_known_steps or self._support.writes_in_steps_alone(optimizer)
        local = _works_on_rows(optimizer, self._elementwise, is_known=writes_in_steps_alone)
        # With elementwise=True `param_groups` always hold plain rows, so the step may be compiled.
        hides_rows = local and has_known_steps and not self._elementwise and compat.takes_closure(optimizer)
        entries_by_group = _held_entries(optimizer, local, self._grad_scaler)
        before = [list(group["params"]) for group in optimizer.param_groups]
        sharded = [
            [
                parameter if (shown_parameter := as_sharded(parameter)) is None else shown_parameter
                for parameter in entry
            ]
            for entry in before
        ]
        stepped = [[as_local(parameter) for parameter in entry] for entry in before] if local else sharded
        shown = sharded if hides_rows else stepped
        for options, held in zip(optimizer.param_groups, shown, strict=True):
            hold(options, held)
        _take_over_state(optimizer, local=local, hides_rows=hides_rows)
        self.steps_rows, self._places = local, None
        self._held = Representations(stepped, shown)
        self._held.begin(optimizer)
        try:
            self._drivers = self._support.prepare(optimizer, entries_by_group, local=local)
        finally:
            self._held.end(optimizer)  # also where it is refused
        if hides_rows and not self._drivers and _is_elementwise(optimizer):
            self._held.flatten(optimizer)
        self._writes_elsewhere = not writes_in_steps_alone
        self._may_assign = local and not (hides_rows and _is_elementwise(optimizer))
        for group, entries in entries_by_group.items():
            if (context := group.root()) is not None:
                context.optimizers.track(entries)
                if local:
                    context.writes.watch(group, RowsOf.ASSIGNING_OPTIMIZER if self._may_assign else RowsOf.OPTIMIZER)
        self._groups = [
            (weakref.ref(group), [group.entries.index(entry) for entry in entries])
            for group, entries in entries_by_group.items()
        ]

    def _take_over_new(self, optimizer: Optimizer) -> None:
        """Adopt what was added to `param_groups` since, and put them into their state between steps, also after a step that raised."""
        self._held.end_unfinished(optimizer)
        if not self._held.are_shown(optimizer):
            self._take_over(optimizer)

    def gradient_places(self, held: Sequence[Tensor]) -> GradientPlaces:
        """The places of the gradients of these parameters, looked up again only if they are others or were sharded since."""
        if self._places is None or not (are_same(self._places.parameters, held) and self._places.is_current):
            self._places = GradientPlaces(held)
        return self._places

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hook before a step: adopt what is new, and put a closure around the user's. Returns changed arguments, or `None`."""
        self._take_over_new(optimizer)
        roots: dict[Context, None] = {}
        for reference, _ in self._groups:
            group = reference()
            if group is None or (root := group.root()) is None or root.root() is None:  # deleted, or plain again
                refuse_left_behind(optimizer, "step")
            else:
                roots[root] = None
                if group.moved:
                    refuse_moved([group], f"{type(optimizer).__name__}.step")
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        changed: Any = None
        own_code = None if self.steps_rows else OwnCode(type(optimizer).__name__)
        if closure is not None and callable(closure):
            evaluate = self._evaluating(optimizer, closure, list(roots), own_code)
            changed = args, kwargs = self._with_closure(evaluate, args, kwargs)
        else:
            _reduce_held_back(roots)
            begin = partial(self._begin, optimizer, list(roots), own_code)
            if self._held.differ:
                changed = args, kwargs = self._with_closure(begin, args, kwargs)
            else:  # an unknown optimizer, which does something else where it is given a closure
                self._own_code = own_code
                begin()
        self._is_due = self._held.differ
        for driver in self._drivers:
            changed = driver.begin(optimizer, args, kwargs) or changed
        return changed

    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """The hook after a step: show sharded tensors again, and note what was written."""
        is_whole = True
        for driver in self._drivers:
            is_whole = driver.end(optimizer) and is_whole
        if is_whole:
            self._held.end(optimizer)
            for root in self._running_in:
                root.optimizers.end(weakref.WeakMethod(self.finish))
            self._running_in, self._own_code = [], None
            if self._is_due:
                self._is_due = False
                warnings.warn(
                    f"{type(optimizer).__name__}.step did not call the closure that fully_shard_optimizer gave it, so it stepped DTensors, "
                    "which takes several times as long. A hook before the step may have returned other arguments: keep the closure among "
                    "them. In an optimizer of your own call the closure first, as those of torch.optim do, or pass elementwise=True",
                    stacklevel=3,
                )
            if self._writes_elsewhere:
                self._was_written()  # which also puts rows back where they belong
            self._note_write()

    def begin_state(self, optimizer: Optimizer) -> None:
        """Hook for the beginning of `state_dict()`."""
        refuse_left_behind(optimizer, "state_dict")
        self._take_over_new(optimizer)
        self._held.show_state(optimizer)

    def begin_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hook for the beginning of `load_state_dict()`."""
        refuse_left_behind(optimizer, "load_state_dict")
        self._take_over_new(optimizer)
        return take_state(state_dict, self._held.shown)

    def end_load(self, optimizer: Optimizer) -> None:
        """Hook for the end of `load_state_dict()`: the program meets a view at once, and no table that is replaced later."""
        self._held.show_state(optimizer)

    def _note_write(self) -> None:
        _note_step((group, indices) for reference, indices in self._groups if (group := reference()) is not None)

    def _was_written(self) -> bool:
        """Whether rows that are watched were written since the last call, or compute shards refreshed."""
        if not self.steps_rows:  # DTensors record writes to them; local rows do not
            return False
        groups = [group for reference, _ in self._groups if (group := reference()) is not None]
        # Lists, because every group has to note its own.
        assigned = [group.weights.take_assigned() for group in groups] if self._may_assign else []
        return any([*assigned, *[group.weights.take_written() for group in groups]])

    def _evaluating(
        self, optimizer: Optimizer, closure: Callable[..., Any], roots: Sequence[Context], own_code: OwnCode | None
    ) -> Callable[..., Any]:
        """A closure that sees writes since its last call (LBFGS), or since the step began (SAM), and runs with nothing held back."""
        was_called = False
        if self._was_written():  # between the last pass and this step
            self._note_write()

        def evaluate(*arguments: Any, **named: Any) -> Any:
            nonlocal was_called
            # An optimizer that writes in its steps alone writes nothing before it first calls its closure.
            if (was_called or self._writes_elsewhere) and (self._was_written() or was_called):
                self._note_write()
            was_called = True
            self._note_own_code(None)
            result = closure(*arguments, **named)
            _reduce_held_back(roots)
            self._begin(optimizer, roots, own_code)
            return result

        return evaluate

    def _begin(self, optimizer: Optimizer, roots: Sequence[Context], own_code: OwnCode | None) -> None:
        """Runs right before the optimizer's own code. Part of its closure, since hooks of the user may run after ours."""
        self._is_due = False
        self._take_over_new(optimizer)
        self._held.begin(optimizer)
        if not self._running_in:
            self._optimizer, self._running_in = weakref.ref(optimizer), list(roots)
            for root in roots:
                root.optimizers.begin(weakref.WeakMethod(self.finish))
        self._note_own_code(own_code)

    def _note_own_code(self, own_code: OwnCode | None) -> None:
        """Note which optimizer's own code works on sharded tensors."""
        for root in self._running_in:
            root.optimizers.works_on_tensors(own_code)

    def finish(self) -> None:
        """The optimizer's own code has raised, and may have written some rows."""
        if (optimizer := self._optimizer()) is not None:
            self._held.end_unfinished(optimizer)
        for reference, _ in self._groups:
            if (group := reference()) is not None and (root := group.root()) is not None:
                root.writes.to_weights([group])
        self._note_own_code(None)
        self._running_in, self._own_code = [], None

    @staticmethod
    def _with_closure(closure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments of a step with the closure replaced."""
        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def _reduce_held_back(roots: Iterable[Context]) -> None:
    """A step comes after backwards under `no_sync` alone. What no rank used has no gradient then. Collective, as the step is."""
    for root in roots:
        root.reduce_held_back()


def _is_elementwise(optimizer: Optimizer) -> bool:
    return type(optimizer) in ELEMENTWISE_OPTIMIZERS or ElementwiseOptimizer in type(optimizer).__bases__


def _works_on_rows(optimizer: Optimizer, elementwise: bool | None, *, is_known: bool) -> bool:
    """Whether an optimizer gets plain rows. All ranks agree.

    Args:
        optimizer: The user's.
        elementwise: What the user specified.
        is_known: It is known to work on rows.

    Raises:
        ShardingError: It needs whole tensors, and some are divided.
    """
    owners = {
        id(owner[0]): owner[0] for parameter in _parameters(optimizer) if (owner := owner_of(parameter)) is not None
    }
    if elementwise is not False and owners and all(_is_whole(group) for group in owners.values()):
        return True
    name = type(optimizer).__name__
    # For a class of their own users may override this.
    if isinstance(optimizer, _WHOLE_OPTIMIZERS) and (elementwise is None or type(optimizer) in _WHOLE_OPTIMIZERS):
        instead = "lightning_mfsdp.optim.Muon, which gathers the matrices that it needs"
        if isinstance(optimizer, torch.optim.Muon):
            instead = "lightning_mfsdp.optim.Muon, the same rule with the same arguments for sharded matrices"
        raise ShardingError(
            f'fully_shard_optimizer: {name} needs whole vectors or matrices and cannot run on shards; use sharding="no_shard" without '
            f"offload and without a tensor axis, which leaves everything whole on every rank, {instead}, or an elementwise optimizer such "
            "as torch.optim.AdamW"
        )
    return is_known if elementwise is None else elementwise


def _is_whole(group: ParameterGroup) -> bool:
    """Whether every rank has all rows of the main weights, all of the time."""
    return not group.offloads and not any(sharded_axes(group, index) for index in range(len(group.entries)))


def _note_step(stepped: Iterable[tuple[ParameterGroup, list[int]]]) -> None:
    """After a step: these groups are out of date, and so are graphs that saved parameters which had a gradient."""
    by_root: dict[Context, list[ParameterGroup]] = {}
    for group, indices in stepped:
        entries = group.entries
        if group.weights.stays:
            group.weights.let_go()
        group.weights.versions.outdate([index for index in indices if entries[index].local.grad is not None])
        if (root := group.root()) is not None:
            by_root.setdefault(root, []).append(group)
    for root, groups in by_root.items():
        root.optimizer_stepped(groups)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _held_entries(optimizer: Optimizer, local: bool, grad_scaler: object | None) -> dict[ParameterGroup, list[Entry]]:
    """The entries that an optimizer holds, by group and in order.

    Raises:
        ShardingError: It cannot step them.
    """
    held: dict[ParameterGroup, list[Entry]] = {}
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner_and_entry = owner_of(parameter)
            if owner_and_entry is None:
                continue
            owner, entry = owner_and_entry
            if id(entry) in seen:
                raise ShardingError(
                    f"fully_shard_optimizer: {type(optimizer).__name__} holds parameter {entry.name} twice and would step it twice; take "
                    "it out of one group"
                )
            seen.add(id(entry))
            if owner.spec.compute_dtype is torch.float16 and grad_scaler is None:
                raise ShardingError(
                    f"fully_shard_optimizer: parameter {entry.name} computes in float16 and there is no loss scaling, "
                    "so small gradients become zero; pass grad_scaler=lightning_mfsdp.DistributedGradScaler(...) and use it "
                    "(a plain GradScaler may skip a step on one rank alone), or compute in bfloat16"
                )
            if owner.offloads and (not local or isinstance(optimizer, LocalRowsOptimizer)):
                raise ShardingError(
                    f'fully_shard_optimizer: parameter {entry.name} was sharded with offload="optimizer", which needs an optimizer that '
                    f"treats every number by itself, and {type(optimizer).__name__} reads whole tensors; shard without offload, use one "
                    "such as torch.optim.AdamW, or pass elementwise=True if it does"
                )
            held.setdefault(owner, []).append(entry)
    return held


def _take_over_state(optimizer: Optimizer, *, local: bool, hides_rows: bool) -> None:
    """Key state by what the optimizer steps, and cut what it has of whole parameters.

    Args:
        optimizer: Between two steps.
        local: Whether it steps local rows.
        hides_rows: Whether it shows something else.
    """
    state: Any = optimizer.state
    if type(state) is ShownState:
        state.plain.separate_all()
        optimizer.state = state.plain.copy() if local else state.as_table()
    for key, values in list(optimizer.state.items()):
        owner = owner_of(key)
        if owner is None:
            continue
        group, entry = owner
        target = entry.local if local else entry.sharded
        if key is target:
            continue
        if key is entry.full or not local:
            values = _shard_state(values, group, entry, local=local)
        del optimizer.state[key]
        optimizer.state[target] = {name: taken(name, value, entry.sharded) for name, value in values.items()}


def _shard_state(state: dict[str, Any], group: ParameterGroup, entry: Entry, *, local: bool) -> dict[str, Any]:
    """State of a whole parameter, cut to this rank's rows."""
    if not local:
        raise ShardingError(
            f"fully_shard_optimizer: the optimizer already has state for {entry.name} from before sharding, and "
            "DTensor optimizers cannot take it over; "
            "shard before the first step"
        )
    index = group.entries.index(entry)
    rows = group.layout.owned_rows(index, group.main_extent.start, len(group.main_extent))
    shape = torch.Size(group.layout.shapes[index])  # before sharding, parts of a parameter are separate
    return {
        key: value[rows.start : rows.stop].clone()
        if isinstance(value, Tensor) and value.shape == shape and value.dim()
        else value
        for key, value in state.items()
    }
