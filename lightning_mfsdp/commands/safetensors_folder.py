"""Inspects folders of safetensors files, which `export` writes and other programs read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mfsdp.base.progress import ByteCount, Progress
from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.tools.leaves import UnreadTensor, size_bytes
from lightning_mfsdp.checkpoint.tools.summary import Summary, summarize_leaves
from lightning_mfsdp.checkpoint.tools.verify import Verification

__all__ = ["is_safetensors", "summarize_folder", "verify_folder"]

_INDEX = "model.safetensors.index.json"
_PIECE_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class _SafeTensor(UnreadTensor):
    file: Path
    name: str

    def _slice(self) -> Any:
        return _open(self.file).get_slice(self.name)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._slice().get_shape())

    @property
    def dtype(self) -> torch.dtype:
        tensor = self._slice()
        # Zero rows read no data, and only the package can map its names of dtypes.
        dtype: torch.dtype = (tensor[:0] if tensor.get_shape() else tensor[...]).dtype
        return dtype

    def read(self) -> Iterator[Tensor]:
        """The tensor in pieces of bounded size."""
        tensor, shape = self._slice(), self.shape
        if not shape:
            yield tensor[...]
            return
        rows = max(1, _PIECE_ELEMENTS * shape[0] // max(1, shape.numel()))
        for start in range(0, shape[0], rows):
            yield tensor[start : start + rows]


def is_safetensors(path: Path) -> bool:
    """Whether it is such a file, or a folder with at least one."""
    return path.suffix == ".safetensors" if path.is_file() else any(path.glob("*.safetensors"))


def summarize_folder(path: Path, *, largest: int = 10) -> Summary:
    """What it holds; tensor data is not read.

    Raises:
        CheckpointError: A file is damaged.
    """
    return summarize_leaves(
        path, {(name,): leaf for name, leaf in _tensors(path)}, kind="safetensors folder", largest=largest
    )


def verify_folder(path: Path, *, fast: bool = False, progress: Progress | None = None) -> Verification:
    """Headers against files, the index against headers, and all numbers unless `fast`. The format has no checksums."""
    verification = Verification()
    tensors: list[tuple[str, _SafeTensor]] = []
    for file in _files(path):
        try:
            tensors += [(name, _SafeTensor(file, name)) for name in _open(file).keys()]  # noqa: SIM118
        except CheckpointError as error:
            verification.problems.append(str(error))
    verification.problems += _index_problems(path, {name: leaf.file.name for name, leaf in tensors})
    verification.tensors = len(tensors)
    verified = ByteCount(progress, sum(size_bytes(leaf) for _, leaf in tensors))
    for name, leaf in tensors if not fast else ():
        for piece in leaf.read():
            verification.count(name, piece)
            verification.read_bytes += piece.nbytes
            verified.add(piece.nbytes)
    return verification


def _index_problems(path: Path, places: dict[str, str]) -> list[str]:
    index = path / _INDEX
    if not index.is_file():
        return []
    try:
        listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{_INDEX} cannot be read ({type(error).__name__}: {error})"]
    problems = [
        f"{name} is not in {file}, where {_INDEX} has it" for name, file in listed.items() if places.get(name) != file
    ]
    return problems + [f"{name} in {file} is not in {_INDEX}" for name, file in places.items() if name not in listed]


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.safetensors"))


def _tensors(path: Path) -> list[tuple[str, _SafeTensor]]:
    return [(name, _SafeTensor(file, name)) for file in _files(path) for name in _open(file).keys()]  # noqa: SIM118


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is a damaged safetensors file ({error}). Download or export it again") from error
