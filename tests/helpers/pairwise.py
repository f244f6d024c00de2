"""Rows of a product in which every pair of values meets: what a push runs of it. With MFSDP_NIGHTLY=1 it is the full product."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

SEED = 3


def pairwise(
    *factors: Iterable[Any], possible: Callable[..., bool] = lambda *row: True, together: int = 2
) -> list[tuple[Any, ...]]:
    """Few rows of `itertools.product(*factors)`, in its order; the same ones on every rank and every time.

    Args:
        *factors: Values to choose from; two factors stay whole.
        possible: Of a row's values; which rows there are.
        together: Of how many factors all values meet; 1: each value occurs.
    """
    values = [list(factor) for factor in factors]
    every = {
        numbers: row
        for numbers in product(*(range(len(own)) for own in values))
        if possible(*(row := tuple(own[number] for own, number in zip(values, numbers, strict=True))))
    }
    numbers = tuple(every) if os.environ.get("MFSDP_NIGHTLY") == "1" else _covering(tuple(every), together)
    return [every[row] for row in numbers]


def in_world(
    world: int,
    worlds: Sequence[int],
    *factors: Iterable[Any],
    possible: Callable[..., bool] = lambda *row: True,
    together: int = 2,
) -> list[tuple[Any, ...]]:
    """The rows of one of several numbers of ranks: several ranks share the pairs, and one, which shards nothing, has each value.

    With `together=1` several ranks share the values.
    """
    if world == 1:
        return pairwise(*factors, possible=possible, together=1)
    several = (
        [number for number in worlds if number > 1] if world in worlds else [world]
    )  # another one, on GPUs, has all
    rows = pairwise(several, *factors, possible=lambda number, *row: possible(*row), together=together)
    return [tuple(row) for number, *row in rows if number == world]


def in_turn(number: int, values: Sequence[Any]) -> Sequence[Any]:
    """For the case of this number: the last value and one of the others, another one for the next case; at night all."""
    if os.environ.get("MFSDP_NIGHTLY") == "1" or len(values) < 3:
        return values
    return [values[number % (len(values) - 1)], values[-1]]


@cache
def _covering(rows: tuple[tuple[int, ...], ...], together: int) -> tuple[tuple[int, ...], ...]:
    order = list(rows)
    random.Random(SEED).shuffle(order)
    shows = {row: set(combinations(enumerate(row), min(together, len(row)))) for row in rows}
    left = set().union(*shows.values())
    chosen = []
    while left:
        best = max(order, key=lambda row: len(shows[row] & left))  # the first of the best: chance is the seed's alone
        chosen.append(best)
        left -= shows[best]
    return tuple(sorted(chosen))
