"""DcpShard: what a rank holds of a larger tensor, in the form that torch.distributed.checkpoint (DCP) accepts."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from lightning_mfsdp.engine.internals import Piece, chunk_memory, chunks_to_read, items_to_write

__all__ = ["DcpShard"]


class DcpShard(Tensor):
    """What `piece` describes of a whole tensor, sharing memory with `local`: `[len(piece.rows), *piece.part_shape[1:]]`.

    Written and read in place by `torch.distributed.checkpoint` on any number of ranks. A rank without rows writes and reads nothing.
    """

    _local: Tensor
    _piece: Piece

    @classmethod
    def of(cls, local: Tensor, piece: Piece) -> DcpShard:
        """Describe `local` as this piece of a tensor."""
        plain = local.detach()
        shard = plain.as_subclass(cls)
        shard._local, shard._piece = plain, piece
        return shard

    @property
    def local(self) -> Tensor:
        """The rows, as a plain tensor."""
        return self._local

    def with_local(self, local: Tensor) -> DcpShard:
        """The same piece, kept in other memory."""
        return DcpShard.of(local, self._piece)

    def fill_from(self, whole: Tensor) -> None:
        """Copy the rows out of a whole tensor."""
        for box in self._piece.boxes:
            box.in_rows(self._local).copy_(box.in_whole(whole))

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor: DCP compares it with the size in the checkpoint."""
        shape = self._piece.shape
        return shape if dim is None else shape[dim]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return items_to_write(fqn, self._local, self._piece)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return chunks_to_read(self._piece)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return chunk_memory(index, self._local, self._piece)
