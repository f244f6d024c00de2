"""docs/troubleshooting.md lists every error and warning that the package can raise, each in an entry of its own, and no other.

A message is what a `raise` or a warning is given. Words that stand elsewhere are looked up: a name stands for what its function or
its file assigns to it, a call of one of the package's functions for the text or the error which that function returns. Assertions
are not messages.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_mfsdp"
PAGE = ROOT / "docs/troubleshooting.md"

# How an entry of the page begins; several such lines may share an explanation.
LISTED = re.compile(r"^\*\*`(.+)`\*\*$", flags=re.MULTILINE)
WARNERS = {"warn", "warning", "rank_zero_warn", "rank_zero_deprecation"}

# Functions whose errors no call of the public functions leads to, and why.
_OWN_LAYOUT = "the engine asks for layouts by itself, and packing.py searches only among those that keep the rules"
INTERNAL = {
    "engine/layout/layout.py:Layout.__post_init__": _OWN_LAYOUT,
    "engine/layout/layout.py:Layout._check_tensor": _OWN_LAYOUT,
    "engine/layout/layout.py:Layout._check_span": _OWN_LAYOUT,
    "engine/layout/layout.py:_check_arguments": _OWN_LAYOUT,
    "checkpoint/state/row_shard.py:RowShard.__get_tensor_shard__": "torch.distributed.checkpoint asks for the rows it was told of",
    "checkpoint/io/location.py:Writer._write_file": "it says what the operating system said, in its words",
    "launch/stopping.py:Stopping._on_sigterm": "it is Lightning's exception, without words",
    "__init__.py:__getattr__": "it is Python's own message for a name that a module lacks",
    "launch/stopping.py:Stopping._before_batch": "it is Lightning's exception, without words",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Text:
    """A string in the code, with `…` for what is filled in."""

    place: str
    words: str


@dataclass(frozen=True)
class Message:
    """Everything that one `raise`, one warning, or one `return` of a function that makes messages may say."""

    place: str
    function: str
    texts: tuple[Text, ...]
    makers: tuple[Message, ...] = ()

    def unlisted(self, fragments: Sequence[str]) -> list[str]:
        """Places of what no fragment is part of: its own, unless all that its makers return is listed."""
        if any(fragment in text.words for text in self.texts for fragment in fragments):
            return []
        missing = [place for maker in self.makers for place in maker.unlisted(fragments)]
        return [f"{self.place}, made at {place}" for place in missing] if self.makers else [self.place]

    def all_texts(self) -> Iterator[Text]:
        yield from self.texts
        for maker in self.makers:
            yield from maker.all_texts()


class Finder:
    """Finds the messages of a set of files, given as their text by name."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in files.items()}
        self.functions: dict[str, list[tuple[str, str, Function]]] = {}
        for name, tree in self.trees.items():
            for function, within in filter(_makes_messages, _functions(tree)):
                self.functions.setdefault(function.name, []).append((name, within, function))

    def messages(self) -> list[Message]:
        found: list[Message] = []
        for name, tree in self.trees.items():
            for function, within in [(None, ""), *_functions(tree)]:
                nodes = list(_own_nodes(function or tree))
                caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
                for node in nodes:
                    said = _said(node, caught)
                    if said is not None:
                        found.append(self._message(said, name, within, function, said.lineno, frozenset()))
        return found

    def _message(
        self, said: ast.expr, name: str, within: str, function: Function | None, line: int, known: frozenset[str]
    ) -> Message:
        texts: list[Text] = []
        makers: list[Message] = []
        names: set[str] = set()

        def look(node: ast.AST) -> None:
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append(Text(f"{name}:{node.lineno}:{node.col_offset}", "".join(parts)))
                for part in node.values:
                    if isinstance(part, ast.FormattedValue):
                        look(part.value)
            elif isinstance(node, ast.Constant):
                if isinstance(node.value, str):
                    texts.append(Text(f"{name}:{node.lineno}:{node.col_offset}", node.value))
            elif isinstance(node, ast.Call) and _called(node) in self.functions:
                makers.extend(self._returned(_called(node), known))
            elif isinstance(node, ast.Name):
                if node.id not in names:
                    names.add(node.id)
                    for scope in (function, self.trees[name]):
                        for value in _assigned(node.id, scope):
                            look(value)
            else:
                for child in ast.iter_child_nodes(node):
                    look(child)

        look(said)
        return Message(f"{name}:{line}", f"{name}:{within}", tuple(texts), tuple(makers))

    def _returned(self, called: str, known: frozenset[str]) -> Iterator[Message]:
        if called in known:
            return
        for name, within, function in self.functions[called]:
            for node in _own_nodes(function):
                if isinstance(node, ast.Return) and node.value is not None and not _is_empty(node.value):
                    yield self._message(node.value, name, within, function, node.lineno, known | {called})


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[Function, str]]:
    """Functions at any depth, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        inner = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{within}.{node.name}" if within else node.name
            if not isinstance(node, ast.ClassDef):
                yield node, inner
        yield from _functions(node, inner)


def _makes_messages(found: tuple[Function, str]) -> bool:
    """Whether what a function returns is a text or an error, and not something that a message is filled in with."""
    result = found[0].returns
    return isinstance(result, ast.Name) and (result.id == "str" or result.id.endswith(("Error", "Exception")))


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Everything inside a function or a file that no function inside it contains."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _own_nodes(node)


def _said(node: ast.AST, caught: set[str]) -> ast.expr | None:
    """What a `raise` or a warning is given. `raise` alone, and of an exception that was caught, passes on what was said elsewhere."""
    if isinstance(node, ast.Raise):
        return None if isinstance(node.exc, ast.Name) and node.exc.id in caught else node.exc
    return node.args[0] if isinstance(node, ast.Call) and _called(node) in WARNERS and node.args else None


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _assigned(name: str, scope: ast.AST | None) -> Iterator[ast.expr]:
    for node in _own_nodes(scope) if scope is not None else ():
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node.value


def _is_empty(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value in ("", None)


def listed() -> list[str]:
    """The fragments of messages that entries of the page begin with."""
    return LISTED.findall(PAGE.read_text())


def package_messages() -> list[Message]:
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return Finder(files).messages()


def test_every_message_of_the_package_is_listed() -> None:
    fragments = listed()
    messages = [message for message in package_messages() if message.function not in INTERNAL]
    assert len(messages) > 80
    missing = [place for message in messages for place in message.unlisted(fragments)]
    assert not missing, "docs/troubleshooting.md lists no part of these messages: " + "; ".join(missing)


def test_every_listed_message_is_one_message_of_the_package() -> None:
    texts = {text.place: text.words for message in package_messages() for text in message.all_texts()}
    places = {fragment: [place for place, words in texts.items() if fragment in words] for fragment in listed()}
    unsaid = [fragment for fragment, found in places.items() if not found]
    assert not unsaid, f"no message says {unsaid}"
    # A fragment that fits several would pass for messages that nobody has explained.
    vague = {fragment: found for fragment, found in places.items() if len(found) > 1}
    assert not vague, f"take more words of one message: {vague}"


def test_no_message_is_listed_twice() -> None:
    assert not [fragment for fragment, count in Counter(listed()).items() if count > 1]


def test_only_functions_that_raise_are_taken_for_internal() -> None:
    assert {message.function for message in package_messages()} >= set(INTERNAL)


SAMPLE = """
import warnings
from elsewhere import check
ADVICE = "rest a while"

