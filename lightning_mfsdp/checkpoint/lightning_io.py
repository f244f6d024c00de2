"""Writes a Lightning checkpoint dictionary to disk, and reads it back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from lightning_mfsdp.base.progress import Progress
from lightning_mfsdp.checkpoint.io.location import META_FILE, TIED_WEIGHTS, Location, check_files
from lightning_mfsdp.checkpoint.io.opening import ReadPlan, no_checkpoint_error, read, read_rows, recover
from lightning_mfsdp.checkpoint.io.progress import CountingFile, CountingReads, SavePlanner
from lightning_mfsdp.checkpoint.io.ranks import Ranks, on_all_ranks
from lightning_mfsdp.checkpoint.io.unpickling import is_trusted
from lightning_mfsdp.checkpoint.state import full, sharded
from lightning_mfsdp.checkpoint.state.index import ParameterIndex
from lightning_mfsdp.checkpoint.state.parameter_state import PARAMETER_STATES, ParameterState, plan_state, rows_of_whole
from lightning_mfsdp.checkpoint.state.sharded_optimizer import optimizer_state, plan_optimizer, restore_planned
from lightning_mfsdp.checkpoint.state.staging import Staging

__all__ = [
    "FullContent",
    "ShardedContent",
    "load",
    "optimizer_state",
    "save",
]


@dataclass(frozen=True, kw_only=True)
class ShardedContent:
    """What a directory will hold.

    Attributes:
        state: For `torch.distributed.checkpoint`: this rank's rows of weights and optimizer states.
        rest: `meta.pt`; empty except on rank 0.
        on_host: No tensor is on a GPU.
    """

    state: dict[str, Any]
    rest: bytes
    on_host: bool = False

    @classmethod
    def of(cls, index: ParameterIndex, checkpoint: dict[str, Any], ranks: Ranks) -> ShardedContent:
        """From Lightning's dictionary. All ranks call it; tensors share memory with the module's.

        Raises:
            RuntimeError: A hook changed values of the state dict so that their rows are unknown, or something cannot be pickled.
        """
        rest = dict(checkpoint)
        if tied := sharded.tied_names(rest["state_dict"]):
            rest[TIED_WEIGHTS] = tied
        rows = sharded.own_share(sharded.rows_by_name(rest.pop("state_dict"), index, "saving a checkpoint"), ranks)
        others = {key: sharded.own_share(value, ranks) for key, value in rest.pop(PARAMETER_STATES, {}).items()}
        states = [_own_state(state, index, ranks) for state in rest.pop("optimizer_states", [])]
        by_number = {f"optimizer_{number}": value for number, value in enumerate(states)}
        return cls.packed({"model": rows, **others, **by_number}, rest, ranks)

    @classmethod
    def packed(cls, state: Mapping[str, Any], rest: dict[str, Any], ranks: Ranks) -> ShardedContent:
        """From rows by the keys of the layout, and from what rank 0 writes. All ranks call it.

        Raises:
            RuntimeError: Something cannot be pickled.
        """
        packed: list[bytes] = []
        ranks.first(f"packing {META_FILE}", lambda: packed.append(_packed(rest)))
        return cls(state=dict(state), rest=packed[0] if packed else b"")

    def staged(self, staging: Staging) -> ShardedContent:
        """A copy in memory of its own."""
        return ShardedContent(state=staging.copy(self.state), rest=self.rest, on_host=True)

    def write(self, location: Location, ranks: Ranks, progress: Progress | None) -> None:
        """Write every rank's part, then `meta.pt`."""
        with location.saving(ranks, directory=True) as place:
            writer = location.writer(place.path, on_host=self.on_host)
            # It ensures that an error on one rank is raised on all.
            planner = SavePlanner(progress)
            metadata = dcp_save(self.state, storage_writer=writer, planner=planner, process_group=ranks.group)

            def finish() -> None:
                location.check_written(place, metadata, ranks)
                location.write(f"{place.path}/{META_FILE}", self.rest)

            ranks.first(f"writing {META_FILE} of {location}", finish)


@dataclass(frozen=True, kw_only=True)
class FullContent:
    """What a single file will hold: Lightning's dictionary with whole tensors on the host; only rank 0 has one."""

    checkpoint: dict[str, Any]

    def staged(self, staging: Staging) -> FullContent:
        """A copy in memory of its own."""
        return FullContent(checkpoint=copy.deepcopy(self.checkpoint))

    def write(self, location: Location, ranks: Ranks, progress: Progress | None) -> None:
        """Write the file on rank 0."""
        with location.saving(ranks, directory=False) as place:
            ranks.first(f"writing {location}", lambda: self._write(location, place.path, progress))

    def _write(self, location: Location, written: str, progress: Progress | None) -> None:
        with location.create(written) as file:
            counted: Any = file if progress is None else CountingFile(file, progress, self.checkpoint)
            torch.save(self.checkpoint, counted)


