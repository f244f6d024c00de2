"""Directory: a sharded checkpoint that was found to be complete, and what is read from it by its flat names, in place or as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from lightning_mfsdp.base.garbage import collector_paused
from lightning_mfsdp.base.progress import Progress
from lightning_mfsdp.checkpoint.io.location import Location
from lightning_mfsdp.checkpoint.io.ranks import FailedRanksError, Ranks, reason_of
from lightning_mfsdp.checkpoint.io.read import CountingLoadPlanner, Reader, file_problems
from lightning_mfsdp.checkpoint.io.table import Chunk, Table
from lightning_mfsdp.checkpoint.io.trust import RefusedError, is_trusted, not_read

__all__ = ["Directory"]


@dataclass(frozen=True, eq=False)
class Directory:
    """An opened directory of torch.distributed.checkpoint.

    Attributes:
        location: Of the directory.
        table: Its table of contents, of which one rank has all, and the others perhaps the outline.
        trusted: Values may be of any class.
    """

    location: Location
    table: Table
    trusted: bool

    @classmethod
    def open(cls, location: Location, ranks: Ranks, *, weights_only: bool | None) -> Directory:
        """Check the files of a sharded checkpoint, before anything is read into a model. Collective.

        Rank 0 reads the table of contents for all. On every host one rank looks at the files.

        Args:
            location: Of the checkpoint.
            ranks: All of them.
            weights_only: As for `torch.load`: only `False` loads classes that were not allowed.

        Raises:
            RuntimeError: On all ranks, if the table of contents cannot be read, or files that it names are missing or too short; all of
                them are listed.
            RefusedError: On all ranks, if it holds classes that were not allowed.
        """
        whole: Table | None = None

        def read() -> tuple[Table | None, str | RefusedError]:
            nonlocal whole
            whole, problem = cls._read_table(location, weights_only=weights_only)
            return None if whole is None else whole.outline(), problem

        outline, problem = ranks.first(f"opening {location}", read)
        if isinstance(problem, RefusedError):
            raise RefusedError(not_read(location, problem))
        looks = ranks.is_first_on_host()
        needed = ranks.share(whole.sizes_needed() if whole is not None else {}, wanted=looks)
        if needed is not None and not problem:
            problem = _listed(location, needed)
        for rank, text in ranks.problems(problem if looks else "").items():
            raise RuntimeError(
                f"{location} is incomplete or damaged, so nothing was read: rank {rank} finds that {text}. Use another checkpoint, or "
                "copy files from where they were written: every node must see all of them"
            )
        table = whole or outline
        assert table is not None, "no problem was found"
        return cls(location, table, is_trusted(weights_only))

    @classmethod
    def look_over(cls, location: Location, *, weights_only: bool | None) -> tuple[Directory | None, str | RefusedError]:
        """The directory as this rank sees it, and what is wrong with its files; empty if nothing."""
        table, problem = cls._read_table(location, weights_only=weights_only)
        if table is None:
            return None, problem
        return cls(location, table, is_trusted(weights_only)), _listed(location, table.sizes_needed())

    @staticmethod
    def _read_table(location: Location, *, weights_only: bool | None) -> tuple[Table | None, str | RefusedError]:
        """The whole table of contents, or why it cannot be read."""
        try:
            with collector_paused():
                return Table.of(location.reader(trusted=is_trusted(weights_only)).read_metadata()), ""
        except RefusedError as error:
            return None, error
        except Exception as error:  # a damaged pickle may raise anything
            return None, f".metadata cannot be read ({type(error).__name__}: {error})"

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

    def read_rows(self, name: str, target: Tensor, ranks: Ranks | None = None) -> None:
        """Read what a `DcpShard` or `DTensor` describes of a tensor, on this rank alone, or on all `ranks` for each what it passes."""
        self._read({name: target}, ranks or Ranks.alone())

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

    @cached_property
    def _whole_table(self) -> Table:
        """For what this rank reads alone, which is little: a program that computes with a tensor before it is read into shards."""
        table, problem = self._read_table(self.location, weights_only=not self.trusted)
        if table is None:
            raise RuntimeError(f"{self.location}: {problem}. It was read before; look at the storage")
        return table

    def fetched(self, targets: dict[str, Any], ranks: Ranks) -> dict[str, list[Chunk]]:
        """Where the parts of tensors lie that this rank reads, as far as its table lacks them. All ranks call it."""
        lacking = self.table.lacks(targets)
        if ranks.size == 1:
            return self._whole_table.chunks(lacking) if lacking else {}
        asked = ranks.to_first(lacking)
        return ranks.for_each(None if asked is None else list(map(self.table.chunks, asked)))

    def plan(
        self, targets: dict[str, Any], fetched: Mapping[str, list[Chunk]], reader: Reader, planner: LoadPlanner
    ) -> LoadPlan:
        """What this rank reads; values that are no tensors are read here."""
        metadata = reader.table = self.table.part(targets, fetched)
        planner.set_up_planner(targets, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        return reader.prepare_local_plan(planner.create_local_plan())

    def _read(self, targets: dict[str, Any], ranks: Ranks, progress: Progress | None = None) -> None:
        reader = self.location.reader(trusted=self.trusted)
        planner = CountingLoadPlanner(reader, progress)

        try:
            fetched = self.fetched(targets, ranks)
            own = ranks.together(lambda: self.plan(targets, fetched, reader, planner))
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


def _listed(location: Location, needed: Mapping[str, int]) -> str:
    """What is wrong with the files, as this rank sees them; empty if nothing."""
    problems = list(file_problems(location.sizes(), needed).values())
    return "; ".join(problems[:8]) + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
