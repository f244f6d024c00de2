"""Optimizer states in sharded checkpoints, by parameter name: what is saved of them, and loading them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.base.containers import map_tensors
from lightning_mfsdp.base.stand_in import StandIn
from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.checkpoint.state.index import ParameterIndex, plain_name
from lightning_mfsdp.checkpoint.state.on_disk import Reads
from lightning_mfsdp.engine import ParameterView
from lightning_mfsdp.engine.internals import empty_at_rest, put_to_rest, steps_rows, view_of

__all__ = [
    "OptimizerPlan",
    "check_optimizer",
    "finish_optimizer",
    "is_divided",
    "is_packed",
    "optimizer_state",
    "plan_optimizer",
    "state_by_number",
]


def optimizer_state(index: ParameterIndex, optimizer: Optimizer) -> dict[str, Any]:
    """State of an optimizer by parameter name, for `save`: what its `state_dict()` has, mostly the optimizer's own memory.

    Raises:
        ValueError: A state tensor that is sharded in another way than its parameter, or has another shape than the rows that it is of, or
            is of no parameter.
    """
    names_by_group, of_rows = index.names_by_group(optimizer), steps_rows(optimizer)
    names = [name for names in names_by_group for name in names]
    saved = state_by_number(optimizer)
    state: dict[str, dict[str, Any]] = {}
    for number, values in saved["state"].items():
        if number not in range(len(names)):
            raise ValueError(
                f"optimizer state of {number!r} in {type(optimizer).__name__}: expected state of parameters alone, as a sharded checkpoint "
                'holds it by their names; use state_dict_type="full", or put it into a parameter group, whose options are saved as they are'
            )
        name = names[number]
        view = index.views.get(name)
        state[name] = {
            key: _state_value(f"{name}.{key}", value, view, of_rows=of_rows) for key, value in values.items()
        }
    groups = [{**group, "params": names} for group, names in zip(saved["param_groups"], names_by_group, strict=True)]
    return {"state": state, "param_groups": groups}


def state_by_number(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer's `state_dict()` has.

    Raises:
        ValueError: It has another form than that of `torch.optim.Optimizer`.
    """
    saved = optimizer.state_dict()
    for name in ("state", "param_groups"):
        if name not in saved:
            raise ValueError(
                f'{type(optimizer).__name__}.state_dict() has no "{name}", only {sorted(map(str, saved))}: a checkpoint needs the form of '
                "torch.optim.Optimizer.state_dict, state by the number of the parameter; return that, or save weights only"
            )
    return saved


@dataclass(frozen=True)
class OptimizerPlan:
    """What will be loaded into one optimizer; it was checked to fit.

    Attributes:
        state: By plain parameter name, with this rank's rows, some of which are yet to be read.
        groups: Options of the parameter groups.
        names_by_group: Parameters here.
    """

    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    names_by_group: list[list[str]]

    def only(self, names: Collection[str]) -> OptimizerPlan:
        """Without the state of other parameters."""
        return replace(self, state={name: values for name, values in self.state.items() if name in names})


def check_optimizer(
    path: Location, saved: Mapping[str, Any], index: ParameterIndex, optimizer: Optimizer, key: str
) -> dict[Any, str]:
    """Compare the parameter groups of a state with those of an optimizer.

    Args:
        path: Of the checkpoint, for messages.
        saved: "state" and "param_groups", by parameter name as in a directory, or by number as `Optimizer.state_dict()` has it.
        index: Of the model.
        optimizer: That will have it.
        key: Its name, for messages.

    Returns:
        By what the state uses for a parameter, its plain name.

    Raises:
        RuntimeError: The groups hold other parameters than the saved ones.
        RefusedError: An option is of a class that was not allowed.
    """
    names_by_group, groups = index.names_by_group(optimizer), saved["param_groups"]
    theirs = [list(group.get("params", [])) for group in groups]
    numbers = [number for group in theirs for number in group]
    if all(isinstance(number, int) for number in numbers):
        _check_counts(path, key, [len(group) for group in theirs], [len(names) for names in names_by_group])
        return dict(zip(numbers, (name for names in names_by_group for name in names), strict=True))
    _check_groups(path, key, [[plain_name(name) for name in group] for group in theirs], names_by_group)
    return {name: plain_name(name) for group in theirs for name in group}


def plan_optimizer(
    path: Location, saved: Mapping[str, Any], index: ParameterIndex, optimizer: Optimizer, key: str, reads: Reads
) -> OptimizerPlan:
    """What `check_optimizer` found to fit, as this rank will have it. Changes nothing; `reads` is told what to read, and where to.

    Raises:
        RuntimeError: It does not fit, or holds tensors of a class that cannot be divided.
    """
    names = check_optimizer(path, saved, index, optimizer, key)
    state: dict[str, dict[str, Any]] = {}
    for number_or_name, values in saved["state"].items():
        if number_or_name in names:
            name = names[number_or_name]
            # Also if this rank has no rows: its gradient there is empty, and is stepped.
            into = partial(_target, view=index.views.get(name), reads=reads)
            state[name] = {part: map_tensors(into, value) for part, value in values.items()}
    groups = [
        {option: value for option, value in group.items() if option != "params"} for group in saved["param_groups"]
    ]
    return OptimizerPlan(state, groups, index.names_by_group(optimizer))


