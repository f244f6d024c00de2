"""A checkpoint as one process sees it: leaves by path, without tensor data. Sizes and dtypes are known, pieces are read on request.

    ("model", "head.weight")                                  of a directory of torch.distributed.checkpoint: `StoredTensor`, `StoredObject`
    ("optimizer_0", "state", "head.weight", "exp_avg")        of a file of `torch.save`: tensors that are mapped into memory, and values

`opened.py` opens either, and what DeepSpeed wrote.
"""

from __future__ import annotations

import gc
import io
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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

from lightning_mfsdp.checkpoint.io.location import looks_like_deepspeed
from lightning_mfsdp.checkpoint.io.read import TABLE_OF_CONTENTS, Reader, name_of, strange_piece
from lightning_mfsdp.checkpoint.io.trust import CheckpointError, RefusedError, key_of, refusal, refused_class

__all__ = [
    "LIGHTNING_VERSION",
    "ChunkedTensor",
    "Leaves",
    "NestedPath",
    "OpenedCheckpoint",
    "StoredCheckpoint",
    "StoredObject",
    "StoredTensor",
    "TensorLeaf",
    "UnreadTensor",
    "check_is_file",
    "check_table_of_contents",
    "flat_name",
    "is_tensor",
    "leaves_of_file",
    "load_file",
    "size_bytes",
    "state_dict_of",
]

NestedPath = tuple[str | int, ...]
Leaves = dict[NestedPath, Any]

# How users of commands and their functions declare that they trust a checkpoint.
TRUSTING = "read it with --trust (trust=True)"

LIGHTNING_VERSION = "pytorch-lightning_version"


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """An opened checkpoint.

    Attributes:
        leaves: Of model and optimizers.
        rest: What a Lightning checkpoint holds besides them; empty if Lightning did not write it.
        tied: Further names of tied weights, and the name that each is the same as, if the checkpoint records that.
        versions: Of the model's modules, by name; `None` if the checkpoint does not record them.
        metadata: Table of contents of a directory.
        kind: What it is, in words.
    """

    leaves: Leaves
    rest: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Any] | None = None
    metadata: Metadata | None = None
    kind: str = "full file"


def check_table_of_contents(path: Path) -> None:
    """Check that a directory has a table of contents.

    Raises:
        CheckpointError: It has none.
    """
    if not (path / TABLE_OF_CONTENTS).is_file():
        if looks_like_deepspeed(file.name for file in path.iterdir()):
            raise CheckpointError(
                f"{path} was written by DeepSpeed; make a directory of it with checkpoint convert first"
            )
        inside = sorted(one.name for one in path.iterdir() if (one / TABLE_OF_CONTENTS).is_file())
        said = f"; take one of those in it: {', '.join(inside[:8])}" if inside else ""
        raise CheckpointError(
            f"{path} is a directory without {TABLE_OF_CONTENTS}, so no checkpoint of torch.distributed.checkpoint; expected one, or a file "
            f"of torch.save{said}"
        )


def flat_name(path: NestedPath) -> str:
    """A path as one word, for messages."""
    return ".".join(map(str, path))


def state_dict_of(values: Mapping[str, Any], versions: Mapping[str, Any] | None) -> OrderedDict[str, Any]:
    """A state dict as modules return it, with the versions that a module of a newer program may look for."""
    state = OrderedDict(values)
    if versions is not None:
        state._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return state


# -- a directory -------------------------------------------------------------------------------------------------------


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


class ChunkedTensor(UnreadTensor):
    """A tensor that is read in chunks.

    `torch.distributed.checkpoint` saves it like any tensor, through a planner that reads the chunks (`convert.py`).
    """

    @property
    @abstractmethod
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where each chunk is in the whole tensor."""

    @abstractmethod
    def read(self, offsets: torch.Size) -> Tensor:
        """The chunk at these offsets, `[*chunk.sizes]`, on the CPU."""

    @property
    def pieces(self) -> int:
        """How many chunks there are."""
        return len(self.chunks)

    def read_into(self, target: Tensor) -> Iterator[int]:
        """Copy all chunks into `target`, `[*shape]`; yields the bytes of each once it is copied."""
        for chunk in self.chunks:
            piece = self.read(torch.Size(chunk.offsets))
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            target[place].copy_(piece)
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
            raise RefusedError(refusal(f"{self.path}: {name_of(index)}", refused_class(error), TRUSTING)) from error
        except (RuntimeError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{self.path}: {name_of(index)} does not load ({type(error).__name__}: {_first_line(error)}). Copy the checkpoint again, "
                "or use another"
            ) from error
        # torch.load leaves a cycle of functions behind, which keeps the tensor in memory until the next collection of young garbage.
        gc.collect(1)
        return loaded


@dataclass(frozen=True, eq=False)
class StoredTensor(ChunkedTensor):
    """A tensor in a sharded checkpoint, in chunks that were written one by one."""

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
    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where each piece is in the whole tensor."""
        return self.entry.chunks

    @cached_property
    def _sizes(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Of each chunk, by its offsets."""
        return {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in self.chunks}

    def rows_of_one_save(self, rows: range, _: object = None) -> Tensor:
        """The chunk that was written of these rows."""
        return self.read(torch.Size([rows.start, *[0] * (len(self.shape) - 1)]))

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
        expected = self._sizes[tuple(index.offset or ())]
        got = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
        if not isinstance(value, Tensor) or got != (expected, self.dtype):
            raise CheckpointError(
                f"{self.checkpoint.path}: {name_of(index)} holds {got}, expected {(expected, self.dtype)} by the table of contents. "
                "Copy the checkpoint again, or use another"
            )
        return value


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


# -- a file ------------------------------------------------------------------------------------------------------------


def check_is_file(path: Path) -> None:
    """Check that a file can be one of `torch.save`.

    Raises:
        CheckpointError: There is no file, or one of another format.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: there is nothing at that path; expected a checkpoint")
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise CheckpointError(
                f"{path} is no checkpoint: expected a directory with {TABLE_OF_CONTENTS}, a folder of .safetensors files, or a file of "
                "torch.save (PyTorch 1.6 or later)"
            )


def load_file(path: Path, *, trust: bool, unpickler: Any = None) -> Any:
    """Load what `torch.save` wrote, with tensors mapped and not read.

    Args:
        path: The file.
        trust: Read Python objects that `torch.load` refuses by default.
        unpickler: With `trust`, the module to use instead of `pickle`.

    Raises:
        CheckpointError: It is not such a file, is damaged, or holds Python objects and `trust` is not set.
    """
    check_is_file(path)
    try:
        return torch.load(path, map_location="cpu", pickle_module=unpickler, weights_only=not trust, mmap=True)
    except pickle.UnpicklingError as error:
        refused = refused_class(error)
        with path.open("rb") as file:
            key = key_of(file, refused)
        raise RefusedError(refusal(f"{path}: {key}" if key else str(path), refused, TRUSTING)) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is a damaged file of torch.save ({type(error).__name__}: {_first_line(error)}). Copy it again, or use another"
        ) from error


def leaves_of_file(value: Any, path: NestedPath = ()) -> Leaves:
    """Leaves of nested dictionaries and lists. Lists without dictionaries and tensors are leaves themselves, as in a directory."""
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and any(isinstance(part, Mapping | list | Tensor) for part in value):
        parts = enumerate(value)
    else:
        return {path: value}
    return {inner: leaf for key, part in parts for inner, leaf in leaves_of_file(part, (*path, key)).items()}


def _first_line(error: BaseException) -> str:
    """Of its message."""
    return (str(error).splitlines() or [""])[0]
