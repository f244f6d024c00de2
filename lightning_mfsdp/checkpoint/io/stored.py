"""The contents of a checkpoint, without tensor data: sizes and dtypes are known, pieces are read on request.

A sharded directory yields `StoredTensor` and `StoredObject`, a single file plain tensors that are mapped into memory. Both come as
leaves by path: `("model", "head.weight")`, `("optimizer_0", "state", "head.weight", "exp_avg")`.
"""

from __future__ import annotations

import gc
import io
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_mfsdp.checkpoint.io.location import TABLE_OF_CONTENTS, Reader, strange_piece, where_of
from lightning_mfsdp.checkpoint.io.unpickling import CheckpointError, RefusedError, refusal, refused_class

__all__ = [
    "TABLE_OF_CONTENTS",
    "TRUSTING",
    "CheckpointError",
    "Leaves",
    "NestedPath",
    "StoredCheckpoint",
    "StoredObject",
    "StoredTensor",
    "TensorLeaf",
    "UnreadTensor",
    "first_line",
    "is_tensor",
    "size_bytes",
]

NestedPath = tuple[str | int, ...]
Leaves = dict[NestedPath, Any]

# How users of commands and their functions declare that they trust a checkpoint.
TRUSTING = "read it with --trust (trust=True)"


class UnreadTensor(ABC):
    """A tensor whose size and dtype are known before any of its data is read."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Of the whole tensor."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of its elements."""

    @property
    def pieces(self) -> int:
        """How many it was written in."""
        return 1


TensorLeaf = Tensor | UnreadTensor


def is_tensor(leaf: Any) -> TypeGuard[TensorLeaf]:
    """Whether a leaf is a tensor, read or not."""
    return isinstance(leaf, Tensor | UnreadTensor)


def size_bytes(leaf: TensorLeaf) -> int:
    """Of the whole tensor."""
    return leaf.shape.numel() * leaf.dtype.itemsize


class StoredCheckpoint:
    """A directory of torch.distributed.checkpoint. Opening it reads the table of contents only.

    Args:
        path: The directory.
        trust: Also read Python objects that `torch.load` refuses by default.

    Raises:
        CheckpointError: There is no table of contents, or it cannot be read.
    """

    def __init__(self, path: Path, *, trust: bool = False) -> None:
        self.path = path
        self.trust = trust
        self._reader = Reader(path)
        self._reader.trusted, self._reader.trusting = trust, TRUSTING
        try:
            self.metadata: Metadata = self._reader.read_metadata()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(
                f"{path}: the table of contents {TABLE_OF_CONTENTS} cannot be read ({type(error).__name__}: {error}). Use "
                "another checkpoint"
            ) from error

    @property
    def leaves(self) -> Leaves:
        """Everything in it, in the order of the state dict that was saved."""
        entries = self.metadata.state_dict_metadata
        paths = {key: path for key, path in (self.metadata.planner_data or {}).items() if key in entries}
        leaves: Leaves = {}
        for key in (*paths, *(key for key in entries if key not in paths)):
            entry = entries[key]
            path = tuple(paths.get(key, (key,)))
            if isinstance(entry, TensorStorageMetadata):
                leaves[path] = StoredTensor(self, key, entry)
            else:
                leaves[path] = StoredObject(self, key)
        return leaves

    def place(self, index: MetadataIndex) -> Any:
        """File (`relative_path`), `offset` and `length` of what was written under `index`, in bytes; `None` if nothing was."""
        return (self.metadata.storage_data or {}).get(index)

    def raw(self, index: MetadataIndex) -> bytes:
        """What one save wrote for a chunk of a tensor or for an object: a whole file of `torch.save`.

        Raises:
            CheckpointError: It is missing.
        """
        return self._reader.raw(index, self.metadata)

    def value(self, index: MetadataIndex, data: bytes) -> Any:
        """Decode what `raw` returned into a tensor or an object.

        Raises:
            CheckpointError: It cannot be decoded.
        """
        is_tensor = isinstance(self.metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata)
        try:
            with io.BytesIO(data) as file:
                loaded = torch.load(file, map_location="cpu", weights_only=is_tensor or not self.trust)
        except pickle.UnpicklingError as error:
            if is_tensor:
                raise RefusedError(strange_piece(self.path, index, error)) from error
            raise RefusedError(refusal(f"{self.path}: {where_of(index)}", refused_class(error), TRUSTING)) from error
        except (RuntimeError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{self.path}: {where_of(index)} does not load ({type(error).__name__}: {first_line(error)}). Copy the checkpoint again, "
                "or use another"
            ) from error
        # torch.load leaves a cycle of functions behind, which keeps the tensor in memory until the next collection of young garbage.
        gc.collect(1)
        return loaded


@dataclass(frozen=True, eq=False)
class StoredTensor(UnreadTensor):
    """A tensor in a sharded checkpoint, in chunks that were written one by one.

    `torch.distributed.checkpoint` saves it like any tensor, through a planner that reads the chunks (`convert.py`).
    """

    checkpoint: StoredCheckpoint
    key: str
    entry: TensorStorageMetadata

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.entry.size

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.entry.properties.dtype

    @property
    def pieces(self) -> int:
        """How many chunks there are."""
        return len(self.chunks)

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where each piece is in the whole tensor."""
        return self.entry.chunks

    def index(self, chunk: ChunkStorageMetadata) -> MetadataIndex:
        """The index under which the checkpoint stores a chunk."""
        return MetadataIndex(self.key, chunk.offsets)

    def read(self, offsets: torch.Size) -> Tensor:
        """The chunk at these offsets, `[*chunk.sizes]`, on the CPU.

        Raises:
            CheckpointError: It is missing, damaged or of another size or dtype than the table of contents specifies.
        """
        index = MetadataIndex(self.key, offsets)
        return self.checked(index, self.checkpoint.value(index, self.checkpoint.raw(index)))

    def checked(self, index: MetadataIndex, value: Any) -> Tensor:
        """`value`, if it matches the table of contents for that chunk."""
        expected = next(tuple(chunk.sizes) for chunk in self.chunks if torch.Size(chunk.offsets) == index.offset)
        found = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
        if not isinstance(value, Tensor) or found != (expected, self.dtype):
            raise CheckpointError(
                f"{self.checkpoint.path}: {where_of(index)} holds {found}, expected {(expected, self.dtype)} by the table of contents. "
                "Copy the "
                "checkpoint again, or use another"
            )
        return value

    def read_into(self, target: Tensor) -> Iterator[int]:
        """Copy all chunks into `target`, `[*shape]`; yields the bytes of each once it is copied."""
        for chunk in self.chunks:
            piece = self.read(torch.Size(chunk.offsets))
            here = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            target[here].copy_(piece)
            yield piece.nbytes

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for chunk in self.chunks
        ]


@dataclass(frozen=True, eq=False)
class StoredObject:
    """A value in a sharded checkpoint that is not a tensor."""

    checkpoint: StoredCheckpoint
    key: str

    @property
    def index(self) -> MetadataIndex:
        """The index under which the checkpoint stores it."""
        return MetadataIndex(self.key)

    def read(self) -> Any:
        """The value.

        Raises:
            CheckpointError: It is missing or damaged, or needs trust.
        """
        return self.checkpoint.value(self.index, self.checkpoint.raw(self.index))


def first_line(error: BaseException) -> str:
    """Of its message."""
    return (str(error).splitlines() or [""])[0]
