"""Where a checkpoint is stored. A save never touches an existing one before all ranks have written; then both are exchanged.

    begin       where to write; nothing of an older checkpoint is touched
    ...         all ranks write; `meta.pt` comes last and marks a directory as complete
    commit      the new checkpoint replaces the old one
    abandon     instead of that, after a failure
    recover     before a load: finish a commit that was interrupted

Local file systems move a directory in one operation (`local.py`); others, reached through fsspec, cannot (`remote.py`).
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_mfsdp.checkpoint.io.progress import bytes_to_write
from lightning_mfsdp.checkpoint.io.ranks import Ranks, root_of
from lightning_mfsdp.checkpoint.io.shared_folder import (
    NotSharedError,
    View,
    see_on_all,
    see_until,
    token_name,
    warn_if_late,
    writers_of,
)
from lightning_mfsdp.checkpoint.io.unpickling import (
    WEIGHTS_ONLY,
    CheckpointError,
    RefusedError,
    not_read,
    read_table,
    refused_class,
)

__all__ = [
    "COPY_AHEAD_BYTES",
    "META_FILE",
    "MODULE_VERSIONS",
    "TABLE_OF_CONTENTS",
    "TIED_WEIGHTS",
    "Location",
    "Place",
    "Reader",
    "Writer",
    "beside",
    "check_files",
    "file_problems",
    "look_over",
    "reason_of",
    "strange_piece",
    "where_of",
]

META_FILE = "meta.pt"
TABLE_OF_CONTENTS = ".metadata"
# In it, where there are any: further names of tied weights, and the name that each is the same as.
TIED_WEIGHTS = "tied_weights"
# In it: by the key of a model, versions of its modules by name, which `load_state_dict` of a newer program may look for.
MODULE_VERSIONS = "module_versions"
# How much is copied from a GPU while the previous copy is written.
COPY_AHEAD_BYTES = 64 * 2**20
_READ_THREADS = 4


@dataclass(frozen=True)
class Place:
    """Where a save writes.

    Attributes:
        path: An empty directory, or a file that does not exist yet.
        token: Name of a file in the directory that all ranks look for, if there are several.
        views: What they saw.
    """

    path: str
    token: str = ""
    views: Sequence[View] = ()


class Location(ABC):
    """A path or URL that one checkpoint has, or will have; in messages, its text.

    Methods that write or move are called by rank 0 alone; those that create readers and writers, and those that check, by any rank.
    """

    @abstractmethod
    def __str__(self) -> str:
        """The path or URL."""

    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether there is a directory with a finished save."""

    @abstractmethod
    def is_directory(self) -> bool:
        """Whether there is a directory of any kind."""

    @abstractmethod
    def is_file(self) -> bool:
        """Whether there is a single file."""

    def missing(self) -> str:
        """Message if there is neither a directory nor a file."""
        return "there is nothing at that path. On several nodes it must lead to the same storage on all"

    @abstractmethod
    def begin(self, *, directory: bool) -> str:
        """Make room for a save.

        Returns:
            Where to write: an empty directory, or a file that does not exist yet.

        Raises:
            IsADirectoryError: There is a directory that is not a checkpoint.
        """

    @abstractmethod
    def commit(self, written: str) -> None:
        """Put what was written to `begin`'s result in place. At any moment one complete checkpoint exists, which `recover` finds."""

    @abstractmethod
    def abandon(self) -> None:
        """Delete what a failed save has written."""

    @abstractmethod
    def recover(self) -> str | None:
        """Finish an interrupted commit. Returns what was put in place, if something was."""

    @abstractmethod
    def create(self, path: str) -> Any:
        """A context manager that yields a binary file to write; on exit, what was written is durable."""

    @abstractmethod
    def writer(self, written: str, *, on_host: bool) -> FileSystemWriter:
        """The writer for `torch.distributed.checkpoint`. `on_host`: nothing has to be copied from a device."""

    @abstractmethod
    def reader(self, metadata: Metadata | None = None, *, trusted: bool = False) -> Reader:
        """The reader for `torch.distributed.checkpoint`; it need not read `metadata` again.

        Args:
            metadata: The table of contents, if it was read already.
            trusted: Values may be of any class.
        """

    @abstractmethod
    def sizes(self, folder: str | None = None) -> dict[str, int]:
        """Names and sizes of the files in the directory, or in another one that `begin` has made."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """What lies in a folder, as its storage says now; an OSError if it is not there."""

    @abstractmethod
    def make_folder(self) -> str:
        """Make the directory, if there is none. Returns its path for `names` and `write`."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file that `write` has written."""

    @abstractmethod
    def load(self, name: str | None, *, weights_only: bool | None) -> dict[str, Any]:
        """`torch.load` of a file in the directory, or of the single file."""

    @abstractmethod
    def open(self, name: str | None) -> AbstractContextManager[IO[bytes]]:
        """The same file, to read its bytes."""

    @contextmanager
    def saving(self, ranks: Ranks, *, directory: bool) -> Iterator[Place]:
        """Context around a save by all ranks: `begin`, and `commit` if nothing failed.

        Raises:
            NotSharedError: On all ranks, before anything is written: one does not see the directory, whose parts all would write.
            RuntimeError: On all ranks, if something failed on any. An existing checkpoint is kept.
        """
        together = directory and ranks.size > 1

        def prepare() -> Place:
            place = Place(self.begin(directory=directory), token_name() if together else "")
            if place.token:
                self.write(f"{place.path}/{place.token}", b"")
            return place

        def finish() -> None:
            if place.token:
                self.delete(f"{place.path}/{place.token}")
            self.commit(place.path)

        place = self._seen(ranks.first(f"preparing to save {self}", prepare), ranks)
        try:
            yield place
        # Raised on all ranks: the writers ensure that. PyTorch's own error is not an Exception.
        except (Exception, CheckpointException) as error:
            ranks.first(f"cleaning up after a failed save of {self}", self.abandon)
            raise RuntimeError(
                f"saving {self} failed, and an earlier checkpoint there is unchanged: {reason_of(error)}. "
                "Make room on the disk, or correct what the error names, and save again"
            ) from error
        ranks.first(f"putting {self} in place", finish)
        warn_if_late(self, place.views, ranks)

    def _seen(self, place: Place, ranks: Ranks) -> Place:
        """With what all ranks see of it."""
        if not place.token:
            return place
        what = f"{self} was not saved, and an earlier one is unchanged"
        try:
            views = see_on_all(place.path, place.token, lambda: self.names(place.path), ranks, what=what)
        except NotSharedError:
            ranks.first(f"cleaning up after a failed save of {self}", self.abandon)
            raise
        return replace(place, views=views)

    def check_written(self, place: Place, metadata: Metadata, ranks: Ranks) -> None:
        """Wait until rank 0, which calls this alone, sees all that the ranks have written.

        Raises:
            NotSharedError: It does not see it.
        """
        problems: dict[str, str] = {}

        def look() -> str:
            nonlocal problems
            problems = file_problems(self.sizes(place.path), metadata)
            return "; ".join(list(problems.values())[:3])

        found, _ = see_until(look, ranks.sees_within.total_seconds())
        if found:
            raise NotSharedError(
                f"rank 0 does not see in {place.path} what was written by {writers_of(problems, place.views) or 'itself'}: {found}"
                f"{' ...' if len(problems) > 3 else ''}. Look at the storage of these nodes, or raise shared_folder_timeout if it shows "
                "files of others later"
            )

    def foreign_content(self) -> IsADirectoryError:
        """What `begin` raises rather than write over a directory that is no checkpoint."""
        return IsADirectoryError(
            f"{self} is a directory with other content; a checkpoint would mix with it. Choose another path"
        )

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file, durably."""
        with self.create(path) as file:
            file.write(content)


class Writer(FileSystemWriter):
    """PyTorch's writer, with the operating system's message in errors, and a new file after a number of bytes.

    PyTorch keeps all tensors of a file in host memory until the file is complete.
    """

    file_bytes = 2**30

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        batches = _batches(plan.items, self.file_bytes)
        results: list[WriteResult] = []
        for number, items in enumerate(batches):
            prefix = f"{plan.storage_data.prefix}{number}_" if len(batches) > 1 else plan.storage_data.prefix
            batch = replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=prefix))
            results += self._write_file(batch, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # torch 2.11 writes them into a copy, and what `save` returns names no file then.
        metadata.storage_data = {one.index: one.storage_data for written in results for one in written}
        super().finish(metadata, results)

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        try:
            return super().write_data(plan, planner).wait()
        except RuntimeError as error:
            root = root_of(error)
            if root is error:
                raise
            raise root from error


def _batches(items: Sequence[WriteItem], most_bytes: int) -> list[list[WriteItem]]:
    """Consecutive items of at most so many bytes together, unless a single one has more."""
    batches: list[list[WriteItem]] = [[]]
    size = 0
    for item in items:
        added = bytes_to_write(item)
        if batches[-1] and size + added > most_bytes:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += added
    return batches


class Reader(FileSystemReader):
    """PyTorch's reader, with several threads: each reads, unpacks and copies to the device some of the tensors.

    Nothing that it reads runs code unless `trusted`.
    """

    known: Metadata | None = None
    trusted = False
    # The words for `trusted` in messages.
    trusting = WEIGHTS_ONLY

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known is not None:
            return self.known
        rank = kwargs.get("rank")
        path = self.fs.concat_path(self.path, TABLE_OF_CONTENTS if rank is None else f"__{rank}{TABLE_OF_CONTENTS}")
        with self.fs.create_stream(path, "rb") as file:
            metadata = read_table(cast(IO[bytes], file), str(path), trusted=self.trusted, trusting=self.trusting)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        shares = [replace(plan, items=plan.items[start::_READ_THREADS]) for start in range(_READ_THREADS)]
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="mfsdp-load") as threads:
            for started in [threads.submit(self._read_share, share, planner) for share in shares]:
                started.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_share(self, share: LoadPlan, planner: LoadPlanner) -> None:
        try:
            super().read_data(share, planner)
        except pickle.UnpicklingError as error:
            for item in share.items:
                self._check_piece(item.storage_index)
            raise RefusedError(
                f"{self.path}: a piece of a tensor holds {refused_class(error)}, which no program writes there; do not use this checkpoint"
            ) from error

    def _check_piece(self, index: MetadataIndex) -> None:
        try:
            with io.BytesIO(self.raw(index)) as file:
                torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise RefusedError(strange_piece(self.path, index, error)) from error

    def raw(self, index: MetadataIndex, metadata: Metadata | None = None) -> bytes:
        """What one save wrote for a chunk of a tensor or for an object: a whole file of `torch.save`.

        Raises:
            CheckpointError: It is not there.
        """
        item = ((metadata or self.known or self.read_metadata()).storage_data or {}).get(index)
        if item is None:
            raise CheckpointError(
                f"{self.path}: the table of contents names no place for {where_of(index)}; it is damaged. Copy the checkpoint again, or "
                "use another"
            )
        if item.transform_descriptors:
            raise CheckpointError(
                f"{self.path}: {where_of(index)} was written through the extensions {list(item.transform_descriptors)}, which cannot be "
                "undone here; save it without them"
            )
        with self.fs.create_stream(self.fs.concat_path(self.path, item.relative_path), "rb") as stream:
            stream.seek(item.offset)
            data: bytes = stream.read(item.length)
        if len(data) != item.length:
            raise CheckpointError(
                f"{self.path}: {item.relative_path} ends {item.length - len(data)} bytes too early for {where_of(index)}. Copy it again "
                "from where it "
                "was written, or use another checkpoint"
            )
        return data


def strange_piece(place: object, index: MetadataIndex, error: BaseException) -> str:
    """The message for an object of another class in place of a tensor."""
    return (
        f"{place}: {where_of(index)} is a tensor, and a piece of it holds {refused_class(error)}, which no program writes there; do not "
        "use "
        "this checkpoint"
    )


def where_of(index: MetadataIndex) -> str:
    """The name of what an index refers to, for messages."""
    return index.fqn if not index.offset else f"{index.fqn} at {tuple(index.offset)}"


def reason_of(error: BaseException) -> str:
    """What happened, on one line; of errors that torch.distributed.checkpoint collected, on which ranks."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    failures = list(error.failures.items())
    return "; ".join(f"rank {rank}: {type(cause[0]).__name__}: {cause[0]}" for rank, cause in failures[:4])


