"""One vocabulary (docs/glossary.md) and American spelling, in the docs and in the text of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "benchmarks"),
    *sorted((ROOT / "lightning_mfsdp").rglob("*.py")),
]

# What is not to be written, and what to write instead.
INSTEAD = {
    r"\w*(?:initial|material|memor|normal|optim|orthogonal|parallel|quant|random|recogn|serial|synchron|util)"
    r"is(?:e|ed|es|er|ers|ing|ation|ations)": "-ize, -ization",
    r"\w*(?:behavi|col|fav|hon|neighb)our\w*": "-or",
    r"(?:analys(?:ed?|es|ing)|centred?|centres|fibres?)": "analyze, center, fiber",
    r"\w*(?:cancel|label|model|travel)l(?:ed|ing)": "a single l",
    r"(?:nobody|somebody|whoever)": "the rank, the user or the function that is meant",
    r"anew": "again",
    r"(?:gives?|given|gave|giving) back": "free, return, release",
    r"front doors?": "entry point",
    r"computed again": "recomputed",
    r"of one's own|loops? of your own": "your own loop",
    r"mend(?:s|ed|ing)?": "fix",
    r"(?:un)?divided (?:parameters?|weights?)": "sharded, whole",
    r"full (?:weights?|parameters?)": "unsharded weight, parameter",
    r"master weights?": "main weight",
    r"gathered in advance": "prefetched",
}
# The terms that other libraries use, which the glossary compares with.
ELSEWHERE = {"docs/glossary.md": {"master weight", "full parameter"}}
BANNED = {re.compile(rf"\b(?:{pattern})\b", flags=re.IGNORECASE): instead for pattern, instead in INSTEAD.items()}


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Banned words with the numbers of their lines and what to write instead."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, instead in BANNED.items():
            for match in pattern.finditer(line):
                yield number, match.group(), instead


def test_texts_use_the_words_of_the_glossary() -> None:
    assert len(TEXTS) > 200
    wrong = []
    for path in TEXTS:
        name = path.relative_to(ROOT).as_posix()
        for number, word, instead in found_in(path.read_text()):
            if word.lower() not in ELSEWHERE.get(name, ()):
                wrong.append(f"{name}:{number}: {word!r}; write: {instead}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("The values are initialised by rank 0.", "initialised"),
        ("the synchronisation of streams", "synchronisation"),
        ("def quantiser_of(x):  # materialises it", "materialises"),
        ("Neighbouring blocks share a unit.", "Neighbouring"),
        ("the behaviour of DDP", "behaviour"),
        ("analysed and centred", "analysed"),
        ("a labelled row", "labelled"),
        ("Nobody sees such writes.", "Nobody"),
        ("build the model anew", "anew"),
        ("The buffer is given back.", "given back"),
        ("one of the front doors", "front doors"),
        ("activations computed again in backward", "computed again"),
        ("in a loop of your own", "loop of your own"),
        ("Mend what it names.", "Mend"),
        ("the divided parameters of a unit", "divided parameters"),
        ("Full weights live in slots.", "Full weights"),
        ("the master weight", "master weight"),
    ],
)
def test_a_banned_word_is_found(line: str, word: str) -> None:
    assert next(found[:2] for found in found_in(f"Plain text.\n{line}")) == (2, word)


@pytest.mark.parametrize(
    "line",
    [
        "otherwise the precise size is promised",
        "We recommend to amend it.",
        "expert parallelism, materialize, normalization",
        "four hours of your training",
        "`your_own` loop; the full state dict",
        "a cancellation, a tensor's color",
    ],
)
def test_ordinary_words_are_left_alone(line: str) -> None:
    assert list(found_in(line)) == []
