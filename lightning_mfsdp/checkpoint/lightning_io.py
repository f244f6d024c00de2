"""Writes a Lightning checkpoint dictionary to disk, and reads it back.

A sharded checkpoint is a directory written by torch.distributed.checkpoint, in the layout of Lightning's own sharded strategies:

    model                     {parameter or buffer name: tensor}
    optimizer_<i>             {"state": {parameter name: {state name: tensor}}, "param_groups": [{..., "params": [names]}]}
    <key>                     {parameter name: tensor} of other state for parameters, see parameter_state.py
    meta.pt                   everything else of a Lightning checkpoint, and which weights are tied (rank 0)

Lightning's ModelParallelStrategy writes "state_dict" instead of "model"; both are read.

Names, shapes and values do not depend on the number of ranks, on the mesh or on the sharding strategy, so any mesh can read them. Names are
compared without what torch.compile and activation checkpointing put into them, so these may be added or removed.
"""

from __future__ import annotations

import copy
import io
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mfsdp.base.progress import ByteCount, Progress
from lightning_mfsdp.checkpoint.background import Staging
from lightning_mfsdp.checkpoint.io.directory import Directory
from lightning_mfsdp.checkpoint.io.location import META_FILE, MODULE_VERSIONS, TIED_WEIGHTS, Location
from lightning_mfsdp.checkpoint.io.ranks import Ranks, on_all_ranks
from lightning_mfsdp.checkpoint.io.saving import save_together
from lightning_mfsdp.checkpoint.io.write import CountingFile, CountingSavePlanner, tensor_bytes
from lightning_mfsdp.checkpoint.state.index import ParameterIndex
from lightning_mfsdp.checkpoint.state.model import finish_model, known_names, plan_model
from lightning_mfsdp.checkpoint.state.on_disk import Reads, StoredOptimizer, StoredState, tensors_under
from lightning_mfsdp.checkpoint.state.optimizer import (
    check_optimizer,
    finish_optimizer,
    optimizer_state,
    plan_optimizer,
)
from lightning_mfsdp.checkpoint.state.parameter_state import PARAMETER_STATES, ParameterState, plan_state
from lightning_mfsdp.checkpoint.state.state_dict import module_versions, own_share, rows_by_name, tied_names

