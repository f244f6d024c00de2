"""What follows what in a step: `Schedule` driven by random programs and compared with lists of what happened."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mfsdp.engine.core.schedule import Schedule

UNITS = st.integers(0, 3)
PASSES = st.lists(
    st.tuples(st.lists(UNITS, min_size=1, max_size=6), st.lists(UNITS, max_size=6), st.booleans()), max_size=5
)


def followers(runs: list[list[int]]) -> dict[int, int]:
    """What came after each in the latest of some lists that has it before another one."""
    return {one: other for run in runs for one, other in pairwise(run) if one != other}


@settings(max_examples=300, deadline=None)
@given(PASSES)
def test_it_knows_what_followed_last_time(passes: list[tuple[list[int], list[int], bool]]) -> None:
    schedule = Schedule()
    runs: list[list[int]] = []  # of forwards from the beginning of a pass, which the first unit of one begins anew
    backwards: list[list[int]] = []
    for forward, backward, has_backward in passes:
        run: list[int] = []
        for unit in forward:
            begins = not run or run[0] == unit
            if begins:
                run = []
                runs.append(run)
            run.append(unit)
            assert schedule.note_forward(unit) == (begins, followers(runs).get(unit))
            assert schedule.ran == list(dict.fromkeys(run))
        if has_backward:
            schedule.begin_backward()
            assert schedule.last_of_forward == forward[-1]
            backwards.append([])
            for unit in backward:
                following = schedule.note_backward(unit)
                backwards[-1].append(unit)
                if unit in followers(backwards):
                    assert following == followers(backwards)[unit]
        schedule.forget_pass()  # as the end of a backward and a step of the optimizer do


def test_the_first_backward_goes_the_way_back() -> None:
    schedule = Schedule()
    for unit in (0, 1, 2):
        schedule.note_forward(unit)
    schedule.begin_backward()
    assert [schedule.note_backward(unit) for unit in (2, 1, 0)] == [1, 0, None]
