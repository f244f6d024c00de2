"""Folders of safetensors files as Hugging Face writes them: one file, or several with an index that says which tensor is where.

A file is the length of its header in eight bytes, the header in JSON, and the bytes of its tensors. Reading is left to the `safetensors`
package, which maps files into memory. Its writer needs all tensors of a file at once; this one takes them one by one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_mfsdp.base.progress import ByteCount, Progress
from lightning_mfsdp.checkpoint.io.local import part_of, put_in_place, remove

__all__ = [
    "DTYPE_NAMES",
    "FolderWriter",
    "PlannedFile",
    "PlannedTensor",
    "TensorInFile",
    "open_file",
    "plan_files",
    "tensors_in_files",
]

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Files of an earlier export, which the next one may replace.
_OWN = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json")


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor that will be written.

    Attributes:
        name: In the file.
        origin: Its name in the source.
        shape: Of the whole tensor.
        dtype: In the file; one of `DTYPE_NAMES`.
    """

    name: str
    origin: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file that will be written, with its tensors in their order inside it."""

    name: str
    tensors: Sequence[PlannedTensor]

    def header(self) -> bytes:
        """The bytes before the tensors."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for tensor in self.tensors:
            stop = start + tensor.num_bytes
            entries[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, stop],
            }
            start = stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin where any dtype may
        return len(text).to_bytes(8, "little") + text


def plan_files(tensors: Sequence[PlannedTensor], max_shard_bytes: int) -> list[PlannedFile]:
    """Distribute tensors in order over files of at most so many bytes of tensors; a larger tensor gets a file of its own."""
    shares: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shares[-1] and size + tensor.num_bytes > max_shard_bytes:
            shares.append([])
            size = 0
        shares[-1].append(tensor)
        size += tensor.num_bytes
    names = [_FILE]
    if len(shares) > 1:
        names = [f"model-{number:05}-of-{len(shares):05}.safetensors" for number in range(1, len(shares) + 1)]
    return [
        # Wide dtypes first: then every tensor begins at a multiple of its element's size, as readers require.
        PlannedFile(name=name, tensors=sorted(share, key=lambda tensor: -tensor.dtype.itemsize))
        for name, share in zip(names, shares, strict=True)
    ]


class FolderWriter:
    """Writes planned files tensor by tensor, next to their folder (`part_of`), and moves them there when all are complete.

    As a context it removes what it began and could not finish.

    Args:
        folder: Where the files go.
        files: From `plan_files`.
        progress: Called after each tensor.
    """

    def __init__(self, folder: Path, files: Sequence[PlannedFile], progress: Progress | None = None) -> None:
        self.folder = folder
        self.part = part_of(folder)
        self._files = files
        self._steps = iter([(file, number) for file in files for number in range(len(file.tensors))])
        self._file: BinaryIO | None = None
        self._begun = False
        self._total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
        self._written = ByteCount(progress, self._total)

    def __enter__(self) -> FolderWriter:
        return self

    def begin(self) -> None:
        """Make the folder `part`; other files for `folder` may be put into it until `finish`.

        Raises:
            IsADirectoryError, NotADirectoryError: `folder` holds something that no export wrote, or is not a folder.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"export to {self.folder}: a file is there; expected a folder, or nothing yet")
        strange = (
            [path.name for path in self.folder.iterdir() if not _OWN.fullmatch(path.name)]
            if self.folder.exists()
            else []
        )
        if strange:
            raise IsADirectoryError(
                f"export to {self.folder}: the folder holds {', '.join(sorted(strange)[:4])} (of {len(strange)}), which no export wrote "
                "and which would be lost. Choose another folder; put other files (a tokenizer) into it afterwards"
            )
        remove(self.part)
        self.part.mkdir(parents=True)
        self._begun = True

    def add(self, tensor: Tensor) -> None:
        """Write the next tensor, in the order of the plan."""
        file, number = next(self._steps)
        if self._file is None:
            self._file = (self.part / file.name).open("wb")
            self._file.write(file.header())
        planned = file.tensors[number]
        content = tensor.detach().to("cpu", planned.dtype).contiguous().reshape(-1).view(torch.uint8)
        assert content.numel() == planned.num_bytes, f"{planned.name}: not what was planned"
        self._file.write(content.numpy().data)
        if number == len(file.tensors) - 1:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._close()
        self._written.add(planned.num_bytes)

    def finish(self) -> list[Path]:
        """Write the index and move everything into place.

        Returns:
            The safetensors files.
        """
        if len(self._files) > 1:
            places = {tensor.name: file.name for file in self._files for tensor in file.tensors}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(places.items()))}
            (self.part / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        put_in_place(self.folder)
        self._begun = False
        return self.paths

    @property
    def paths(self) -> list[Path]:
        """The safetensors files, once they are in place."""
        return [self.folder / file.name for file in self._files]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if self._begun:
            remove(self.part)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TensorInFile:
    """A tensor in a file: its name there, shape and dtype (`None`: one that this PyTorch does not have)."""

    file: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype | None


def open_file(path: Path) -> Any:
    """`safetensors.safe_open`, mapped into memory: a context with `keys()` and `get_slice(name)`.

    Raises:
        ImportError: `safetensors` is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            'reading safetensors files needs the package safetensors; install it with: pip install "lightning-mfsdp[hf]"'
        ) from error
    return safe_open(path, framework="pt", device="cpu")


