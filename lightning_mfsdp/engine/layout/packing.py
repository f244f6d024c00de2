"""Finds addresses for the tensors of a layout: which segments to have, how long their shards are, what goes where.

Works on numbers only. A tensor that spans two or more shard boundaries forces its row size to divide the shard length; one
boundary only fixes where the tensor may start, and none fixes nothing. So few tensors constrain the shard length, and
there is no need for a common multiple of all rows.

The search proposes shard lengths, shortest sum first, and a packer either fills them or refuses. Everything is integer
arithmetic in a fixed order: equal arguments give equal answers on every rank.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_GOOD_PADDING = 100  # 1 part in 100: below this, one more collective costs more than the padding it saves
_WORTH_A_SEGMENT = 1000  # above it, a further segment must save at least 1 part in 1000
_MAX_SEGMENTS = 4  # tried in every combination; beyond that only one segment per row size
_MAX_BASES = 16  # shard-length bases considered together
_MAX_PROPOSALS = 20_000  # proposals per number of segments
_MAX_PLACEMENTS = 20_000  # tensors placed per number of segments, roughly


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Shard lengths in elements, longest first, and per tensor the segment and its offset there."""

    shard_numels: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


class _Item(NamedTuple):
    """A tensor to place. Where it crosses a boundary, its start and that boundary differ by a multiple of `quantum`."""

    numel: int
    row: int
    quantum: int


_Free = tuple[tuple[int, int], ...]  # ascending free ranges of one segment
_Lengths = tuple[int, ...]  # one shard length per segment


class _Choice(NamedTuple):
    """One place for one tensor, and what each segment then has left."""

    segment: int
    offset: int
    free: tuple[_Free, ...]
    room: tuple[int, ...]


def find_packing(tensors: Sequence[tuple[int, int]], num_shards: int, *, unit: int, start_unit: int) -> Packing:
    """Packs tensors into the fewest segments that waste at most 1 %, or else with the least waste found.

    Args:
        tensors: Elements of each tensor and of each of its rows; none of them 0.
        num_shards: Size of the axis every segment is divided over.
        unit: Every shard length is a multiple of it.
        start_unit: Every offset is a multiple of it; divides `unit`.
    """
    if not tensors:
        return Packing(shard_numels=(unit,), places=())
    items = [_Item(numel, row, math.lcm(row, start_unit)) for numel, row in tensors]
    lengths, places = _Search(items, num_shards, unit, start_unit).run()
    order = sorted(range(len(lengths)), key=lambda segment: (-lengths[segment], segment))
    position = {segment: index for index, segment in enumerate(order)}
    return Packing(
        shard_numels=tuple(lengths[segment] for segment in order),
        places=tuple((position[segment], offset) for segment, offset in places),
    )


