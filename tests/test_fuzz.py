"""Drawn training programs do under the engine what plain PyTorch does; defects that are known fail still. See tests/fuzz.py."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings

from tests.fuzz import Tally, fuzz, report
from tests.fuzzing.checking import check, growth_of_a_nudge
from tests.fuzzing.comparing import BFLOAT16, problems
from tests.fuzzing.description import (
    Block,
    Configuration,
    Description,
    Micro,
    Model,
    Program,
    Step,
    features,
    from_json,
    size,
    to_json,
)
from tests.fuzzing.drawing import descriptions, drawn, settled
from tests.fuzzing.known import DEFECTS, KNOWN, Defect, is_known, known_items
from tests.fuzzing.plain import run_plainly
from tests.fuzzing.refusals import MOST
from tests.fuzzing.script import as_script
from tests.fuzzing.shrinking import shrunk, smaller
from tests.fuzzing.workers import Outcome, Workers
from tests.helpers.nights import NIGHT
from tests.mends import MENDS, without

CASES = 100 if NIGHT else 16  # tests/nightly.sh draws for many minutes, too
GUARD_S = 200.0  # on a machine that is busy with other things, fewer cases are run


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(timeout_s=60) as running:
        yield running


def test_drawn_programs_agree_with_plain_pytorch(workers):
    tally, began = Tally(), time.monotonic()
    fuzz(workers, tally, first_seed=0, most=CASES, deadline=began + GUARD_S)
    said = [f"{verdict.kind}\n{verdict.problems[0]}\n{as_script(case)}" for case, verdict in tally.failures]
    assert not said, "\n".join(said)
    print(report(tally, time.monotonic() - began))
    assert tally.share_refused <= MOST


def _marked(defect: Defect) -> object:
    marks = [pytest.mark.xfail(strict=True, reason=f"item {defect.item}")] if is_known(defect.item) else []
    return pytest.param(defect, marks=marks, id=f"{defect.item}: {defect.name}")


@pytest.mark.parametrize("defect", [_marked(defect) for defect in DEFECTS])
def test_a_program_that_once_went_wrong(defect, workers):
    verdict = check(defect.case, workers, timeout_s=6 if is_known(defect.item) else None)
    assert not verdict.failed, f"{verdict.kind}\n{verdict.problems[0]}"


def test_rounding_that_grows_from_step_to_step_is_allowed_and_more_than_that_is_not():
    """LARS divides by norms of gradients that bfloat16 knows to two digits, and a norm that is called twice multiplies what they lack."""
    blocks = (Block(kind="norm"), Block(kind="mlp", frozen="weight"), Block(), Block(kind="norm", calls=2, same_as=0))
    program = Program(steps=(Step(micros=(Micro(kind="interleaved"),)), Step(), Step()), optimizer="lars")
    case = Description(Model(blocks, row=True, tied=True), program, Configuration(ranks=3, precision="mixed"))
    expected, slack = run_plainly(case), growth_of_a_nudge(case)
    number = max(range(len(expected)), key=lambda n: slack[n] * (expected[n].tag == "gradients"))
    gradients = {name: value for name, (_, value) in expected[number].values.items() if value is not None}
    name, largest = max(gradients.items(), key=lambda one: float(one[1].abs().max()))

    def found(relative: float) -> list[str]:
        moved = largest + relative * slack[number] * largest.abs().max()
        event = expected[number]._replace(values={**expected[number].values, name: (0, moved)})
        events = [event if n == number else one for n, one in enumerate(expected)]
        return problems(case, expected, Outcome([events]), slack)

    assert slack[number] > BFLOAT16 * 2.0**-7, "the tolerance alone would not allow it"
    assert not found(0.9)
    assert found(1.1)


def test_what_shows_a_defect_is_left_out_of_the_draws():
    missed = [defect for defect in DEFECTS if defect.item in KNOWN and defect.item not in known_items(defect.case)]
    assert not missed


@settings(max_examples=100, database=None, derandomize=True, deadline=None)
@given(descriptions())
def test_draws_are_sound_and_survive_json(case):
    assert from_json(to_json(case)) == case
    assert settled(case) == case


def test_every_feature_is_drawn_often_enough():
    """Of all draws, also of those that are left out as long as a defect is known."""
    cases = [drawn(Random(number)) for number in range(2000)]
    counts = Counter(name for case in cases for name in features(case))
    assert len(counts) > 70
    rare = {name: count for name, count in counts.items() if count < 0.05 * len(cases)}
    assert not rare


BIG = Description(
    Model(blocks=(Block("mlp", tied_to=-1), Block(clamps=True, calls=2), Block(tied_to=1)), scale=True, tied=True),
    Program("manual", (Step(edit="in_place"), Step((Micro("retained"), Micro()), write="copy")), "adamw"),
    Configuration(ranks=3, grouped=True, offload=True),
)


def test_shrinking_keeps_what_fails_and_nothing_else():
    def fails(case: Description) -> bool:
        kinds = [micro.kind for step in case.program.steps for micro in step.micros]
        return "retained" in kinds and any(block.clamps for block in case.model.blocks) and case.configuration.ranks > 1

    found = shrunk(BIG, fails)
    assert found == Description(
        Model((Block(clamps=True),)), Program(steps=(Step((Micro("retained"),)),)), Configuration(ranks=2)
    )
    assert all(size(settled(case)) >= size(found) or not fails(settled(case)) for case in smaller(found))


@pytest.mark.nightly
def test_a_script_shows_the_difference_by_itself(tmp_path):
    """In a process that does not see the tests."""
    case = Description(configuration=Configuration(ranks=1))
    path = tmp_path / "wrong.py"
    path.write_text(as_script(case).replace("view.grad.detach().clone()", "view.grad.detach() * 2"))
    command = [sys.executable, "-W", "ignore", path]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, cwd=tmp_path).stdout
    lines = said.splitlines()
    assert lines
    assert all(line.startswith("rank 0: gradients (event 1)") for line in lines)


def test_mends_that_the_fuzzer_is_tried_without_are_in_the_code():
    """See tests/mends.py."""
    for mend in MENDS:
        ast.parse(without(mend), filename=f"without mend {mend.item}")
