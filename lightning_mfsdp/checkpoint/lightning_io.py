"""What a Lightning checkpoint dictionary becomes on disk, and back."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_mfsdp.checkpoint import full, sharded
from lightning_mfsdp.checkpoint.files import (
    META_FILE,
    check_files,
    is_sharded_checkpoint,
    part_of,
    put_in_place,
    recover,
    refuse_foreign,
    remove,
)
from lightning_mfsdp.checkpoint.parameter_state import (
    PARAMETER_STATES,
    ParameterState,
    load_rows,
    plan_rows,
    rows_of_whole,
)
from lightning_mfsdp.checkpoint.sharded_optimizer import load_optimizer, optimizer_state, plan_optimizer

__all__ = ["load", "optimizer_state", "save", "save_file"]


def save(path: Path, module: nn.Module, checkpoint: dict[str, Any], *, is_rank_zero: bool) -> None:
    """Write a Lightning checkpoint as a directory. A checkpoint of that name is replaced; all ranks call it.

    It is written beside its place, as `<name>.part`, and moved there once all ranks have written: a save that fails leaves the old
    checkpoint as it was. On return of rank 0 everything is in place.

    Raises:
        IsADirectoryError: `path` is a directory with something else in it.
        RuntimeError: A hook changed values of the state dict so that their rows are unknown.
    """
    refuse_foreign(path)
    rest = dict(checkpoint)
    model_state = rest.pop("state_dict")
    optimizer_states = rest.pop("optimizer_states", [])
    parameter_states = rest.pop(PARAMETER_STATES, {})
    part = part_of(path)
    if is_rank_zero:
        remove(part)
        part.mkdir(parents=True)
    # Its first collective also makes the others wait for the directory.
    sharded.save(part, module, model_state, optimizer_states, parameter_states)
    if is_rank_zero:
        _write(rest, part / META_FILE)
        put_in_place(path)


def save_file(path: Path, checkpoint: dict[str, Any], *, is_rank_zero: bool) -> None:
    """Write a Lightning checkpoint of whole states as one file, atomically as `save` does. Only rank 0 has something to write.

    Raises:
        IsADirectoryError: `path` is a directory with something else in it.
    """
    refuse_foreign(path)
    if not is_rank_zero:
        return
    part = part_of(path)
    remove(part)
    part.parent.mkdir(parents=True, exist_ok=True)
    _write(checkpoint, part)
    put_in_place(path)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    """`torch.save`, on disk before anything is moved."""
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def load(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
    is_rank_zero: bool,
    parameter_states: Mapping[str, ParameterState] | None = None,
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into a sharded module and its optimizers; all ranks call it.

    Args:
        path: A directory written by `save`, or a single file written by Lightning without sharding.
        module: Sharded.
        optimizers: Empty unless training resumes.
        strict: Names must match exactly.
        weights_only: As for `torch.load`.
        is_rank_zero: Finishes a move that was interrupted.
        parameter_states: Who else keeps something for parameters, by key.
        prepare: Called with what is returned, before optimizers are compared with the checkpoint.

    Returns:
        What neither weights nor optimizer states are: loops, callbacks, schedulers, hyperparameters.

    Raises:
        ValueError: The path holds no checkpoint.
        RuntimeError: The checkpoint does not fit.
    """
    states = parameter_states or {}
    recover(path, is_rank_zero=is_rank_zero)
    if is_sharded_checkpoint(path):
        metadata = check_files(path)
        rest = _torch_load(path / META_FILE, weights_only)
        model_plan = sharded.plan_model(path, metadata, module, strict=strict)
        state_plans = [plan_rows(path, metadata, module, key, strict=strict) for key in states]
        if prepare is not None:
            prepare(rest)
        plans = [
            plan_optimizer(path, metadata, module, optimizer, number) for number, optimizer in enumerate(optimizers)
        ]
        # All of it fits; from here on things change.
        sharded.load_model(path, model_plan, module)
        for plan, optimizer in zip(plans, optimizers, strict=True):
            if plan is not None:
                load_optimizer(path, plan, optimizer)
        for state_plan in state_plans:
            load_rows(path, state_plan, states[state_plan.key])
        restored = [plan is not None for plan in plans]
    elif path.is_file():
        rest = _torch_load(path, weights_only)
        saved_states = rest.pop(PARAMETER_STATES, {})
        rows = {key: rows_of_whole(path, key, saved_states.get(key, {}), module, strict=strict) for key in states}
        full.load_model(path, rest.pop("state_dict"), module, strict=strict)
        if prepare is not None:
            prepare(rest)
        restored = full.load_optimizers(path, rest.pop("optimizer_states", []), module, optimizers)
        for key, state in states.items():
            state.load_rows(rows[key])
    else:
        raise ValueError(
            f"ckpt_path={str(path)!r}: expected a directory with {META_FILE} in it, as this strategy writes, or a single Lightning "
            "checkpoint file; "
            + ("the directory has no such file" if path.is_dir() else "there is nothing at that path")
        )
    if optimizers and not all(restored):
        rank_zero_warn(
            f"{path} holds no state for {restored.count(False)} of {len(restored)} optimizers, which start afresh"
        )
        # Lightning insists on the key; there is nothing to restore schedulers from.
        rest.setdefault("lr_schedulers", [])
    return rest


def _torch_load(path: Path, weights_only: bool | None) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except pickle.UnpicklingError as error:
        raise RuntimeError(
            f"{path} holds Python objects that torch.load refuses by default. If you trust it, allow their classes with "
            "torch.serialization.add_safe_globals, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 "
            "(Lightning does not hand weights_only on to strategies that load after setup)"
        ) from error
    return loaded
