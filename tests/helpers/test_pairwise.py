from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.engine.worlds import in_turns
from tests.helpers.nights import rest_at_night, thinned
from tests.helpers.pairwise import in_turn, in_world, pairwise

FACTORS = ("abcd", (1, 2, 3), (False, True), ("x", "y", "z"))


@pytest.fixture(autouse=True)
def by_day(monkeypatch):
    monkeypatch.delenv("MFSDP_NIGHTLY", raising=False)
    for module in ("tests.engine.worlds", "tests.helpers.nights"):
        monkeypatch.setattr(f"{module}.NIGHT", False)


def pairs(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_every_pair_meets_in_few_rows():
    rows = pairwise(*FACTORS)
    assert pairs(rows) == pairs(product(*FACTORS))
    assert len(rows) <= 15 < 72
    assert rows == pairwise(*FACTORS)
    assert rows == [row for row in product(*FACTORS) if row in rows], "in the order of the product"


def test_two_factors_stay_whole_and_one_is_itself():
    assert pairwise("abcd", (1, 2)) == list(product("abcd", (1, 2)))
    assert pairwise("abcd") == [("a",), ("b",), ("c",), ("d",)]


def test_several_ranks_share_the_pairs_and_one_has_every_value():
    worlds = (1, 2, 4)
    rows = {world: in_world(world, worlds, "abcd", (1, 2)) for world in worlds}
    assert pairs(rows[2] + rows[4]) == pairs(product("abcd", (1, 2)))
    for own in rows.values():
        assert {value for row in own for value in row} == {*"abcd", 1, 2}
    assert [len(own) for own in rows.values()] == [4, 4, 4]
    assert in_world(2, (1, 2), "abcd", (1, 2)) == list(product("abcd", (1, 2))), "nobody to share with"
    assert in_world(8, worlds, "abcd", (1, 2)) == list(product("abcd", (1, 2)))


def test_several_ranks_can_share_the_values():
    rows = {world: in_world(world, (2, 4), "abcd", (1, 2), together=1) for world in (2, 4)}
    assert {value for own in rows.values() for row in own for value in row} == {*"abcd", 1, 2}
    assert sum(map(len, rows.values())) == 4
    assert all(rows.values())


def test_what_is_impossible_is_left_out_and_its_partners_meet_others():
    def possible(letter, number, *_):
        return (letter, number) != ("a", 1)

    rows = pairwise(*FACTORS, possible=possible)
    assert pairs(rows) == pairs(row for row in product(*FACTORS) if possible(*row))
    found = [row for world in (2, 3) for row in in_world(world, (1, 2, 3), *FACTORS, possible=possible)]
    assert pairs(found) == pairs(rows)


def test_values_need_not_be_hashable_or_different():
    assert pairwise([[1], [2]], [{}, {}]) == list(product([[1], [2]], [{}, {}]))


def test_cases_take_the_last_value_and_the_others_in_turn():
    assert [in_turn(number, "abcd") for number in range(4)] == [["a", "d"], ["b", "d"], ["c", "d"], ["a", "d"]]
    assert in_turn(5, "ab") == "ab"


def test_cases_take_turns_on_numbers_of_ranks():
    assert in_turns((3, 2), "abcde") == {3: "ace", 2: "bd"}


def test_at_night_it_is_the_full_product(monkeypatch):
    monkeypatch.setenv("MFSDP_NIGHTLY", "1")
    for module in ("tests.engine.worlds", "tests.helpers.nights"):
        monkeypatch.setattr(f"{module}.NIGHT", True)
    assert pairwise(*FACTORS) == list(product(*FACTORS))
    assert in_world(2, (1, 2), "ab") == [("a",), ("b",)]
    assert in_turn(1, "abcd") == "abcd"
    assert in_turns((3, 2), "abc") == {3: "abc", 2: "abc"}
    assert thinned([1, 2, 3], 3) == [1, 2, 3]


def test_thinned_rows_have_each_value_of_all():
    assert thinned(range(7), 3) == [0, 3, 6]
    rows = list(product("abc", (1, 2)))
    chosen = thinned(rows, 4)
    assert len(chosen) < len(rows)
    assert [{row[place] for row in chosen} for place in (0, 1)] == [set("abc"), {1, 2}]


def test_the_rest_of_the_rows_is_marked():
    parameters = rest_at_night(["first", "second"], lambda name: name == "first")
    assert [(parameter.values, [mark.name for mark in parameter.marks]) for parameter in parameters] == [
        (("first",), []),
        (("second",), ["nightly"]),
    ]
