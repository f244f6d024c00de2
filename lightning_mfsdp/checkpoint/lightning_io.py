"""What a Lightning checkpoint dictionary becomes on disk, and back."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from lightning_mfsdp.checkpoint.sharded_optimizer import load_optimizer, optimizer_state, plan_optimizer

__all__ = ["load", "no_checkpoint_error", "optimizer_state", "read", "save", "save_directory", "save_file"]


def save(path: Path, module: nn.Module, checkpoint: dict[str, Any], *, is_rank_zero: bool) -> None:
    """Write a Lightning checkpoint as a directory. A checkpoint of that name is replaced; all ranks call it.

    It is written beside its place, as `<name>.part`, and moved there once all ranks have written: a save that fails leaves the old
    checkpoint as it was. On return of rank 0 everything is in place.

    Raises:
        IsADirectoryError: `path` is a directory with something else in it.
        RuntimeError: A hook changed values of the state dict so that their rows are unknown.
    """
    rest = dict(checkpoint)
    index = sharded.ParameterIndex(module)
    state: dict[str, Any] = {"model": sharded.rows_by_name(rest.pop("state_dict"), index, "saving a checkpoint")}
    state.update({f"optimizer_{number}": value for number, value in enumerate(rest.pop("optimizer_states", []))})
    save_directory(path, state, rest, is_rank_zero=is_rank_zero)


def save_directory(path: Path, state: Mapping[str, Any], rest: dict[str, Any], *, is_rank_zero: bool) -> None:
    """Write `state` as every rank's rows and `rest` as `meta.pt`, as `save` explains.

    Raises:
        IsADirectoryError: `path` is a directory with something else in it.
    """
    refuse_foreign(path)
    part = part_of(path)
    if is_rank_zero:
        remove(part)
        part.mkdir(parents=True)
    if dist.is_initialized():  # the directory is there before anybody writes into it
        dist.barrier()
    sharded.save(part, state)
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
) -> dict[str, Any]:
    """Read a checkpoint into a sharded module and its optimizers; all ranks call it.

    Args:
        path: A directory written by `save`, or a single file written by Lightning without sharding.
        module: Sharded.
        optimizers: Empty unless training resumes.
        strict: Names must match exactly.
        weights_only: As for `torch.load`.
        is_rank_zero: Finishes a move that was interrupted.

    Returns:
        What neither weights nor optimizer states are: loops, callbacks, schedulers, hyperparameters.

    Raises:
        ValueError: The path holds no checkpoint.
        RuntimeError: The checkpoint does not fit.
    """
    recover(path, is_rank_zero=is_rank_zero)
    if is_sharded_checkpoint(path):
        metadata = check_files(path)
        rest = read(path / META_FILE, weights_only)
        model_plan = sharded.plan_model(path, metadata, module, strict=strict)
        plans = [
            plan_optimizer(path, metadata, module, optimizer, f"optimizer_{number}")
            for number, optimizer in enumerate(optimizers)
        ]
        # All of it fits; from here on things change.
        sharded.load_model(path, model_plan, module)
        for plan, optimizer in zip(plans, optimizers, strict=True):
            if plan is not None:
                load_optimizer(path, plan, optimizer)
        restored = [plan is not None for plan in plans]
    elif path.is_file():
        rest = read(path, weights_only)
        full.load_model(path, rest.pop("state_dict"), module, strict=strict)
        restored = full.load_optimizers(path, rest.pop("optimizer_states", []), module, optimizers)
    else:
        raise no_checkpoint_error(path)
    if optimizers and not all(restored):
        rank_zero_warn(
            f"{path} holds no state for {restored.count(False)} of {len(restored)} optimizers, which start afresh"
        )
        # Lightning insists on the key; there is nothing to restore schedulers from.
        rest.setdefault("lr_schedulers", [])
    return rest


def no_checkpoint_error(path: Path) -> ValueError:
    """What to raise where nothing lies that can be read."""
    return ValueError(
        f"{str(path)!r}: expected a directory with {META_FILE} in it, as this strategy writes, or a single Lightning checkpoint file; "
        + ("the directory has no such file" if path.is_dir() else "there is nothing at that path")
    )


def read(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """`torch.load` of a dictionary, mapped into memory.

    Raises:
        RuntimeError: It holds classes that `torch.load` refuses.
    """
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except pickle.UnpicklingError as error:
        raise RuntimeError(
            f"{path} holds Python objects that torch.load refuses by default. If you trust it, allow their classes with "
            "torch.serialization.add_safe_globals, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 "
            "(the Trainer does not hand weights_only on to strategies that load after setup; under Fabric, pass weights_only=False)"
        ) from error
    return loaded
