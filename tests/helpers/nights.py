"""What a push runs of many parameters, and what is left to the night."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")

NIGHT = os.environ.get("MFSDP_NIGHTLY") == "1"


def rest_at_night(rows: Iterable[Any], kept: Callable[..., bool]) -> list[Any]:
    """Parameters of a test: all of them, those that are not `kept` with the mark `nightly`.

    Args:
        rows: Values, or tuples of values where a test has several parameters.
        kept: Of a row's values; whether a push runs it.
    """
    parameters = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*values, marks=[] if kept(*values) else pytest.mark.nightly) for values in parameters]


def thinned(rows: Iterable[Row], every: int) -> list[Row]:
    """The first of so many rows and the first of the next ones; of tuples also those with a value that these lack. At night all."""
    rows = list(rows)
    if NIGHT:
        return rows
    chosen = set(range(0, len(rows), every))
    seen = {value for number in chosen for value in _values(rows[number])}
    for number in reversed(range(len(rows))):  # the last of a product are its most sharded ones
        if not _values(rows[number]) <= seen:
            chosen.add(number)
            seen |= _values(rows[number])
    return [rows[number] for number in sorted(chosen)]


def _values(row: Any) -> set[tuple[int, str]]:
    return {(place, repr(value)) for place, value in enumerate(row)} if isinstance(row, tuple) else set()
