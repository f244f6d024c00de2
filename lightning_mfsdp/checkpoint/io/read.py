"""Reading tensors: the reader and planner of torch.distributed.checkpoint, and how much of a load is done, in bytes of tensors.

A reader is made by a `Location`, or from the path of a directory.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from lightning_mfsdp.base.progress import ByteCount, Progress
from lightning_mfsdp.checkpoint.io.trust import (
    WEIGHTS_ONLY,
    CheckpointError,
    RefusedError,
    read_table,
    refusal,
    refused_class,
)

__all__ = [
    "TABLE_OF_CONTENTS",
    "CountingLoadPlanner",
    "Reader",
    "file_problems",
    "name_of",
    "sizes_needed",
    "strange_piece",
]

TABLE_OF_CONTENTS = ".metadata"
_READ_THREADS = 4


class Reader(FileSystemReader):
    """PyTorch's reader, with several threads: each reads, unpacks and copies to the device some of the tensors.

    Nothing that it reads runs code unless `trusted`.

    Attributes:
        table: The table of contents, if it was read already.
        trusted: Values may be of any class.
        trusting: The words for `trusted` in messages.
    """

    table: Metadata | None = None
    trusted = False
    trusting = WEIGHTS_ONLY

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.table is not None:
            return self.table
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
        item = ((metadata or self.read_metadata()).storage_data or {}).get(index)
        if item is None:
            raise CheckpointError(
                f"{self.path}: the table of contents names no place for {name_of(index)}; it is damaged. Copy the checkpoint again, or "
                "use another"
            )
        if item.transform_descriptors:
            raise CheckpointError(
                f"{self.path}: {name_of(index)} was written through the extensions {list(item.transform_descriptors)}, which cannot be "
                "undone here; save it without them"
            )
        try:
            with self.fs.create_stream(self.fs.concat_path(self.path, item.relative_path), "rb") as stream:
                stream.seek(item.offset)
                data: bytes = stream.read(item.length)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path}: {item.relative_path}, which has {name_of(index)}, is missing. Copy it from where it was written, or use "
                "another checkpoint; `mfsdp checkpoint verify` lists all that are missing"
            ) from error
        if len(data) != item.length:
            raise CheckpointError(
                f"{self.path}: {item.relative_path} ends {item.length - len(data)} bytes too early for {name_of(index)}. Copy it again "
                "from where it was written, or use another checkpoint"
            )
        return data


class CountingLoadPlanner(DefaultLoadPlanner):
    """Reports each tensor that was read to `progress`. Other objects are loaded while ranks plan: if one is refused, nothing is read.

    Args:
        reader: Of the same checkpoint.
        progress: Called with the bytes that this rank has read, and the total.
    """

    def __init__(self, reader: Reader, progress: Progress | None = None) -> None:
        super().__init__()
        self._reader = reader
        self._progress = progress
        self._read = ByteCount(None, 0)
        self._values: dict[str, Any] = {}

    @override
    def create_local_plan(self) -> LoadPlan:
        plan: LoadPlan = super().create_local_plan()
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._values[item.dest_index.fqn] = self._value(item.storage_index)
        return plan

    def _value(self, index: MetadataIndex) -> Any:
        with io.BytesIO(self._reader.raw(index, self.metadata)) as file:
            try:
                return torch.load(file, map_location="cpu", weights_only=not self._reader.trusted)
            except pickle.UnpicklingError as error:
                what = f"{self._reader.path}: {index.fqn}"
                raise RefusedError(refusal(what, refused_class(error), WEIGHTS_ONLY)) from error

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        *parents, last = self.mappings[name]
        holder: Any = self.original_state_dict
        for key in parents:
            holder = holder[key]
        holder[last] = self._values[name]

    @override
    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        self._read = ByteCount(self._progress, sum(self._bytes_to_read(item) for item in plan.items))
        self._read.add(0)
        return plan

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._read.add(self._bytes_to_read(read_item))

    def _bytes_to_read(self, item: ReadItem) -> int:
        assert self.metadata is not None
        index: MetadataIndex = item.dest_index
        properties = getattr(self.metadata.state_dict_metadata[index.fqn], "properties", None)
        return math.prod(item.lengths) * properties.dtype.itemsize if properties is not None else 0


def sizes_needed(metadata: Metadata) -> dict[str, int]:
    """The files that a table of contents names, and how many bytes each has at least."""
    needed: dict[str, int] = {}
    for item in (metadata.storage_data or {}).values():
        needed[item.relative_path] = max(needed.get(item.relative_path, 0), item.offset + item.length)
    return needed


def file_problems(present: Mapping[str, int], needed: Mapping[str, int]) -> dict[str, str]:
    """Files that are missing or too short: a sentence for each, by name.

    Args:
        present: Sizes of the existing files.
        needed: Sizes that they have at least.
    """
    problems = {}
    for name, size in sorted(needed.items()):
        if name not in present:
            problems[name] = f"{name} is missing"
        elif present[name] < size:
            problems[name] = f"{name} has {present[name]} bytes instead of {size}"
    return problems


def strange_piece(place: object, index: MetadataIndex, error: BaseException) -> str:
    """The message for an object of another class in place of a tensor."""
    return (
        f"{place}: {name_of(index)} is a tensor, and a piece of it holds {refused_class(error)}, which no program writes there; do not "
        "use this checkpoint"
    )


def name_of(index: MetadataIndex) -> str:
    """What an index refers to, for messages: a name, and of a chunk its offsets."""
    return index.fqn if not index.offset else f"{index.fqn} at {tuple(index.offset)}"