def tensors_in_files(source: Path) -> dict[str, TensorInFile]:
    """What a file, or the files of a folder, hold, by name; only their headers are read.

    Raises:
        ValueError: `source` is neither a safetensors file nor a folder with one, or with an index.
        RuntimeError: A file is missing or damaged.
        ImportError: `safetensors` is not installed.
    """
    places = _places(source)
    tensors: dict[str, TensorInFile] = {}
    for file in dict.fromkeys(places.values()):
        in_file = _header(file)
        wanted = [name for name, place in places.items() if place == file and name]
        lost = [name for name in wanted if name not in in_file]
        if lost:
            raise RuntimeError(
                f"{file} does not hold {', '.join(lost[:4])} (of {len(lost)}), which it should contain according to the index. "
                "Download or export the files again"
            )
        tensors.update({name: in_file[name] for name in wanted} if wanted else in_file)
    return tensors


def _header(file: Path) -> dict[str, TensorInFile]:
    if not file.is_file():
        raise RuntimeError(f"{file} is missing; copy it from where the other files came from, to every node")
    tensors = {}
    try:
        with open_file(file) as mapped:
            for name in mapped.keys():  # noqa: SIM118 - it cannot be iterated itself
                part = mapped.get_slice(name)
                tensors[name] = TensorInFile(
                    file=file, name=name, shape=torch.Size(part.get_shape()), dtype=_DTYPES.get(part.get_dtype())
                )
    except ImportError:
        raise
    except Exception as error:  # the package has its own kind, and a file may be damaged in many ways
        raise RuntimeError(
            f"{file} cannot be read as safetensors ({type(error).__name__}: {error}); it is incomplete, damaged or something else. "
            "Download or export it again"
        ) from error
    return tensors


def _places(source: Path) -> dict[str, Path]:
    """File of each tensor according to an index, or one file for all, under the empty name."""
    if source.is_file():
        return {"": source}
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    indices = sorted(source.glob("*.safetensors.index.json")) if source.is_dir() else []
    if source / _FILE in files:
        return {"": source / _FILE}
    if source / _INDEX in indices or len(indices) == 1:
        index = source / _INDEX if source / _INDEX in indices else indices[0]
        return _index(index)
    if len(files) == 1 and not indices:
        return {"": files[0]}
    raise ValueError(
        f"{source}: expected a safetensors file, or a folder with one or with {_INDEX}; found "
        + (f"{len(files)} safetensors files and {len(indices)} indices in it" if source.is_dir() else "nothing there")
    )


def _index(path: Path) -> dict[str, Path]:
    try:
        places = {str(name): str(file) for name, file in json.loads(path.read_text())["weight_map"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RuntimeError(
            f"{path} is no index of safetensors files ({type(error).__name__}: {error}); expected JSON with a weight_map"
        ) from error
    for name, file in places.items():
        if not _lies_inside(file):
            raise RuntimeError(
                f"{path} says that {name} is in {file!r}, which is not below the folder of the index; expected the name of a file "
                "beside it. Do not use this index, or correct it"
            )
    return {name: path.parent / file for name, file in places.items()}


def _lies_inside(file: str) -> bool:
    """Whether a path leads to somewhere below the folder it starts from, on any system. Links in that folder may lead elsewhere."""
    kinds = (PurePosixPath(file), PureWindowsPath(file))
    return bool(kinds[0].parts) and not any(path.anchor or ".." in path.parts for path in kinds)
