"""Tests named by case and world size whose cases share one start of the processes per world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from tests.engine.cases import Case, run_cases
from tests.helpers.nights import NIGHT

__all__ = ["at_night", "by_world", "check", "in_turns"]

Worlds = Mapping[int, Sequence[Case]]


def in_turns(sizes: Sequence[int], cases: Sequence[Case]) -> dict[int, Sequence[Case]]:
    """Each case on one of these numbers of ranks, the next case on the next; at night every case on all of them."""
    if NIGHT:
        return dict.fromkeys(sizes, cases)
    return {size: cases[first :: len(sizes)] for first, size in enumerate(sizes)}


def at_night(worlds: dict[int, Sequence[Case]]) -> dict[int, Sequence[Case]]:
    """Numbers of ranks that come to what others come to on a push."""
    return worlds if NIGHT else {}


def by_world(worlds: Worlds) -> Any:
    """Parametrize a test by `(world, case)`; ids are the names of the case functions."""
    pairs = [(world, case) for world, cases in worlds.items() for case in cases]
    return pytest.mark.parametrize(
        ("world", "case"), pairs, ids=[f"{case.__name__}-world{world}" for world, case in pairs]
    )


def check(worlds: Worlds, world: int, case: Case) -> None:
    """Fail with every rank's traceback if the case failed; the first check of a world runs all its cases."""
    errors = _outcome(world, tuple(worlds[world]))[case.__name__]
    assert not errors, errors


@cache
def _outcome(world: int, cases: tuple[Case, ...]) -> dict[str, str]:
    return run_cases({case.__name__: case for case in cases}, world)