class _Search:
    """Proposes shard lengths for 1, 2, ... segments, shortest sum first, until the packer can fill them."""

    def __init__(self, items: list[_Item], num_shards: int, unit: int, start_unit: int) -> None:
        self.items, self.num_shards, self.unit, self.start_unit = items, num_shards, unit, start_unit
        self.least = -(-sum(item.numel for item in items) // num_shards)
        self.weight: dict[int, int] = {unit: 0}  # what a shard length may be a multiple of -> elements that require it
        for item in items:
            # Shorter tensors never span two boundaries of a segment worth having.
            base = math.lcm(item.row, unit) if 16 * item.numel > self.least else unit
            self.weight[base] = self.weight.get(base, 0) + item.numel

    def run(self) -> tuple[_Lengths, list[tuple[int, int]]]:
        best = next(packed for length in self.single_lengths() if (packed := self.fill((length,))))
        good = max(self.unit, self.least + self.least // _GOOD_PADDING)
        if sum(best[0]) <= good:
            return best
        apart = next((packed for lengths in self.lengths_by_row() if (packed := self.fill(lengths))), best)
        bases = self.bases(min(sum(best[0]), sum(apart[0])))
        for count in range(2, min(_MAX_SEGMENTS, len(bases)) + 1):
            limit = min(sum(best[0]) - self.least // _WORTH_A_SEGMENT, max(good, sum(apart[0])) + 1)
            combinations = list(itertools.combinations(bases, count))
            most = _MAX_PROPOSALS // len(combinations)
            proposals = {lengths for some in combinations for lengths in self.lengths(some, limit, most)}
            shortest_first = sorted(proposals, key=lambda lengths: (sum(lengths), lengths))
            tried = shortest_first[: max(16, _MAX_PLACEMENTS // len(self.items))]
            best = next((packed for lengths in tried if (packed := self.fill(lengths))), best)
            if sum(best[0]) <= good:
                return best
        return apart if sum(apart[0]) < sum(best[0]) - self.least // _WORTH_A_SEGMENT else best

    def single_lengths(self) -> Iterator[int]:
        """Lengths to try for one segment, ascending and without end.

        A tensor longer than two shards has two boundaries inside, so its row divides the shard. Sorted by length, those
        tensors come first: each such prefix has a least common multiple, which counts until the shard is half as long
        as the next tensor.
        """
        base, shortest = self.unit, {}
        for item in sorted(self.items, key=lambda item: -item.numel):
            shortest[base] = max(self.least, -(-item.numel // 2))
            base = math.lcm(base, item.row)
        shortest[base] = self.least
        return heapq.merge(*(_multiples(base, least) for base, least in shortest.items()))

    def lengths_by_row(self) -> Iterator[_Lengths]:
        """One segment per row size: as short as its elements allow, then with room for the gaps between tensors."""
        loads = sorted(self.weight.items(), reverse=True)
        for spare in (0, 1):
            yield tuple(max(1, -(-load // (base * self.num_shards)) + spare) * base for base, load in loads)

    def bases(self, limit: int) -> list[int]:
        """What shard lengths may be multiples of, largest first: least common multiples of row sizes."""
        multiples = {self.unit}
        for base in sorted(self.weight, key=lambda base: (-self.weight[base], base)):
            grown = multiples | {joint for multiple in multiples if (joint := math.lcm(base, multiple)) < limit}
            multiples = grown if len(grown) <= _MAX_BASES else multiples | {base}
        return sorted(multiples, reverse=True)

    def lengths(self, bases: tuple[int, ...], limit: int, most: int) -> Iterator[_Lengths]:
        """Up to about `most` tuples of multiples of the bases that hold all elements and sum up to less than `limit`."""
        forced, flexible = [0] * len(bases), 0
        for item in self.items:
            open_to = [index for index, base in enumerate(bases) if base % item.row == 0]
            if item.numel > 2 * limit and not open_to:
                return
            if item.numel > 2 * limit and len(open_to) == 1:
                forced[open_to[0]] += item.numel
            else:
                flexible += item.numel
        capacity = [base * self.num_shards for base in bases]
        lowest = [max(1, -(-load // room)) for load, room in zip(forced, capacity, strict=True)]
        if sum(count * base for count, base in zip(lowest, bases, strict=True)) >= limit:
            return
        steps = next(steps for steps in itertools.count(1) if (steps + 1) ** (len(bases) - 1) > most)
        ranges = []
        for low, load, room in zip(lowest[:-1], forced, capacity, strict=False):
            high = max(low, -(-(load + flexible) // room))
            ranges.append(range(low, high + 1, 1 + (high - low) // steps))
        for counts in itertools.product(*ranges):
            head = tuple(count * base for count, base in zip(counts, bases, strict=False))
            last = max(lowest[-1], -(-(self.least - sum(head)) // bases[-1]))
            for spare in (0, 1, 2, 4):
                if sum(head) + (last + spare) * bases[-1] < limit:
                    yield (*head, (last + spare) * bases[-1])

    def fill(self, lengths: _Lengths) -> tuple[_Lengths, list[tuple[int, int]]] | None:
        """Packs every item into segments of these shard lengths; None where it cannot.

        Items with the fewest possible segments come first, then those with the longest rows. When an item fits nowhere,
        the last choice is undone, within a budget.
        """
        options = [
            [s for s, shard in enumerate(lengths) if shard % item.row == 0 or item.numel <= 2 * shard]
            for item in self.items
        ]
        if not all(options):
            return None
        order = sorted(
            range(len(self.items)),
            key=lambda index: (len(options[index]), -self.items[index].row, -self.items[index].numel, index),
        )
        room = tuple(shard * self.num_shards for shard in lengths)
        free = tuple(((0, numel),) for numel in room)
        places = [(0, 0)] * len(order)
        stack = [self.choices(order[0], options[order[0]], lengths, free, room)]
        for _ in range(64 + 2 * len(order)):
            if not stack:
                return None
            choice = next(stack[-1], None)
            if choice is None:
                stack.pop()
                continue
            places[order[len(stack) - 1]] = (choice.segment, choice.offset)
            if len(stack) == len(order):
                return lengths, places
            index = order[len(stack)]
            stack.append(self.choices(index, options[index], lengths, choice.free, choice.room))
        return None

    def choices(
        self, index: int, segments: list[int], lengths: _Lengths, free: tuple[_Free, ...], room: tuple[int, ...]
    ) -> Iterator[_Choice]:
        """Places for one item, the fullest segment first and in each the lowest address."""
        item = self.items[index]
        for segment in sorted((s for s in segments if room[s] >= item.numel), key=lambda s: room[s]):
            for position, (low, high) in enumerate(free[segment]):
                if high - low < item.numel:
                    continue
                start = _first_start(item, low, lengths[segment], self.start_unit)
                if start is None or start + item.numel > high:
                    continue
                parts = tuple((a, b) for a, b in ((low, start), (start + item.numel, high)) if a < b)
                left = (*free[segment][:position], *parts, *free[segment][position + 1 :])
                yield _Choice(
                    segment=segment,
                    offset=start,
                    free=(*free[:segment], left, *free[segment + 1 :]),
                    room=(*room[:segment], room[segment] - item.numel, *room[segment + 1 :]),
                )
                break


def _first_start(item: _Item, low: int, shard: int, start_unit: int) -> int | None:
    """Lowest start from `low` up where no boundary splits a row of the item; None where there always would be two."""
    start = -(-low // start_unit) * start_unit
    boundary = (start // shard + 1) * shard
    if start + item.numel <= boundary:
        return start
    if shard % item.row == 0:
        return -(-start // item.quantum) * item.quantum
    for inside in (boundary, boundary + shard):
        first = max(start, inside - shard)
        aligned = inside - (inside - first) // item.quantum * item.quantum
        if aligned + item.numel <= inside + shard:
            return aligned
    return None


def _multiples(base: int, least: int) -> Iterator[int]:
    """Multiples of `base` from `least` up: each one at first, then ever wider apart, so that any length is reached soon."""
    first, excess = -(-least // base), 0
    while True:
        yield (first + excess) * base
        excess += 1 + excess // 8
