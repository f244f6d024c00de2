"""Directory: a sharded checkpoint that was found to be complete, and what is read from it by its flat names, in place or as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan

from lightning_mfsdp.base.progress import Progress
from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.ranks import FailedRanksError, Ranks, reason_of
from lightning_mfsdp.checkpoint.io.read import CountingLoadPlanner, file_problems
from lightning_mfsdp.checkpoint.io.table import Table
from lightning_mfsdp.checkpoint.io.trust import RefusedError, is_trusted, not_read

__all__ = ["Directory"]


@dataclass(frozen=True, eq=False)
class Directory:
    """An opened directory of torch.distributed.checkpoint.

    Attributes:
        location: Of the directory.
        table: Its table of contents.
        trusted: Values may be of any class.
    """

    location: Location
    table: Table
    trusted: bool

    @classmethod
    def open(cls, location: Location, ranks: Ranks, *, weights_only: bool | None) -> Directory:
        """Check the files of a sharded checkpoint, before anything is read into a model. Collective.

        Rank 0 reads the table of contents for all. On every host one rank lists the files.

        Args:
            location: Of the checkpoint.
            ranks: All of them.
            weights_only: As for `torch.load`: only `False` loads classes that were not allowed.

        Raises:
            RuntimeError: On all ranks, if the table of contents cannot be read, or files that it names are missing or too short; all of
                them are listed.
            RefusedError: On all ranks, if it holds classes that were not allowed.
        """
        opened = ranks.first(f"opening {location}", lambda: cls._read_table(location, weights_only=weights_only))
        looks = ranks.is_first_on_host()
        problem: str | RefusedError = opened if not isinstance(opened, Table) else ""
        if isinstance(problem, RefusedError):
            raise RefusedError(not_read(location, problem))
        if looks and isinstance(opened, Table):
            problem = _listed(location, opened)
        for rank, text in ranks.problems(problem if looks else "").items():
            raise RuntimeError(
                f"{location} is incomplete or damaged, so nothing was read: rank {rank} finds that {text}. Use another checkpoint, or "
                "copy files from where they were written: every node must see all of them"
            )
        assert isinstance(opened, Table), "no problem was found"
        return cls(location, opened, is_trusted(weights_only))

    @classmethod
    def look_over(cls, location: Location, *, weights_only: bool | None) -> tuple[Directory | None, str | RefusedError]:
        """The directory as this rank sees it, and what is wrong with its files; empty if nothing."""
        opened = cls._read_table(location, weights_only=weights_only)
        if not isinstance(opened, Table):
            return None, opened
        return cls(location, opened, is_trusted(weights_only)), _listed(location, opened)

    @staticmethod
    def _read_table(location: Location, *, weights_only: bool | None) -> Table | str | RefusedError:
        """The table of contents, or why it cannot be read."""
        try:
            return Table.of(location.reader(trusted=is_trusted(weights_only)).read_metadata())
        except RefusedError as error:
            return error
        except Exception as error:  # a damaged pickle may raise anything
            return f".metadata cannot be read ({type(error).__name__}: {error})"

    def top_keys(self) -> list[str]:
        """Of the dictionary that `torch.distributed.checkpoint` was given."""
        return list(dict.fromkeys(str(path[0]) for path in self._paths().values()))

    def paths(self, key: str) -> dict[str, tuple[Any, ...]]:
        """Flat names of everything under `key`, and where each lies there."""
        return {name: path[1:] for name, path in self._paths().items() if path[0] == key and len(path) > 1}

    def _paths(self) -> dict[str, tuple[Any, ...]]:
        return {name: entry.path for name, entry in self.table.entries.items() if entry.path is not None}

    def entry(self, name: str) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and dtype of the tensor of a flat name; `None` for other objects."""
        entry = self.table.entries[name]
        return None if entry.size is None or entry.properties is None else (entry.size, entry.properties.dtype)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Read objects and whole tensors, on this rank alone.

        Raises:
            RuntimeError: It is damaged.
            RefusedError: An object is of a class that was not allowed.
        """
        values: dict[str, Any] = {}
        for name in names:
            entry = self.entry(name)
            values[name] = None if entry is None else torch.empty(entry[0], dtype=entry[1], device="cpu")
        if values:
            self._read(values, Ranks.alone())
        return values

    def read_rows(self, name: str, target: Tensor) -> None:
        """Read what a `DcpShard` or `DTensor` describes of a tensor, on this rank alone."""
        self._read({name: target}, Ranks.alone())

    def read(self, targets: dict[str, Any], progress: Progress | None) -> None:
        """Read into tensors of a model, all in one go. All ranks call it.

        Args:
            targets: By flat name.
            progress: Called for every tensor that was read.

        Raises:
            RuntimeError: On all ranks, if it fails on any; it is undefined then what was read.
            RefusedError: On all ranks, if a value is of a class that was not allowed; then nothing was read.
        """
        self._read(targets, Ranks(), progress)

    def _read(self, targets: dict[str, Any], ranks: Ranks, progress: Progress | None = None) -> None:
        reader = self.location.reader(trusted=self.trusted)
        planner = CountingLoadPlanner(reader, progress)

        def plan() -> LoadPlan:
            metadata = reader.table = self.table.part(targets)
            planner.set_up_planner(targets, metadata, is_coordinator=True)
            reader.set_up_storage_reader(metadata, is_coordinator=True)
            return reader.prepare_local_plan(planner.create_local_plan())

        try:
            own = ranks.together(plan)
            ranks.together(lambda: reader.read_data(planner.finish_plan(own), planner).wait())
        except FailedRanksError as error:
            refused = [text for kind, text in error.failures.values() if kind == RefusedError.__name__]
            if refused:
                raise RefusedError(not_read(self.location, refused[0])) from error
            if ranks.size == 1:
                raise RuntimeError(
                    f"reading {self.location} failed, and nothing was changed: {reason_of(error)}. Use another one"
                ) from error
            raise RuntimeError(
                f"reading {self.location} failed half-way, so the model is no longer what it was: {reason_of(error)}. Use another "
                "checkpoint"
            ) from error


def _listed(location: Location, table: Table) -> str:
    """What is wrong with the files, as this rank sees them; empty if nothing."""
    problems = list(file_problems(location.sizes(), table.sizes_needed()).values())
    return "; ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
