"""Sets of moments, as intervals in order that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Interval", "clipped", "length", "merged", "without"]

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


def without(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """The moments of the first that are not among the second; both disjoint and in order, as the result."""
    result, index = [], 0
    for start, end in intervals:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                result.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            result.append((start, end))
    return result


def clipped(intervals: list[Interval], window: Interval) -> list[Interval]:
    """What lies in a window."""
    first, last = window
    return [(max(start, first), min(end, last)) for start, end in intervals if end > first and start < last]
