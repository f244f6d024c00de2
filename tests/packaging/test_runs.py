"""README, docs and bounds name the versions that all tests have run with (.ci/runs.tsv), and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from tests.helpers import runs
from tests.packaging.test_dependencies import PROJECT, ROOT

RUNS = runs.read()
# The first run with a version that is to be allowed cannot be in the file yet.
compares = pytest.mark.skipif(bool(os.environ.get("RECORD")), reason="the run that is recorded")
REQUIRED = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}


def bound(name: str, operator: str) -> Version:
    [found] = [one.version for one in REQUIRED[name].specifier if one.operator == operator]
    return Version(found)


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@compares
def test_the_bounds_of_torch_are_the_lowest_and_the_newest_version_that_ran():
    assert bound("torch", ">=") == Version(RUNS[0].torch.split("+")[0])
    assert bound("torch", "<=") == Version(RUNS[-1].torch.split("+")[0])


@compares
def test_the_bounds_of_lightning_admit_the_minor_version_that_ran():
    for run in RUNS:
        assert REQUIRED["lightning"].specifier.contains(run.lightning)
    assert {minor(run.lightning) for run in RUNS} == {str(bound("lightning", ">="))}


@compares
def test_nothing_failed_with_the_newest_and_what_failed_with_others_is_described():
    assert RUNS[-1].failed == "0"
    for run in RUNS:
        assert int(run.passed) > 2500, run
        assert run.failed == "0" or (ROOT / run.where).is_file(), run


@compares
@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_name_the_versions_that_ran(page):
    text = (ROOT / page).read_text()
    said = {
        one
        for found in re.findall(r"all tests (?:have )?r[au]n with PyTorch ([^;:|]*)", text)
        for one in re.findall(r"\d+\.\d+\.\d+", found)
    }
    assert said == {run.torch.split("+")[0] for run in RUNS}


@compares
@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/quickstart.md"])
def test_pages_name_the_bounds(page):
    text = (ROOT / page).read_text()
    assert f"{minor(RUNS[0].torch)} to {minor(RUNS[-1].torch)}" in text
    assert not set(re.findall(r"PyTorch (\d\.\d+ to \d\.\d+)", text)) - {
        f"{minor(RUNS[0].torch)} to {minor(RUNS[-1].torch)}"
    }


def test_the_check_installs_what_a_newcomer_gets():
    assert "torch==" not in (ROOT / ".ci/run").read_text()


def test_these_tests_run_with_a_version_that_the_bounds_admit():
    assert REQUIRED["torch"].specifier.contains(torch.__version__, prereleases=True)


def test_a_run_takes_the_place_of_the_last_one_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "runs.tsv"
    path.write_text("\t".join(runs.Run._fields) + "\n")

    def ran(torch: str, passed: int) -> None:
        found: dict[str, Any] = {
            "python": "3.11",
            "torch": torch,
            "lightning": "2.6.6",
            "transformers": "5",
            "peft": "-",
        }
        monkeypatch.setattr(runs, "versions", lambda: found)
        runs.record(path, {"passed": passed, "failed": 0, "skipped": 2}, "pytest")

    for torch_version, passed in (("2.15.0+cu132", 1), ("2.9.1", 2), ("2.15.0+cpu", 3)):
        ran(torch_version, passed)
    assert [(run.torch, run.passed) for run in runs.read(path)] == [("2.9.1", "2"), ("2.15.0+cpu", "3")]


@pytest.mark.nightly
def test_pytest_records_a_run(tmp_path: Path):
    path, tests = tmp_path / "runs.tsv", ["tests/helpers/test_pairwise.py"]
    path.write_text("\t".join(runs.Run._fields) + "\n")
    command = [
        "env",
        *("-u", "PYTEST_XDIST_WORKER", "-u", "DURATIONS"),  # a run of its own, not a part of this one
        f"RECORD={path}",
        "RECORD_AS=by hand",
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stdout
    [run] = runs.read(path)
    assert f" {run.passed} passed" in result.stdout
    assert f"with python {run.python}, torch {torch.__version__}" in result.stdout
    assert (run.torch, run.failed, run.where) == (torch.__version__, "0", "by hand")
