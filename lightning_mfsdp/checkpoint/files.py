"""Files of a checkpoint: put in place in one move, found again after an interrupted one, and looked over before anything is read."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "META_FILE",
    "check_files",
    "file_problems",
    "is_sharded_checkpoint",
    "part_of",
    "put_in_place",
    "recover",
    "refuse_foreign",
    "remove",
]

META_FILE = "meta.pt"


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
    metadata, problem = _look_over(path)
    problems = [problem]
    if dist.is_initialized():
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found:
            raise RuntimeError(
                f"{path} is incomplete or damaged, so nothing was read: rank {rank} finds that {found}. Use another checkpoint, or copy "
                "files from where they were written: every node must see all of them"
            )
    assert metadata is not None, "no problem was found"
    return metadata


def _look_over(path: Path) -> tuple[Metadata | None, str]:
    """The table of contents, and what is wrong with the files; empty if nothing."""
    try:
        metadata: Metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle may come to anything
        return None, f".metadata cannot be read ({type(error).__name__}: {error})"
    problems = list(file_problems(path, metadata).values())
    return metadata, "; ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")


def file_problems(path: Path, metadata: Metadata) -> dict[str, str]:
    """Files that the table of contents names and that are missing or too short: a sentence for each, by name."""
    needed: dict[str, int] = {}
    for item in (metadata.storage_data or {}).values():
        needed[item.relative_path] = max(needed.get(item.relative_path, 0), item.offset + item.length)
    problems = {}
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            problems[name] = f"{name} is missing"
        elif file.stat().st_size < size:
            problems[name] = f"{name} has {file.stat().st_size} bytes instead of {size}"
    return problems
