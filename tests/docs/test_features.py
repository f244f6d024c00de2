"""docs/features.md names a test for every feature, and the tests exist."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/features.md"

NAMED_TEST = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")


def rows() -> list[str]:
    """Of all tables, without their heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [line for line in lines if not line.startswith(("| |", "|---"))]


def test_every_feature_names_the_test_that_shows_it() -> None:
    assert len(rows()) > 20
    assert [row for row in rows() if not NAMED_TEST.search(row.split("|")[2])] == []


def test_every_named_test_exists() -> None:
    named = NAMED_TEST.findall(PAGE.read_text())
    missing = [name for name, path in named if f"def {name}(" not in (PAGE.parent / path).read_text()]
    assert missing == []


def test_every_row_has_a_cell_for_each_column() -> None:
    assert {row.count("|") for row in rows()} == {7}