def save(
    location: Location, content: ShardedContent | FullContent, *, ranks: Ranks, progress: Progress | None = None
) -> None:
    """Write a checkpoint. One at that place is replaced once all ranks have written; all ranks call it.

    Raises:
        RuntimeError: On all ranks, if something failed on any. An older checkpoint is unchanged.
    """
    content.write(location, ranks, progress)


def _own_state(state: dict[str, Any], index: ParameterIndex, ranks: Ranks) -> dict[str, Any]:
    """State of an optimizer; without parameters that are not sharded, except on rank 0, whose weights are saved for them too."""
    kept = {name: value for name, value in state["state"].items() if ranks.rank == 0 or name in index.views}
    return {**state, "state": kept}


def _packed(rest: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    return buffer.getvalue()


def load(
    location: Location,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
    progress: Progress | None = None,
    parameter_states: Mapping[str, ParameterState] | None = None,
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into a sharded module and its optimizers; all ranks call it.

    Args:
        location: Of a directory written by `save`, or a single file written by Lightning with or without sharding.
        module: Sharded.
        optimizers: Empty unless training resumes.
        strict: Names must match exactly.
        weights_only: As for `torch.load`, and for everything in a directory: only `False` loads classes that were not allowed.
        progress: Called for every tensor that was read.
        parameter_states: Other objects that keep a tensor for each parameter, by key.
        prepare: Called with what is returned, before optimizers are compared with the checkpoint.

    Returns:
        Everything but weights and optimizer states: loops, callbacks, schedulers, hyperparameters.

    Raises:
        ValueError: There is no checkpoint.
        RuntimeError: The checkpoint does not fit, or is damaged.
        RefusedError: It holds a class that was not allowed; nothing was changed.
    """
    ranks, states, index = Ranks(), parameter_states or {}, ParameterIndex(module)
    recover(location, ranks)
    if location.is_sharded():
        trusted = is_trusted(weights_only)
        metadata = check_files(location, ranks, trusted=trusted)
        with on_all_ranks(f"reading {META_FILE} of {location}"):
            rest = read(location, META_FILE, weights_only)
        rest.pop(TIED_WEIGHTS, None)
        model_plan = sharded.plan_model(location, metadata, index, strict=strict)
        state_plans = [plan_state(location, metadata, index, key, strict=strict) for key in states]
        if prepare is not None:
            prepare(rest)
        _check_number(location, metadata, optimizers)
        plans = [
            plan_optimizer(location, metadata, index, optimizer, f"optimizer_{number}", trusted=trusted)
            for number, optimizer in enumerate(optimizers)
        ]
        # Everything fits; state is changed from here on.
        all_plans: list[ReadPlan] = [model_plan, *(plan for plan in plans if plan is not None), *state_plans]
        read_rows(location, metadata, all_plans, progress, trusted=trusted)
        sharded.finish_model(model_plan, module)
        for plan, optimizer in zip(plans, optimizers, strict=True):
            if plan is not None:
                restore_planned(plan, optimizer)
        for state_plan in state_plans:
            states[state_plan.key].load_rows(state_plan.rows)
        restored = [plan is not None for plan in plans]
    elif location.is_file():
        rest = read(location, None, weights_only)
        if "state_dict" not in rest:
            raise RuntimeError(
                f"{location} is no Lightning checkpoint: it has no 'state_dict', only {list(rest)[:8]}. Load plain weights with "
                "load_state_dict, in your own loop or before the model is sharded"
            )
        saved_states = rest.pop(PARAMETER_STATES, {})
        rows = {key: rows_of_whole(location, key, saved_states.get(key, {}), index, strict=strict) for key in states}
        if prepare is not None:
            prepare(rest)
        optimizer_states = rest.pop("optimizer_states", [])
        full.check_optimizers(location, optimizer_states, index, optimizers)
        weights = rest.pop("state_dict")
        states_to_read = [state["state"] for state in optimizer_states] if optimizers else []
        reads = CountingReads(progress, [weights, states_to_read])
        full.load_model(location, weights, index, strict=strict, reads=reads)
        restored = full.load_optimizers(optimizer_states, index, optimizers, reads=reads)
        for key, state in states.items():
            state.load_rows(rows[key])
    else:
        raise no_checkpoint_error(location)
    if optimizers and not all(restored):
        rank_zero_warn(
            f"{location} holds no state for {restored.count(False)} of {len(restored)} optimizers, which start afresh; to go on exactly, "
            "resume "
            "from a checkpoint with the state of all"
        )
        # Lightning requires the key; there is nothing to restore schedulers from.
        rest.setdefault("lr_schedulers", [])
    return rest


def _check_number(location: Location, metadata: Metadata, optimizers: Sequence[Optimizer]) -> None:
    """Raise if anything that was saved for an optimizer would be lost when training resumes."""
    keys = {str(item[0]) for item in sharded.paths_of(metadata).values() if str(item[0]).startswith("optimizer_")}
    if optimizers and len(keys) > len(optimizers):
        raise RuntimeError(
            f"{location} holds {len(keys)} states of optimizers, but only {len(optimizers)} optimizers are there; configure all of them"
        )
