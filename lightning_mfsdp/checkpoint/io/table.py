"""Table: the table of contents of a sharded checkpoint, of which each rank has what it reads.

`.metadata` has some Python objects for every chunk: of 1,000 ranks that saved 80 units and Adam's state, for 240,000 chunks. One rank
reads it. The others get its outline, whose size is that of the model, and ask for the chunks of what they read.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_mfsdp.base import compat

__all__ = ["Chunk", "Entry", "Spans", "Table"]

Chunk: TypeAlias = tuple[
    Sequence[int], Sequence[int], str, int, int, Any
]  # offsets, sizes, file, first byte, length, extensions
Spans: TypeAlias = "list[tuple[int, int]] | None"  # begin and end in dim 0; `None`: all of it

_NOWHERE = -1  # the number of no file
_FEW = 4  # chunks, which outlines have too: of objects, and of tensors that are not divided among ranks


class Entry(NamedTuple):
    """What a table has of a flat name. Thousands of them go to each rank, so they are tuples.

    Attributes:
        path: Where it lies in the dictionary that was saved; `None` if that is not known.
        size: Shape of the tensor; `None` of another object.
        properties: Of the tensor.
        longest: Of its chunks, in dim 0.
        places: Number of the file, first byte and length of each chunk, in the order of `bounds`; `None` in outlines.
        bounds: Offset and size of each chunk, in every dim, ordered by offset; `None` in outlines.
        begins: Offset of each chunk in dim 0, which is looked for; `None` in outlines.
    """

    path: tuple[Any, ...] | None
    size: torch.Size | None
    properties: TensorProperties | None
    longest: int
    places: array[int] | None
    bounds: array[int] | None
    begins: array[int] | None


@dataclass(frozen=True)
class Table:
    """A table of contents.

    Attributes:
        entries: By flat name, in the order of the save.
        files: Names of files, by number.
        transforms: Extensions through which chunks were written, by name and number of the chunk.
    """

    entries: dict[str, Entry]
    files: dict[int, str]
    transforms: dict[tuple[str, int], Any]

    @classmethod
    def of(cls, metadata: Metadata) -> Table:
        """From the objects of `torch.distributed.checkpoint`."""
        entries: dict[str, Entry] = {}
        files: dict[str, int] = {}
        transforms: dict[tuple[str, int], Any] = {}
        known_properties: list[TensorProperties] = []  # equal ones once, so that they are pickled once
        paths, stored = metadata.planner_data or {}, metadata.storage_data or {}
        written = metadata.state_dict_metadata  # PyTorch has paths of tensors of which no rank wrote anything, too
        for name in dict.fromkeys([*(name for name in paths if name in written), *written]):
            entry = written[name]
            places, bounds = array("q"), array("q")
            size = properties = None
            indices, longest = [MetadataIndex(name)], 0
            if isinstance(entry, TensorStorageMetadata):
                size = entry.size
                if entry.properties not in known_properties:
                    known_properties.append(entry.properties)
                properties = known_properties[known_properties.index(entry.properties)]
                longest = max((chunk.sizes[0] for chunk in entry.chunks if chunk.sizes), default=0)
                chunks = sorted(entry.chunks, key=_offsets_of)
                for chunk in chunks:
                    bounds.extend(chunk.offsets)
                    bounds.extend(chunk.sizes)
                indices = [MetadataIndex(name, chunk.offsets) for chunk in chunks]
            for number, index in enumerate(indices):
                info = stored.get(index)
                if info is None:
                    places.extend((_NOWHERE, 0, 0))
                    continue
                if getattr(info, "transform_descriptors", None):
                    transforms[name, number] = info.transform_descriptors
                places.extend((files.setdefault(str(info.relative_path), len(files)), info.offset, info.length))
            begins = bounds[:: 2 * len(size)] if size else array("q")
            entries[name] = Entry(paths.get(name), size, properties, longest, places, bounds, begins)
        return cls(entries, {number: name for name, number in files.items()}, transforms)

    def outline(self) -> Table:
        """The same without the chunks of tensors that have many."""
        entries: dict[str, Entry] = {}
        files: dict[int, str] = {}
        for name, entry in self.entries.items():
            assert entry.places is not None, "this is no outline"
            if len(entry.places) > 3 * _FEW:
                entries[name] = entry._replace(places=None, bounds=None, begins=None)
            else:
                entries[name] = entry
                files.update({file: self.files[file] for file in entry.places[::3] if file != _NOWHERE})
        few = {key: value for key, value in self.transforms.items() if entries[key[0]].places is not None}
        return Table(entries, files, few)

    def sizes_needed(self) -> dict[str, int]:
        """The files, and how many bytes each has at least."""
        sizes = dict.fromkeys(self.files, 0)
        for entry in self.entries.values():
            places = iter(entry.places or ())
            for file, offset, length in zip(places, places, places, strict=True):
                if file != _NOWHERE:
                    sizes[file] = max(sizes[file], offset + length)
        return {self.files[file]: size for file, size in sizes.items()}

    def lacks(self, targets: Mapping[str, Any]) -> dict[str, Spans]:
        """What must be asked for to read into some targets: names, and where in dim 0 their rows are.

        Args:
            targets: By flat name: tensors, or what describes chunks of one as DTensors do; anything else of other objects.
        """
        known = ((name, target) for name, target in targets.items() if name in self.entries)
        return {name: _spans(target) for name, target in known if self.entries[name].places is None}

    def chunks(self, wanted: Mapping[str, Spans]) -> dict[str, list[Chunk]]:
        """Chunks with rows in some spans, and perhaps others, by name."""
        return {name: [self._chunk(name, number) for number in self._numbers(name, wanted[name])] for name in wanted}

    def part(self, targets: Mapping[str, Any], fetched: Mapping[str, list[Chunk]]) -> Metadata:
        """The objects of `torch.distributed.checkpoint` for what is read into some targets.

        Args:
            targets: As for `lacks`.
            fetched: What was asked for because of `lacks`.

        Raises:
            KeyError: No such name.
        """
        entries: dict[str, Any] = {}
        stored: dict[MetadataIndex, Any] = {}
        for name, target in targets.items():
            entry = self.entries[name]
            chunks = fetched[name] if name in fetched else self.chunks({name: _spans(target)})[name]
            described = []
            for offsets, sizes, file, at, length, transforms in chunks:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                described.append(chunk)
                if file:
                    index = MetadataIndex(name) if entry.size is None else MetadataIndex(name, chunk.offsets)
                    stored[index] = compat.storage_info(file, at, length, transforms)
            if entry.size is None or entry.properties is None:
                entries[name] = BytesStorageMetadata()
            else:
                entries[name] = TensorStorageMetadata(properties=entry.properties, size=entry.size, chunks=described)
        paths = {name: path for name in targets if (path := self.entries[name].path) is not None}
        return Metadata(entries, planner_data=paths, storage_data=stored)

    def _chunk(self, name: str, number: int) -> Chunk:
        entry = self.entries[name]
        assert entry.places is not None, "it was asked for"
        assert entry.bounds is not None
        file, at, length = entry.places[3 * number : 3 * number + 3]
        num_dims = len(entry.size or ())
        begin = 2 * num_dims * number
        bounds = entry.bounds[begin : begin + 2 * num_dims].tolist()
        transforms = self.transforms.get((name, number))
        return bounds[:num_dims], bounds[num_dims:], self.files.get(file, ""), at, length, transforms

    def _numbers(self, name: str, spans: Spans) -> Sequence[int]:
        """Of chunks with rows in some spans of dim 0."""
        entry = self.entries[name]
        if spans is None or not entry.begins:
            return range(len(entry.places or ()) // 3)
        if len(spans) == 1:
            return self._numbers_in(entry.begins, entry.longest, *spans[0])
        numbers = (number for span in spans for number in self._numbers_in(entry.begins, entry.longest, *span))
        return list(dict.fromkeys(numbers))

    @staticmethod
    def _numbers_in(begins: array[int], longest: int, begin: int, end: int) -> range:
        return range(bisect_right(begins, begin - longest), bisect_left(begins, end))


def _spans(target: Any) -> Spans:
    described = getattr(target, "__create_chunk_list__", None)
    if described is None:
        return None
    boxes = described()
    if any(not box.offsets for box in boxes):  # a single number
        return None
    return [(box.offsets[0], box.offsets[0] + box.sizes[0]) for box in boxes]


def _offsets_of(chunk: ChunkStorageMetadata) -> torch.Size:
    return chunk.offsets