def check_files(location: Location, ranks: Ranks, *, trusted: bool = False) -> Metadata:
    """Check the files of a sharded checkpoint, before anything is read into a model. Collective.

    Args:
        location: Of the checkpoint.
        ranks: All of them.
        trusted: The table of contents may hold any class.

    Returns:
        The checkpoint's table of contents.

    Raises:
        RuntimeError: On all ranks, if on any it cannot be read, or files that it names are missing or too short; all of them are listed.
        RefusedError: On all ranks, if on any it holds classes that were not allowed.
    """
    metadata, problem = look_over(location, trusted=trusted)
    for rank, (found, is_refused) in enumerate(ranks.gather((str(problem), isinstance(problem, RefusedError)))):
        if is_refused:
            raise RefusedError(not_read(location, found))
        if found:
            raise RuntimeError(
                f"{location} is incomplete or damaged, so nothing was read: rank {rank} finds that {found}. Use another checkpoint, or "
                "copy files from where they were written: every node must see all of them"
            )
    assert metadata is not None, "no problem was found"
    return metadata


def look_over(location: Location, *, trusted: bool = False) -> tuple[Metadata | None, str | RefusedError]:
    """The table of contents, and what is wrong with the files; empty if nothing."""
    try:
        metadata: Metadata = location.reader(trusted=trusted).read_metadata()
    except RefusedError as error:
        return None, error
    except Exception as error:  # a damaged pickle may raise anything
        return None, f".metadata cannot be read ({type(error).__name__}: {error})"
    problems = list(file_problems(location.sizes(), metadata).values())
    return metadata, "; ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")


def file_problems(present: Mapping[str, int], metadata: Metadata) -> dict[str, str]:
    """Files that the table of contents names and that are missing or too short: a sentence for each, by name.

    Args:
        present: Sizes of the existing files.
        metadata: The table of contents.
    """
    needed: dict[str, int] = {}
    for item in (metadata.storage_data or {}).values():
        needed[item.relative_path] = max(needed.get(item.relative_path, 0), item.offset + item.length)
    problems = {}
    for name, size in sorted(needed.items()):
        if name not in present:
            problems[name] = f"{name} is missing"
        elif present[name] < size:
            problems[name] = f"{name} has {present[name]} bytes instead of {size}"
    return problems


def beside(name: str, kind: str) -> str:
    """Name of what lies beside a checkpoint while it is replaced. Nothing of the checkpoint's own name matches it.

    Lightning takes every entry with "hpc_ckpt_" anywhere in its name for a checkpoint, and people search for "*.ckpt*".
    """
    readable = re.sub("[^0-9A-Za-z]+", "-", name)[:80].strip("-")
    return f".mfsdp-{kind}-{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
