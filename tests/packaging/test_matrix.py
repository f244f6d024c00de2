"""`.ci/matrix`: one line for each pair of versions. A stand-in for python plays pip and pytest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Torch 1.0 cannot be installed; with 2.0 the tests fail; others pass.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *torch==1.0*) echo "ERROR: No matching distribution found for torch==1.0" >&2; exit 1 ;;
    "-m pip "*) ;;
    *) case "$0" in *2.0-*) echo "1 failed, 2 passed in 3s"; exit 1 ;; *) echo "3 passed, given $* recorded ${RECORD:-nowhere}" ;; esac ;;
esac
"""


def matrix(folder: Path, *pairs: str, **settings: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "VENVS": str(folder / "venvs")} | settings
    command = ["bash", str(ROOT / ".ci/matrix"), *pairs]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_each_pair_has_a_line_and_a_failure_is_the_result(tmp_path):
    result = matrix(tmp_path, "1.0:2.6", "2.0:2.6", "3.0:2.7")
    skipped, failed, passed = result.stdout.splitlines()
    assert skipped == "torch 1.0, lightning 2.6: skipped, ERROR: No matching distribution found for torch==1.0"
    log = tmp_path / "venvs/2.0-2.6.log"
    assert failed == f"torch 2.0, lightning 2.6: failed, 1 failed, 2 passed in 3s, see {log}"
    assert log.read_text() == "1 failed, 2 passed in 3s\n"
    assert passed.startswith("torch 3.0, lightning 2.7: passed, 3 passed")
    assert result.returncode == 1
    assert result.stderr == ""


@pytest.mark.parametrize(("pairs", "code"), [(("1.0:2.6", "3.0:2.6"), 0), (("3.0:2.6",), 0), (("2.0:2.6",), 1)])
def test_what_cannot_be_installed_is_no_failure(tmp_path, pairs, code):
    assert matrix(tmp_path, *pairs).returncode == code


def test_other_arguments_reach_pytest(tmp_path):
    result = matrix(tmp_path, "3.0:2.6", TESTS="tests/engine -x", WORKERS="4")
    assert " -n 4 " in result.stdout
    assert result.stdout.endswith("tests/engine -x recorded nowhere\n")


def test_a_run_of_all_tests_is_recorded(tmp_path):
    assert matrix(tmp_path, "3.0:2.6").stdout.endswith(f" recorded {ROOT}/.ci/runs.tsv\n")
