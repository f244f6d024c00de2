"""How ranks save together: each decides what it has to write, rank 0 which of them writes what several have, and the table of it all.

The same steps as in `torch.distributed.checkpoint.save`, with its planner and writer, and the same files. There every rank sends rank 0 all
names and a plan of Python objects, and gets the plan back. Here a rank sends the indices of what it has, then where it has written that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from lightning_mfsdp.base import compat
from lightning_mfsdp.base.garbage import collector_paused
from lightning_mfsdp.checkpoint.io.ranks import Ranks
from lightning_mfsdp.checkpoint.io.write import item_bytes

__all__ = ["save_together", "shares_of", "table_of_contents"]


Row: TypeAlias = tuple[str, "tuple[list[int], list[int]] | None", str, int, int, Any]


@dataclass(frozen=True)
class Written:
    """What one rank has written, in few kinds of objects: rank 0 unpickles that of all.

    Attributes:
        rows: Name, offsets and sizes of the chunk (`None` of an object that is no tensor), file, first byte, length and extensions.
        tensors: Properties and size of the whole tensor, by name.
        paths: Where each name lies in the dictionary that is saved.
    """

    rows: list[Row]
    tensors: dict[str, tuple[TensorProperties, tuple[int, ...]]]
    paths: dict[str, Any]


def save_together(
    state: dict[str, Any], writer: FileSystemWriter, planner: SavePlanner, ranks: Ranks
) -> Metadata | None:
    """Write what all ranks have of a dictionary. All ranks call it.

    Returns:
        The table of contents, which is written last, on rank 0.

    Raises:
        FailedRanksError: On all ranks, if something failed on any.
    """

    def plan() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    own = ranks.together(plan)
    offers = ranks.to_first(_offer(own.items))
    kept = ranks.for_each(None if offers is None else shares_of(offers))

    def write() -> Written:
        nonlocal own
        own = replace(own, items=[item for item, is_kept in zip(own.items, kept, strict=True) if is_kept])
        [placed] = writer.prepare_global_plan([own])  # it numbers the plans that it is given
        placed = replace(placed, storage_data=replace(placed.storage_data, prefix=f"__{ranks.rank}_"))
        return _written(own, writer.write_data(planner.finish_plan(placed), planner).wait())

    written = ranks.together(write)
    table: Metadata | None = None

    def finish() -> None:
        nonlocal table
        assert everything is not None, "rank 0 has it"
        table, results = table_of_contents(everything, own.planner_data)
        writer.finish(table, [results])

    with collector_paused():  # of 1,000 ranks a million objects come, which are all in the table
        everything = ranks.to_first(written)
        ranks.first("writing the table of contents", finish)
    return table


def _offer(items: Sequence[WriteItem]) -> bytes:
    """What a rank could write: the same bytes on ranks with the same."""
    return json.dumps(
        [
            (item.index.fqn, None if item.index.offset is None else list(item.index.offset), item_bytes(item))
            for item in items
        ]
    ).encode()


def shares_of(offers: Sequence[bytes]) -> list[bytes]:
    """Who writes what: of what several ranks offer, the one that has the least to write so far.

    Args:
        offers: By rank.

    Returns:
        By rank, a byte for each of the items that it offers: 1 if it writes it.
    """
    ranks_by_offer: dict[bytes, list[int]] = {}
    for rank, offer in enumerate(offers):
        ranks_by_offer.setdefault(offer, []).append(rank)
    places: dict[tuple[str, tuple[int, ...] | None], list[tuple[list[int], int, int]]] = {}
    kept: list[bytearray] = [bytearray() for _ in offers]
    for offer, ranks in ranks_by_offer.items():  # replicas have the same one
        items = json.loads(offer)
        for number, (name, offset, size) in enumerate(items):
            key = name, None if offset is None else tuple(offset)
            places.setdefault(key, []).append((ranks, number, size))
        for rank in ranks:
            kept[rank] = bytearray(len(items))
    bytes_of = [0] * len(offers)
    shared = []
    for offered in places.values():
        ranks, number, size = offered[0]
        if len(offered) > 1 or len(ranks) > 1:
            shared.append(offered)
            continue
        kept[ranks[0]][number] = 1
        bytes_of[ranks[0]] += size
    for offered in shared:
        candidates = [(rank, number, size) for ranks, number, size in offered for rank in ranks]
        rank, number, size = min(candidates, key=lambda candidate: (bytes_of[candidate[0]], candidate[0]))
        kept[rank][number] = 1
        bytes_of[rank] += size
    return [bytes(flags) for flags in kept]


def _written(plan: SavePlan, results: Sequence[WriteResult]) -> Written:
    items = {item.index: item for item in plan.items}
    properties: list[TensorProperties] = []  # equal ones once, so that they are pickled once
    written = Written([], {}, {})
    paths = plan.planner_data or {}
    for result in results:
        name, place, bounds = result.index.fqn, result.storage_data, None
        if (data := items[result.index].tensor_data) is not None:
            if data.properties not in properties:
                properties.append(data.properties)
            written.tensors[name] = properties[properties.index(data.properties)], tuple(data.size)
            bounds = list(data.chunk.offsets), list(data.chunk.sizes)
        transforms = getattr(place, "transform_descriptors", None)
        written.rows.append((name, bounds, place.relative_path, place.offset, place.length, transforms))
        written.paths[name] = paths[name]
    return written


def table_of_contents(everything: Sequence[Written], paths: Mapping[str, Any]) -> tuple[Metadata, list[WriteResult]]:
    """The table of what all ranks have written, and where that is.

    Args:
        everything: By rank.
        paths: Of names on rank 0, of which perhaps nothing was written.

    Raises:
        ValueError: A part of a tensor was written by no rank, or by several.
    """
    entries: dict[str, Any] = {}
    counts: dict[str, int] = {}
    all_paths = dict(paths)
    results: list[WriteResult] = []
    # Equal names and shapes are one object each, which is pickled once: of thousands of ranks they are most of the table.
    names: dict[str, str] = {}
    shapes: dict[tuple[int, ...], torch.Size] = {}

    def shape_of(numbers: Sequence[int]) -> torch.Size:
        key = tuple(numbers)
        return shapes.get(key) or shapes.setdefault(key, torch.Size(key))

    for written in everything:
        all_paths.update(written.paths)
        for own_name, bounds, file, at, length, transforms in written.rows:
            name = names.setdefault(own_name, own_name)
            place = compat.storage_info(file, at, length, transforms)
            if bounds is None:
                entries[name] = BytesStorageMetadata()
                results.append(WriteResult(MetadataIndex(name), length, place))
                continue
            entry = entries.get(name)
            if entry is None:
                properties, size = written.tensors[name]
                entry = entries[name] = TensorStorageMetadata(properties=properties, size=torch.Size(size), chunks=[])
                counts[name] = 0
            offsets, sizes = shape_of(bounds[0]), shape_of(bounds[1])
            results.append(WriteResult(MetadataIndex(name, offsets, len(entry.chunks)), length, place))
            entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
            counts[name] += sizes.numel()
    for name, count in counts.items():
        if count != entries[name].size.numel():
            raise ValueError(
                f"{name} has {entries[name].size.numel()} elements, and {count} were written: ranks do not have all of its rows, or some "
                "twice. Save with the ranks that share the model, all of them"
            )
    return Metadata(entries, planner_data=all_paths), results
