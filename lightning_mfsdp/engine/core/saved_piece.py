"""A piece as torch.distributed.checkpoint asks for it: which chunks a rank writes and reads, and their memory.

DCP computes the offsets of a DTensor by assuming equal chunks, one on each rank. That is wrong for shards that follow whole rows, and for
packed weights, of which a rank has several boxes. It asks tensors that define `__create_write_items__`, `__create_chunk_list__` and
`__get_tensor_shard__` instead, without communication. Of ranks with the same chunk one writes it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_mfsdp.engine.core.piece import Piece

__all__ = ["chunk_memory", "chunks_to_read", "items_to_write"]


def chunks_to_read(piece: Piece) -> list[ChunkStorageMetadata]:
    """One for each box; none without elements."""
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in piece.boxes]


def items_to_write(name: str, local: Tensor, piece: Piece) -> list[WriteItem]:
    """One for each box. Of a tensor without elements every rank offers the whole, and PyTorch takes it from one.

    Args:
        name: Of the tensor in the checkpoint.
        local: What this rank holds of it.
        piece: Where that lies.
    """
    chunks = chunks_to_read(piece)
    if not piece.shape.numel():
        chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * len(piece.shape)), sizes=piece.shape)]
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=piece.shape),
        )
        for chunk in chunks
    ]


def chunk_memory(index: MetadataIndex, local: Tensor, piece: Piece) -> Tensor:
    """A view of `local` that is the chunk at an index.

    Raises:
        EngineStateError: This rank has no such chunk.
    """
    if not piece.shape.numel():
        return local.new_empty(piece.shape)
    return piece.box_at(index.offset).in_rows(local)
