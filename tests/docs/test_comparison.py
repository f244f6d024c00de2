"""docs/comparison.md says of a subject what docs/features.md says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Rows of both pages about one subject, by their first words.
SUBJECTS = {
    "Context parallelism": "Sequences of a batch divided over ranks",
    "Tensor parallelism": "Weights of each layer divided over ranks",
    "Expert parallelism": "Expert parallelism",
    "FP8 with Transformer Engine, weights sharded in 8 bits": "FP8 weights: sharded",
}


def cells(page: str, first_words: str) -> list[str]:
    """What a page's row says: of mfsdp, FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy and megatron-fsdp."""
    [row] = [line for line in (DOCS / page).read_text().splitlines() if line.startswith(f"| {first_words}")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def answer(cell: str) -> str:
    """What a cell says in a word: options and functions that are named mean yes."""
    word = cell.split(",")[0].split(" ")[0]
    return "yes" if word.startswith(("`", "[")) else word


@pytest.mark.parametrize("subject", SUBJECTS)
def test_both_pages_give_one_answer_about_this_package(subject: str) -> None:
    assert answer(cells("comparison.md", subject)[0]) == answer(cells("features.md", SUBJECTS[subject])[0]) == "yes"


@pytest.mark.parametrize("subject", ["Context parallelism", "Tensor parallelism"])
def test_both_pages_give_one_answer_about_others(subject: str) -> None:
    features = cells("features.md", SUBJECTS[subject])
    for ours, theirs in zip(cells("comparison.md", subject)[1:], features[1:], strict=True):
        assert ours.startswith(theirs)
