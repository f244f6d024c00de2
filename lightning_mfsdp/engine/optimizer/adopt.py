"""Who writes main weights, and the refresh of compute weights after a step.

An elementwise optimizer does to each number what it would do to it in the whole tensor, so it can work on plain local
rows: no DTensor dispatch, and fused kernels. So can one that fetches by itself what it needs of other ranks (local_rows.py), and
any optimizer at all where every rank has all rows (`no_shard`, one rank). Others (LARS, LAMB: norms of the whole tensor) keep DTensors
of divided parameters; those that need whole matrices (torch's Muon, Shampoo, Adafactor) are refused there, by name or by the operation.

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
from lightning_mfsdp.engine.params.group import ParameterGroup, Root, owner_of
from lightning_mfsdp.engine.params.parameter import Entry, outdate_graphs
from lightning_mfsdp.engine.params.rows import sharded_axes
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
    optimizer.register_state_dict_post_hook(show_state)
    optimizer.register_load_state_dict_pre_hook(take_state)
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
        self._held: list[Tensor] = []
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
        writes_in_steps_alone = _writes_in_steps_alone(optimizer) or self._support.writes_in_steps_alone(optimizer)
        local = _works_on_rows(optimizer, self._elementwise, known=writes_in_steps_alone)
        found = _adopt_parameters(optimizer, local, self._grad_scaler)
        self._drivers = self._support.prepare(optimizer, found, local=local)
        for group, entries in found.items():
            if (context := context_of_group(group)) is not None:
                context.track(entries)
        # DTensors note what is written to them; local rows do not.
        self._is_watched, self._writes_elsewhere = local, not writes_in_steps_alone
        if self._is_watched:
            for group in found:
                if (context := context_of_group(group)) is not None:
                    context.watch([group])
        self._groups = [
            (weakref.ref(group), [group.entries.index(entry) for entry in entries]) for group, entries in found.items()
        ]
        self._held = _parameters(optimizer)

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a step."""
        if not _is_same(self._held, _parameters(optimizer)):
            self._take_over(optimizer)
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
            changed = args, kwargs = self._with_closure(self._evaluating(closure, list(roots)), args, kwargs)
        else:
            _reduce_held_back(roots)
        for driver in self._drivers:
            changed = driver.begin(optimizer, args, kwargs) or changed
        return changed

    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """After a step."""
        is_whole = True
        for driver in self._drivers:
            is_whole = driver.end(optimizer) and is_whole
        if is_whole:
            if self._writes_elsewhere:
                self._was_written()  # which also puts rows back where they belong
            self._note_write()

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

    def _evaluating(self, closure: Callable[..., Any], roots: Sequence[Root]) -> Callable[..., Any]:
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
            return result

        return evaluate

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


def _writes_in_steps_alone(optimizer: Optimizer) -> bool:
    """Whether it is known to work on rows, and to write to them nowhere but in `step`, after its closure."""
    return type(optimizer) in ELEMENTWISE_OPTIMIZERS or isinstance(optimizer, LocalRowsOptimizer)


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


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(operator.is_, found, expected))


def _adopt_parameters(
    optimizer: Optimizer, local: bool, grad_scaler: object | None
) -> dict[ParameterGroup, list[Entry]]:
    """Replace parameters in place by the representation that the optimizer works on; returns those of each group, in order."""
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
            shown = entry.local if local else entry.sharded
            group["params"][index] = shown
            if parameter in optimizer.state and parameter is not shown:
                optimizer.state[shown] = _shard_state(optimizer.state.pop(parameter), owner, entry, local=local)
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
