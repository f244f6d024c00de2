"""Who writes main weights, and the refresh of compute weights after a step.

An elementwise optimizer does to each number what it would do to it in the whole tensor, so it can work on plain local
rows: no DTensor dispatch, and fused kernels. So can one that fetches by itself what it needs of other ranks (local_rows.py), and
any optimizer at all where every rank has all rows (`no_shard`, one rank). Others (LARS, LAMB: norms of the whole tensor) keep DTensors
of divided parameters; those that need whole matrices (torch's Muon, Shampoo, Adafactor) are refused there, by name or by the operation.

What `param_groups` hold is seen by the program, too: it takes norms of it, clips it, sets it to None. So an optimizer that is known to use
its parameters in `step` alone has rows in `param_groups` for as long as its own code runs there; at all other times, the closure's
included, they hold what the module shows. Of another optimizer nobody knows which of its methods read `param_groups`, so one that works
on rows always has them there. The optimizer's own code begins where its closure has been called: all of PyTorch's call it first.

Alternatives considered: rows at all times, which made `clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)` scale every rank's
gradients by another number.

Source of the list: the update rules in `torch.optim`; a class is taken only if it is exactly one of these, since a
subclass may do anything. Of other optimizers, and of steps that need more, `OptimizerSupport` knows (driver.py).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.errors import ShardingError
from lightning_mfsdp.engine.optimizer.driver import OptimizerDriver, OptimizerSupport
from lightning_mfsdp.engine.optimizer.local_rows import LocalRowsOptimizer
from lightning_mfsdp.engine.optimizer.state import refuse_left_behind, show_state, take_state
from lightning_mfsdp.engine.params.group import ParameterGroup, Root, as_local, owner_of
from lightning_mfsdp.engine.params.parameter import Entry, outdate_graphs
from lightning_mfsdp.engine.params.rows import sharded_axes
from lightning_mfsdp.engine.params.sharded_parameter import ShardedParameter
from lightning_mfsdp.engine.params.stepping import call_closure
from lightning_mfsdp.engine.runtime.context import context_of_group
from lightning_mfsdp.engine.runtime.conversion import refuse_moved

__all__ = ["ELEMENTWISE_OPTIMIZERS", "adopt_optimizer"]

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
    """Do what `fully_shard_optimizer` says (engine/api/optimizer.py)."""
    step = next((hook for hook in compat.step_pre_hooks(optimizer) if isinstance(hook, _ShardedStep)), None)
    if step is not None:
        step.adopt(optimizer, elementwise, grad_scaler)
        return
    step = _ShardedStep(support())
    step.adopt(optimizer, elementwise, grad_scaler)
    optimizer.register_state_dict_pre_hook(step.begin_state)
    optimizer.register_state_dict_post_hook(step.end_state)
    optimizer.register_load_state_dict_pre_hook(step.begin_load)
    optimizer.register_load_state_dict_post_hook(step.end_load)
    optimizer.register_step_pre_hook(step)
    # They find weights and gradients as after any step.
    compat.before_other_hooks(optimizer.register_step_post_hook(step.end))


class _ShardedStep:
    """What is done around the steps of one optimizer, and what was said of it. The optimizer's own hooks keep it."""

    def __init__(self, support: OptimizerSupport) -> None:
        self._support = support
        self._drivers: Sequence[OptimizerDriver] = ()
        self._elementwise: bool | None = None
        self._grad_scaler: object | None = None
        self._groups: list[tuple[weakref.ref[ParameterGroup], list[int]]] = []
        self._shown: list[Tensor] = []  # what `param_groups` hold, in order
        self._stepped: list[Tensor] = []  # what they hold while the optimizer's own code runs
        self._is_watched = self._writes_elsewhere = False

    def adopt(self, optimizer: Optimizer, elementwise: bool | None, grad_scaler: object | None) -> None:
        """Take over the parameters that the optimizer holds. `None` leaves what was said before."""
        if elementwise is not None:
            self._elementwise = elementwise
        if grad_scaler is not None:
            self._grad_scaler = grad_scaler
        self._take_over(optimizer)
        if not self._groups:
            raise ShardingError(
                f"fully_shard_optimizer: {type(optimizer).__name__} holds no parameter of a sharded module; call fully_shard(module) first "
                "and build the optimizer "
                "from module.parameters()"
            )

    def _take_over(self, optimizer: Optimizer) -> None:
        has_known_steps = type(optimizer) in ELEMENTWISE_OPTIMIZERS or isinstance(optimizer, LocalRowsOptimizer)
        uses_in_steps_alone = has_known_steps and compat.takes_closure(optimizer)
        writes_in_steps_alone = has_known_steps or self._support.writes_in_steps_alone(optimizer)
        local = _works_on_rows(optimizer, self._elementwise, known=writes_in_steps_alone)
        found = _adopt_parameters(optimizer, local, self._grad_scaler)
        self._drivers = self._support.prepare(optimizer, found, local=local)
        for group, entries in found.items():
            if (context := context_of_group(group)) is not None:
                context.track(entries)
        self._stepped = _parameters(optimizer)
        self._shown = [_as_shown(one) for one in self._stepped] if local and uses_in_steps_alone else self._stepped
        self._put(optimizer, self._shown)
        # DTensors note what is written to them; local rows do not.
        self._is_watched, self._writes_elsewhere = self._shown is self._stepped and local, not writes_in_steps_alone
        if self._is_watched:
            for group in found:
                if (context := context_of_group(group)) is not None:
                    context.watch([group])
        self._groups = [
            (weakref.ref(group), [group.entries.index(entry) for entry in entries]) for group, entries in found.items()
        ]

    def _take_over_new(self, optimizer: Optimizer) -> None:
        """Take over what came into `param_groups` since, and have them as they are between steps, also after a step that raised."""
        if not _is_same(self._shown, _parameters(optimizer)):
            self._take_over(optimizer)

    def _take_over_state(self, optimizer: Optimizer) -> None:
        """State that was put in for a parameter that the module shows becomes that of its local rows."""
        if self._shown is self._stepped:
            return
        state = optimizer.state
        for key in [key for key in state if isinstance(key, ShardedParameter)]:
            state[as_local(key)] = state.pop(key)  # the same key to a dictionary, and another object
        for values in state.values():
            for name, value in values.items():
                if isinstance(value, DTensor):
                    values[name] = value.to_local()

    def _put(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        """Have `param_groups` hold the other representation of what they hold."""
        if self._shown is not self._stepped:
            first = 0
            for group in optimizer.param_groups:
                held = group["params"]
                held[:] = parameters[first : first + len(held)]
                first += len(held)

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a step."""
        self._take_over_new(optimizer)
        self._take_over_state(optimizer)
        roots: dict[Root, None] = {}
        for reference, _ in self._groups:
            group = reference()
            if group is None or (root := group.root()) is None or root.root() is None:  # gone, or plain again
                refuse_left_behind(optimizer, "step")
            else:
                roots[root] = None
                if group.moved:
                    refuse_moved([group], f"{type(optimizer).__name__}.step")
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        changed: Any = None
        if closure is not None and callable(closure):
            evaluate = self._evaluating(optimizer, closure, list(roots))
            changed = args, kwargs = self._with_closure(evaluate, args, kwargs)
        else:
            _reduce_held_back(roots)
            if self._shown is not self._stepped:
                changed = args, kwargs = self._with_closure(self._beginning(optimizer), args, kwargs)
        for driver in self._drivers:
            changed = driver.begin(optimizer, args, kwargs) or changed
        return changed

    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """After a step."""
        is_whole = True
        for driver in self._drivers:
            is_whole = driver.end(optimizer) and is_whole
        if is_whole:
            self._put(optimizer, self._shown)
            if self._writes_elsewhere:
                self._was_written()  # which also puts rows back where they belong
            self._note_write()

    def begin_state(self, optimizer: Optimizer) -> None:
        """Hook for the beginning of `state_dict()`, which numbers parameters as keys of the state: those that are stepped."""
        refuse_left_behind(optimizer, "state_dict")
        self._take_over_new(optimizer)
        self._take_over_state(optimizer)
        self._put(optimizer, self._stepped)

    def end_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hook for the end of `state_dict()`."""
        self._put(optimizer, self._shown)
        return show_state(optimizer, state_dict)

    def begin_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hook for the beginning of `load_state_dict()`."""
        refuse_left_behind(optimizer, "load_state_dict")
        self._take_over_new(optimizer)
        return take_state(state_dict, self._stepped)

    def end_load(self, optimizer: Optimizer) -> None:
        """Hook for the end of `load_state_dict()`, which keyed the state by what it found."""
        self._take_over_state(optimizer)

    def _note_write(self) -> None:
        _note_step((group, indices) for reference, indices in self._groups if (group := reference()) is not None)

    def _was_written(self) -> bool:
        """Whether rows that are watched were written since this was last asked, or compute shards refreshed."""
        if not self._is_watched:
            return False
        written = [group.weights.note_writes() for group in self._present_groups()]  # all of them, not up to the first
        return any(written)

    def _present_groups(self) -> list[ParameterGroup]:
        return [group for reference, _ in self._groups if (group := reference()) is not None]

    def _evaluating(
        self, optimizer: Optimizer, closure: Callable[..., Any], roots: Sequence[Root]
    ) -> Callable[..., Any]:
        """A closure that sees what was written since it was last called (LBFGS), or since the step began (SAM), and holds nothing back."""
        was_called = False
        if self._was_written():  # between the last pass and this step
            self._note_write()

        def evaluate(*given: Any, **named: Any) -> Any:
            nonlocal was_called
            if self._was_written() or was_called:
                self._note_write()
            was_called = True
            result = call_closure(closure, *given, **named)
            _reduce_held_back(roots)
            self._take_over_new(optimizer)
            self._put(optimizer, self._stepped)
            return result

        return evaluate

    def _beginning(self, optimizer: Optimizer) -> Callable[[], None]:
        """A closure that computes nothing. Not done before the step, since hooks of the user's may come after ours."""

        def begin() -> None:
            self._put(optimizer, self._stepped)

        return begin

    @staticmethod
    def _with_closure(closure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments of a step with another closure."""
        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def _reduce_held_back(roots: Iterable[Root]) -> None:
    """A step comes after backwards under `no_sync` alone. What no rank used has no gradient then. Collective, as the step is."""
    for root in roots:
        root.reduce_held_back()


def _works_on_rows(optimizer: Optimizer, said: bool | None, *, known: bool) -> bool:
    """Whether an optimizer gets plain rows. All ranks agree.

    Args:
        optimizer: The user's.
        said: What the user says of it.
        known: It is known to work on rows.

    Raises:
        ShardingError: It needs whole tensors, and some are divided.
    """
    owners = {id(found[0]): found[0] for one in _parameters(optimizer) if (found := owner_of(one)) is not None}
    if said is not False and owners and all(_is_whole(group) for group in owners.values()):
        return True
    name = type(optimizer).__name__
    # Of a class of its own the user may know better.
    if isinstance(optimizer, _WHOLE_OPTIMIZERS) and (said is None or type(optimizer) in _WHOLE_OPTIMIZERS):
        instead = "an elementwise optimizer such as torch.optim.AdamW"
        if isinstance(optimizer, torch.optim.Muon):
            instead = "lightning_mfsdp.optim.Muon, the same rule with the same arguments for sharded matrices"
        raise ShardingError(
            f"fully_shard_optimizer: {name} needs whole vectors or matrices and cannot run on shards; use {instead}, or "
            'sharding="no_shard" without offload, which leaves everything whole on every rank'
        )
    return known if said is None else said


def _is_whole(group: ParameterGroup) -> bool:
    """Whether every rank has all rows of the main weights, all of the time."""
    return not sharded_axes(group) and not group.offloads


def _note_step(stepped: Iterable[tuple[ParameterGroup, list[int]]]) -> None:
    """What an optimizer holds was stepped: these groups are out of date, and graphs that saved what had a gradient are, too."""
    by_root: dict[Root, list[ParameterGroup]] = {}
    written: list[Entry] = []
    for group, indices in stepped:
        entries = group.entries
        written += [entry for index in indices if (entry := entries[index]).local.grad is not None]
        if (root := group.root()) is not None:
            by_root.setdefault(root, []).append(group)
    outdate_graphs(written)
    for root, groups in by_root.items():
        root.optimizer_stepped(groups)


def _as_shown(parameter: Tensor) -> Tensor:
    """What the module shows of local rows."""
    owner = owner_of(parameter)
    return parameter if owner is None else owner[1].sharded


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _adopt_parameters(
    optimizer: Optimizer, local: bool, grad_scaler: object | None
) -> dict[ParameterGroup, list[Entry]]:
    """Replace parameters in place by the representation that the optimizer works on, also as keys of its state.

    Returns:
        Those of each group, in order.
    """
    held: dict[ParameterGroup, list[Entry]] = {}
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            found = owner_of(parameter)
            if found is None:
                continue
            owner, entry = found
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
                    f"treats every number by itself, and {type(optimizer).__name__} looks at whole tensors; shard without offload, use one "
                    "such as torch.optim.AdamW, or pass elementwise=True if it does"
                )
            held.setdefault(owner, []).append(entry)
            stepped = entry.local if local else entry.sharded
            group["params"][index] = stepped
            if parameter in optimizer.state and parameter is not stepped:
                optimizer.state[stepped] = _shard_state(optimizer.state.pop(parameter), owner, entry, local=local)
    return held


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
    shape = torch.Size(group.layout.shapes[index])  # before sharding, parts of a parameter are apart
    return {key: _rows(value, shape, rows) for key, value in state.items()}


def _rows(value: Any, shape: torch.Size, rows: range) -> Any:
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, Tensor) and value.shape == shape and value.dim():
        return value[rows.start : rows.stop].clone()
    return value
