"""Rows of one tensor where those of another lie: for arithmetic between parameters of models that are sharded differently.

Which rank holds which rows follows from layouts alone, so all sends and receives are known everywhere. Rows of many tensors travel in one
all-to-all for each dtype. Where meshes differ, tensors are gathered whole, one by one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mfsdp.base import compat
from lightning_mfsdp.engine.core.rows import holders

if TYPE_CHECKING:
    from lightning_mfsdp.engine.comm.mesh import Mesh
    from lightning_mfsdp.engine.core.group import ParameterGroup
    from lightning_mfsdp.engine.core.sharded_tensor import ShardedTensor

__all__ = ["fetch_rows", "sharded_alike"]


def sharded_alike(a: ShardedTensor, b: ShardedTensor) -> bool:
    """Whether every rank has the same rows of both. All ranks find the same answer, also those that have no rows."""
    if a.shape[:1] != b.shape[:1]:
        return False
    if not (a.is_divided and b.is_divided):
        return a.is_divided == b.is_divided
    spec, other = a.shard_spec, b.shard_spec
    if spec is other:
        return True
    if not _same_axes(spec.mesh, other.mesh) or spec.split != other.split or spec.piece.parts != other.piece.parts:
        return False
    return spec.rows_by_shard is other.rows_by_shard or spec.rows_by_shard == other.rows_by_shard


def fetch_rows(pairs: Sequence[tuple[ShardedTensor, ShardedTensor]]) -> list[Tensor]:
    """Of each pair, those rows of the first tensor that this rank has of the second, `[len(rows), ...]`. Collective: the same on all ranks.

    Args:
        pairs: Tensors with equally many rows, in an order that all ranks share.
    """
    fetched: list[Tensor | None] = [None] * len(pairs)
    together: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
    for number, (source, like) in enumerate(pairs):
        group, like_group = source.place[0], like.place[0]
        wanted = like.shard_spec.piece
        of_parts = (
            source.is_divided
            and _same_axes(group.mesh, like_group.mesh)
            and source.shard_spec.piece.parts == wanted.parts
        )
        sharers, _ = holders(group)
        if not source.is_divided:
            fetched[number] = like.of_whole(source._local_tensor)
        elif of_parts and sharers is None:
            fetched[number] = source._local_tensor[wanted.rows.start : wanted.rows.stop]
        elif of_parts and sharers is not None and (_same_split(group, like_group) or holders(like_group)[0] is None):
            key = tuple(dist.get_process_group_ranks(sharers)), source.dtype
            together.setdefault(key, []).append(number)
        else:
            fetched[number] = like.of_whole(source.full_tensor())
    for numbers in together.values():
        for number, rows in zip(numbers, _exchange([pairs[number] for number in numbers]), strict=True):
            fetched[number] = rows
    return [rows for rows in fetched if rows is not None]


def _same_axes(a: Mesh, b: Mesh) -> bool:
    dims = (a.shard_dim, a.outer_dim, a.expert_dim, a.tensor_dim) == (
        *(b.shard_dim, b.outer_dim, b.expert_dim, b.tensor_dim),
    )
    return dims and (a.device_mesh is b.device_mesh or a.device_mesh == b.device_mesh)


def _same_split(a: ParameterGroup, b: ParameterGroup) -> bool:
    return (a.placement.main, a.placement.outer_main) == (b.placement.main, b.placement.outer_main)


def _exchange(pairs: Sequence[tuple[ShardedTensor, ShardedTensor]]) -> list[Tensor]:
    """One all-to-all for tensors of one dtype whose rows are distributed over the same ranks."""
    process_group, shards = holders(pairs[0][0].place[0])
    assert process_group is not None, "checked before"
    own_shard, position_of = shards[dist.get_rank(process_group)], {shard: place for place, shard in enumerate(shards)}
    outwards: list[list[Tensor]] = [[] for _ in shards]
    inwards: list[list[Tensor]] = [[] for _ in shards]
    results = []
    with torch.inference_mode(False):
        for source, like in pairs:
            local = source._local_tensor.detach()
            sent, wanted = _tables(source, like)
            result = local.new_empty((len(wanted[own_shard]), *local.shape[1:]))
            for shard, rows in _overlaps(sent[own_shard], wanted):
                start = sent[own_shard].start
                outwards[position_of[shard]].append(local[rows.start - start : rows.stop - start])
            for shard, rows in _overlaps(wanted[own_shard], sent):
                start = wanted[own_shard].start
                inwards[position_of[shard]].append(result[rows.start - start : rows.stop - start])
            results.append(result)
        first = pairs[0][0]._local_tensor
        counts = [[sum(map(torch.Tensor.numel, pieces)) for pieces in part] for part in (outwards, inwards)]
        packed = [piece.reshape(-1) for pieces in outwards for piece in pieces]
        outgoing = torch.cat(packed) if packed else first.new_empty(0)
        incoming = first.new_empty(sum(counts[1]))
        _all_to_all(incoming, outgoing, counts[1], counts[0], process_group)
        targets = [piece for pieces in inwards for piece in pieces]
        if targets:
            parts = torch.split(incoming, [target.numel() for target in targets])
            compat.foreach_copy_(targets, [part.view(t.shape) for part, t in zip(parts, targets, strict=True)])
    return results


def _tables(source: ShardedTensor, like: ShardedTensor) -> tuple[Sequence[range], Sequence[range]]:
    """By shard of the source: its rows there, and those of `like` that are needed there."""
    (group, index), (like_group, like_index) = source.place, like.place
    sent = group.layout.rows_by_shard[index]
    if holders(like_group)[0] is None:
        return sent, [range(like_group.layout.shapes[like_index][0])] * len(sent)
    return sent, like_group.layout.rows_by_shard[like_index]


def _overlaps(rows: range, table: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Shards that have some of `rows`, and which; `table` is in the order of rows, or every shard has all."""
    first = bisect_right(table, rows.start, key=lambda other: other.stop)
    last = bisect_left(table, rows.stop, key=lambda other: other.start)
    for shard in range(first, last):
        common = range(max(rows.start, table[shard].start), min(rows.stop, table[shard].stop))
        if len(common):
            yield shard, common


def _all_to_all(
    incoming: Tensor, outgoing: Tensor, inwards: list[int], outwards: list[int], group: dist.ProcessGroup
) -> None:
    if not incoming.is_floating_point():  # backends do not support all integers
        size = incoming.element_size()
        incoming, outgoing = incoming.view(torch.uint8), outgoing.view(torch.uint8)
        inwards, outwards = [count * size for count in inwards], [count * size for count in outwards]
    dist.all_to_all_single(incoming, outgoing, inwards, outwards, group=group)
