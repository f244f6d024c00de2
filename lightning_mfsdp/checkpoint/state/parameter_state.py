"""State for parameters besides optimizers': one tensor each, of its shape and sharded like it, such as an average of weights.

<key>        {parameter name: tensor}        in a sharded checkpoint next to "model"; in a full one under "parameter_states"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_mfsdp.base.stand_in import StandIn
from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.checkpoint.state.index import ParameterIndex, plain_name
from lightning_mfsdp.checkpoint.state.on_disk import Reads
from lightning_mfsdp.engine.internals import placed_as

__all__ = [
    "AVERAGE",
    "PARAMETER_STATES",
    "ParameterState",
    "StatePlan",
    "average_in",
    "dcp_shards",
    "full_tensors",
    "plan_state",
    "under_all_names",
]

PARAMETER_STATES = "parameter_states"
AVERAGE = "ema"  # the key of ShardedEMA


def average_in(path: object, states: Any) -> Mapping[str, Any]:
    """The average of weights among the states that a checkpoint has, by name of the parameter.

    Args:
        path: Of the checkpoint, for the message.
        states: By key; `None`: none.

    Raises:
        CheckpointError: There is none.
    """
    average: Mapping[str, Any] = (states or {}).get(AVERAGE) or {}
    if not average:
        raise CheckpointError(
            f"{path} has no average of the weights: it was saved without ShardedEMA, before the first update, or with weights only. Leave "
            "averaged out, or choose another checkpoint"
        )
    return average


def under_all_names(
    path: object, average: Mapping[str, Any], state: Iterable[str], tied: Mapping[str, str]
) -> dict[str, Any]:
    """An average by the names of a state dict: tied weights have it under each of theirs, compiled modules' as they are there.

    Args:
        path: Of the checkpoint, for the message.
        average: By one name of each parameter.
        state: All names.
        tied: Further names of tied weights, and the first one.

    Raises:
        CheckpointError: There is an average of something else.
    """
    first_of = {plain_name(name): plain_name(tied.get(name, name)) for name in state}
    if strange := [name for name in average if name not in first_of]:
        raise CheckpointError(
            f"{path}: there is an average of {', '.join(strange[:4])} (of {len(strange)}), which the model in it has not; expected "
            "names of its parameters. Leave averaged out, or choose another checkpoint"
        )
    known = {first_of[name]: value for name, value in average.items()}
    return {name: known[first] for name in state if (first := first_of[plain_name(name)]) in known}


class ParameterState(Protocol):
    """The object whose state it is."""

    def rows(self) -> Mapping[str, Tensor]:
        """This rank's rows, shaped like `ParameterView.main`, by the names of `sharded_parameters`; other parameters are whole."""
        ...

    def load_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Load what `rows` returned when the checkpoint was saved; empty if the checkpoint has none."""
        ...


def dcp_shards(index: ParameterIndex, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a sharded checkpoint holds of it; shares memory with `rows`."""
    shards: dict[str, Tensor] = {}
    for name, value in rows.items():
        view = index.views.get(plain_name(name))
        shards[plain_name(name)] = value if view is None else DcpShard.of(value, view.piece)
    return shards


def full_tensors(index: ParameterIndex, rows: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """What a full checkpoint holds of it: whole tensors on the CPU. All ranks call it.

    Args:
        index: Of the sharded module.
        rows: Of the same parameters on all ranks, in the same order.
        keep: Whether this rank needs the result; otherwise it is empty.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in rows.items():
        view = index.views.get(plain_name(name))
        if view is not None:
            sharded: Any = placed_as(value.to(view.main.device), view.dtensor)
            value = sharded.full_tensor()
        if keep:
            tensors[plain_name(name)] = value.cpu()
        del value  # frees its memory before the next one is gathered
    return tensors


@dataclass(frozen=True)
class StatePlan:
    """What will be read for one key; it was checked to fit.

    Attributes:
        key: Its name in the checkpoint.
        rows: By the names here; some are yet to be read.
    """

    key: str
    rows: dict[str, Tensor]


def plan_state(
    path: Location, saved: Mapping[str, Tensor], index: ParameterIndex, key: str, reads: Reads, *, strict: bool
) -> StatePlan:
    """Check that tensors fit the module's parameters; changes nothing. `reads` is told what to read, and where to.

    Args:
        path: Of the checkpoint, for messages.
        saved: By name, from a directory, or whole.
        index: Of the module.
        key: What they are saved under.
        reads: Of the checkpoint.
        strict: All names must be known.

    Raises:
        RuntimeError: Shapes differ, or with `strict` a name belongs to no parameter here.
    """
    rows = {}
    shapes = {name: value.shape for name, value in saved.items()}
    for name, (own_name, like, view) in _targets(path, key, shapes, index, strict=strict).items():
        value = saved[name]
        if reads.takes(value):
            local = torch.empty_like(like, dtype=value.dtype, device="cpu", requires_grad=False)
            reads.add(value, local if view is None else DcpShard.of(local, view.piece))
        else:
            whole = value.whole() if isinstance(value, StandIn) else value
            local = (whole if view is None else view.piece.of(whole)).reshape(like.shape)
        rows[own_name] = local
    return StatePlan(key, rows)


def _targets(
    path: Location, key: str, shapes: Mapping[str, torch.Size], index: ParameterIndex, *, strict: bool
) -> dict[str, tuple[str, Tensor, Any]]:
    """For each saved name: the name here, a tensor like the local one, and the view unless the parameter is not sharded."""
    targets: dict[str, tuple[str, Tensor, Any]] = {}
    problems = []
    for name, shape in shapes.items():
        view = index.views.get(plain_name(name))
        own_name, like = (
            (view.name, view.dtensor) if view is not None else index.others.get(plain_name(name), (name, None))
        )
        if like is None:
            problems += [f"missing in the model: {name}"] if strict else []
        elif like.shape != shape:
            problems.append(f"shape of {name}: {tuple(shape)} in the checkpoint, {tuple(like.shape)} in the model")
        else:
            targets[name] = (own_name, view.main if view is not None else like, view)
    if problems:
        raise RuntimeError(
            f"{path}: {key} fits other parameters than the model has:\n  "
            + "\n  ".join(problems)
            + "\nLoad it into the model it was saved from"
        )
    return targets
