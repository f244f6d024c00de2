"""From a path or URL to the contents of a checkpoint: its location, its dictionary, its rows."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from lightning_mfsdp.base.progress import Progress
from lightning_mfsdp.checkpoint.io.local import LocalLocation
from lightning_mfsdp.checkpoint.io.location import META_FILE, Location, reason_of
from lightning_mfsdp.checkpoint.io.progress import LoadPlanner
from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.checkpoint.io.remote import RemoteLocation
from lightning_mfsdp.checkpoint.io.unpickling import (
    WEIGHTS_ONLY,
    RefusedError,
    key_of,
    not_read,
    refusal,
    refused_class,
)

__all__ = ["locate", "no_checkpoint_error", "read", "read_rows", "recover"]


def locate(path: str | os.PathLike[str]) -> Location:
    """The location that a path or URL names. `file://` and paths without a protocol are local."""
    text = os.fspath(path)
    protocol, separator, rest = text.partition("://")
    if not separator or protocol in ("file", "local"):
        return LocalLocation(Path(rest if separator else text))
    return RemoteLocation(text)


def recover(location: Location, ranks: Ranks) -> None:
    """Finish an exchange of checkpoints that was interrupted, with a warning. All ranks call it."""
    taken = ranks.first(f"looking for {location}", location.recover)
    if taken and ranks.rank == 0:
        warnings.warn(
            f"{location}: a save was interrupted while it replaced this checkpoint; taking {taken}, which is complete",
            stacklevel=2,
        )


def no_checkpoint_error(location: Location) -> ValueError:
    """The error if there is nothing readable."""
    return ValueError(
        f"{str(location)!r}: expected a directory with {META_FILE} in it, as this strategy writes, or a single Lightning checkpoint file; "
        + ("the directory has no such file" if location.is_directory() else location.missing())
    )


def read(location: Location, name: str | None, weights_only: bool | None) -> dict[str, Any]:
    """`torch.load` of a file in a directory, or of the single file (`None`).

    Raises:
        RuntimeError: It is damaged.
        RefusedError: It holds classes that `torch.load` refuses.
    """
    file = f"{location}{'' if name is None else '/' + name}"
    try:
        return location.load(name, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        refused = refused_class(error)
        with location.open(name) as opened:
            key = key_of(opened, refused)
        raise RefusedError(refusal(f"{file}: {key}" if key else file, refused, WEIGHTS_ONLY)) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise RuntimeError(
            f"{file} cannot be read, so nothing was: {error}. It is damaged, or no checkpoint; use another"
        ) from error


def read_rows(
    location: Location,
    metadata: Metadata,
    targets: dict[str, Any],
    progress: Progress | None = None,
    *,
    trusted: bool = False,
    alone: bool = False,
    in_place: bool = True,
) -> None:
    """Read tensors and objects, all in one go. All ranks call it, unless one process works `alone`.

    Args:
        location: Of the checkpoint.
        metadata: Its table of contents.
        targets: By flat name, what is read in place (tensors) or replaced.
        progress: Called for every tensor that was read.
        trusted: Values may be of any class.
        alone: Other ranks do not join.
        in_place: Into the model, which messages then mention.

    Raises:
        RuntimeError: On all ranks, if it fails on any; it is undefined then what was read.
        RefusedError: On all ranks, if a value is of a class that was not allowed and not `trusted`; then nothing was read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            reader = location.reader(metadata, trusted=trusted)
            dcp_load(targets, storage_reader=reader, planner=LoadPlanner(reader, progress), no_dist=alone)
    except CheckpointException as error:
        refused = [cause for cause, _ in error.failures.values() if isinstance(cause, RefusedError)]
        if refused:
            raise RefusedError(not_read(location, refused[0])) from error
        if not in_place:
            raise RuntimeError(
                f"reading {location} failed, and nothing was changed: {reason_of(error)}. Use another one"
            ) from error
        raise RuntimeError(
            f"reading {location} failed half-way, so the model is no longer what it was: {reason_of(error)}. Use another checkpoint"
        ) from error
