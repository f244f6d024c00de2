"""Checkpoints on a file system of the operating system, where a rename moves a whole directory at once."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from lightning_mfsdp.checkpoint.io.location import META_FILE, Location, beside
from lightning_mfsdp.checkpoint.io.read import Reader
from lightning_mfsdp.checkpoint.io.trust import is_trusted
from lightning_mfsdp.checkpoint.io.write import COPY_AHEAD_BYTES, Writer

__all__ = ["LocalLocation", "exchange", "part_of", "put_in_place", "remove"]


class LocalLocation(Location):
    """A path. A save is written next to it (`part_of`); between the two renames of a commit its predecessor is there, too (`_old_of`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part, self._old = part_of(path), _old_of(path)
        # Names that versions before 0.1 used.
        self._earlier_part, self._earlier_old = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.old")

    def __str__(self) -> str:
        return str(self._path)

    @override
    def is_sharded(self) -> bool:
        return (self._path / META_FILE).is_file()

    @override
    def is_directory(self) -> bool:
        return self._path.is_dir()

    @override
    def is_file(self) -> bool:
        return self._path.is_file()

    @override
    def missing(self) -> str:
        if not self._path.is_symlink():
            return super().missing()
        return f"the path is a link to {os.readlink(self._path)}, which is not there: its save did not end. Load an older checkpoint"

    @override
    def begin(self, *, directory: bool) -> str:
        if self.is_directory() and not self.is_sharded() and any(self._path.iterdir()):
            raise self.foreign_content()
        self.recover()
        remove(self._part)
        remove(self._earlier_part)
        (self._part if directory else self._part.parent).mkdir(parents=True, exist_ok=True)
        return str(self._part)

    @override
    def commit(self, written: str) -> None:
        put_in_place(self._path)

    @override
    def abandon(self) -> None:
        remove(self._part)

    @override
    def recover(self) -> str | None:
        if self._path.exists() or self._path.is_symlink():
            return None
        for part, old in ((self._part, self._old), (self._earlier_part, self._earlier_old)):
            if old.exists():
                source = part if part.exists() else old
                source.rename(self._path)
                return source.name
        return None

    @override
    @contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    @override
    def writer(self, written: str, *, on_host: bool) -> FileSystemWriter:
        return Writer(written, overwrite=False, per_thread_copy_ahead=0 if on_host else COPY_AHEAD_BYTES)

    @override
    def reader(self, metadata: Metadata | None = None, *, trusted: bool = False) -> Reader:
        reader = Reader(self._path)
        reader.table, reader.trusted = metadata, trusted
        return reader

    @override
    def sizes(self, folder: str | None = None) -> dict[str, int]:
        return {entry.name: entry.stat().st_size for entry in os.scandir(folder or self._path) if entry.is_file()}

    @override
    def names(self, folder: str) -> list[str]:
        # A listing is what asks the server of a network file system; the first one asks for the folder's own name, where it is permitted.
        with suppress(OSError):
            os.listdir(Path(folder).parent)
        return os.listdir(folder)

    @override
    def make_folder(self) -> str:
        self._path.mkdir(parents=True, exist_ok=True)
        return str(self._path)

    @override
    def delete(self, path: str) -> None:
        os.unlink(path)

    @override
    def load(self, name: str | None, *, weights_only: bool | None) -> dict[str, Any]:
        trusted = is_trusted(weights_only)
        loaded: dict[str, Any] = torch.load(self._file(name), map_location="cpu", weights_only=not trusted, mmap=True)
        return loaded

    @override
    def open(self, name: str | None) -> BinaryIO:
        return self._file(name).open("rb")

    def _file(self, name: str | None) -> Path:
        return self._path if name is None else self._path / name


def part_of(path: Path) -> Path:
    """Where a save is written before it is moved to `path`."""
    return path.with_name(beside(path.name, "part"))


def _old_of(path: Path) -> Path:
    return path.with_name(beside(path.name, "old"))


def put_in_place(path: Path) -> None:
    """Move what was written next to `path` there. At any moment the old or the new one is complete under some name."""
    part = part_of(path)
    if part.is_file() and (path.is_symlink() or not path.is_dir()):
        part.replace(path)
        return
    if path.exists() or path.is_symlink():
        if exchange(part, path):
            remove(part)
            return
        remove(_old_of(path))
        path.rename(_old_of(path))
    part.rename(path)
    remove(_old_of(path))


def exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one operation. Returns whether this system and file system support that."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return renameat2 is not None and not renameat2(
        -100, bytes(first), -100, bytes(second), 2
    )  # AT_FDCWD, RENAME_EXCHANGE


def remove(path: Path) -> None:
    """Delete a file, a link or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
