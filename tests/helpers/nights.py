"""What a push runs of many parameters, and what is left to the night."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

NIGHT = os.environ.get("MFSDP_NIGHTLY") == "1"


def rest_at_night(rows: Iterable[Any], kept: Callable[..., bool]) -> list[Any]:
    """Parameters of a test: all of them, those that are not `kept` with the mark `nightly`.

    Args:
        rows: Values, or tuples of values where a test has several parameters.
        kept: Of a row's values; whether a push runs it.
    """
    parameters = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*values, marks=[] if kept(*values) else pytest.mark.nightly) for values in parameters]