__all__ = [
    "FullContent",
    "Loading",
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
        versions = module_versions(rest["state_dict"])
        if versions is not None:
            rest[MODULE_VERSIONS] = {"model": versions}
        if tied := tied_names(rest["state_dict"]):
            rest[TIED_WEIGHTS] = tied
        rows = own_share(rows_by_name(rest.pop("state_dict"), index, "saving a checkpoint"), ranks)
        others = {key: own_share(value, ranks) for key, value in rest.pop(PARAMETER_STATES, {}).items()}
        states = [_own_state(state, index, ranks) for state in rest.pop("optimizer_states", [])]
        by_number = {f"optimizer_{number}": value for number, value in enumerate(states)}
        return cls.packed({"model": rows, **others, **by_number}, rest, ranks)

    @classmethod
    def packed(cls, state: Mapping[str, Any], rest: dict[str, Any], ranks: Ranks) -> ShardedContent:
        """From rows by the keys of the layout, and from what rank 0 writes. All ranks call it.

        Raises:
            RuntimeError: Something cannot be pickled.
        """
        buffer = io.BytesIO()  # stays empty except on rank 0
        ranks.first(f"packing {META_FILE}", lambda: torch.save(rest, buffer))
        return cls(state=dict(state), rest=buffer.getvalue())

    def staged(self, staging: Staging) -> ShardedContent:
        """A copy in memory of its own."""
        return ShardedContent(state=staging.copy(self.state), rest=self.rest, on_host=True)

    def write(self, location: Location, ranks: Ranks, progress: Progress | None) -> None:
        """Write every rank's part, then `meta.pt`."""
        with location.saving(ranks, directory=True) as place:
            writer = location.writer(place.path, on_host=self.on_host)
            metadata = save_together(self.state, writer, CountingSavePlanner(progress), ranks)

            def finish() -> None:
                assert metadata is not None, "rank 0 has it"
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

            def write() -> None:
                with location.create(place.path) as file:
                    counted: Any = file if progress is None else CountingFile(file, progress, self.checkpoint)
                    torch.save(self.checkpoint, counted)

            ranks.first(f"writing {location}", write)


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


@dataclass(frozen=True)
class Loading:
    """A checkpoint that is being loaded: opened, shown to the program, then read.

    Attributes:
        location: Of a directory written by `save`, or a single file written by Lightning with or without sharding.
        directory: What it holds besides `meta.pt`; `None` for a file.
        lacks_optimizers: It holds no state for any optimizer.
    """

    location: Location
    directory: Directory | None
    lacks_optimizers: bool

    @classmethod
    def open(
        cls, location: Location, module: nn.Module, *, weights_only: bool | None
    ) -> tuple[Loading, dict[str, Any]]:
        """Open a checkpoint; all ranks call it.

        Args:
            location: Where it is.
            module: Sharded.
            weights_only: As for `torch.load`, and for everything in a directory: only `False` loads classes that were not allowed.

        Returns:
            Lightning's dictionary as well, with "state_dict", "optimizer_states" and "parameter_states" whose tensors are not read yet.

        Raises:
            ValueError: There is no checkpoint.
            RuntimeError: It is damaged.
            RefusedError: It holds a class that was not allowed.
        """
        ranks, directory = Ranks(), None
        location.finish_interrupted_save(ranks)
        if location.is_sharded():
            directory = Directory.open(location, ranks, weights_only=weights_only)
            is_known = known_names(module)
            with on_all_ranks(f"opening {location}"):
                content = location.read_file(META_FILE, weights_only)
                _add_states(content, directory, is_known)
        elif location.is_file():
            content = location.read_file(None, weights_only)
            if "state_dict" not in content:
                raise RuntimeError(
                    f"{location} is no Lightning checkpoint: it has no 'state_dict', only {list(content)[:8]}. Load plain weights with "
                    "load_state_dict, in your own loop or before the model is sharded"
                )
        else:
            raise location.no_checkpoint_error()
        return cls(location, directory, not content.get("optimizer_states")), content

    def load_model(
        self,
        content: dict[str, Any],
        index: ParameterIndex,
        *,
        strict: bool,
        progress: Progress | None = None,
        parameter_states: Mapping[str, ParameterState] | None = None,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        """Read "state_dict" into a model, as the program has left it, and other states of its parameters. All ranks call it.

        Args:
            content: Lightning's dictionary.
            index: Of the sharded model.
            strict: Names must match exactly.
            progress: Called for every tensor that was read.
            parameter_states: Other objects that keep a tensor for each parameter, by key.
            optimizers: What is saved for these is compared with them as well, before anything is read.

        Raises:
            RuntimeError: It does not fit.
        """
        reads, states = Reads(self.directory), parameter_states or {}
        weights = content.get("state_dict")
        if not isinstance(weights, Mapping):
            raise RuntimeError(
                f'{self.location}: checkpoint["state_dict"] is {type(weights).__name__} after on_load_checkpoint; leave a mapping of '
                "names to tensors there, or take names out of it and set strict_loading=False on the LightningModule"
            )
        self._agree("state_dict", {name: _kind(value) for name, value in weights.items()})
        plan = plan_model(self.location, weights, index, reads, strict=strict)
        saved = content.pop(PARAMETER_STATES, {})
        state_plans = [
            plan_state(self.location, saved.get(key, {}), index, key, reads, strict=strict) for key in states
        ]
        if optimizers:
            self._check(content, index, optimizers)
        # What can be compared fits; state is changed from here on.
        reads.run(progress)
        finish_model(plan, index.module, progress)
        for state_plan in state_plans:
            states[state_plan.key].load_rows(state_plan.rows)

    def load_optimizers(
        self,
        content: dict[str, Any],
        index: ParameterIndex,
        optimizers: Sequence[Optimizer],
        *,
        progress: Progress | None = None,
    ) -> None:
        """Read "optimizer_states" into optimizers, as the program has left them. All ranks call it.

        Raises:
            RuntimeError: They do not fit.
        """
        states, reads = content.get("optimizer_states") or [], Reads(self.directory)
        self._check_number(states, optimizers)
        for number, state in enumerate(states):
            self._agree(f"optimizer_states[{number}]", dict.fromkeys(state["state"]))
        with on_all_ranks(f"comparing optimizers with {self.location}"):
            plans = [
                plan_optimizer(self.location, state, index, optimizer, f"optimizer_{number}", reads)
                for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=False))
            ]
        reads.run(progress)
        in_memory = [state for state in states if not isinstance(state, StoredOptimizer)]
        loaded = ByteCount(progress, tensor_bytes(in_memory))
        for state, plan, optimizer in zip(states, plans, optimizers, strict=False):
            finish_optimizer(plan, optimizer)
            if not isinstance(state, StoredOptimizer):
                loaded.add(tensor_bytes(state))
        missing = len(optimizers) - len(plans)
        if missing and (plans or self.lacks_optimizers):
            rank_zero_warn(
                f"{self.location} holds no state for {missing} of {len(optimizers)} optimizers, which start afresh; to go on exactly, "
                "resume from a checkpoint with the state of all"
            )

    def _check(self, content: Mapping[str, Any], index: ParameterIndex, optimizers: Sequence[Optimizer]) -> None:
        states = content.get("optimizer_states") or []
        self._check_number(states, optimizers)
        with on_all_ranks(f"comparing optimizers with {self.location}"):
            for number, (state, optimizer) in enumerate(zip(states, optimizers, strict=False)):
                check_optimizer(self.location, state, index, optimizer, f"optimizer_{number}")

    def _agree(self, where: str, kinds: Mapping[Any, Any]) -> None:
        """Raise if on_load_checkpoint has left other entries on another rank: shards would be of different states."""
        differing = Ranks().decide(zlib.crc32(repr(list(kinds.items())).encode()), _unlike_first)
        if differing:
            raise RuntimeError(
                f'{self.location}: on_load_checkpoint has left other entries in checkpoint["{where}"] on ranks {differing} than on '
                "rank 0. Every rank loads its own part of what is left; make the same changes on all ranks"
            )

    def _check_number(self, states: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
        """Raise if anything that was saved for an optimizer would be lost when training resumes."""
        numbered = states and not isinstance(states[0], StoredOptimizer)
        if len(states) > len(optimizers) or (numbered and len(states) != len(optimizers)):
            raise RuntimeError(
                f"{self.location} holds {len(states)} states of optimizers, but {len(optimizers)} optimizers are there; configure all of "
                'them as they were, or choose in on_load_checkpoint what is loaded: checkpoint["optimizer_states"] is a list'
            )


def load(
    location: Location,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
    progress: Progress | None = None,
    parameter_states: Mapping[str, ParameterState] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into a sharded module and its optimizers, without a program that changes it; all ranks call it.

    Args:
        location: Of the checkpoint.
        module: Sharded.
        optimizers: Empty unless training resumes.
        strict: Names must match exactly.
        weights_only: As for `Loading.open`.
        progress: Called for every tensor that was read.
        parameter_states: Other objects that keep a tensor for each parameter, by key.

    Returns:
        Everything but weights and optimizer states: loops, callbacks, schedulers, hyperparameters.

    Raises:
        ValueError: There is no checkpoint.
        RuntimeError: The checkpoint does not fit, or is damaged.
        RefusedError: It holds a class that was not allowed; nothing was changed.
    """
    loading, content = Loading.open(location, module, weights_only=weights_only)
    index = ParameterIndex(module)
    loading.load_model(
        content,
        index,
        strict=strict,
        progress=progress,
        parameter_states=parameter_states,
        optimizers=optimizers,
    )
    if optimizers:
        loading.load_optimizers(content, index, optimizers, progress=progress)
    return {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states")}


def _unlike_first(checksums: list[int]) -> list[int]:
    """The first few ranks whose checksum is not that of rank 0."""
    return [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]][:8]


def _kind(value: Any) -> Any:
    """What must be the same on all ranks of an entry."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _add_states(content: dict[str, Any], directory: Directory, is_known: Callable[[str], bool]) -> None:
    """Add to what `meta.pt` holds what the other files hold, in the form of one file."""
    tied = content.pop(TIED_WEIGHTS, {})
    keys = directory.top_keys()
    state = StoredState.of(directory, "model" if "model" in keys else "state_dict", is_known)
    state.update({name: state[first] for name, first in tied.items() if name in state and first in state})
    versions = content.pop(MODULE_VERSIONS, {})
    if "model" in versions:
        state._metadata = versions["model"]
    content["state_dict"] = state
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in keys if re.fullmatch(r"optimizer_\d+", key))
    if numbers:
        content["optimizer_states"] = [StoredOptimizer(directory, f"optimizer_{number}") for number in numbers]
    others = [key for key in keys if key not in ("model", "state_dict") and not key.startswith("optimizer_")]
    if others:
        content[PARAMETER_STATES] = {key: tensors_under(directory, key) for key in others}
