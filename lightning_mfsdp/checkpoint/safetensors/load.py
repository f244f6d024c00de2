"""Pretrained weights from safetensors files, directly into shards: every rank maps the files and copies what it owns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mfsdp.base.progress import ByteCount, Progress, progress_bar
from lightning_mfsdp.checkpoint.io.ranks import on_all_ranks
from lightning_mfsdp.checkpoint.safetensors.files import TensorInFile, open_file, tensors_in_files
from lightning_mfsdp.checkpoint.state.index import ParameterIndex, plain_name
from lightning_mfsdp.checkpoint.state.state_dict import check_names, check_restored, tied_names
from lightning_mfsdp.checkpoint.state.translation import Translation
from lightning_mfsdp.engine import ShardingError, refresh_weights
from lightning_mfsdp.engine.internals import Piece

__all__ = ["load_safetensors"]

# How much of a tensor is read at once: with another dtype or device, this much host memory is needed.
_CHUNK_BYTES = 64 * 2**20

_ADVICE = "Translate names with rename=, leave tensors out with ignore=, or pass strict=False to load what fits"


def load_safetensors(
    module: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> None:
    """Read pretrained weights into a sharded model. All ranks call it; each reads its own rows, and no rank holds the model.

    In a LightningModule call it in `on_fit_start`, for a model that may have been built on the meta device: by then it is sharded, and a
    checkpoint to resume from (`ckpt_path`) is read afterwards. Values are cast to the dtype of the main weights. Nothing is written
    before all names and shapes were checked on all ranks.

    Args:
        module: Sharded, or a part of it such as `self.model` of a LightningModule.
        source: A safetensors file, or a folder with one, or with several and their index, as `from_pretrained` takes it.
        strict: Names must match exactly. Of tied weights one name is enough. `False`: only shapes must.
        rename: From a name in the files to the name in `module`; `None` for tensors to skip.
        ignore: Names in the files, or `fnmatch` patterns of them, to skip.
        progress: Called on each rank with the bytes it has read and all it will read, after each tensor. `None`: a bar on a terminal.

    Raises:
        ShardingError: The module is not sharded yet.
        ValueError: No safetensors at `source`, `rename` gives two tensors one name, or a pattern of `ignore` fits none.
        RuntimeError: A file is damaged or missing, or names or shapes differ; all of them are listed. Also if another rank met an error.
        ImportError: `safetensors` is not installed.
    """
    path, translation = Path(source), Translation(rename, ignore)
    index = ParameterIndex(module)
    if not index.all:
        raise ShardingError(
            f"load_safetensors: {type(module).__name__} has no sharded parameters; call it in on_fit_start of the LightningModule, or "
            "after fully_shard"
        )
    with on_all_ranks(f"load_safetensors: {path}, before anything was written"):
        copies = _plan(path, index, translation, strict=strict)
    with (
        on_all_ranks(f"load_safetensors: {path}, with weights partly written"),
        progress_bar(f"Loading {path}", progress) as shown,
    ):
        _read(copies, shown)
    refresh_weights(module)


@dataclass(frozen=True)
class _Copy:
    """From a stored tensor to `target`, which is `piece` of it."""

    stored: TensorInFile
    target: Tensor
    piece: Piece

    @property
    def _itemsize(self) -> int:
        return (self.stored.dtype or self.target.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self._itemsize

    def chunks(self, file: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the target, and the values to copy there."""
        if not self.stored.shape:
            yield self.target, file.get_tensor(self.stored.name).reshape(self.target.shape)
            return
        whole = file.get_slice(self.stored.name)  # a view of the mapped file
        for box in self.piece.boxes:
            target, first = box.in_rows(self.target), box.offsets[0]
            others = [slice(start, start + size) for start, size in zip(box.offsets[1:], box.sizes[1:], strict=True)]
            length = max(1, _CHUNK_BYTES // (math.prod(box.sizes[1:]) * self._itemsize))
            for start in range(0, len(target), length):
                stop = min(start + length, len(target))
                place = (slice(first + start, first + stop), *others)
                yield target[start:stop], whole[place]


def _plan(path: Path, index: ParameterIndex, translation: Translation, *, strict: bool) -> list[_Copy]:
    """Compare files with the model; changes nothing."""
    stored = translation.model(path, tensors_in_files(path))
    state = index.module.state_dict()
    present = {plain_name(name): value for name, value in state.items()}
    tied = {plain_name(name): plain_name(first) for name, first in tied_names(state).items()}
    first_names = {tied.get(name, name) for name in stored}
    expected = {
        name: value for name, value in present.items() if name in stored or tied.get(name, name) not in first_names
    }
    shapes = {name: item.shape for name, item in stored.items()}
    check_names(path, expected, list(stored), shapes, strict=strict, advice=_ADVICE)
    check_restored(path, index, list(stored), strict=strict, advice="pass strict=False")
    copies: dict[str, _Copy] = {}
    for name, item in stored.items():
        view = index.views.get(name)
        target = present.get(name) if view is None else view.main
        if not isinstance(target, Tensor):
            continue
        _check_kind(path, name, item, target)
        everything = Piece(shape=item.shape, rows=range(item.shape[0] if item.shape else 1))
        copy = _Copy(item, target, everything if view is None else view.piece)
        first = copies.setdefault(tied.get(name, name), copy)
        if first is not copy and not _equal(first, copy):
            raise RuntimeError(
                f"{path} holds different values for {first.stored.name} and {item.name}, which are one weight in the model. Build the "
                "model with untied weights, or leave one of the names out with ignore="
            )
    return [copy for copy in copies.values() if copy.target.numel()]


def _check_kind(path: Path, name: str, item: TensorInFile, target: Tensor) -> None:
    """Refuse integers that represent packed or quantized weights."""
    if item.dtype is None or item.dtype.is_floating_point != target.is_floating_point():
        raise RuntimeError(
            f"{path}: {name} is {item.dtype or 'of a dtype that this PyTorch does not have'} in the files and {target.dtype} in the model, "
            "so its values would lose their meaning. Convert quantized weights to floating point before"
        )


def _equal(first: _Copy, second: _Copy) -> bool:
    """Whether what this rank owns is the same in both."""
    if first.stored.dtype != second.stored.dtype:
        return False
    with open_file(first.stored.file) as first_file, open_file(second.stored.file) as second_file:
        pairs = zip(first.chunks(first_file), second.chunks(second_file), strict=True)
        return not first.target.numel() or all(torch.equal(left[1], right[1]) for left, right in pairs)


def _read(copies: list[_Copy], progress: Progress | None) -> None:
    read = ByteCount(progress, sum(copy.num_bytes for copy in copies))
    by_file: dict[Path, list[_Copy]] = {}
    for copy in copies:
        by_file.setdefault(copy.stored.file, []).append(copy)
    for path, inside in by_file.items():
        with open_file(path) as file, torch.no_grad():
            for copy in inside:
                for target, values in copy.chunks(file):
                    target.copy_(values)
                read.add(copy.num_bytes)
