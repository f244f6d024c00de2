"""`.ci/runs.tsv`: with which versions all tests ran, when, and how many passed; one line for each version of PyTorch, the latest run.

`RECORD=.ci/runs.tsv python -m pytest` writes the line of a run, as `.ci/matrix` does. README, docs and the bounds in pyproject.toml say no
more than the file (tests/packaging/test_runs.py).
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["Run", "read", "record", "versions"]

ROOT = Path(__file__).resolve().parents[2]


class Run(NamedTuple):
    """A run of all tests.

    Attributes:
        where: Which command ran them, or the page that describes the run and what failed in it.
    """

    date: str
    commit: str
    python: str
    torch: str
    lightning: str
    transformers: str
    peft: str
    passed: str
    failed: str
    skipped: str
    where: str

    @property
    def torch_numbers(self) -> tuple[int, ...]:
        """2.11.0+cu130 is (2, 11, 0)."""
        return tuple(int(part) for part in self.torch.split("+")[0].split("."))


def versions() -> dict[str, str]:
    """Of what this process would run the tests with."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("lightning", "transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "-"
    return found


def read(path: Path = ROOT / ".ci/runs.tsv") -> list[Run]:
    """From the lowest version of PyTorch to the newest; none before the first run is recorded."""
    if not path.exists():
        return []
    first, *lines = path.read_text().splitlines()
    assert first.split("\t") == list(Run._fields), f"{path} begins with {first!r}"
    return [Run(*line.split("\t")) for line in lines]


def record(path: Path, counts: Mapping[str, int], where: str) -> None:
    """Put the run of this process in the place of the last one with this version of PyTorch."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout
    numbers = {name: str(counts[name]) for name in ("passed", "failed", "skipped")}
    made = Run(date=date.today().isoformat(), commit=head.strip() or "-", where=where, **versions(), **numbers)
    others = [run for run in read(path) if run.torch_numbers != made.torch_numbers]
    runs = sorted([*others, made], key=lambda run: run.torch_numbers)
    path.write_text("".join("\t".join(line) + "\n" for line in (Run._fields, *runs)))