def _target(value: Tensor, *, view: ParameterView | None, reads: Reads) -> Tensor:
    """Where a tensor is read to, or what this rank has of it."""
    if reads.takes(value):
        if view is not None and value.dim() and value.shape == view.shape:
            target: Tensor = DcpShard.of(empty_at_rest(view.local, value.dtype), view.piece)
        else:
            target = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        reads.add(value, target)
        return target
    if isinstance(value, StandIn):
        value = value.whole()
    if is_packed(value) and not isinstance(value, DTensor):
        if view is None or view.local.shape == view.shape:
            return value
        raise RuntimeError(
            f"optimizer state of {view.name} in the checkpoint is a {type(value).__name__}, which cannot be divided; resume with "
            'sharding="no_shard" and without a tensor axis, or load weights only: trainer.validate(ckpt_path=...), then fit'
        )
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if view is not None and value.dim() and value.shape == view.shape:
        return view.piece.of(value).clone()
    return value.clone()


def finish_optimizer(plan: OptimizerPlan, optimizer: Optimizer) -> None:
    """After everything planned was read: load it into the optimizer. Options that the checkpoint lacks keep their present value."""
    numbers = {name: number for number, name in enumerate(name for names in plan.names_by_group for name in names)}
    groups = []
    for present, saved, names in zip(optimizer.param_groups, plan.groups, plan.names_by_group, strict=True):
        groups.append({**present, **saved, "params": [numbers[name] for name in names]})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        numbers[name]: {key: _at_rest(value, parameters[numbers[name]]) for key, value in values.items()}
        for name, values in plan.state.items()
        if name in numbers
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _at_rest(value: Any, parameter: Tensor) -> Any:
    """State of local rows in the memory where the optimizer keeps it. Its `load_state_dict` makes it a DTensor if necessary."""
    rows = value.local if isinstance(value, DcpShard) else value
    if not isinstance(rows, Tensor) or not rows.dim():
        return rows
    view = view_of(parameter)
    return put_to_rest(rows, parameter if view is None else view.local)


def _state_value(name: str, value: Any, view: ParameterView | None, *, of_rows: bool) -> Any:
    if view is None or not isinstance(value, Tensor):
        return value
    local = value.to_local() if isinstance(value, DTensor) else value
    if is_packed(local):
        raise ValueError(
            f"optimizer state {name}: a {type(local).__name__}, whose numbers only its own class reads; a sharded checkpoint can hold "
            'plain tensors. Use sharding="no_shard", no tensor axis, and state_dict_type="full", which saves it as it is, or save weights '
            "only"
        )
    if value.dim() and local.shape == view.local.shape and value.shape in (view.shape, view.local.shape):
        return DcpShard.of(local, view.piece)
    if isinstance(value, DTensor):
        if any(placement.is_shard() for placement in value.placements):
            raise ValueError(
                f"optimizer state {name}: a tensor of shape {tuple(value.shape)} sharded as {value.placements} for a parameter of shape "
                f"{tuple(view.shape)}; a sharded checkpoint can hold state shaped like its parameter, or the same on all ranks. Have the "
                "optimizer keep it whole on all ranks, or save weights only"
            )
        return local
    if value.numel() > 1 and of_rows and is_divided(view):
        raise ValueError(
            f"optimizer state {name}: a tensor of shape {tuple(value.shape)} was made of this rank's rows of shape "
            f"{tuple(view.local.shape)}, so each rank has another one; a sharded checkpoint can hold state shaped like its parameter, or "
            'one for all ranks. Train with sharding="no_shard" and without a tensor axis, where every rank has all rows, or save weights '
            "only"
        )
    return value


def is_divided(view: ParameterView) -> bool:
    """Whether ranks have different numbers of a parameter; all ranks agree."""
    placements = view.dtensor.placements if isinstance(view.dtensor, DTensor) else ()
    return any(placement.is_shard() for placement in placements)


def is_packed(value: Tensor) -> bool:
    """Whether a tensor is of a custom class, like torchao's 8-bit states: it is unknown which operators it supports."""
    return type(value) not in (Tensor, nn.Parameter)


def _check_counts(path: Location, key: str, theirs: list[int], ours: list[int]) -> None:
    if theirs != ours:
        raise RuntimeError(
            f"{path}: {key} has parameter groups of {theirs} parameters, here they have {ours}; configure the optimizers as they were when "
            'the checkpoint was saved, or begin with a new optimizer: checkpoint["optimizer_states"] = [] in on_load_checkpoint'
        )


def _check_groups(path: Location, key: str, saved: list[list[str]], present: list[list[str]]) -> None:
    for number in range(max(len(saved), len(present))):
        theirs = saved[number] if number < len(saved) else []
        ours = present[number] if number < len(present) else []
        if sorted(theirs) != sorted(ours):
            only_saved, only_here = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
            raise RuntimeError(
                f"{key} in {path}: parameter group {number} differs: only in the checkpoint {only_saved[:8]}, only here {only_here[:8]}. "
                "Configure the optimizers as they were; in on_load_checkpoint, give changed names to "
                'checkpoint["optimizer_states"] too, in "state" and "params" of "param_groups", or set it to [] to begin a new optimizer'
            )
