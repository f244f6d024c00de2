"""Optimizer states of sharded checkpoints, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.opening import read_rows
from lightning_mfsdp.checkpoint.state.index import ParameterIndex, plain_name
from lightning_mfsdp.checkpoint.state.piece_shard import PieceShard
from lightning_mfsdp.checkpoint.state.sharded import paths_of
from lightning_mfsdp.engine import ParameterView
from lightning_mfsdp.engine.features.offload.offloaded_state import empty_at_rest, put_to_rest
from lightning_mfsdp.engine.optimizer.adopt import prepare_state, steps_rows
from lightning_mfsdp.engine.params.group import as_local, owner_of
from lightning_mfsdp.engine.params.rows import sharded_axes

__all__ = [
    "OptimizerPlan",
    "is_packed",
    "optimizer_state",
    "plan_optimizer",
    "restore_optimizer",
    "restore_planned",
]


def optimizer_state(index: ParameterIndex, optimizer: Optimizer) -> dict[str, Any]:
    """State of an optimizer by parameter name, for `save`; tensors share memory with the optimizer's.

    Raises:
        ValueError: A state tensor that is sharded in another way than its parameter, or has another shape than the rows that it is of.
    """
    state: dict[str, dict[str, Any]] = {}
    prepare_state(optimizer)
    of_rows = steps_rows(optimizer)
    for parameter, values in optimizer.state.items():
        name = index.name_of(parameter)
        view = index.views.get(name)
        state[name] = {
            key: _state_value(f"{name}.{key}", value, view, parameter, of_rows=of_rows) for key, value in values.items()
        }
    groups = []
    for group, names in zip(optimizer.param_groups, index.names_by_group(optimizer), strict=True):
        groups.append({**group, "params": names})
    return {"state": state, "param_groups": groups}


@dataclass(frozen=True)
class OptimizerPlan:
    """What will be read for one optimizer; it was checked to fit.

    Attributes:
        key: Its name in the checkpoint.
        wanted: Where `torch.distributed.checkpoint` reads to; groups are read already.
        names_by_group: Parameters here.
    """

    key: str
    wanted: dict[str, Any]
    names_by_group: list[list[str]]


@dataclass(frozen=True)
class _Groups:
    """What `read_rows` reads: options of the parameter groups."""

    key: str
    wanted: dict[str, Any]


def plan_optimizer(
    path: Location, metadata: Metadata, index: ParameterIndex, optimizer: Optimizer, key: str, *, trusted: bool = False
) -> OptimizerPlan | None:
    """Find the state of the optimizer saved as `key`, and check that it fits; changes nothing. All ranks call it.

    Returns:
        `None` where the checkpoint holds no state for it (saved with weights only).

    Raises:
        RuntimeError: The optimizer's parameter groups hold other parameters than the saved ones.
        RefusedError: An option is of a class that was not allowed, and not `trusted`.
    """
    names_by_group = index.names_by_group(optimizer)
    known = {name for names in names_by_group for name in names}
    target: dict[str, Any] = {"state": {}, "param_groups": []}
    found = False
    for flat, item in paths_of(metadata).items():
        if item[0] != key:
            continue
        found = True
        if item[1] == "param_groups":
            while len(target["param_groups"]) <= int(item[2]):
                target["param_groups"].append({})
            target["param_groups"][int(item[2])][item[3]] = _empty_like_saved(metadata, flat, None)
        elif plain_name(str(item[2])) in known:
            view = index.views.get(plain_name(str(item[2])))
            # Also if this rank has no rows: its gradient there is empty, and is stepped.
            _place(target["state"].setdefault(item[2], {}), item[3:], _empty_like_saved(metadata, flat, view))
    if not found:
        return None
    read_rows(path, metadata, [_Groups(key, {"param_groups": target["param_groups"]})], trusted=trusted, in_place=False)
    saved_groups = [[plain_name(name) for name in group.get("params", [])] for group in target["param_groups"]]
    _check_groups(path, key, saved_groups, names_by_group)
    return OptimizerPlan(key, target, names_by_group)


def restore_planned(plan: OptimizerPlan, optimizer: Optimizer) -> None:
    """After everything planned was read: load it into the optimizer."""
    state = {plain_name(name): values for name, values in plan.wanted["state"].items()}
    restore_optimizer(optimizer, state, plan.wanted["param_groups"], plan.names_by_group)


def restore_optimizer(
    optimizer: Optimizer,
    state_by_name: Mapping[str, Mapping[str, Any]],
    param_groups: list[dict[str, Any]],
    names_by_group: list[list[str]],
) -> None:
    """Put state keyed by parameter name, with local tensors, into an optimizer. Options a checkpoint lacks keep their present value."""
    numbers = {name: number for number, name in enumerate(name for names in names_by_group for name in names)}
    groups = []
    for present, saved, names in zip(optimizer.param_groups, param_groups, names_by_group, strict=True):
        groups.append({**present, **saved, "params": [numbers[name] for name in names]})
    held = [as_local(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        numbers[name]: {key: _at_rest(value, held[numbers[name]]) for key, value in values.items()}
        for name, values in state_by_name.items()
        if name in numbers
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _at_rest(value: Any, local: Tensor) -> Any:
    """State of local rows in the memory where the optimizer keeps it. Its `load_state_dict` makes it a DTensor if necessary."""
    rows = value.local if isinstance(value, PieceShard) else value
    return put_to_rest(rows, local) if isinstance(rows, Tensor) and rows.dim() else rows


def _state_value(name: str, value: Any, view: ParameterView | None, parameter: Tensor, *, of_rows: bool) -> Any:
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
        return PieceShard.of(local, view.piece)
    if isinstance(value, DTensor):
        if any(placement.is_shard() for placement in value.placements):
            raise ValueError(
                f"optimizer state {name}: a tensor of shape {tuple(value.shape)} sharded as {value.placements} for a parameter of shape "
                f"{tuple(view.shape)}; a sharded checkpoint can hold state shaped like its parameter, or the same on all ranks. Have the "
                "optimizer keep it whole on all ranks, or save weights only"
            )
        return local
    owner = owner_of(parameter)
    if value.numel() > 1 and of_rows and owner is not None and sharded_axes(owner[0], owner[0].entries.index(owner[1])):
        raise ValueError(
            f"optimizer state {name}: a tensor of shape {tuple(value.shape)} was made of this rank's rows of shape "
            f"{tuple(view.local.shape)}, so each rank has another one; a sharded checkpoint can hold state shaped like its parameter, or "
            'one for all ranks. Train with sharding="no_shard" and without a tensor axis, where every rank has all rows, or save weights '
            "only"
        )
    return value


def is_packed(value: Tensor) -> bool:
    """Whether a tensor is of a custom class, like torchao's 8-bit states: it is unknown which operators it supports."""
    return type(value) not in (Tensor, nn.Parameter)


