"""REQUIRE turns a skip for want of GPUs into a failure, if as many as it names would have run the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.programs import run_forked

SKIPPED = """
import pytest

REASONS = [
    "needs a CUDA device",
    "needs 1 CUDA device(s), found 0",
    "needs 2 CUDA device(s), found 1",
    "needs 4 CUDA device(s), found 2",
    "needs peft",
]

@pytest.mark.parametrize("reason", [pytest.param(reason, marks=pytest.mark.skip(reason=reason)) for reason in REASONS])
def test_marked(reason):
    raise AssertionError("it is skipped")

@pytest.mark.parametrize("reason", REASONS)
def test_inside(reason):
    pytest.skip(reason)
"""


PROGRAM = """
import os
import sys

import pytest

for name in ("REQUIRE", "PYTEST_XDIST_WORKER"):
    os.environ.pop(name, None)
os.environ.update({required})
options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-ra", "--rootdir=.", "-W", "default"]
print(int(pytest.main(["test_skipped.py", *options])))
"""


def run(folder: Path, required: str | None) -> tuple[int, str]:
    """Exit code and output of pytest, in a process of its own."""
    (folder / "test_skipped.py").write_text(SKIPPED)
    program = folder / "run_pytest.py"
    program.write_text(PROGRAM.format(required={} if required is None else {"REQUIRE": required}))
    *lines, code = run_forked(program).splitlines()
    return int(code), "\n".join(lines)


@pytest.mark.parametrize(
    ("required", "failed", "skipped"),
    [
        ("gpus2", 6, 4),
        *(pytest.param(*row, marks=pytest.mark.nightly) for row in ((None, 0, 10), ("gpu", 4, 6), ("gpus4", 8, 2))),
    ],
)
def test_a_skip_for_want_of_gpus_fails_where_they_are_required(
    tmp_path: Path, required: str | None, failed: int, skipped: int
) -> None:
    code, printed = run(tmp_path, required)
    # What a mark skips is an error of the test's setup.
    counts = [f"{failed // 2} failed", f"{skipped} skipped", f"{failed // 2} error"]
    shown = [count for count in counts if not count.startswith("0 ")]
    assert all(count in printed.splitlines()[-1] for count in shown), printed
    assert code == bool(failed)
    if required == "gpus2":
        assert "REQUIRE=gpus2, but this test was skipped. Skipped: needs 2 CUDA device(s), found 1" in printed
        assert "REQUIRE=gpus2, but this test was skipped. Skipped: needs 4" not in printed
        assert "needs peft" in printed


def test_an_unknown_requirement_is_refused(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "gpus3")
    assert code != 0
    assert "REQUIRE=gpus3: expected one of gpu, gpus2, gpus4" in printed
