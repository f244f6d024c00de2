"""Full states of a sharded model, with whole tensors, for checkpoints that plain PyTorch reads.

They are gathered tensor by tensor. The device holds one tensor at a time, in pieces and whole; the rank that keeps them holds the model and
its optimizer state in host memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mfsdp.base.containers import leaves_in, map_tensors
from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.checkpoint.state.optimizer import is_divided, is_packed, state_by_number
from lightning_mfsdp.engine import ParameterView
from lightning_mfsdp.engine.internals import placed_as, view_of

__all__ = ["full_model_state", "full_optimizer_state", "full_state_dict", "with_whole_tensors"]


@dataclass(frozen=True)
class _RowsOf:
    """A state tensor that is sharded as its parameter is."""

    dtype: torch.dtype
    problem: str


@dataclass(frozen=True)
class _OnEveryRank:
    """State, of any kind, of a parameter that every rank has whole."""

    name: str


def full_state_dict(module: nn.Module, *, rank0_only: bool = True) -> dict[str, Any]:
    """`module.state_dict()` with plain whole tensors on the CPU, as plain PyTorch has it. Collective.

    Tensors are gathered one after the other, so the device holds one of them whole.

    Args:
        module: Sharded, or with sharded modules inside.
        rank0_only: Other ranks get an empty dictionary, and need no memory for it.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    return full_model_state(module.state_dict(), keep=rank == 0 or not rank0_only)


def full_model_state(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """A state dict with every sharded tensor whole, on the CPU. All ranks call it.

    Args:
        state: Of a sharded module.
        keep: Whether this rank needs the result; otherwise it is empty.
    """
    full: OrderedDict[str, Any] = OrderedDict()
    if keep and hasattr(state, "_metadata"):
        full._metadata = state._metadata  # type: ignore[attr-defined]  # versions of modules
    kept: dict[int, list[Tensor]] = {}
    for name, value in state.items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            full[name] = _once(tensor.detach().cpu(), value, kept) if isinstance(tensor, Tensor) else tensor
        del tensor  # frees its memory before the next one is gathered
    return full


def _once(tensor: Tensor, origin: Tensor, kept: dict[int, list[Tensor]]) -> Tensor:
    """Tied weights stay one tensor, as in the state dict of a plain model."""
    view = view_of(origin)
    if view is None:
        return tensor
    alike = kept.setdefault(id(view.local), [])
    for other in alike:
        if other.dtype is tensor.dtype and torch.equal(other, tensor):
            return other
    alike.append(tensor)
    return tensor


def with_whole_tensors(content: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What a program has put into a checkpoint beside its states; rank 0 gets sharded tensors whole, on the CPU. Collective.

    Raises:
        RuntimeError: On all ranks: they have put different ones there.
    """
    paths = [path for path, value in leaves_in(content) if isinstance(value, DTensor)]
    other = ranks.decide(paths, _first_other)
    if other is not None:
        rank, theirs, of_first = other
        raise RuntimeError(
            f"saving a checkpoint: rank {rank} has put the sharded tensors {theirs} into it, and rank 0 {of_first}; whole tensors "
            "are gathered from all ranks; put the same ones there on all of them (on_save_checkpoint runs on all)"
        )

    def whole(value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        tensor = value.full_tensor()
        return tensor.detach().cpu() if ranks.rank == 0 else value

    return {key: map_tensors(whole, value) for key, value in content.items()}


def _first_other(paths: list[list[Any]]) -> tuple[int, list[Any], list[Any]] | None:
    """The first rank whose paths are not those of rank 0, a few of its paths, and of those of rank 0."""
    rank = next((rank for rank, theirs in enumerate(paths) if theirs != paths[0]), None)
    return None if rank is None else (rank, paths[rank][:8], paths[0][:8])


def full_optimizer_state(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """What `optimizer.state_dict()` would be without sharding, on the CPU. All ranks call it.

    Args:
        optimizer: Over sharded parameters.
        keep: Whether this rank needs the result; otherwise it is empty.

    Raises:
        ValueError: On all ranks; a state tensor of a sharded parameter that has neither its shape nor one value for all ranks.
    """
    views = [view_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    saved = state_by_number(optimizer)
    described = [_described(saved["state"].get(number, {}), view) for number, view in enumerate(views)]
    layout = _agreed(described)
    state: dict[int, dict[str, Any]] = {}
    for number, (view, parts) in enumerate(zip(views, layout, strict=True)):
        own = saved["state"].get(number, {})
        for key, part in parts.items():
            value = own.get(key) if isinstance(part, _OnEveryRank) else part
            if isinstance(part, _RowsOf):
                assert view is not None, "only sharded parameters have rows"
                value = _gathered(own.get(key), part.dtype, view)
            if keep:
                state.setdefault(number, {})[key] = map_tensors(_on_host, value)
            del value  # as above
    if not keep:
        return {}
    others = {key: value for key, value in saved["state"].items() if key not in range(len(views))}  # of no parameter
    state.update(map_tensors(_on_host, others))
    groups = [
        {key: value.cpu() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in saved["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _on_host(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().cpu()


def _described(state: Mapping[str, Any], view: ParameterView | None) -> dict[str, Any]:
    """Each state of a parameter: how this rank's rows of it look, or the value where it is the same on all ranks."""
    described: dict[str, Any] = {}
    for key, value in state.items():
        if view is not None and not is_divided(view):
            described[key] = _OnEveryRank(view.name)
            continue
        if view is None or not isinstance(value, Tensor) or not value.dim():
            described[key] = value.detach().cpu() if isinstance(value, Tensor) else value
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        problem = ""
        if is_packed(local):
            problem = f"{key} of parameter {view.name}: a {type(local).__name__}"
        elif local.shape != view.local.shape:
            problem = (
                f"{key} of parameter {view.name}: {tuple(local.shape)} where its rows are {tuple(view.local.shape)}"
            )
        described[key] = _RowsOf(value.dtype, problem)
    return described


def _agreed(described: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The union of what ranks have, in an order that all share."""
    merged, problems = Ranks().decide(described, _merged)
    if problems:
        raise ValueError(
            "optimizer state in a full checkpoint: expected plain tensors shaped like their parameters, or single numbers, got "
            f'{problems[0]} (of {len(problems)}). Use state_dict_type="sharded" if it is the same on all ranks, train with '
            'sharding="no_shard" and without a tensor axis, where every rank has all rows, or save weights only'
        )
    return merged


def _merged(everyones: list[list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The union, and what cannot be in a full checkpoint."""
    merged: list[dict[str, Any]] = [{} for _ in everyones[0]]
    for theirs in everyones:
        for parts, their_parts in zip(merged, theirs, strict=True):
            for key, part in their_parts.items():
                if key not in parts or (isinstance(part, _RowsOf) and part.problem):
                    parts[key] = part
    problems = [
        part.problem for parts in merged for part in parts.values() if isinstance(part, _RowsOf) and part.problem
    ]
    problems += [
        f"{key} of parameter {part.name}: on some ranks only, though each has all of the parameter"
        for number, parts in enumerate(merged)
        for key, part in parts.items()
        if isinstance(part, _OnEveryRank) and any(key not in theirs[number] for theirs in everyones)
    ]
    return merged, problems


def _gathered(rows: Any, dtype: torch.dtype, view: ParameterView) -> Tensor:
    if rows is None:
        rows = torch.empty_like(view.local, dtype=dtype, requires_grad=False)
    elif isinstance(rows, DTensor):
        rows = rows.to_local()
    sharded: Any = placed_as(rows.detach(), view.dtensor)
    full: Tensor = sharded.full_tensor()
    return full
