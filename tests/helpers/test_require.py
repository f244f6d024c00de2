"""REQUIRE turns a skip for want of GPUs into a failure, if as many as it names would have run the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


def run(folder: Path, required: str | None) -> subprocess.CompletedProcess[str]:
    file = folder / "test_skipped.py"
    file.write_text(SKIPPED)
    environment = {key: value for key, value in os.environ.items() if key != "REQUIRE"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if required is None else {"REQUIRE": required})
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-ra"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment, cwd=folder
    )


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
    done = run(tmp_path, required)
    # What a mark skips is an error of the test's setup.
    counts = [f"{failed // 2} failed", f"{skipped} skipped", f"{failed // 2} error"]
    shown = [count for count in counts if not count.startswith("0 ")]
    assert all(count in done.stdout.splitlines()[-1] for count in shown), done.stdout
    assert done.returncode == bool(failed)
    if required == "gpus2":
        assert "REQUIRE=gpus2, but this test was skipped. Skipped: needs 2 CUDA device(s), found 1" in done.stdout
        assert "REQUIRE=gpus2, but this test was skipped. Skipped: needs 4" not in done.stdout
        assert "needs peft" in done.stdout


def test_an_unknown_requirement_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "gpus3")
    assert done.returncode != 0
    assert "REQUIRE=gpus3: expected one of gpu, gpus2, gpus4" in done.stdout + done.stderr
