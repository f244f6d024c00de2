"""Directory: a sharded checkpoint that was found to be complete, and what is read from it by its flat names, in place or as values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from lightning_mfsdp.base.progress import Progress
from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.ranks import Ranks, reason_of
from lightning_mfsdp.checkpoint.io.read import CountingLoadPlanner, file_problems
from lightning_mfsdp.checkpoint.io.trust import RefusedError, is_trusted, not_read

__all__ = ["Directory"]


@dataclass(frozen=True, eq=False)
class Directory:
    """An opened directory of torch.distributed.checkpoint.

    Attributes:
        location: Of the directory.
        metadata: Its table of contents.
        trusted: Values may be of any class.
    """

    location: Location
    metadata: Metadata
    trusted: bool

    @classmethod
    def open(cls, location: Location, ranks: Ranks, *, weights_only: bool | None) -> Directory:
        """Check the files of a sharded checkpoint, before anything is read into a model. Collective.

        Args:
            location: Of the checkpoint.
            ranks: All of them.
            weights_only: As for `torch.load`: only `False` loads classes that were not allowed.

        Raises:
            RuntimeError: On all ranks, if on any the table of contents cannot be read, or files that it names are missing or too short; all
                of them are listed.
            RefusedError: On all ranks, if on any it holds classes that were not allowed.
        """
        directory, problem = cls.look_over(location, weights_only=weights_only)
        for rank, (text, is_refused) in enumerate(ranks.gather((str(problem), isinstance(problem, RefusedError)))):
            if is_refused:
                raise RefusedError(not_read(location, text))
            if text:
                raise RuntimeError(
                    f"{location} is incomplete or damaged, so nothing was read: rank {rank} finds that {text}. Use another checkpoint, or "
                    "copy files from where they were written: every node must see all of them"
                )
        assert directory is not None, "no problem was found"
        return directory

    @classmethod
    def look_over(cls, location: Location, *, weights_only: bool | None) -> tuple[Directory | None, str | RefusedError]:
        """The directory as this rank sees it, and what is wrong with its files; empty if nothing."""
        trusted = is_trusted(weights_only)
        try:
            metadata: Metadata = location.reader(trusted=trusted).read_metadata()
        except RefusedError as error:
            return None, error
        except Exception as error:  # a damaged pickle may raise anything
            return None, f".metadata cannot be read ({type(error).__name__}: {error})"
        problems = list(file_problems(location.sizes(), metadata).values())
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        return cls(location, metadata, trusted), "; ".join(problems[:8]) + more

    def top_keys(self) -> list[str]:
        """Of the dictionary that `torch.distributed.checkpoint` was given."""
        return list(dict.fromkeys(str(path[0]) for path in self._paths().values()))

    def paths(self, key: str) -> dict[str, tuple[Any, ...]]:
        """Flat names of everything under `key`, and where each lies there."""
        return {name: path[1:] for name, path in self._paths().items() if path[0] == key and len(path) > 1}

    def _paths(self) -> dict[str, tuple[Any, ...]]:
        written = self.metadata.state_dict_metadata
        # PyTorch lists tensors of which no rank wrote anything, too.
        return {name: path for name, path in (self.metadata.planner_data or {}).items() if name in written}

    def entry(self, name: str) -> TensorStorageMetadata | None:
        """Shape and dtype of the tensor of a flat name; `None` for other objects."""
        entry = self.metadata.state_dict_metadata[name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Read objects and whole tensors, on this rank alone.

        Raises:
            RuntimeError: It is damaged.
            RefusedError: An object is of a class that was not allowed.
        """
        values: dict[str, Any] = {}
        for name in names:
            entry = self.entry(name)
            values[name] = (
                None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            )
        if values:
            self._read(values, alone=True)
        return values

    def read_rows(self, name: str, target: Tensor) -> None:
        """Read what a `DcpShard` or `DTensor` describes of a tensor, on this rank alone."""
        self._read({name: target}, alone=True)

    def read(self, targets: dict[str, Any], progress: Progress | None) -> None:
        """Read into tensors of a model, all in one go. All ranks call it.

        Args:
            targets: By flat name.
            progress: Called for every tensor that was read.

        Raises:
            RuntimeError: On all ranks, if it fails on any; it is undefined then what was read.
            RefusedError: On all ranks, if a value is of a class that was not allowed; then nothing was read.
        """
        self._read(targets, progress)

    def _read(self, targets: dict[str, Any], progress: Progress | None = None, *, alone: bool = False) -> None:
        reader = self.location.reader(self.metadata, trusted=self.trusted)
        planner = CountingLoadPlanner(reader, progress)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
                dcp_load(targets, storage_reader=reader, planner=planner, no_dist=alone)
        except CheckpointException as error:
            refused = [cause for cause, _ in error.failures.values() if isinstance(cause, RefusedError)]
            if refused:
                raise RefusedError(not_read(self.location, refused[0])) from error
            if alone:
                raise RuntimeError(
                    f"reading {self.location} failed, and nothing was changed: {reason_of(error)}. Use another one"
                ) from error
            raise RuntimeError(
                f"reading {self.location} failed half-way, so the model is no longer what it was: {reason_of(error)}. Use another "
                "checkpoint"
            ) from error
