"""Verifies a checkpoint: files, places and sizes; then every piece is read, one at a time."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lightning_mfsdp.base.progress import ByteCount, Progress
from lightning_mfsdp.checkpoint.io.local import LocalLocation
from lightning_mfsdp.checkpoint.io.location import META_FILE
from lightning_mfsdp.checkpoint.io.read import file_problems, sizes_needed
from lightning_mfsdp.checkpoint.io.trust import CheckpointError
from lightning_mfsdp.checkpoint.tools.leaves import (
    StoredCheckpoint,
    StoredObject,
    StoredTensor,
    check_is_file,
    check_table_of_contents,
    flat_name,
    load_file,
    size_bytes,
)
from lightning_mfsdp.checkpoint.tools.opened import open_checkpoint

__all__ = ["NonFinite", "Verification", "count_nonfinite", "cover_problems", "rows_in_pieces", "verify"]

_PIECE_ELEMENTS = 1 << 24


@dataclass(kw_only=True)
class NonFinite:
    """How many elements of one tensor are not finite."""

    nan: int = 0
    inf: int = 0


@dataclass(kw_only=True)
class Verification:
    """What was found.

    Attributes:
        problems: A sentence for each; none in a whole checkpoint.
        tensors: How many there are.
        read_bytes: Of their data, as stored.
        nonfinite: Tensors with NaN or infinity, by name. They are not damage of the checkpoint.
    """

    problems: list[str] = field(default_factory=list)
    tensors: int = 0
    read_bytes: int = 0
    nonfinite: dict[str, NonFinite] = field(default_factory=dict)

    def count(self, name: str, piece: Tensor) -> None:
        """Check the numbers of a piece of tensor `name`."""
        counts = count_nonfinite(piece)
        if counts.nan or counts.inf:
            sofar = self.nonfinite.setdefault(name, NonFinite())
            sofar.nan += counts.nan
            sofar.inf += counts.inf


def verify(path: Path, *, fast: bool = False, trust: bool = False, progress: Progress | None = None) -> Verification:
    """Check a sharded directory or a file of `torch.save`.

    Args:
        path: Of the checkpoint.
        fast: Do not read tensors: files, sizes and places only.
        trust: Read Python objects that `torch.load` refuses by default. Without it they are a problem.
        progress: Called after each piece.

    Raises:
        CheckpointError: There is no checkpoint at the path.
    """
    if path.is_dir():
        return _verify_directory(path, fast, trust, progress)
    return _verify_file(path, fast, trust, progress)


def _verify_directory(path: Path, fast: bool, trust: bool, progress: Progress | None) -> Verification:
    check_table_of_contents(path)
    verification = Verification()
    try:
        stored = StoredCheckpoint(path, trust=trust)
    except CheckpointError as error:
        verification.problems.append(str(error))
        return verification
    files = file_problems(LocalLocation(path).sizes(), sizes_needed(stored.metadata))
    verification.problems += files.values()
    for leaf_path, leaf in stored.leaves.items():
        if isinstance(leaf, StoredTensor):
            verification.tensors += 1
            chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in leaf.chunks]
            verification.problems += [
                f"{flat_name(leaf_path)}: {text}" for text in cover_problems(tuple(leaf.shape), chunks)
            ]
    if not (path / META_FILE).is_file():
        verification.problems.append(
            f"{META_FILE} is missing, so nothing here loads the directory: the save did not get to its end, or the file was not copied, or "
            "another program wrote the directory (convert makes one of it that loads)"
        )
    else:
        try:
            _check_file(path / META_FILE, trust, fast)
        except CheckpointError as error:
            verification.problems.append(str(error))
    _verify_pieces(stored, files, verification, fast, progress)
    return verification


def _verify_pieces(
    stored: StoredCheckpoint,
    bad_files: Mapping[str, str],
    verification: Verification,
    fast: bool,
    progress: Progress | None,
) -> None:
    """Check where every piece lies, and read it unless `fast` or its file has a problem already."""
    pieces = [
        (leaf_path, leaf, index)
        for leaf_path, leaf in stored.leaves.items()
        for index in (
            [leaf.index]
            if isinstance(leaf, StoredObject)
            else [leaf.index(chunk) for chunk in leaf.chunks if math.prod(chunk.sizes)]
        )
    ]
    places = [stored.place(index) for *_, index in pieces]
    verified = ByteCount(progress, sum(place.length for place in places if place is not None))
    for (leaf_path, leaf, index), place in zip(pieces, places, strict=True):
        if place is None or (not fast and place.relative_path not in bad_files):
            try:
                data = stored.raw(index)
                verification.read_bytes += len(data)
                _check_sums(io.BytesIO(data), f"{stored.path}: {flat_name(leaf_path)} in {place.relative_path}")
                value = stored.value(index, data)
                if isinstance(leaf, StoredTensor):
                    verification.count(flat_name(leaf_path), leaf.checked(index, value))
            except CheckpointError as error:
                verification.problems.append(str(error))
        if place is not None and not fast:
            verified.add(place.length)


def _verify_file(path: Path, fast: bool, trust: bool, progress: Progress | None) -> Verification:
    check_is_file(path)
    verification = Verification()
    try:
        _check_file(path, trust, fast)
        leaves = open_checkpoint(path, trust=trust).leaves
    except CheckpointError as error:
        verification.problems.append(str(error))
        return verification
    tensors = {flat_name(leaf_path): leaf for leaf_path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    verification.tensors = len(tensors)
    verified = ByteCount(progress, sum(map(size_bytes, tensors.values())))
    for name, tensor in tensors.items() if not fast else ():
        for piece in rows_in_pieces(tensor):
            verification.count(name, piece)
            verification.read_bytes += piece.nbytes
            verified.add(piece.nbytes)
    return verification


def _check_file(path: Path, trust: bool, fast: bool) -> None:
    """Open a file of `torch.save`, and compare its checksums unless `fast`."""
    load_file(path, trust=trust)
    if not fast:
        with path.open("rb") as file:
            _check_sums(file, str(path))


def _check_sums(file: IO[bytes], what: str) -> None:
    """Compare the checksums that `torch.save` wrote, which `torch.load` does not check."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{what} is no readable archive ({error}). Copy it again, or use another checkpoint"
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"{what} is damaged: the checksum of {damaged} differs from what was written (or it was written with "
            "torch.serialization.set_crc32_options(False)). Copy it again, or use another checkpoint"
        )


