"""What a Lightning checkpoint dictionary becomes on disk, and back."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_mfsdp.checkpoint import full, sharded
from lightning_mfsdp.checkpoint.sharded import META_FILE, is_sharded_checkpoint, optimizer_state

__all__ = ["load", "optimizer_state", "save", "save_file"]


def save(path: Path, module: nn.Module, checkpoint: dict[str, Any], *, is_rank_zero: bool) -> None:
    """Write a Lightning checkpoint as a directory. A checkpoint of that name is replaced; all ranks call it.

    It is written beside its place, as `<name>.part`, and moved there once all ranks have written: a save that fails leaves the old
    checkpoint as it was. On return of rank 0 everything is in place.

    Raises:
        IsADirectoryError: `path` is a directory with something else in it.
        RuntimeError: A hook changed values of the state dict so that their rows are unknown.
    """
    _refuse_foreign(path)
    rest = dict(checkpoint)
    model_state = rest.pop("state_dict")
    optimizer_states = rest.pop("optimizer_states", [])
    part = path.with_name(f"{path.name}.part")
    if is_rank_zero:
        _remove(part)
        part.mkdir(parents=True)
    # Its first collective also makes the others wait for the directory.
    sharded.save(part, module, model_state, optimizer_states)
    if is_rank_zero:
        torch.save(rest, part / META_FILE)
        _replace(path, part)


def save_file(path: Path, checkpoint: dict[str, Any], *, is_rank_zero: bool) -> None:
    """Write a Lightning checkpoint of whole states as one file, atomically as `save` does. Only rank 0 has something to write.

    Raises:
        IsADirectoryError: `path` is a directory with something else in it.
    """
    _refuse_foreign(path)
    if not is_rank_zero:
        return
    part = path.with_name(f"{path.name}.part")
    _remove(part)
    part.parent.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, part)
    _replace(path, part)


def _refuse_foreign(path: Path) -> None:
    if path.is_dir() and not is_sharded_checkpoint(path) and any(path.iterdir()):
        raise IsADirectoryError(
            f"{path} is a directory with other content; a checkpoint would mix with it. Choose another path"
        )


def _replace(path: Path, part: Path) -> None:
    """Put `part` where `path` is or is not. At any moment one complete checkpoint exists under some name."""
    old = path.with_name(f"{path.name}.old")
    if path.exists() or path.is_symlink():
        _remove(old)
        path.rename(old)
    part.rename(path)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Read a checkpoint into a sharded module and its optimizers; all ranks call it.

    Args:
        path: A directory written by `save`, or a single file written by Lightning without sharding.
        module: Sharded.
        optimizers: Empty unless training resumes.
        strict: Names must match exactly.
        weights_only: As for `torch.load`.

    Returns:
        What neither weights nor optimizer states are: loops, callbacks, schedulers, hyperparameters.

    Raises:
        ValueError: The path holds no checkpoint.
        RuntimeError: The checkpoint does not fit.
    """
    if is_sharded_checkpoint(path):
        rest = _torch_load(path / META_FILE, weights_only)
        sharded.load_model(path, module, strict=strict)
        restored = [
            sharded.load_optimizer(path, module, optimizer, number) for number, optimizer in enumerate(optimizers)
        ]
    elif path.is_file():
        rest = _torch_load(path, weights_only)
        full.load_model(path, rest.pop("state_dict"), module, strict=strict)
        restored = full.load_optimizers(path, rest.pop("optimizer_states", []), module, optimizers)
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
