"""Writing tensors: the writer and planner of torch.distributed.checkpoint, and how much of a save is done, in bytes of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_mfsdp.base.progress import ByteCount, Progress
from lightning_mfsdp.checkpoint.io.ranks import root_of

__all__ = ["COPY_AHEAD_BYTES", "CountingFile", "CountingSavePlanner", "Writer", "item_bytes", "tensor_bytes"]

# How much is copied from a GPU while the previous copy is written.
COPY_AHEAD_BYTES = 64 * 2**20


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
            try:
                results += super().write_data(batch, planner).wait()
            except RuntimeError as error:
                root = root_of(error)
                if root is error:
                    raise
                raise root from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # torch 2.11 writes them into a copy, and what `save` returns names no file then.
        metadata.storage_data = {result.index: result.storage_data for written in results for result in written}
        super().finish(metadata, results)


def _batches(items: Sequence[WriteItem], most_bytes: int) -> list[list[WriteItem]]:
    """Consecutive items of at most so many bytes together, unless a single one has more."""
    batches: list[list[WriteItem]] = [[]]
    size = 0
    for item in items:
        added = item_bytes(item)
        if batches[-1] and size + added > most_bytes:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += added
    return batches


class CountingSavePlanner(DefaultSavePlanner):
    """Reports each tensor that is about to be written to `progress`."""

    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self._progress = progress
        self._written = ByteCount(None, 0)

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._written = ByteCount(self._progress, sum(map(item_bytes, plan.items)))
        self._written.add(0)
        return plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        self._written.add(item_bytes(write_item))
        return data


class CountingFile:
    """A file that reports to `progress` the bytes written to it, out of those of all tensors in `content`."""

    def __init__(self, file: IO[bytes], progress: Progress, content: Any) -> None:
        self._file, self._progress = file, progress
        self._done, self._total = 0, tensor_bytes(content)

    def write(self, data: Any) -> int:
        """As of a file."""
        count = self._file.write(data)
        self._done += count
        self._progress(min(self._done, self._total), self._total)
        return count

    def flush(self) -> None:
        """As of a file."""
        self._file.flush()


def tensor_bytes(content: Any) -> int:
    """Bytes of all tensors in nested dictionaries, lists and tuples."""
    if isinstance(content, Tensor):
        return content.nbytes
    if isinstance(content, dict):
        content = list(content.values())
    return sum(map(tensor_bytes, content)) if isinstance(content, (list, tuple)) else 0


def item_bytes(item: WriteItem) -> int:
    """Bytes of a tensor; other objects count as zero."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
