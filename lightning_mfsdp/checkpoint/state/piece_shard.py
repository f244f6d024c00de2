"""RowShard: some rows of a larger tensor, in the form that torch.distributed.checkpoint accepts.

DCP computes the offsets of a DTensor by assuming equal chunks, which is wrong for shards that follow whole rows. It queries any tensor that
has these three methods instead, and needs no communication to do so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["RowShard"]


class RowShard(Tensor):
    """Rows `rows` of a tensor of global shape `shape`, sharing memory with `piece`: `[len(rows), *shape[1:]]`.

    Written and read in place by `torch.distributed.checkpoint` on any number of ranks. A rank without rows writes and reads nothing.
    """

    _piece: Tensor
    _global_shape: torch.Size
    _offsets: torch.Size

    @classmethod
    def of(cls, piece: Tensor, shape: torch.Size, rows: range) -> RowShard:
        """Describe `piece` as these rows of a tensor of this shape."""
        plain = piece.detach()
        made = plain.as_subclass(cls)
        made._piece = plain
        made._global_shape = torch.Size(shape)
        first = rows.start if made._global_shape.numel() else 0  # without elements all ranks have all of it
        made._offsets = torch.Size([first, *[0] * (len(shape) - 1)] if shape else [])
        return made

    @property
    def piece(self) -> Tensor:
        """The rows, as a plain tensor."""
        return self._piece

    def with_piece(self, piece: Tensor) -> RowShard:
        """The same rows, kept in other memory."""
        start = self._offsets[0] if self._offsets else 0
        return RowShard.of(piece, self._global_shape, range(start, start + (len(piece) if piece.dim() else 1)))

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor: DCP compares it with the size in the checkpoint."""
        return self._global_shape if dim is None else self._global_shape[dim]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self._piece), size=self._global_shape
                ),
            )
            for chunk in self.__create_chunk_list__() or _nothing(self._global_shape)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self._piece.numel():
            return []
        return [ChunkStorageMetadata(offsets=self._offsets, sizes=self._piece.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is not None and index.offset != self._offsets:
            raise ValueError(
                f"{index.fqn}: this rank holds rows from {tuple(self._offsets)}, asked for {tuple(index.offset)}"
            )
        return self._piece


def _nothing(shape: torch.Size) -> list[ChunkStorageMetadata]:
    """All of a tensor without elements, which no rank has rows of; every rank offers it, and PyTorch takes it from one."""
    return [] if shape.numel() else [ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)]
