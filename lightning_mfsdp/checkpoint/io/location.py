"""Where a checkpoint is stored. A save never touches an existing one before all ranks have written; then both are exchanged.

    begin       where to write; nothing of an older checkpoint is touched
    ...         all ranks write; `meta.pt` comes last and marks a directory as complete
    commit      the new checkpoint replaces the old one
    abandon     instead of that, after a failure
    recover     before a load: finish a commit that was interrupted

Local file systems move a directory in one operation (`local.py`); others, reached through fsspec, cannot (`remote.py`).
`saving` is the context around a save by all ranks. What a directory holds is read by `directory.py`.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from lightning_mfsdp.checkpoint.io.ranks import FailedRanksError, Ranks, reason_of, root_of
from lightning_mfsdp.checkpoint.io.read import Reader, file_problems, sizes_needed
from lightning_mfsdp.checkpoint.io.shared_folder import (
    NotSharedError,
    View,
    see_on_all,
    see_until,
    token_name,
    warn_if_late,
    writers_of,
)
from lightning_mfsdp.checkpoint.io.trust import WEIGHTS_ONLY, RefusedError, key_of, refusal, refused_class

__all__ = [
    "DEEPSPEED_TAG",
    "META_FILE",
    "MODULE_VERSIONS",
    "TIED_WEIGHTS",
    "Location",
    "Place",
    "beside",
    "looks_like_deepspeed",
]

# What a directory holds besides tensors. Rank 0 writes it last.
META_FILE = "meta.pt"
# In it, where there are any: further names of tied weights, and the name that each is the same as.
TIED_WEIGHTS = "tied_weights"
# In it: by the key of a model, versions of its modules by name, which `load_state_dict` of a newer program may look for.
MODULE_VERSIONS = "module_versions"
# What DeepSpeed writes beside the folders of its checkpoints: the name of the last one.
DEEPSPEED_TAG = "latest"


@dataclass(frozen=True)
class Place:
    """Where a save writes.

    Attributes:
        path: An empty directory, or a file that does not exist yet.
        token: Name of a file in the directory that all ranks look for, if there are several.
        views: What they saw, on rank 0.
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

    # -- by all ranks --------------------------------------------------------------------------------------------------

    def finish_interrupted_save(self, ranks: Ranks) -> None:
        """Before a load: `recover`, with a warning if there was something to do. All ranks call it."""
        taken = ranks.first(f"looking for {self}", self.recover)
        if taken and ranks.rank == 0:
            warnings.warn(
                f"{self}: a save was interrupted while it replaced this checkpoint; taking {taken}, which is complete",
                stacklevel=2,
            )

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

        place = self._seen_by_all(ranks.first(f"preparing to save {self}", prepare), ranks)
        try:
            yield place
        except Exception as error:  # raised on all ranks: the writers ensure that
            ranks.first(f"cleaning up after a failed save of {self}", self.abandon)
            raise RuntimeError(
                f"saving {self} failed, and an earlier checkpoint there is unchanged: {reason_of(error)}. "
                f"{_way_out(error)}, and save again"
            ) from error
        ranks.first(f"putting {self} in place", finish)
        warn_if_late(self, place.views, ranks)

    def _seen_by_all(self, place: Place, ranks: Ranks) -> Place:
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
        needed = sizes_needed(metadata)

        def look() -> str:
            nonlocal problems
            problems = file_problems(self.sizes(place.path), needed)
            return "; ".join(list(problems.values())[:3])

        problem, _ = see_until(look, ranks.sees_within.total_seconds())
        if problem:
            raise NotSharedError(
                f"rank 0 does not see in {place.path} what was written by {writers_of(problems, place.views) or 'itself'}: {problem}"
                f"{' ...' if len(problems) > 3 else ''}. Look at the storage of these nodes, or raise shared_folder_timeout if it shows "
                "files of others later"
            )

    def check_shared(self, ranks: Ranks) -> None:
        """Have every rank look for this folder, in which it will write checkpoints. Collective; rank 0 makes the folder.

        Raises:
            RuntimeError: On all ranks: rank 0 cannot write there.
            NotSharedError: On all ranks: one does not see it.
        """

        def prepare() -> tuple[str, str]:
            path, token = self.make_folder(), token_name()
            self.write(f"{path}/{token}", b"")
            return path, token

        path, token = ranks.first(f"preparing the checkpoints' folder {self}", prepare)
        try:
            views = see_on_all(path, token, lambda: self.names(path), ranks, what="training did not begin")
        finally:
            if ranks.rank == 0:
                self.delete(f"{path}/{token}")
        warn_if_late(self, views, ranks)

    # -- by one rank ---------------------------------------------------------------------------------------------------

    def read_file(self, name: str | None, weights_only: bool | None) -> dict[str, Any]:
        """`load`, with errors that say what is wrong and what to do.

        Raises:
            RuntimeError: It is damaged.
            RefusedError: It holds classes that `torch.load` refuses.
        """
        file = f"{self}{'' if name is None else '/' + name}"
        try:
            return self.load(name, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            refused = refused_class(error)
            with self.open(name) as stream:
                key = key_of(stream, refused)
            raise RefusedError(refusal(f"{file}: {key}" if key else file, refused, WEIGHTS_ONLY)) from error
        except (RuntimeError, EOFError, OSError) as error:
            raise RuntimeError(
                f"{file} cannot be read, so nothing was: {error}. It is damaged, or no checkpoint; use another"
            ) from error

    def no_checkpoint_error(self) -> ValueError:
        """The error if there is nothing that can be loaded."""
        return ValueError(
            f"{str(self)!r}: expected a directory with {META_FILE} in it, as this strategy writes, or a single Lightning checkpoint file; "
            + (self.other_directory() if self.is_directory() else self.missing())
        )

    def other_directory(self) -> str:
        """What a directory is that holds no finished save, for messages."""
        if looks_like_deepspeed(self.names(str(self))):
            return "DeepSpeed wrote this directory: make one of it that loads, with lightning-mfsdp checkpoint convert PATH OUTPUT"
        return "the directory has no such file"

    def foreign_content(self) -> IsADirectoryError:
        """What `begin` raises rather than write over a directory that is no checkpoint."""
        return IsADirectoryError(
            f"{self} is a directory with other content; a checkpoint would mix with it. Choose another path"
        )

    def write(self, path: str, content: bytes) -> None:
        """Write a whole file, durably."""
        with self.create(path) as file:
            file.write(content)


def looks_like_deepspeed(names: Iterable[str]) -> bool:
    """Whether a directory with these names in it is one that DeepSpeed saved into, or that of a tag in it."""
    return any(name == DEEPSPEED_TAG or name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names)


def beside(name: str, kind: str) -> str:
    """Name of what lies beside a checkpoint while it is replaced. Nothing of the checkpoint's own name matches it.

    Lightning takes every entry with "hpc_ckpt_" anywhere in its name for a checkpoint, and people search for "*.ckpt*".
    """
    readable = re.sub("[^0-9A-Za-z]+", "-", name)[:80].strip("-")
    return f".mfsdp-{kind}-{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _way_out(error: Exception) -> str:
    """What to do after a save that failed."""
    kinds = {kind for kind, _ in error.failures.values()} if isinstance(error, FailedRanksError) else set()
    if FileNotFoundError.__name__ in kinds or isinstance(root_of(error), FileNotFoundError):
        return "If another run saves into this folder, give each run one of its own; else correct what the error names"
    return "Make room on the disk, or correct what the error names"
