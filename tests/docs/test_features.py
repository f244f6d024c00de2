"""Pages with tables of tests: docs/design/feature_tests.md, which has the rows of docs/features.md, and docs/design/lightning_tests.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"

NAMED_TEST = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")


@dataclass(frozen=True)
class Page:
    """Attributes:
    path: In docs.
    column: Where the tests stand, from 1.
    columns: Of each table.
    """

    path: str
    column: int
    columns: int

    @property
    def file(self) -> Path:
        return DOCS / self.path

    def rows(self) -> list[list[str]]:
        """Cells of all tables whose heads have that many, without the heads."""
        lines = self.file.read_text().splitlines()
        heads = {number - 1 for number, line in enumerate(lines) if line.startswith("|---")}
        found, wide = [], False
        for number, line in enumerate(lines):
            if number in heads:
                wide = line.count("|") == self.columns + 1
            elif wide and line.startswith("|") and not line.startswith("|---"):
                found.append(line.split("|")[1:-1])
        return found


FEATURES = Page("features.md", 2, 6)
TESTS_OF_FEATURES = Page("design/feature_tests.md", 2, 2)
LIGHTNINGS = Page("design/lightning_tests.md", 3, 3)
PAGES = pytest.mark.parametrize("page", [TESTS_OF_FEATURES, LIGHTNINGS], ids=lambda page: page.path)


@PAGES
def test_every_row_names_a_test_that_shows_it(page: Page) -> None:
    assert len(page.rows()) > 50
    assert [row for row in page.rows() if not NAMED_TEST.search(row[page.column - 1])] == []


@PAGES
def test_every_named_test_exists(page: Page) -> None:
    named = NAMED_TEST.findall(page.file.read_text())
    missing = [name for name, path in named if f"def {name}(" not in (page.file.parent / path).read_text()]
    assert missing == []


@PAGES
def test_every_row_has_a_cell_for_each_column(page: Page) -> None:
    assert {len(row) for row in page.rows()} == {page.columns}


def test_every_feature_has_its_row_of_tests_and_a_short_answer() -> None:
    features = [row[0].strip() for row in FEATURES.rows()]
    assert len(features) > 100
    assert features == [row[0].strip() for row in TESTS_OF_FEATURES.rows()]
    assert [row for row in FEATURES.rows() if not row[1].strip() or len(row[1]) > 70 or "test_" in row[1]] == []


def test_no_behavior_stands_in_the_list_twice() -> None:
    behaviors = [row[1] for row in LIGHTNINGS.rows()]
    assert len(set(behaviors)) == len(behaviors)
