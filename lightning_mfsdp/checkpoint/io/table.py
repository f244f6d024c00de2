"""Table: the table of contents of a sharded checkpoint in a few arrays, of which each rank makes what it reads.

`.metadata` has some Python objects for every chunk: of 1,000 ranks that saved 80 units and Adam's state, for 240,000 chunks. One rank
reads it. The others get this, whose number of objects is that of the tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_mfsdp.base import compat

__all__ = ["Entry", "Table"]

_NOWHERE = -1  # the number of no file


@dataclass(frozen=True)
class Entry:
    """What a table has of a flat name.

    Attributes:
        path: Where it lies in the dictionary that was saved; `None` if that is not known.
        size: Shape of the tensor; `None` of another object.
        properties: Of the tensor.
        chunks: Which rows of the arrays are its chunks.
        bounds_at: Where offset and size of its first chunk begin in their array.
    """

    path: tuple[Any, ...] | None
    size: torch.Size | None
    properties: TensorProperties | None
    chunks: range
    bounds_at: int


@dataclass(frozen=True)
class Table:
    """A table of contents.

    Attributes:
        entries: By flat name, in the order of the save.
        files: Names of files.
        places: Number of the file, first byte and length of each chunk, int64, `[chunks, 3]`.
        bounds: Offset and size of each chunk of a tensor, in every dim, int64, one after the other.
        transforms: Extensions through which some chunks were written, by row.
    """

    entries: dict[str, Entry]
    files: list[str]
    places: Tensor
    bounds: Tensor
    transforms: dict[int, Any]

    @classmethod
    def of(cls, metadata: Metadata) -> Table:
        """From the objects of `torch.distributed.checkpoint`."""
        entries: dict[str, Entry] = {}
        files: dict[str, int] = {}
        places, bounds = array("q"), array("q")
        transforms: dict[int, Any] = {}
        paths, stored = metadata.planner_data or {}, metadata.storage_data or {}

        def add(index: MetadataIndex) -> None:
            info = stored.get(index)
            if info is None:
                places.extend((_NOWHERE, 0, 0))
                return
            if getattr(info, "transform_descriptors", None):
                transforms[len(places) // 3] = info.transform_descriptors
            places.extend((files.setdefault(str(info.relative_path), len(files)), info.offset, info.length))

        written = metadata.state_dict_metadata  # PyTorch has paths of tensors of which no rank wrote anything, too
        for name in dict.fromkeys([*(name for name in paths if name in written), *written]):
            entry = written[name]
            first, bounds_at = len(places) // 3, len(bounds)
            size = properties = None
            if isinstance(entry, TensorStorageMetadata):
                size, properties = entry.size, entry.properties
                for chunk in entry.chunks:
                    bounds.extend(chunk.offsets)
                    bounds.extend(chunk.sizes)
                    add(MetadataIndex(name, chunk.offsets))
            else:
                add(MetadataIndex(name))
            entries[name] = Entry(paths.get(name), size, properties, range(first, len(places) // 3), bounds_at)
        return cls(entries, list(files), _tensor(places).view(-1, 3), _tensor(bounds), transforms)

    def sizes_needed(self) -> dict[str, int]:
        """The files, and how many bytes each has at least."""
        placed = self.places[self.places[:, 0] != _NOWHERE]
        sizes = torch.zeros(len(self.files), dtype=torch.int64)
        sizes.scatter_reduce_(0, placed[:, 0], placed[:, 1] + placed[:, 2], "amax")
        return dict(zip(self.files, sizes.tolist(), strict=True))

    def part(self, targets: Mapping[str, Any]) -> Metadata:
        """The objects for what is read into some targets: of a tensor, those chunks that have elements of its target.

        Args:
            targets: By flat name: tensors, or what describes chunks of one as DTensors do; anything else of other objects.

        Raises:
            KeyError: No such name.
        """
        entries: dict[str, Any] = {}
        stored: dict[MetadataIndex, Any] = {}
        for name, target in targets.items():
            entry = self.entries[name]
            if entry.size is None or entry.properties is None:
                entries[name] = BytesStorageMetadata()
                self._store(stored, MetadataIndex(name), entry.chunks.start)
                continue
            chunks = []
            bounds = self._bounds(entry)
            rows = self._rows_in(bounds, target)
            for row, (offsets, sizes) in zip(rows, bounds[rows].tolist(), strict=True):
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                chunks.append(chunk)
                self._store(stored, MetadataIndex(name, chunk.offsets), entry.chunks[row])
            entries[name] = TensorStorageMetadata(properties=entry.properties, size=entry.size, chunks=chunks)
        paths = {name: path for name in targets if (path := self.entries[name].path) is not None}
        return Metadata(entries, planner_data=paths, storage_data=stored)

    def _bounds(self, entry: Entry) -> Tensor:
        """Offsets and sizes of its chunks, `[chunks, 2, dims]`."""
        assert entry.size is not None, "it is a tensor"
        count, num_dims = len(entry.chunks), len(entry.size)
        return self.bounds[entry.bounds_at : entry.bounds_at + 2 * count * num_dims].view(count, 2, num_dims)

    def _rows_in(self, bounds: Tensor, target: Any) -> list[int]:
        """Which of some chunks overlap those of a target."""
        described = getattr(target, "__create_chunk_list__", None)
        if described is None:
            return list(range(len(bounds)))
        begins, ends = bounds[:, 0], bounds.sum(1)
        overlap = torch.zeros(len(bounds), dtype=torch.bool)
        for box in described():
            begin = torch.tensor(box.offsets, dtype=torch.int64)
            end = begin + torch.tensor(box.sizes, dtype=torch.int64)
            overlap |= ((begins < end) & (ends > begin)).all(1)
        rows: list[int] = overlap.nonzero()[:, 0].tolist()
        return rows

    def _store(self, stored: dict[MetadataIndex, Any], index: MetadataIndex, row: int) -> None:
        file, offset, length = self.places[row].tolist()
        if file != _NOWHERE:
            stored[index] = compat.storage_info(self.files[file], offset, length, self.transforms.get(row))


def _tensor(numbers: array[int]) -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)