def rows_in_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor in pieces of bounded size."""
    if not tensor.dim() or not tensor.numel():
        yield tensor
        return
    rows = max(1, _PIECE_ELEMENTS * len(tensor) // tensor.numel())
    yield from (tensor[start : start + rows] for start in range(0, len(tensor), rows))


def count_nonfinite(piece: Tensor) -> NonFinite:
    """NaN and infinities in a tensor of any dtype."""
    if not (piece.is_floating_point() or piece.is_complex()):
        return NonFinite()
    if piece.dtype.itemsize == 1:  # 8-bit floats support hardly any operators
        piece = piece.float()
    return NonFinite(nan=int(torch.count_nonzero(piece.isnan())), inf=int(torch.count_nonzero(piece.isinf())))


Box = tuple[tuple[int, ...], tuple[int, ...]]


def cover_problems(shape: tuple[int, ...], chunks: Sequence[Box]) -> list[str]:
    """What is wrong with chunks (offsets, sizes) that should cover a tensor of this shape exactly once."""
    problems = []
    for offsets, sizes in chunks:
        if len(offsets) != len(shape) or any(
            start < 0 or start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=False)
        ):
            problems.append(f"the chunk at {offsets} of size {sizes} lies outside of its shape {shape}")
    if problems:
        return problems
    filled = [(offsets, sizes) for offsets, sizes in sorted(chunks) if math.prod(sizes)]
    open_boxes: list[Box] = []
    for box in filled:
        # Sorted by where they begin in dim 0: boxes that end before that are done.
        open_boxes = [other for other in open_boxes if not shape or other[0][0] + other[1][0] > box[0][0]]
        problems += [f"chunks at {other[0]} and {box[0]} overlap" for other in open_boxes if _overlap(other, box)]
        open_boxes.append(box)
    covered = sum(math.prod(sizes) for _, sizes in filled)
    if not problems and covered != math.prod(shape):
        problems.append(f"chunks cover {covered} of {math.prod(shape)} elements")
    return problems


def _overlap(first: Box, second: Box) -> bool:
    return all(
        start < second_start + second_size and second_start < start + size
        for start, size, second_start, second_size in zip(*first, *second, strict=True)
    )
