"""Sets of moments, as intervals in order that do not overlap."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

__all__ = ["Interval", "common", "contains", "length", "merged", "without"]

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        elif end > start:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> float:
    """How long disjoint intervals are together."""
    return sum(end - start for start, end in intervals)


def contains(intervals: list[Interval], moment: float) -> bool:
    """Whether a moment lies in one, ends included."""
    index = _last_begun(intervals, moment)
    return index >= 0 and moment <= intervals[index][1]


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """The moments of the first that are not among the second; both disjoint and in order, as the result."""
    result: list[Interval] = []
    for start, end in intervals:
        for other_start, other_end in _meeting(others, start, end):
            if other_start > start:
                result.append((start, other_start))
            start = max(start, other_end)
        if start < end:
            result.append((start, end))
    return result


def common(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """The moments of both; both disjoint and in order, as the result."""
    return [
        (max(start, other_start), min(end, other_end))
        for start, end in intervals
        for other_start, other_end in _meeting(others, start, end)
    ]


def _last_begun(intervals: list[Interval], moment: float) -> int:
    return bisect_right(intervals, (moment, float("inf"))) - 1


def _meeting(intervals: list[Interval], start: float, end: float) -> Iterable[Interval]:
    """Those that have moments of one interval; a short one among many is found at once."""
    index = max(0, _last_begun(intervals, start))
    while index < len(intervals) and intervals[index][0] < end:
        if intervals[index][1] > start:
            yield intervals[index]
        index += 1
