"""Progress of a save or load in bytes of tensors, from the planners of torch.distributed.checkpoint, which see every item."""

from __future__ import annotations

import io
import math
from typing import IO, Any, Protocol

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem
from typing_extensions import override

from lightning_mfsdp.base.progress import Progress
from lightning_mfsdp.checkpoint.io.unpickling import load_trusting

__all__ = ["CountingFile", "CountingReads", "LoadPlanner", "SavePlanner", "bytes_to_write"]

"""Called with the bytes this rank has written or read, and with the total."""


class SavePlanner(DefaultSavePlanner):
    """Reports each tensor that is about to be written to `progress`."""

    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self._progress = progress
        self._done = self._total = 0

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._total = sum(map(bytes_to_write, plan.items))
        self._advance(0)
        return plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        self._advance(bytes_to_write(write_item))
        return data

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None and self._total:
            self._progress(self._done, self._total)


class Raw(Protocol):
    """Reads bytes of a checkpoint."""

    trusted: bool
    path: Any

    def raw(self, index: MetadataIndex, metadata: Metadata | None = None) -> bytes:
        """What was written under `index`."""
        ...


class LoadPlanner(DefaultLoadPlanner):
    """Reports each tensor that was read to `progress`. Other objects are loaded while ranks plan: if one is refused, nothing is read.

    Args:
        reader: Of the same checkpoint.
        progress: As above.
    """

    def __init__(self, reader: Raw, progress: Progress | None = None) -> None:
        super().__init__()
        self._reader = reader
        self._progress = progress
        self._done = self._total = 0
        self._values: dict[str, Any] = {}

    @override
    def create_local_plan(self) -> LoadPlan:
        plan: LoadPlan = super().create_local_plan()
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                with io.BytesIO(self._reader.raw(item.storage_index, self.metadata)) as file:
                    what = f"{self._reader.path}: {name}"
                    self._values[item.dest_index.fqn] = load_trusting(file, what, trusted=self._reader.trusted)
        return plan

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
        self._total = sum(self._bytes_to_read(item) for item in plan.items)
        self._advance(0)
        return plan

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._advance(self._bytes_to_read(read_item))

    def _bytes_to_read(self, item: ReadItem) -> int:
        assert self.metadata is not None
        index: MetadataIndex = item.dest_index
        properties = getattr(self.metadata.state_dict_metadata[index.fqn], "properties", None)
        return math.prod(item.lengths) * properties.dtype.itemsize if properties is not None else 0

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None and self._total:
            self._progress(self._done, self._total)


class CountingFile:
    """A file that reports to `progress` the bytes written to it, out of those of all tensors in `content`."""

    def __init__(self, file: IO[bytes], progress: Progress, content: Any) -> None:
        self._file, self._progress = file, progress
        self._done, self._total = 0, _tensor_bytes(content)

    def write(self, data: Any) -> int:
        """As of a file."""
        count = self._file.write(data)
        self._done += count
        self._progress(min(self._done, self._total), self._total)
        return count

    def flush(self) -> None:
        """As of a file."""
        self._file.flush()


class CountingReads:
    """Reports to `progress`, if there is one, how much of `content` was loaded: the bytes of tensors of which this rank has its rows."""

    def __init__(self, progress: Progress | None, content: Any) -> None:
        self._progress = progress
        self._done, self._total = 0, _tensor_bytes(content)

    def took(self, part: Any) -> None:
        """A part of the content was read."""
        self._done += _tensor_bytes(part)
        if self._progress is not None and self._total:
            self._progress(self._done, self._total)


def _tensor_bytes(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.nbytes
    if isinstance(content, dict):
        content = list(content.values())
    return sum(map(_tensor_bytes, content)) if isinstance(content, (list, tuple)) else 0


def bytes_to_write(item: WriteItem) -> int:
    """Bytes of a tensor; other objects count as zero."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