def at_once(count):
    if count > 3:
        raise ValueError(f"{count} cats are too many; " + ADVICE)
    try:
        check()
    except KeyError as error:
        raise error
    message = f"{count} cats"
    if count:
        raise RuntimeError(message)
    raise NotImplementedError

class Box:
    def open(self):
        what = _verdict(self)
        warnings.warn(f"box: {what}")

def _verdict(box) -> str:
    if not box:
        return ""
    text = "the cat sleeps"
    if box.open:
        return text + " outside"
    return f"nobody looked for {box.age} days"
"""


def unlisted_in_sample(*fragments: str) -> list[str]:
    return [place for message in Finder({"cats.py": SAMPLE}).messages() for place in message.unlisted(fragments)]


def test_messages_are_found_where_their_words_stand() -> None:
    assert unlisted_in_sample() == [
        "cats.py:8",
        "cats.py:15",
        "cats.py:16",
        "cats.py:21, made at cats.py:28",
        "cats.py:21, made at cats.py:29",
    ]
    assert unlisted_in_sample("… cats are too many", "the cat sleeps") == [
        "cats.py:15",
        "cats.py:16",
        "cats.py:21, made at cats.py:29",
    ]
    assert unlisted_in_sample("… cats", "box: …") == ["cats.py:16"]
    assert {message.function for message in Finder({"cats.py": SAMPLE}).messages()} == {
        "cats.py:at_once",
        "cats.py:Box.open",
    }
