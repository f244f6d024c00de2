"""The table of contents of a sharded checkpoint: what an outline leaves out is asked for, and who writes what several ranks have."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
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
from lightning_mfsdp.checkpoint.io.saving import shares_of
from lightning_mfsdp.checkpoint.io.table import Table
from lightning_mfsdp.checkpoint.state.dcp_shard import DcpShard
from lightning_mfsdp.engine.internals import Piece

ROWS = 64


def written_by(num_ranks: int) -> Metadata:
    """A tensor that is divided, one that is not, a number and an object; chunks are not in order."""
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, Any] = {}
    rows = ROWS // num_ranks
    boxes = {
        "divided": [((rank * rows, 0), (rows, 3)) for rank in reversed(range(num_ranks))],
        "whole": [((0,), (5,))],
        "number": [((), ())],
    }
    for name, chunks in boxes.items():
        size = torch.Size({"divided": (ROWS, 3), "whole": (5,), "number": ()}[name])
        described = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
        entries[name] = TensorStorageMetadata(properties=TensorProperties(), size=size, chunks=described)
        for rank, chunk in enumerate(described):
            stored[MetadataIndex(name, chunk.offsets)] = compat.storage_info(f"__{rank}_0.distcp", 10 * rank, 7)
    entries["object"] = BytesStorageMetadata()
    stored[MetadataIndex("object")] = compat.storage_info("__0_0.distcp", 500, 20)
    return Metadata(entries, planner_data={"divided": ("model", "divided")}, storage_data=stored)


def shard(rows: range) -> DcpShard:
    return DcpShard.of(torch.zeros(len(rows), 3), Piece(shape=torch.Size([ROWS, 3]), rows=rows))


def test_an_outline_does_not_grow_with_the_ranks_that_have_saved() -> None:
    sizes = [len(pickle.dumps(Table.of(written_by(ranks)).outline())) for ranks in (8, 64)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("rows", [range(4, 12), range(17, 18), range(ROWS), range(0)])
def test_what_an_outline_lacks_is_asked_for_and_no_more(rows: range) -> None:
    table = Table.of(written_by(16))
    outline = pickle.loads(pickle.dumps(table.outline()))
    targets = {"divided": shard(rows), "whole": torch.zeros(5), "number": torch.tensor(0.0), "object": None}
    lacking = outline.lacks(targets)
    assert list(lacking) == ["divided"]
    part = outline.part(targets, table.chunks(lacking))
    assert part.state_dict_metadata.keys() == targets.keys()
    chunks = part.state_dict_metadata["divided"].chunks
    assert [chunk.offsets[0] for chunk in chunks] == [
        row for row in range(0, ROWS, 4) if set(range(row, row + 4)) & set(rows)
    ]
    whole = written_by(16).storage_data
    assert {index: whole[index] for index in part.storage_data} == part.storage_data
    assert len(part.storage_data) == len(chunks) + 3


def test_a_table_knows_its_files_and_their_sizes() -> None:
    table = Table.of(written_by(4))
    assert table.sizes_needed() == {"__0_0.distcp": 520, "__1_0.distcp": 17, "__2_0.distcp": 27, "__3_0.distcp": 37}
    assert not table.lacks({"divided": shard(range(ROWS))})


def offer(*items: tuple[str, int]) -> bytes:
    return json.dumps([(name, [0], size) for name, size in items]).encode()


def test_what_several_ranks_have_is_written_by_the_one_with_least_to_write() -> None:
    shares = shares_of([offer(("a", 8), ("shared", 4)), offer(("shared", 4), ("b", 2)), offer(("shared", 4), ("c", 3))])
    assert shares == [b"\1\0", b"\1\1", b"\0\1"]


def test_replicas_divide_what_they_have() -> None:
    shares = shares_of([offer(*((str(number), 1) for number in range(12)))] * 4)
    assert [sum(share) for share in shares] == [3, 3, 3, 3]
    assert [sum(flags) for flags in zip(*shares, strict=True)] == [1] * 12
