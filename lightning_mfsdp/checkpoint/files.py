"""Files of a checkpoint: put in place in one move, found again after an interrupted one, and looked over before anything is read."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "META_FILE",
    "TIED_WEIGHTS",
    "check_files",
    "is_sharded_checkpoint",
    "look_over",
    "on_all_ranks",
    "part_of",
    "put_in_place",
    "recover",
    "refuse_foreign",
    "remove",
    "torch_load",
]

META_FILE = "meta.pt"
# In it, where there are any: further names of tied weights, and the name that each is the same as.
TIED_WEIGHTS = "tied_weights"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether `path` is a directory that a save has finished: `meta.pt` is written last."""
    return path.is_dir() and (path / META_FILE).is_file()


def part_of(path: Path) -> Path:
    """Where a checkpoint is written before it is moved to `path`."""
    return path.with_name(f"{path.name}.part")


def _old_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def refuse_foreign(path: Path) -> None:
    """Never write over a directory that is no checkpoint.

    Raises:
        IsADirectoryError: `path` is one, and not empty.
    """
    if path.is_dir() and not is_sharded_checkpoint(path) and any(path.iterdir()):
        raise IsADirectoryError(
            f"{path} is a directory with other content; a checkpoint would mix with it. Choose another path"
        )


def put_in_place(path: Path) -> None:
    """Move what was written beside `path` there. At any moment one complete checkpoint exists, and `recover` finds it."""
    old = _old_of(path)
    if path.exists() or path.is_symlink():
        remove(old)
        path.rename(old)
    part_of(path).rename(path)
    remove(old)


def remove(path: Path) -> None:
    """Delete a file, a link or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def recover(path: Path, *, is_rank_zero: bool) -> None:
    """Finish a move that was interrupted between its two halves: the old checkpoint set aside, the new one not yet in place. Collective."""
    if is_rank_zero and not (path.exists() or path.is_symlink()) and _old_of(path).exists():
        part = part_of(path)
        source = part if part.exists() else _old_of(path)
        warnings.warn(
            f"{path}: a save was interrupted while it replaced this checkpoint; taking {source.name}", stacklevel=2
        )
        source.rename(path)
    if dist.is_initialized():
        dist.barrier()


def check_files(path: Path) -> Metadata:
    """Look over the files of a sharded checkpoint, before anything is read into a model. Collective.

    Returns:
        The checkpoint's table of contents.

    Raises:
        RuntimeError: On all ranks, if on any it cannot be read, or files that it names are missing or too short; all of them are listed.
    """
    metadata, problem = look_over(path)
    for rank, found in enumerate(_problems(problem)):
        if found:
            raise RuntimeError(
                f"{path} is incomplete or damaged, so nothing was read: rank {rank} finds that {found}. Use another checkpoint, or copy "
                "files from where they were written: every node must see all of them"
            )
    assert metadata is not None, "no problem was found"
    return metadata


def look_over(path: Path) -> tuple[Metadata | None, str]:
    """The table of contents of a sharded checkpoint, and what is wrong with its files; empty if nothing."""
    try:
        metadata: Metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle may come to anything
        return None, f".metadata cannot be read ({type(error).__name__}: {error})"
    needed: dict[str, int] = {}
    for item in (metadata.storage_data or {}).values():
        needed[item.relative_path] = max(needed.get(item.relative_path, 0), item.offset + item.length)
    problems = []
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size < size:
            problems.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
    return metadata, "; ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")


@contextmanager
def on_all_ranks(doing: str) -> Iterator[None]:
    """What fails inside on one rank fails on all, each time at the end of the context. Collective; nothing inside may be.

    Args:
        doing: Begins the message of ranks that met no error themselves.

    Raises:
        RuntimeError: On those ranks; with the number of another rank and its error.
    """
    try:
        yield
    except Exception as error:
        _problems(f"{type(error).__name__}: {error}")
        raise
    for rank, problem in enumerate(_problems("")):
        if problem:
            raise RuntimeError(f"{doing}: rank {rank} failed, so all do: {problem}")


def _problems(own: str) -> list[str]:
    """Of each rank."""
    problems = [own]
    if dist.is_initialized():
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, own)
    return problems


def torch_load(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """`torch.load` of a checkpoint's dictionary, mapped into memory.

    Raises:
        RuntimeError: It holds objects that are not loaded without trust.
    """
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
    except pickle.UnpicklingError as error:
        raise RuntimeError(
            f"{path} holds Python objects that torch.load refuses by default. If you trust it, allow their classes with "
            "torch.serialization.add_safe_globals, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 "
            "(Lightning does not hand weights_only on to strategies that load after setup)"
        ) from error
    return loaded
