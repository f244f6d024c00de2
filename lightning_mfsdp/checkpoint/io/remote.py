"""Checkpoints behind a URL, through fsspec: object stores and other file systems that cannot move a directory in one operation.

A directory is written in place if nothing is there. `meta.pt` is written last, so what lacks it was never finished. Over an older
checkpoint the new one is first written next to it and then copied, `meta.pt` last again: as long as `meta.pt` exists there, the new
checkpoint is complete, and `recover` copies it once more.

Alternatives considered: always writing next to it and copying (every byte moves twice), and never (an interrupted save would have destroyed
the checkpoint it replaces).
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any

import fsspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from lightning_mfsdp.checkpoint.io.location import META_FILE, Location, beside
from lightning_mfsdp.checkpoint.io.read import Reader
from lightning_mfsdp.checkpoint.io.shared_folder import TOKEN
from lightning_mfsdp.checkpoint.io.trust import is_trusted
from lightning_mfsdp.checkpoint.io.write import COPY_AHEAD_BYTES, Writer

__all__ = ["RemoteLocation", "names_in"]


def names_in(folder: str) -> list[str]:
    """Names of what is in a folder, given as a path or URL; none if there is no folder."""
    files, path = fsspec.core.url_to_fs(folder)
    files.invalidate_cache()
    if not files.isdir(path):
        return []
    return [os.path.basename(str(name).rstrip("/")) for name in files.ls(path, detail=False)]


class RemoteLocation(Location):
    """A URL whose file system fsspec supports."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, path = fsspec.core.url_to_fs(url)
        self._path: str = path.rstrip("/")
        folder, separator, name = self._path.rpartition("/")
        self._part, self._old = (f"{folder}{separator}{beside(name, kind)}" for kind in ("part", "old"))
        self._earlier_part, self._earlier_old = f"{self._path}.part", f"{self._path}.old"  # before 0.1

    def __str__(self) -> str:
        return self._url

    @override
    def is_sharded(self) -> bool:
        return self._exists(f"{self._path}/{META_FILE}")

    @override
    def is_directory(self) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.isdir(self._path))

    @override
    def is_file(self) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.isfile(self._path))

    @override
    def begin(self, *, directory: bool) -> str:
        self.recover()
        names = self._names(self._path)
        if names and not self.is_sharded() and not all(map(_is_ours, names)):
            raise self.foreign_content()
        is_free = not self.is_file() and not self.is_sharded()
        written = self._path if directory and is_free else self._part
        self._remove(written)
        self._remove(self._earlier_part)
        self._fs.makedirs(written if directory else self._path.rpartition("/")[0], exist_ok=True)
        return written

    @override
    def commit(self, written: str) -> None:
        if written == self._path:
            return
        if self._exists(f"{self._part}/{META_FILE}"):
            self._copy_directory(self._part)
            return
        if self._exists(self._path):
            self._remove(self._old)
            self._fs.mv(self._path, self._old, recursive=self.is_directory())
        self._fs.mv(self._part, self._path)
        self._remove(self._old)

    def _copy_directory(self, part: str) -> None:
        meta = f"{self._path}/{META_FILE}"
        if self._exists(meta):
            self._fs.rm(meta)
        self._remove(self._path)
        self._fs.makedirs(self._path, exist_ok=True)
        names = self._names(part)
        for name in sorted(names, key=lambda name: name == META_FILE):
            self._fs.copy(f"{part}/{name}", f"{self._path}/{name}")
        self._fs.rm(f"{part}/{META_FILE}")
        self._remove(part)

    @override
    def abandon(self) -> None:
        self._remove(self._part)
        names = self._names(self._path)
        if names and META_FILE not in names and all(map(_is_ours, names)):
            self._remove(self._path)

    @override
    def recover(self) -> str | None:
        for part, old in ((self._part, self._old), (self._earlier_part, self._earlier_old)):
            if self._exists(f"{part}/{META_FILE}"):
                self._copy_directory(part)
                return part
            if not self._exists(self._path) and self._exists(old):
                source = part if self._exists(part) else old
                self._fs.mv(source, self._path, recursive=bool(self._fs.isdir(source)))
                return source
        return None

    @override
    @contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        with self._fs.open(path, "wb") as file:
            yield file

    @override
    def writer(self, written: str, *, on_host: bool) -> FileSystemWriter:
        return _Writer(written, _Files(self._fs), 0 if on_host else COPY_AHEAD_BYTES)

    @override
    def reader(self, metadata: Metadata | None = None, *, trusted: bool = False) -> Reader:
        reader = _Reader(self._path, _Files(self._fs))
        reader.table, reader.trusted = metadata, trusted
        return reader

    @override
    def sizes(self, folder: str | None = None) -> dict[str, int]:
        self._fs.invalidate_cache()
        entries = self._fs.ls(folder or self._path, detail=True)
        return {_name(entry["name"]): entry["size"] for entry in entries if entry["type"] == "file"}

    @override
    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        return [_name(entry) for entry in self._fs.ls(folder, detail=False)]

    @override
    def make_folder(self) -> str:
        self._fs.makedirs(self._path, exist_ok=True)
        return self._path

    @override
    def delete(self, path: str) -> None:
        self._fs.rm_file(path)

    @override
    def load(self, name: str | None, *, weights_only: bool | None) -> dict[str, Any]:
        with self.open(name) as file:
            loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=not is_trusted(weights_only))
        return loaded

    @override
    def open(self, name: str | None) -> AbstractContextManager[IO[bytes]]:
        file: AbstractContextManager[IO[bytes]] = self._fs.open(
            self._path if name is None else f"{self._path}/{name}", "rb"
        )
        return file

    def _exists(self, path: str) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(path))

    def _names(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        return [_name(entry) for entry in self._fs.ls(path, detail=False)] if self._fs.isdir(path) else []

    def _remove(self, path: str) -> None:
        if self._exists(path):
            self._fs.rm(path, recursive=True)


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _is_ours(name: str) -> bool:
    """Whether an unfinished save may have left a file of this name."""
    return name.endswith(".distcp") or name.startswith((".metadata", TOKEN))


class _Files(FileSystemBase):
    """The file operations of `torch.distributed.checkpoint`, through fsspec."""

    def __init__(self, fs: fsspec.AbstractFileSystem) -> None:
        self._fs = fs

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with self._fs.open(os.fspath(path), mode) as stream:
            yield stream

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._fs.mv(os.fspath(path), os.fspath(new_path))

    @override
    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    @override
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._fs.makedirs(os.fspath(path), exist_ok=True)

    @override
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str)

    @override
    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self._fs.exists(os.fspath(path)))

    @override
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._fs.rm_file(os.fspath(path))


class _Writer(Writer):
    def __init__(self, path: str, files: _Files, copy_ahead: int) -> None:
        # Closing a file is what makes it durable; there is nothing to fsync.
        super().__init__(path, sync_files=False, overwrite=False, per_thread_copy_ahead=copy_ahead)
        self.fs = files  # type: ignore[assignment]
        self.path = path


class _Reader(Reader):
    def __init__(self, path: str, files: _Files) -> None:
        super().__init__(path)
        self.fs = files  # type: ignore[assignment]
        self.path = path
