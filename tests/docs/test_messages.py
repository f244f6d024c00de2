"""docs/reference/messages.md has every error and warning that the package can raise, and each says what to do."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/messages.md"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_messages", ROOT / "docs/messages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = _script()
MESSAGES = [message for message in script.package_messages() if message.function not in script.INTERNAL]

MOST_CHARACTERS = 420
# What a sentence of advice begins with, or a clause of one.
ADVICE = re.compile(
    r"(?:(?:elsewhere|otherwise|else|under \w+|if [^,;.]*,) )?(?:"
    "add|allow|ask|average|avoid|build|call|cap|cast|checkpoint|choose|clone|compute|configure|convert|copy|do|"
    "expected|export|fetch|find|flatten|free|freeze|give|go|hand|have|inspect|install|keep|leave|let|list|load|log|look|"
    "lower|make|name|pack|pad|pass|pip|put|raise|record|remove|rename|restart|resume|return|run|save|set|shard|share|"
    "shorten|step|submit|take|train|turn|unfreeze|use|wrap|write"
    r")\b",
    flags=re.IGNORECASE,
)
# Messages that end with what somebody else said, and those of what needs nothing to be done, by words of theirs.
PASSED_ON = {
    "a checkpoint saved in the background failed: …": "the error of the save",
    " was not read: …": "what was refused",
    "failed, so all do: …": "the error of the other rank",
    ": rank 0 failed with …": "the error of rank 0",
    "stopped after step … and saved …, but …": "the error of scontrol",
    "was not written (": "the error of the reader",
    "cannot be sharded as it is stored: …": "the reason of a codec",
    "because another rank ended: …": "the error of the other rank",
    "rank … ends…: …": "the error of the rank that failed",
    "does not fit the model:": "advice for where it is loaded",
    "has no option …: …": "what to use instead",
    "did you mean …?": "the nearest name",
    "if … is meant: …": "what to use instead",
    "leave this optimizer step out; …": "which factor to raise",
    "with what suffices; …": "which factor to raise",
    "taking …, which is complete": "there is nothing to do",
    "which keep their present values": "strict=False asks for it",
    "these keep their present values": "strict=False asks for it",
    "names look like …": "the names to choose from",
    "The model has: …": "the names to choose from",
    "it would not see the other tokens. …": "what to use instead",
    "has no option …; it takes …": "the names to choose from",
    "those are …": "the names to choose from",
}


def advises(text: str) -> bool:
    return any(ADVICE.match(clause) for clause in re.split(r"[.,;:(]\s+| or | and |\n", text)) or "expected " in text


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text() == script.index(script.package_messages()), "run: python docs/messages.py"


def test_every_message_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert len(MESSAGES) > 400
    assert not [message.place for message in MESSAGES if script.code(message.text) not in text]


def test_every_message_has_words_and_a_class() -> None:
    assert not [message.place for message in MESSAGES if not re.search(r"\w{4}", message.text) or message.kind == "…"]


def test_every_message_says_what_to_do() -> None:
    silent = [message for message in MESSAGES if not advises(message.text)]
    unsaid = [message for message in silent if not any(words in message.text for words in PASSED_ON)]
    assert not unsaid, "say what to do: " + "; ".join(f"{message.place}: {message.text}" for message in unsaid)
    assert not [words for words in PASSED_ON if not any(words in message.text for message in silent)]


def test_messages_are_short() -> None:
    assert not [message.place for message in MESSAGES if len(message.text) > MOST_CHARACTERS]


def test_every_section_has_messages() -> None:
    assert {script.section_of(message.file) for message in MESSAGES} == set(script.SECTIONS)


def test_every_link_is_of_a_message_and_leads_to_a_heading() -> None:
    assert not [words for words in script.READ_MORE if not any(words in message.text for message in MESSAGES)]
    for target in script.READ_MORE.values():
        assert script.link(target)


def test_only_functions_that_raise_are_taken_for_internal() -> None:
    assert {message.function for message in script.package_messages()} >= set(script.INTERNAL)


SAMPLE = """
import warnings
from elsewhere import check
ADVICE = "rest a while; a cat needs that more than anything else"

def at_once(count):
    if count > 3:
        raise ValueError(f"{count} cats are too many; " + ADVICE)
    try:
        check()
    except KeyError as error:
        raise error
    message = f"{count} cats; {ADVICE}"
    if count:
        raise RuntimeError(message)
    raise NotImplementedError

class Box:
    def open(self):
        what = _verdict(self)
        warnings.warn(f"box: {what}", BoxWarning)
        log.warning("%s is open", self)
        raise _closed(self)

def _closed(box) -> BoxError:
    return BoxError(f"{box} is " + ("shut" if box else "gone"))

def _verdict(box) -> str:
    if not box:
        return ""
    if box.open:
        return "the cat sleeps outside, where it has slept every night"
    return f"nobody looked for {box.age} days"
"""
RESTS = "rest a while; a cat needs that more than anything else"


def test_messages_are_found_where_their_words_stand() -> None:
    assert [
        (message.line, message.kind, message.text) for message in script.Finder({"cats.py": SAMPLE}).messages()
    ] == [
        (8, "ValueError", f"… cats are too many; {RESTS}"),
        (15, "RuntimeError", f"… cats; {RESTS}"),
        (16, "NotImplementedError", ""),
        (21, "BoxWarning", "box: the cat sleeps outside, where it has slept every night"),
        (21, "BoxWarning", "box: nobody looked for … days"),
        (22, "log", "… is open"),
        (23, "BoxError", "… is shut"),
        (23, "BoxError", "… is gone"),
    ]
    assert {message.function for message in script.Finder({"cats.py": SAMPLE}).messages()} == {
        "cats.py:at_once",
        "cats.py:Box.open",
    }


@pytest.mark.parametrize(
    ("text", "whether"),
    [
        ("box: 4 cats; take one out", True),
        ("box: expected 3 cats, got 4", True),
        ("box has 4 cats. Take one out", True),
        ("box is closed", False),
        ("the cats use a box", False),
    ],
)
def test_advice_is_a_clause_that_begins_with_what_to_do(text: str, whether: bool) -> None:
    assert advises(text) == whether