def _empty_like_saved(metadata: Metadata, key: str, view: ParameterView | None) -> Any:
    saved = metadata.state_dict_metadata[key]
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if view is None or not saved.size or saved.size != view.shape:
        return torch.empty(saved.size, dtype=dtype, device="cpu")
    return PieceShard.of(empty_at_rest(view.local, dtype), view.piece)


def _place(values: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Put the value of one flat key of a checkpoint back in its place: state may be lists of tensors (LBFGS)."""
    inside: Any = values
    for key, following in pairwise(path):
        made: Any = [] if isinstance(following, int) else {}
        if isinstance(inside, list):
            inside += [None] * (key + 1 - len(inside))
            inside[key] = made if inside[key] is None else inside[key]
            inside = inside[key]
        else:
            inside = inside.setdefault(key, made)
    if isinstance(inside, list):
        inside += [None] * (path[-1] + 1 - len(inside))
    inside[path[-1]] = value


def _check_groups(path: Location, key: str, saved: list[list[str]], present: list[list[str]]) -> None:
    for number in range(max(len(saved), len(present))):
        theirs = saved[number] if number < len(saved) else []
        ours = present[number] if number < len(present) else []
        if sorted(theirs) != sorted(ours):
            only_saved, only_here = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
            raise RuntimeError(
                f"{key} in {path}: parameter group {number} differs: only in the checkpoint {only_saved[:8]}, only here {only_here[:8]}. "
                "Configure the optimizers as they were when the checkpoint was saved, or load weights only: "
                "trainer.validate(ckpt_path=...), then fit"
            )
